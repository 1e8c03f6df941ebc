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
    const context_arrays expected = context_on_cpu(in);
    const bool zigzag = !documents;
    CAPTURE(zigzag);
    check_below(errors_of(on_ranks<float, ring<cp>>(in, 4, zigzag), expected), 1e-5);
    check_below(errors_of(on_ranks<float, all_gather_kv<cp>>(in, 4, zigzag), expected), 1e-5);
    check_below(errors_of(on_ranks<float, ulysses<cp>>(in, 4, zigzag), expected), 1e-5);
  }
}

TEST_CASE("in bf16 eight ranks are as accurate as one") {
  const context_inputs in = random_inputs<bf16>({}, false);
  const context_arrays expected = context_on_cpu(in);
  const values one = errors_of(on_ranks<bf16, ring<cp>>(in, 1, true), expected);
  check_below(one, 1e-2);
  const auto no_worse = [&](const context_arrays& got) { check_no_worse(errors_of(got, expected), one, 1.02); };
  no_worse(on_ranks<bf16, ring<cp>>(in, 8, true));
  no_worse(on_ranks<bf16, ring<cp>>(in, 8, false));
  no_worse(on_ranks<bf16, all_gather_kv<cp>>(in, 8, true));
  no_worse(on_ranks<bf16, ulysses<cp>>(in, 4, true));  // on four ranks, two share a kv head
}

TEST_CASE("a library's pieces are each rounded once, for any length of the ring") {
  context_inputs in = random_inputs<bf16>({}, false);
  in.sinks = random_values<bf16>(in.sizes.heads, 5);
  const context_arrays expected = context_on_cpu(in);
  const values one = errors_of(on_ranks<bf16, ring<cp>>(in, 1, true, true), expected);
  check_below(one, 1e-2);
  const auto no_worse = [&](const context_arrays& got) { check_no_worse(errors_of(got, expected), one, 1.5); };
  for (const int ranks : {2, 4, 8}) no_worse(on_ranks<bf16, ring<cp>>(in, ranks, true, true));
  no_worse(on_ranks<bf16, all_gather_kv<cp>>(in, 8, true, true));
  no_worse(on_ranks<bf16, ulysses<cp>>(in, 4, true, true));
}
