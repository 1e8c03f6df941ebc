// Linears with collectives in chunks, in parallel with products. They have the bits and bytes of linears without
// overlap, as a dry run predicts, under any delays. Weights that cannot be split are refused.
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plait/nn/attention.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/strategy.hpp"
#include "support/equal_parts_only.hpp"
#include "support/layer_check.hpp"
#include "support/linear_policies.hpp"
#include "support/on_mesh.hpp"
#include "support/slow_link.hpp"
#include "support/small_layers.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Row counts that chunks do not divide. Products of doubles in a fixed order are slow.
dim_sizes odd_sizes(std::int64_t batch_size, std::int64_t seq_size, bool doubles = false) {
  dim_sizes s = transformer_sizes(batch_size, seq_size);
  s.set(dim_of<hidden>, doubles ? 24 : 72);
  s.set(dim_of<ffn>, doubles ? 48 : 88);
  return s;
}

/// Products whose sums do not depend on the number of rows; a library's may.
const cpu::options fixed_order{.deterministic = true};
const testing::on_cpu on_fixed_order{fixed_order};

/// Makes a linear whose collectives have `chunks` chunks.
template <class T, class Policy>
auto making(std::int64_t chunks) {
  return [chunks](const auto& ctx) {
    return linear<T, Policy, device_of<decltype(ctx)>>(ctx, "layer", {.overlap = chunks});
  };
}

std::uint64_t calls_of(const ledger& sent) { return sent.total().calls; }

/// Checks that each rank has the bits of `whole`, which has no overlap, and has sent the same bytes.
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

/// Every mesh meets every size, and each of them every number of chunks and both modes of recompute.
template <class T, class Policy>
void check_bits(std::uint64_t collectives) {
  std::int64_t turn = sizeof(T) == 8;
  for (const two& mesh : {two{1, 2}, two{1, 4}, two{2, 2}, two{2, 4}}) {
    std::int64_t place = turn++;
    for (const dim_sizes& sizes : {odd_sizes(2, 20, sizeof(T) == 8), odd_sizes(10, 8, sizeof(T) == 8),
                                   odd_sizes(2, 23, sizeof(T) == 8), odd_sizes(6, 9, sizeof(T) == 8)}) {
      const recompute policy = place % 2 == 0 ? recompute::none : recompute::selective;
      const layer_run how{.policy = policy, .deferred = policy == recompute::selective};
      const auto whole = run_on(mesh, sizes, making<T, Policy>(1), how, on_fixed_order);
      for (const std::int64_t chunks : {2 + place % 4, 2 + (place + 1) % 4}) {
        INFO(describe(mesh.shape()) << ", " << chunks << " chunks, recompute " << name_of(policy));
        const auto cut = run_on(mesh, sizes, making<T, Policy>(chunks), how, on_fixed_order);
        check_same(whole, cut);
        CHECK(calls_of(cut[0].sent) - calls_of(whole[0].sent) == collectives * static_cast<std::uint64_t>(chunks - 1));
      }
      ++place;
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("column-parallel: the input's gather and its gradient's reduction run in chunks", T, double, float) {
  check_bits<T, policy<rows_split, column, wide, true>>(2);
  check_bits<T, policy<rows_whole, column, wide, true>>(1);  // the gradient's all-reduce
}

TEST_CASE_TEMPLATE("row-parallel: the output's reduction and its gradient's gather run in chunks", T, double, float) {
  check_bits<T, policy<wide, row, rows_split, true>>(2);
  check_bits<T, policy<wide, row, rows_whole, true>>(1);  // the output's all-reduce
}

TEST_CASE("large products of doubles") {
  dim_sizes sizes = transformer_sizes(1, 128);
  sizes.set(dim_of<hidden>, 64);
  sizes.set(dim_of<ffn>, 128);
  const auto check = [&]<class Policy>() {
    const auto whole = run_on(two{1, 2}, sizes, making<double, Policy>(1), {}, on_fixed_order);
    check_same(whole, run_on(two{1, 2}, sizes, making<double, Policy>(4), {}, on_fixed_order));
  };
  check.template operator()<policy<rows_split, column, wide>>();
  check.template operator()<policy<wide, row, rows_split>>();
}

namespace {

/// A linear with an adapter with nonzero weights.
template <class Policy>
auto adapted(std::int64_t chunks) {
  return [chunks](const auto& ctx) {
    return linear<float, Policy, device_of<decltype(ctx)>>(ctx, "layer", {.lora = {.rank = 3}, .overlap = chunks});
  };
}

}  // namespace

TEST_CASE("adapters add to each chunk, without further communication") {
  const auto check = [&]<class Policy>() {
    for (const two& mesh : {two{1, 2}, two{1, 4}, two{2, 2}})
      for (const recompute policy : {recompute::none, recompute::selective}) {
        const bool selective = policy == recompute::selective;
        const layer_run how{.policy = policy, .deferred = selective};
        const dim_sizes sizes = selective == (mesh.size() == 2) ? odd_sizes(2, 20) : odd_sizes(10, 8);
        const auto whole = run_on(mesh, sizes, adapted<Policy>(1), how, on_fixed_order);
        for (const std::int64_t chunks : {2, 5}) {
          INFO(describe(mesh.shape()) << ", " << chunks << " chunks, recompute " << name_of(policy));
          check_same(whole, run_on(mesh, sizes, adapted<Policy>(chunks), how, on_fixed_order));
        }
      }
  };
  check.template operator()<policy<rows_split, column, wide>>();
  check.template operator()<policy<rows_whole, column, wide>>();
  check.template operator()<policy<wide, row, rows_split>>();
  check.template operator()<policy<wide, row, rows_whole>>();
}

TEST_CASE("the gather for recomputation runs during the product for the input's gradient") {
  for (const std::int64_t chunks : {1, 3})
    for (const bool adapter : {false, true})
      threads::run(2, [&](threads::communicator& c) {
        using up = policy<rows_split, column, wide>;
        const auto recorded = std::make_shared<recorder>();
        world ranks(two{1, 2}.shape(), c, recorded);
        cpu device(fixed_order);
        const layer_run how{.policy = recompute::selective};
        if (adapter)
          run_layer(ranks, device, odd_sizes(2, 20), adapted<up>(chunks), how);
        else
          run_layer(ranks, device, odd_sizes(2, 20), making<float, up>(chunks), how);
        std::size_t gathers = 0, waited_for_at_once = 0;
        for (const recorder::event& e : recorded->events()) {
          if (e.kind != collective::all_gather || recorded->labels()[static_cast<std::size_t>(e.label)] != "tp")
            continue;
          ++gathers;
          waited_for_at_once += !e.asynchronous;
        }
        const std::size_t shown = 3;  // `run_layer` gathers the output and two gradients
        CHECK(gathers - shown == static_cast<std::size_t>(chunks) + 1);  // forward in chunks, and once whole
        CHECK(waited_for_at_once - shown == (chunks == 1 ? 2 : 0));
      });
}

namespace {

/// The results of a linear on ranks on which each operation takes a random time.
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
    cpu device(fixed_order);
    all[static_cast<std::size_t>(c.rank())] = run_layer(ranks, device, odd_sizes(2, 20), making<float, Policy>(chunks));
  });
  return all;
}

struct in_chunks : policy<rows_split, column, wide> {
  using overlap = plait::overlap<3>;
};

}  // namespace

