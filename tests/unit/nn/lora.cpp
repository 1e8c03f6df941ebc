// program: more_layers
// Low-rank adapters: finite differences on one rank, meshes equal one rank, and the base does not change.
#include "plait/kernels/settings.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "support/layer_check.hpp"
#include "support/linear_policies.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using column_sp = policy<rows_split, column, wide, true>;
using column_tp = policy<rows_whole, column, wide>;
using row_sp = policy<wide, row, rows_split, true>;
using row_tp = policy<wide, row, rows_whole>;
using row_open = policy<wide, row, rows_pending>;
struct column_stored : column_sp {
  using stored = spec<shard<ffn, tp>, shard<hidden, dp>>;
};
struct row_stored : row_sp {
  using stored = spec<shard<hidden, dp>, shard<ffn, tp>>;
};

// Both dims of the weight sharded, and a batch of products.
struct across : axis_tag<"across"> {};
struct down : axis_tag<"down"> {};
struct expert : dim_tag<"expert"> {};
using grid = plait::mesh<axis<down>, axis<across>>;
struct grid_policy {
  using mesh = grid;
  using input = spec<batch, shard<seq, across>, shard<hidden, down>>;
  using weight = spec<shard<ffn, across>, shard<hidden, down>>;
  using output = spec<batch, seq, shard<ffn, across, down>>;
};
using batched = policy<spec<shard<expert, dp>, batch, hidden, invariant<tp>>,
                       spec<shard<expert, dp>, shard<ffn, tp>, hidden>, spec<shard<expert, dp>, batch, shard<ffn, tp>>>;

/// The specs derived for an adapter fit those derived for the linear.
template <class Policy>
constexpr bool adapter_fits() {
  constexpr const auto& d = plait::detail::linear_value<Policy>::derivation;
  constexpr lora_derivation adapter = derive_lora(d.gathered, d.branches[0]);
  return adapter.verdict.ok() && equivalent(adapter.product, d.branches[0].product);
}
static_assert(adapter_fits<column_sp>() && adapter_fits<column_tp>() && adapter_fits<row_sp>());
static_assert(adapter_fits<row_tp>() && adapter_fits<row_open>() && adapter_fits<grid_policy>());
static_assert(adapter_fits<batched>());

dim_sizes lora_sizes() {
  dim_sizes sizes = transformer_sizes();
  sizes.set(dim_of<expert>, 4);
  return sizes;
}

template <class Policy>
auto maker(std::int64_t rank) {
  return [rank](const auto& ctx) {
    using layer = linear<double, Policy, device_of<decltype(ctx)>>;
    return layer(ctx, "up", {.lora = {.rank = rank, .scale = 2.0}});
  };
}

std::vector<std::string> names_of(const layer_values& values) {
  std::vector<std::string> names;
  for (const auto& [name, gradient] : values.gradients) names.push_back(name);
  return names;
}

template <class Policy, class Mesh = two>
void check_adapter() {
  const layer_values& one = check_once(name_on_one_rank<Policy>(), Mesh{1, 1}, lora_sizes(), maker<Policy>(3));
  CHECK(names_of(one) == std::vector<std::string>{"up.lora_A.weight", "up.lora_B.weight"});
  check_meshes({Mesh{2, 1}, Mesh{1, 4}, Mesh{2, 2}, Mesh{4, 2}}, lora_sizes(), one, maker<Policy>(3));
}

