// Dropout, residual, sequential and redistribute as layers: finite differences on one rank, meshes equal one rank.
#include "../support/layer_check.hpp"
#include "plait/models/strategies.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using two = plait::mesh<axis<dp>, axis<tp>>;
using rows_split = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
using rows_whole = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
using wide = spec<shard<batch, dp>, seq, shard<ffn, tp>>;

/// Dropout as a layer of the harness.
template <class Spec>
struct dropout_layer {
  using value_type = double;
  using device = cpu;
  using input = Spec;
  using output = Spec;
  struct saved {};
  dropout<double, Spec> drop;

  tensor<double, Spec> forward(context<cpu>& ctx, const tensor<double, Spec>& x, saved*, recompute) {
    tensor<double, Spec> y(ctx);
    ctx.device.copy(y.data(), x.data(), static_cast<std::size_t>(x.size()) * sizeof(double));
    drop.forward(ctx, y);
    return y;
  }
  tensor<double, dual_t<Spec>> backward(context<cpu>& ctx, const tensor<double, Spec>&, saved&,
                                        const tensor<double, dual_t<Spec>>& dy) {
    tensor<double, dual_t<Spec>> dx(ctx);
    ctx.device.copy(dx.data(), dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(double));
    drop.backward(ctx, dx);
    return dx;
  }
  std::int64_t saved_bytes(const context<cpu>&, recompute) const { return 0; }
  template <class F>
  void visit(F&&) {}
  template <class F>
  void visit_collectives(F&&, recompute) const {}
};

/// A redistribution and its adjoint.
template <class From, class To>
struct moving_layer {
  using value_type = double;
  using device = cpu;
  using input = From;
  using output = To;
  struct saved {};
  executor there, back;

  explicit moving_layer(context<cpu>& ctx)
      : there(layout_v<From>, layout_v<To>, ctx.ranks, ctx.sizes, "there"),
        back(layout_v<dual_t<To>>, layout_v<dual_t<From>>, ctx.ranks, ctx.sizes, "back") {}
  tensor<double, To> forward(context<cpu>& ctx, const tensor<double, From>& x, saved*, recompute) {
    return redistribute<To>(ctx, x);
  }
  tensor<double, dual_t<From>> backward(context<cpu>& ctx, const tensor<double, From>&, saved&,
                                        const tensor<double, dual_t<To>>& dy) {
    return redistribute<dual_t<From>>(ctx, dy);
  }
  std::int64_t saved_bytes(const context<cpu>&, recompute) const { return 0; }
  template <class F>
  void visit(F&&) {}
  template <class F>
  void visit_collectives(F&& f, recompute) const {
    there.visit_collectives([&](const collective_cost& c) { f("forward", c); }, sizeof(double));
    back.visit_collectives([&](const collective_cost& c) { f("backward", c); }, sizeof(double));
  }
};

struct up_policy {
  using input = rows_split;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = wide;
  static constexpr bool bias = true;
};
struct down_policy {
  using input = wide;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = rows_split;
};

template <class Make>
void check(Make make) {
  const dim_sizes sizes = transformer_sizes();
  const layer_values one = check_differences(two{1, 1}, sizes, make);
  for (const auto& mesh : {two{1, 2}, two{2, 1}, two{2, 2}, two{4, 4}, two{1, 8}})
    for (const recompute keep : {recompute::none, recompute::selective}) check_layer(mesh, sizes, one, make, keep);
}

}  // namespace

TEST_CASE("dropout: a fixed mask on every mesh, scaled so that the mean stays") {
  check([](context<cpu>&) { return dropout_layer<rows_split>{{0.3, "drop"}}; });
  check([](context<cpu>&) { return dropout_layer<rows_whole>{{0.3, "drop"}}; });
  const dim_sizes sizes = transformer_sizes(32, 8);
  const layer_values y = run_on(two{1, 1}, sizes, [](context<cpu>&) {
    return dropout_layer<rows_split>{{0.3, "drop"}};
  })[0];
  const layer_values x = run_on(two{1, 1}, sizes, [](context<cpu>&) {
    return dropout_layer<rows_split>{{0.0, "drop"}};
  })[0];
  double dropped = 0;
  for (std::size_t i = 0; i < x.y.size(); ++i) {
    dropped += y.y[i] == 0;
    if (y.y[i] != 0) REQUIRE(std::abs(y.y[i] - x.y[i] / 0.7) < 1e-14);
  }
  CHECK(dropped / static_cast<double>(x.y.size()) == doctest::Approx(0.3).epsilon(0.1));
}

TEST_CASE("dropout differs from sample to sample, layer to layer and seed to seed") {
  const auto mask = [](const char* name, std::int64_t first_sample, std::uint64_t seed) {
    std::vector<double> out;
    threads::run(1, [&](threads::communicator c) {
      world ranks(two{1, 1}.shape(), c);
      cpu device;
      context<cpu> ctx{device, ranks, transformer_sizes(2, 8), seed, first_sample};
      tensor<double, rows_split> x(ctx);
      kernels::fill(device, x.data(), x.size(), 1.0);
      dropout<double, rows_split>(0.5, name).forward(ctx, x);
      out.assign(x.data(), x.data() + x.size());
    });
    return out;
  };
  const auto base = mask("a", 0, 1);
  CHECK(mask("a", 0, 1) == base);
  CHECK(mask("b", 0, 1) != base);
  CHECK(mask("a", 2, 1) != base);
  CHECK(mask("a", 0, 2) != base);
  const auto next = mask("a", 1, 1);  // sample 1 is the second of the base
  CHECK(std::equal(next.begin(), next.begin() + 64, base.begin() + 64));
  CHECK_THROWS_AS((dropout<double, rows_split>(1.0, "a")), error);
  CHECK_THROWS_AS((dropout<double, rows_split>(-0.1, "a")), error);
}

TEST_CASE("sequential") {
  check([](context<cpu>& ctx) {
    return sequential(linear<double, up_policy>(ctx, "up"), linear<double, down_policy>(ctx, "down"),
                      rms_norm<double, rows_split>(ctx, 1e-5, "norm"));
  });
}

TEST_CASE("residual, with and without dropout") {
  for (const double p : {0.0, 0.25})
    check([p](context<cpu>& ctx) {
      using inner = sequential<linear<double, up_policy>, linear<double, down_policy>>;
      using norm = rms_norm<double, rows_split>;
      return residual<norm, inner>(
          norm(ctx, 1e-5, "norm"),
          inner(linear<double, up_policy>(ctx, "up"), linear<double, down_policy>(ctx, "down")), {p, "branch"});
    });
}

TEST_CASE("redistribute is a layer, and its adjoint is a redistribution of duals") {
  check(
      [](context<cpu>& ctx) { return moving_layer<rows_split, spec<shard<batch, dp>, seq, shard<hidden, tp>>>(ctx); });
  check([](context<cpu>& ctx) {
    return moving_layer<rows_split, spec<shard<batch, dp>, seq, hidden, replicate<tp>>>(ctx);
  });
  check([](context<cpu>& ctx) { return moving_layer<rows_whole, rows_split>(ctx); });
  check([](context<cpu>& ctx) {
    return moving_layer<spec<shard<batch, dp>, seq, hidden, partial<tp>>, rows_split>(ctx);
  });
  check([](context<cpu>& ctx) {
    return moving_layer<spec<batch, seq, hidden, partial<dp, tp>>, spec<batch, seq, hidden, invariant<dp, tp>>>(ctx);
  });
}