TEST_CASE("delays of any operation change no bit") {
  for (const two& mesh : {two{1, 4}, two{2, 2}})
    for (unsigned seed = 0; seed < 4; ++seed) {
      check_same(run_on(mesh, odd_sizes(2, 20), making<float, policy<rows_split, column, wide>>(1), {}, on_fixed_order),
                 delayed<policy<rows_split, column, wide>>(mesh, 3, seed));
      check_same(run_on(mesh, odd_sizes(2, 20), making<float, policy<wide, row, rows_split>>(1), {}, on_fixed_order),
                 delayed<policy<wide, row, rows_split>>(mesh, 3, seed));
    }
}

TEST_CASE("a policy sets the chunks, and a layer's options override them") {
  const auto made = [](std::int64_t chunks) {
    return run_on(two{1, 2}, odd_sizes(2, 20), making<float, in_chunks>(chunks))[0].sent.total().calls;
  };
  CHECK(made(0) == 6);
  CHECK(made(1) == 2);
  CHECK(made(5) == 10);
}

namespace {

template <class Base, std::int64_t Chunks>
struct chunked : Base {
  using overlap = plait::overlap<Chunks>;
};

/// Checks that attention and MLP with overlap have the bits of `S`, also on meshes with further axes.
template <class S>
void check_blocks() {
  const typename S::mesh mesh{2, 1, 2, 2};
  dim_sizes sizes = transformer_sizes(4, 24);
  sizes.set(dim_of<hidden>, 64);
  sizes.set(dim_of<head_dim>, 16);
  sizes.set(dim_of<ffn>, 128);
  const auto mlp = [&]<class Strategy>() {
    const auto make = [](const auto& ctx) {
      return swiglu_mlp<float, Strategy, device_of<decltype(ctx)>>(ctx, "mlp", {0, 0.2}, true);
    };
    return run_on(mesh, sizes, make, {}, on_fixed_order);
  };
  const auto attention = [&]<class Strategy>() {
    const auto make = [](const auto& ctx) {
      return self_attention<float, Strategy, device_of<decltype(ctx)>>(ctx, "attention", {.qkv_bias = true});
    };
    return run_on(mesh, sizes, make, {}, on_fixed_order);
  };
  check_same(mlp.template operator()<S>(), mlp.template operator()<chunked<S, 3>>());
  check_same(attention.template operator()<S>(), attention.template operator()<chunked<S, 3>>());
}

}  // namespace

