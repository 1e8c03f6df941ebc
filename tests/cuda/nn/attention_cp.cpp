// Context parallelism on the GPU: every policy equals the processor's attention on one rank, and in bf16 eight ranks
// are as accurate as one.
#include "cuda/kernels/rounding_library.hpp"
#include "cuda/nn/attention_cp_ranks.hpp"
#include "plait/comm/threads/cuda.hpp"

using namespace plait;
using namespace plait::test;

namespace plait::test {
kernels::attention_mask chunks();  // rule_mask.cu
}

namespace {

/// With `library`, another library computes attention and rounds its results to bf16.
template <class T, class Policy>
context_arrays on_ranks(const context_inputs& in, int ranks, bool zigzag, bool library = false) {
  const auto launch = [&](int n, auto&& body) {
    threads::run(n, cuda::options{.workspace_bytes = 1 << 20}, [&](threads::communicator comm, cuda& device) {
      rounding_library attention;
      if (library) device.use_attention({attention_backend::cudnn, &attention});
      body(comm, device);
      if (library) CHECK(attention.forwards >= 1);
      if (library) CHECK(attention.backwards >= 1);
    });
  };
  return attend_on<T, Policy>(launch, in, ranks, zigzag);
}

struct errors {
  double o, dq, dk, dv, dsinks;
};
errors errors_of(const context_arrays& got, const context_arrays& expected) {
  return {difference(got.o, expected.o), difference(got.dq, expected.dq), difference(got.dk, expected.dk),
          difference(got.dv, expected.dv), got.dsinks.empty() ? 0 : difference(got.dsinks, expected.dsinks)};
}
void check_below(const errors& got, double most) {
  CHECK(got.o <= most);
  CHECK(got.dq <= most);
  CHECK(got.dk <= most);
  CHECK(got.dv <= most);
  CHECK(got.dsinks <= most);
}

context_arrays expected_of(const context_inputs& in) {
  return context_on_cpu(in.sizes, in.q, in.k, in.v, in.d_o, in.starts, in.sinks);
}

}  // namespace

TEST_CASE("in float every policy equals the processor's attention") {
  context_sizes sizes;
  sizes.seq = 64;
  using masks = kernels::attention_mask;
  for (const auto& [mask, documents] : {std::pair{masks::window(25), false},
                                        {masks::causal(), true},
                                        {masks::full(), true},
                                        {masks::local(masks::all, 9), true},
                                        {chunks(), false},
                                        {chunks(), true}}) {
    CAPTURE(kernels::describe(mask));
    sizes.mask = mask;
    if (mask == masks::causal()) sizes.score = {.cap = 2, .alibi = true};
    if (mask == masks::full()) sizes.score = {};
    context_inputs in = random_inputs<float>(sizes, documents);
    in.sinks = random_values<float>(sizes.heads, 5);
    const context_arrays expected = expected_of(in);
    const bool zigzag = !documents;
    CAPTURE(zigzag);
    check_below(errors_of(on_ranks<float, ring<cp>>(in, 4, zigzag), expected), 1e-5);
    check_below(errors_of(on_ranks<float, all_gather_kv<cp>>(in, 4, zigzag), expected), 1e-5);
    check_below(errors_of(on_ranks<float, ulysses<cp>>(in, 4, zigzag), expected), 1e-5);
  }
}

TEST_CASE("in bf16 eight ranks are as accurate as one") {
  const context_inputs in = random_inputs<bf16>({}, false);
  const context_arrays expected = expected_of(in);
  const errors one = errors_of(on_ranks<bf16, ring<cp>>(in, 1, true), expected);
  check_below(one, 1e-2);
  const auto no_worse = [&](const errors& got) {
    const auto close = [](double many, double alone) {
      CAPTURE(many);
      CAPTURE(alone);
      CHECK(many <= 1.02 * alone);
    };
    close(got.o, one.o);
    close(got.dq, one.dq);
    close(got.dk, one.dk);
    close(got.dv, one.dv);
  };
  no_worse(errors_of(on_ranks<bf16, ring<cp>>(in, 8, true), expected));
  no_worse(errors_of(on_ranks<bf16, ring<cp>>(in, 8, false), expected));
  no_worse(errors_of(on_ranks<bf16, all_gather_kv<cp>>(in, 8, true), expected));
  no_worse(errors_of(on_ranks<bf16, ulysses<cp>>(in, 4, true), expected));  // on four ranks, two share a kv head
}

TEST_CASE("a library's pieces are each rounded once, for any length of the ring") {
  context_inputs in = random_inputs<bf16>({}, false);
  in.sinks = random_values<bf16>(in.sizes.heads, 5);
  const context_arrays expected = expected_of(in);
  const errors one = errors_of(on_ranks<bf16, ring<cp>>(in, 1, true, true), expected);
  check_below(one, 1e-2);
  const auto bounded = [&](const std::string& how, const errors& got) {
    const auto near = [&](const std::string& what, double many, double alone) {
      MESSAGE(how << ": the error of " << what << " is " << many / alone << " times that of one rank");
      CHECK(many <= 1.5 * alone);
    };
    near("o", got.o, one.o);
    near("dq", got.dq, one.dq);
    near("dk", got.dk, one.dk);
    near("dv", got.dv, one.dv);
  };
  for (const int ranks : {2, 4, 8})
    bounded("ring", errors_of(on_ranks<bf16, ring<cp>>(in, ranks, true, true), expected));
  bounded("all_gather_kv", errors_of(on_ranks<bf16, all_gather_kv<cp>>(in, 8, true, true), expected));
  bounded("ulysses", errors_of(on_ranks<bf16, ulysses<cp>>(in, 4, true, true), expected));
}