/// All weights after three steps of AdamW with `coefficients`, and the memory of the device then.
struct trained {
  std::vector<std::pair<std::string, std::vector<double>>> weights;
  std::size_t bytes = 0;
};
template <class Mesh, class Make>
std::vector<trained> train(const Mesh& mesh, Make make) {
  std::vector<trained> all(static_cast<std::size_t>(mesh.size()));
  on_mesh(mesh, lora_sizes(), 7, [&](const context<cpu>& ctx) {
    auto layer = make(ctx);
    using L = decltype(layer);
    fill_parameters(ctx, layer, {});
    const auto x = place_full<typename L::input>(ctx, random_full(layout_v<typename L::input>, ctx.sizes, 1));
    const auto dy =
        place_full<dual_t<typename L::output>>(ctx, random_full(layout_v<typename L::output>, ctx.sizes, 2));
    trained& out = all[static_cast<std::size_t>(ctx.ranks.rank())];
    {
      adamw<double, cpu> optimizer;
      for (int step = 0; step < 3; ++step) {
        gather_parameters(ctx, layer);
        zero_gradients(ctx, layer);
        typename L::saved kept;
        layer.forward(ctx, x, &kept);
        layer.backward(ctx, x, kept, dy);
        optimizer.begin_step(ctx, 0.05);
        layer.visit([&](auto& p) {
          if (p.trainable()) optimizer.update(ctx, p.reduce(ctx));
        });
      }
      out.bytes = ctx.device.bytes_in_use();
    }
    layer.visit([&](auto& p) {
      const parameter<double, cpu>& constant = p;
      const context<cpu> own{ctx.device, ctx.ranks, p.sizes(), ctx.seed};
      out.weights.emplace_back(p.name(), collect_full(own, p.stored(), constant.value()));
    });
  });
  return all;
}

template <class Mesh, class Make>
void check_training(std::initializer_list<Mesh> meshes, Make make) {
  const trained one = train(Mesh{1, 1}, make)[0];
  for (const Mesh& mesh : meshes)
    for (const trained& got : train(mesh, make)) {
      REQUIRE(got.weights.size() == one.weights.size());
      for (std::size_t i = 0; i < one.weights.size(); ++i)
        check_near(got.weights[i].second, one.weights[i].second, 1e-10, one.weights[i].first);
    }
}

}  // namespace

TEST_CASE("an adapter of a column-parallel linear") {
  check_adapter<column_sp>();
  check_adapter<column_tp>();
  check_adapter<column_stored>();
}

TEST_CASE("an adapter of a row-parallel linear") {
  check_adapter<row_sp>();
  check_adapter<row_tp>();
  check_adapter<row_open>();
  check_adapter<row_stored>();
}

TEST_CASE("an adapter of a weight that is sharded on both dims, and of a batch of weights") {
  check_adapter<grid_policy, grid>();
  check_adapter<batched>();
}

TEST_CASE("an adapter adds no communication to a forward or backward pass") {
  const auto sent = [](auto make) {
    const layer_plan plan = dry_run(two{2, 4}.shape(), lora_sizes(), 0, make);
    return std::pair{plan.forward, plan.backward};
  };
  const auto compare = [&]<class Policy>(std::type_identity<Policy>) {
    const auto with = sent(maker<Policy>(3)), without = sent(maker<Policy>(0));
    CHECK(with.first.total("tp").calls == 1);
    CHECK(compare_ledgers(with.first, without.first).text() == "");
    // The frozen weight needs no saved input; the adapter needs it once.
    CHECK(compare_ledgers(with.second, without.second).text() == "");
  };
  compare(std::type_identity<column_sp>{});
  compare(std::type_identity<row_sp>{});
}

TEST_CASE("three steps of AdamW on meshes equal those on one rank, and do not change the base") {
  check_training({two{2, 1}, two{1, 4}, two{4, 2}}, maker<column_sp>(3));
  check_training({two{2, 1}, two{1, 4}, two{4, 2}}, maker<row_sp>(3));
  check_training({two{2, 1}, two{4, 2}, two{2, 4}}, maker<row_stored>(2));
  const auto still = [](const context<cpu>& ctx) {
    linear<double, column_sp> layer(ctx, "up");
    layer.visit([](auto& p) { p.freeze(); });
    return layer;
  };
  const trained before = train(two{1, 1}, still)[0], after = train(two{1, 1}, maker<column_sp>(3))[0];
  REQUIRE(after.weights.size() == 4);
  CHECK(after.weights[0] == before.weights[0]);  // the weight
  CHECK(after.weights[1] == before.weights[1]);  // the bias
}