TEST_CASE("a strategy sets the chunks of all its linears") {
  check_blocks<megatron_sp>();
  check_blocks<megatron_tp>();
}

namespace {

/// The text of the error when a linear is made, or "".
template <class Policy, class Mesh = two, class Communicator = threads::communicator>
std::string refusal(const Mesh& mesh, linear_options<float, cpu> how, const dim_sizes& sizes = transformer_sizes()) {
  std::string text;
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator& c) {
    world ranks(mesh.shape(), Communicator(c));
    cpu device;
    const context<cpu> ctx{device, ranks, sizes, 1};
    const std::string mine = text_thrown_by([&] { const linear<float, Policy> made(ctx, "layer", how); });
    if (c.rank() == 0) text = mine;
  });
  return text;
}

struct across : axis_tag<"across"> {};
struct down : axis_tag<"down"> {};
using grid = plait::mesh<axis<down>, axis<across>>;
struct both_sides {
  using mesh = grid;
  using input = spec<batch, shard<seq, across>, shard<hidden, down>>;
  using weight = spec<shard<ffn, across>, shard<hidden, down>>;
  using output = spec<batch, shard<seq, down>, shard<ffn, across>>;
};
struct own_dim {
  using mesh = grid;
  using input = spec<batch, seq, shard<hidden, down>, invariant<across>>;
  using weight = spec<shard<ffn, across>, shard<hidden, down>>;
  using output = spec<batch, seq, shard<ffn, across, down>>;
};

}  // namespace

TEST_CASE("linears that cannot be split are refused with the reason") {
  using up = policy<rows_split, column, wide>;
  CHECK(has(refusal<up>(two{1, 2}, {.overlap = -1}),
            "layer: overlap in -1 chunks; at least 1, which is no overlap, or 0"));
  CHECK(has(refusal<up>(two{1, 2}, {.overlap = 17}),
            "input of layer.weight: overlap in 17 chunks, of 16 rows on each rank; legal are 1 to 16 chunks"));
  CHECK(refusal<up>(two{1, 2}, {.overlap = 16}).empty());
  CHECK(refusal<up>(two{1, 2}, {.overlap = 16}, transformer_sizes(4, 9)).empty());
  CHECK(has(refusal<up>(two{1, 2}, {.overlap = 17}, transformer_sizes(4, 9)),  // one rank has 16 rows, another 20
            "input of layer.weight: overlap in 17 chunks, of 16 rows on each rank; legal are 1 to 16 chunks"));
  CHECK(
      has(refusal<up, two, equal_parts_only>(two{1, 2}, {.overlap = 2}, transformer_sizes(4, 9)),
          "input of layer.weight: overlap in 2 chunks of a dim that does not divide by the ranks needs a communicator "
          "that takes parts of unequal sizes (unequal_parts), and 'tp' does not"));
  CHECK(refusal<up, two, equal_parts_only>(two{1, 2}, {.overlap = 2}).empty());
  CHECK(refusal<up>(two{2, 1}, {.overlap = 16}).empty());  // one rank along tp sends nothing
  CHECK(has(
      refusal<both_sides>(grid{2, 2}, {.overlap = 2}),
      "layer.weight: overlap needs a product with one collective, before it or after it, and a product here has both: "
      "all_gather over across, and reduce_scatter over down; leave overlap out"));
  CHECK(refusal<both_sides>(grid{1, 2}, {.overlap = 2}).empty());
  CHECK(has(refusal<own_dim>(grid{2, 1}, {.overlap = 2}),
            "output of layer.weight: overlap in 2 chunks is of one all-gather, reduce-scatter or all-reduce of whole "
            "rows; here it would be of reduce_scatter over down"));
}

TEST_CASE("the peak memory of a rank is as a dry run predicts") {
  const dim_sizes sizes = odd_sizes(2, 20);
  const auto check = [&]<class Policy>(std::int64_t chunks) {
    const auto make = making<float, Policy>(chunks);
    on_mesh(two{1, 4}, sizes, 1, [&](const context<cpu>& ctx) {
      auto layer = make(ctx);
      using made = decltype(layer);
      begin(ctx, layer);
      typename made::template tensor_of<typename made::input> x(ctx);
      typename made::template tensor_of<dual_t<typename made::output>> dy(ctx);
      ctx.device.zero(x.data(), static_cast<std::size_t>(x.size()) * sizeof(float));
      ctx.device.zero(dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(float));
      typename made::saved kept;
      layer.forward(ctx, x, &kept);
      layer.backward(ctx, x, kept, dy);
      const layer_plan plan = dry_run(ctx.ranks.shape(), sizes, ctx.ranks.rank(), make);
      CHECK(plan.peak_bytes == static_cast<std::int64_t>(ctx.device.peak_bytes()));
    });
  };
  for (const std::int64_t chunks : {1, 2, 4}) {
    check.template operator()<policy<rows_split, column, wide>>(chunks);
    check.template operator()<policy<wide, row, rows_split>>(chunks);
  }
}
