// Linears whose collectives go in chunks beside their products: the same bits as without, the same bytes, what a dry
// run says, whatever the delays; and the refusals of what cannot be cut.
#include "plait/nn/linear/overlap.hpp"

#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plait/nn/attention.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/strategies.hpp"
#include "plait/testing/slow_link.hpp"
#include "support/layer_check.hpp"
#include "support/linear_policies.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Rows that chunks do not divide. OpenBLAS, which multiplies doubles, has other kernels for small products, whose sums
/// depend on how many rows there are where columns are no multiple of 4 or transposed ones have more than 31 terms: in
/// double, sizes are such that it takes one kernel for all and for some rows.
template <class T>
dim_sizes odd_sizes(std::int64_t batch_size, std::int64_t seq_size) {
  dim_sizes s = transformer_sizes(batch_size, seq_size);
  s.set(dim_of<hidden>, sizeof(T) == 8 ? 24 : 264);
  s.set(dim_of<ffn>, sizeof(T) == 8 ? 48 : 328);
  return s;
}

/// Makes a linear whose collectives go in `chunks`.
template <class T, class Policy>
auto making(std::int64_t chunks) {
  return [chunks](const auto& ctx) {
    return linear<T, Policy, device_of<decltype(ctx)>>(ctx, "layer", {.overlap = chunks});
  };
}

std::uint64_t calls_of(const ledger& sent) { return sent.total().calls; }

/// That each rank has the bits of `whole`, which has no overlap, and has sent the same bytes.
void check_same(const std::vector<layer_values>& whole, const std::vector<layer_values>& cut) {
  REQUIRE(whole.size() == cut.size());
  for (std::size_t r = 0; r < whole.size(); ++r) {
    INFO("rank " << r);
    CHECK(cut[r].found.text() == "");
    CHECK(cut[r].y == whole[r].y);
    CHECK(cut[r].dx == whole[r].dx);
    REQUIRE(cut[r].gradients.size() == whole[r].gradients.size());
    for (std::size_t i = 0; i < whole[r].gradients.size(); ++i)
      CHECK(cut[r].gradients[i].second == whole[r].gradients[i].second);
    CHECK(cut[r].sent.total().wire == whole[r].sent.total().wire);
    CHECK(cut[r].sent.total().payload == whole[r].sent.total().payload);
  }
}

template <class T, class Policy>
void check_bits(std::uint64_t collectives) {
  for (const two& mesh : {two{1, 2}, two{1, 4}, two{2, 2}, two{2, 4}})
    for (const dim_sizes& sizes : {odd_sizes<T>(2, 20), odd_sizes<T>(10, 8)})
      for (const recompute policy : {recompute::none, recompute::selective}) {
        const layer_run how{.policy = policy, .deferred = policy == recompute::selective};
        const auto whole = run_on(mesh, sizes, making<T, Policy>(1), how);
        for (const std::int64_t chunks : {2, 3, 4, 5}) {
          INFO(describe(mesh.shape()) << ", " << chunks << " chunks, recompute " << name_of(policy));
          const auto cut = run_on(mesh, sizes, making<T, Policy>(chunks), how);
          check_same(whole, cut);
          CHECK(calls_of(cut[0].sent) - calls_of(whole[0].sent) ==
                collectives * static_cast<std::uint64_t>(chunks - 1));
        }
      }
}

}  // namespace

TEST_CASE_TEMPLATE("column-parallel: the input's gather and its gradient's reduction go in chunks", T, double, float) {
  check_bits<T, policy<rows_split, column, wide, true>>(2);
  check_bits<T, policy<rows_whole, column, wide, true>>(1);  // the gradient's all-reduce
}

TEST_CASE_TEMPLATE("row-parallel: the output's reduction and its gradient's gather go in chunks", T, double, float) {
  check_bits<T, policy<wide, row, rows_split, true>>(2);
  check_bits<T, policy<wide, row, rows_whole, true>>(1);  // the output's all-reduce
}

TEST_CASE("large products of doubles") {
  dim_sizes sizes = transformer_sizes(1, 128);
  sizes.set(dim_of<hidden>, 256);
  sizes.set(dim_of<ffn>, 512);
  const auto check = [&]<class Policy>() {
    const auto whole = run_on(two{1, 2}, sizes, making<double, Policy>(1));
    check_same(whole, run_on(two{1, 2}, sizes, making<double, Policy>(4)));
  };
  check.template operator()<policy<rows_split, column, wide>>();
  check.template operator()<policy<wide, row, rows_split>>();
}

namespace {

/// The results of a linear on ranks of which each operation takes a random time.
template <class Policy>
std::vector<layer_values> delayed(const two& mesh, std::int64_t chunks, unsigned seed) {
  std::vector<layer_values> all(static_cast<std::size_t>(mesh.size()));
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator& c) {
    std::minstd_rand random(seed * 100 + static_cast<unsigned>(c.rank()) + 1);
    const testing::link_time link = [random](const call&, double, double now) mutable {
      if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
      return now + static_cast<double>(random() % 1000) * 1e-6;
    };
    world ranks(mesh.shape(), any_communicator(testing::slow_communicator(c, link)));
    cpu device;
    all[static_cast<std::size_t>(c.rank())] =
        run_layer(ranks, device, odd_sizes<float>(2, 20), making<float, Policy>(chunks));
  });
  return all;
}

struct said : policy<rows_split, column, wide> {
  using overlap = plait::overlap<3>;
};

}  // namespace

TEST_CASE("delays of any operation change no bit") {
  for (const two& mesh : {two{1, 4}, two{2, 2}})
    for (unsigned seed = 0; seed < 4; ++seed) {
      check_same(run_on(mesh, odd_sizes<float>(2, 20), making<float, policy<rows_split, column, wide>>(1)),
                 delayed<policy<rows_split, column, wide>>(mesh, 3, seed));
      check_same(run_on(mesh, odd_sizes<float>(2, 20), making<float, policy<wide, row, rows_split>>(1)),
                 delayed<policy<wide, row, rows_split>>(mesh, 3, seed));
    }
}

TEST_CASE("a policy says it, and a layer can be told otherwise") {
  const auto made = [](std::int64_t chunks) {
    return run_on(two{1, 2}, odd_sizes<float>(2, 20), making<float, said>(chunks))[0].sent.total().calls;
  };
  CHECK(made(0) == 6);
  CHECK(made(1) == 2);
  CHECK(made(5) == 10);
}
