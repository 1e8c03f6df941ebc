// Context parallelism on the GPU: every policy equals the processor's attention on one rank, and in bf16 eight ranks
// are as accurate as one.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "attention_cp_reference.hpp"
#include "cuda/device_array.hpp"
#include "plait/comm/threads_cuda.hpp"
#include "plait/nn/context_parallel/ring.hpp"
#include "plait/nn/context_parallel/ulysses.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct inputs {
  context_sizes sizes;
  values q, k, v, d_o;
  std::vector<std::int32_t> starts;  ///< of documents; empty: none
};

template <class T>
inputs random_inputs(const context_sizes& s, bool documents) {
  inputs in{s,
            random_values<T>(s.seq * s.heads * s.head_dim, 1),
            random_values<T>(s.seq * s.kv_heads * s.head_dim, 2),
            random_values<T>(s.seq * s.kv_heads * s.head_dim, 3),
            random_values<T>(s.seq * s.heads * s.head_dim, 4),
            {}};
  for (std::int64_t p = 0; documents && p < s.seq; ++p) {
    const std::int64_t last = s.seq * 3 / 4;  // the last rank's tokens, in the order of the text, see nothing
    in.starts.push_back(static_cast<std::int32_t>(p < 41 ? 0 : p < last ? 41 : s.seq));
  }
  return in;
}

/// This rank's rows of [seq, width], or their way back.
values taken(const values& all, const std::vector<std::int64_t>& positions, std::int64_t width) {
  values mine;
  for (const std::int64_t p : positions)
    for (std::int64_t i = 0; i < width; ++i) mine.push_back(all[static_cast<std::size_t>(p * width + i)]);
  return mine;
}
void put(values& all, const values& mine, const std::vector<std::int64_t>& positions, std::int64_t width) {
  for (std::size_t row = 0; row < positions.size(); ++row)
    for (std::int64_t i = 0; i < width; ++i)
      all[static_cast<std::size_t>(positions[row] * width + i)] =
          mine[row * static_cast<std::size_t>(width) + static_cast<std::size_t>(i)];
}

template <class T, class Policy>
context_arrays on_ranks(const inputs& in, int ranks, bool zigzag) {
  const context_sizes& s = in.sizes;
  const std::int64_t q_width = s.heads * s.head_dim, k_width = s.kv_heads * s.head_dim, own = s.seq / ranks;
  const sequence_order order = zigzag ? sequence_order::zigzag(s.seq, ranks) : sequence_order::text(s.seq);
  std::vector<context_arrays> all(static_cast<std::size_t>(ranks));
  threads::run(ranks, cuda::options{.workspace_bytes = 1 << 20}, [&](threads::communicator comm, cuda& device) {
    using engine = typename Policy::template engine<T, cuda>;
    static_assert(attention_engine<engine, T, cuda>);
    world w(mesh<axis<cp>>{ranks}.shape(), comm);
    context<cuda> ctx{device, w, {}};
    attention_part part;
    part.shape.q_len = part.shape.k_len = own;
    part.shape.heads = s.heads, part.shape.kv_heads = s.kv_heads, part.shape.head_dim = s.head_dim;
    part.shape.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
    part.shape.window = s.window;
    for (std::int64_t r = 0; r < ranks; ++r) part.blocks.push_back(order.runs(r * own, own));
    part.mine = static_cast<std::size_t>(w.rank());
    part.documents = !in.starts.empty();
    engine e(ctx, part, context_axes<Policy>);

    const std::vector<std::int64_t> positions = order.positions(w.rank() * own, own);
    number_array<T> q(device, taken(in.q, positions, q_width)), k(device, taken(in.k, positions, k_width));
    number_array<T> v(device, taken(in.v, positions, k_width)), d_o(device, taken(in.d_o, positions, q_width));
    number_array<T> o(device, own * q_width), dq(device, own * q_width), dk(device, own * k_width),
        dv(device, own * k_width);
    std::vector<std::int32_t> starts;
    for (const std::int64_t p : positions)
      if (part.documents) starts.push_back(in.starts[static_cast<std::size_t>(p)]);
    device_array<std::int32_t> first_visible(device, starts);
    const attention_inputs<T> args{q.view(), k.view(), v.view(), part.documents ? first_visible.data() : nullptr};
    typename engine::saved kept;
    e.forward(ctx, args, o.data(), &kept);
    e.backward(ctx, args, o.view(), d_o.view(), kept, attention_gradients<T>{dq.data(), dk.data(), dv.data()});
    all[static_cast<std::size_t>(w.rank())] = {o.read(), dq.read(), dk.read(), dv.read()};
  });
  context_arrays text{values(in.q.size()), values(in.q.size()), values(in.k.size()), values(in.v.size())};
  for (int r = 0; r < ranks; ++r) {
    const std::vector<std::int64_t> positions = order.positions(r * own, own);
    const context_arrays& mine = all[static_cast<std::size_t>(r)];
    put(text.o, mine.o, positions, q_width);
    put(text.dq, mine.dq, positions, q_width);
    put(text.dk, mine.dk, positions, k_width);
    put(text.dv, mine.dv, positions, k_width);
  }
  return text;
}

struct errors {
  double o, dq, dk, dv;
};
errors errors_of(const context_arrays& got, const context_arrays& expected) {
  return {difference(got.o, expected.o), difference(got.dq, expected.dq), difference(got.dk, expected.dk),
          difference(got.dv, expected.dv)};
}
void check_below(const errors& got, double most) {
  CHECK(got.o <= most);
  CHECK(got.dq <= most);
  CHECK(got.dk <= most);
  CHECK(got.dv <= most);
}

context_arrays expected_of(const inputs& in) { return context_on_cpu(in.sizes, in.q, in.k, in.v, in.d_o, in.starts); }

}  // namespace

TEST_CASE("in float every policy is the processor's attention") {
  context_sizes sizes;
  sizes.seq = 64;
  for (const bool documents : {false, true}) {
    sizes.window = documents ? 0 : 25;
    const inputs in = random_inputs<float>(sizes, documents);
    const context_arrays expected = expected_of(in);
    const bool zigzag = !documents;
    CAPTURE(zigzag);
    check_below(errors_of(on_ranks<float, ring<cp>>(in, 4, zigzag), expected), 1e-5);
    check_below(errors_of(on_ranks<float, all_gather_kv<cp>>(in, 4, zigzag), expected), 1e-5);
    check_below(errors_of(on_ranks<float, ulysses<cp>>(in, 4, zigzag), expected), 1e-5);
  }
}

TEST_CASE("in bf16 eight ranks lose no more than one") {
  const inputs in = random_inputs<bf16>({}, false);
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
  no_worse(errors_of(on_ranks<bf16, ulysses<cp>>(in, 4, true), expected));  // on four, two ranks share a kv head
}