TEST_CASE("a frozen base has no gradient, and no memory for gradients or moments") {
  const std::size_t full = train(two{1, 1}, maker<column_tp>(0))[0].bytes;
  const std::size_t adapted = train(two{1, 1}, maker<column_tp>(2))[0].bytes;
  const std::size_t base = 16 * 8 * sizeof(double), adapter = (16 + 8) * 2 * sizeof(double);
  const std::size_t scalars = full - 4 * base;  // the rest is weight, gradient and two moments
  CHECK(adapted == base + 4 * adapter + scalars);
  on_mesh(two{1, 1}, lora_sizes(), 7, [](const context<cpu>& ctx) {
    auto layer = maker<column_sp>(2)(ctx);
    CHECK(!layer.weight()->trainable());
    CHECK(!layer.bias()->trainable());
    const auto refused = [&](std::int64_t rank, auto policy_of) {
      return text_thrown_by([&] { maker<decltype(policy_of)>(rank)(ctx); });
    };
    CHECK(has(refused(-1, column_sp{}), "up: the rank of an adapter is -1; at least 1, or 0 for none"));
    using in_out = policy<rows_split, spec<hidden, shard<ffn, tp>>, wide, false>;
    CHECK(has(refused(2, in_out{}),
              "up: an adapter is for a weight whose contracted dims come last; this one's come "
              "first"));
  });
}

TEST_CASE("a new adapter adds zero") {
  on_mesh(two{1, 1}, lora_sizes(), 7, [](const context<cpu>& ctx) {
    const auto output = [&](std::int64_t rank) {
      auto layer = maker<column_tp>(rank)(ctx);
      layer.visit([&](auto& p) { p.initialize(ctx); });
      gather_parameters(ctx, layer);
      const auto y = layer.forward(ctx, place_full<rows_whole>(ctx, random_full(layout_v<rows_whole>, ctx.sizes, 1)));
      return std::vector<double>(y.data(), y.data() + y.size());
    };
    CHECK(output(3) == output(0));
    auto layer = maker<column_tp>(3)(ctx);
    double largest_a = 0, largest_b = 0;
    layer.visit([&](auto& p) {
      p.initialize(ctx);
      const parameter<double, cpu>& constant = p;
      double& largest = p.name() == "up.lora_A.weight" ? largest_a : largest_b;
      if (p.name().find("lora") != std::string::npos)
        for (std::int64_t i = 0; i < p.size(); ++i) largest = std::max(largest, std::abs(constant.value()[i]));
    });
    CHECK(largest_a > 0);
    CHECK(largest_b == 0);
  });
}

namespace {

using four = megatron_sp::mesh;

template <class Make>
void check_sublayer(Make make, const std::vector<std::string>& names) {
  const dim_sizes sizes = transformer_sizes(2, 8);
  const layer_values& one = check_once(names[0], four{1, 1, 1, 1}, sizes, make, 25);
  CHECK(names_of(one) == names);
  check_meshes({four{2, 1, 1, 1}, four{1, 1, 2, 1}, four{1, 2, 1, 2}, four{1, 1, 2, 2}, four{2, 1, 2, 1}}, sizes, one,
               make);
}

template <class S>
void check_fused() {
  check_sublayer(
      [](const auto& ctx) {
        attention_options how;
        how.frequencies = kernels::rope_inverse_frequencies(4, 100.0);
        how.qkv_bias = true;
        how.lora = {.q = {3, 0.5}, .v = {2, 2.0}, .o = {1, 1.0}};
        self_attention<double, S, device_of<decltype(ctx)>> layer(ctx, "attention", how);
        freeze_all_but_adapters(layer);
        return layer;
      },
      {"attention.q_proj.lora_A.weight", "attention.q_proj.lora_B.weight", "attention.v_proj.lora_A.weight",
       "attention.v_proj.lora_B.weight", "attention.o_proj.lora_A.weight", "attention.o_proj.lora_B.weight"});
  check_sublayer(
      [](const auto& ctx) {
        return swiglu_mlp<double, S, device_of<decltype(ctx)>>(ctx, "mlp", {}, true,
                                                               {.up = {3, 0.5}, .down = {2, 2.0}});
      },
      {"mlp.gate_proj.weight", "mlp.gate_proj.bias", "mlp.up_proj.lora_A.weight", "mlp.up_proj.lora_B.weight",
       "mlp.down_proj.lora_A.weight", "mlp.down_proj.lora_B.weight"});
}

}  // namespace

TEST_CASE("adapters of some of the linears of attention and of the MLP") {
  check_fused<megatron_sp>();
  check_fused<megatron_tp>();
  check_fused<stored_over_dp<megatron_sp>>();
}
