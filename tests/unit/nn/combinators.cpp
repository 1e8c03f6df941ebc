// program: combinators
// Dropout, residual, sequential and redistribute as layers: finite differences on one rank, meshes equal one rank.
#include "plait/nn/combinators.hpp"

#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/pointwise.hpp"
#include "plait/nn/strategy.hpp"
#include "support/layer_check.hpp"
#include "support/linear_policies.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Dropout as a layer for the checks.
template <class Spec, class Device>
struct dropout_layer : layer_types<double, Spec, Spec, Device> {
  struct saved {};
  dropout<double, Spec, Device> drop;

  explicit dropout_layer(double p) : drop(p, "drop") {}
  tensor<double, Spec, Device> forward(const microbatch<Device>& mb, const tensor<double, Spec, Device>& x, saved*) {
    tensor<double, Spec, Device> y(mb.ctx);
    mb.ctx.device.copy(y.data(), x.data(), static_cast<std::size_t>(x.size()) * sizeof(double));
    drop.forward(mb, y);
    return y;
  }
  tensor<double, dual_t<Spec>, Device> backward(const microbatch<Device>& mb, const tensor<double, Spec, Device>&,
                                                saved&, const tensor<double, dual_t<Spec>, Device>& dy) {
    tensor<double, dual_t<Spec>, Device> dx(mb.ctx);
    mb.ctx.device.copy(dx.data(), dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(double));
    drop.backward(mb, dx);
    return dx;
  }
  template <class F>
  void visit(F&&) {}
};

using up_policy = policy<rows_split, column, wide, true>;
using down_policy = policy<wide, row, rows_split>;

template <class Make>
void check(Make make) {
  const dim_sizes sizes = transformer_sizes();
  const layer_values one = check_one(two{1, 1}, sizes, make);
  check_meshes({two{2, 1}, two{1, 8}, two{2, 2}, two{4, 2}}, sizes, one, make);
}

}  // namespace

TEST_CASE("dropout: a fixed mask on every mesh, scaled to keep the mean") {
  check([](const auto& ctx) { return dropout_layer<rows_split, device_of<decltype(ctx)>>(0.3); });
  check([](const auto& ctx) { return dropout_layer<rows_whole, device_of<decltype(ctx)>>(0.3); });
  const dim_sizes sizes = transformer_sizes(32, 8);
  const auto drops = [](double p) {
    return [p](const auto& ctx) { return dropout_layer<rows_split, device_of<decltype(ctx)>>(p); };
  };
  const layer_values y = run_on(two{1, 1}, sizes, drops(0.3))[0];
  const layer_values x = run_on(two{1, 1}, sizes, drops(0.0))[0];
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
    on_mesh(two{1, 1}, transformer_sizes(2, 8), seed, [&](const context<cpu>& ctx) {
      microbatch<cpu> mb(ctx);
      mb.first_sample = first_sample;
      tensor<double, rows_split> x(ctx);
      kernels::fill(ctx.device, x.data(), x.size(), 1.0);
      dropout<double, rows_split>(0.5, name).forward(mb, x);
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

namespace {

template <class D>
using up = linear<double, up_policy, D>;
template <class D>
using down = linear<double, down_policy, D>;
template <class D>
using norm = rms_norm<double, rows_split, D>;
template <class D>
using gelu_wide = activation<double, gelu, wide, D>;
template <class D>
using mlp = sequential<up<D>, gelu_wide<D>, down<D>>;

template <class D>
mlp<D> make_mlp(const context<D>& ctx, const std::string& name = "") {
  return mlp<D>(up<D>(ctx, name + "up"), gelu_wide<D>(), down<D>(ctx, name + "down"));
}

}  // namespace

TEST_CASE("sequential") {
  check([](const auto& ctx) {
    using D = device_of<decltype(ctx)>;
    return sequential(up<D>(ctx, "up"), gelu_wide<D>(), down<D>(ctx, "down"), norm<D>(ctx, 1e-5, "norm"));
  });
}

TEST_CASE("recomputation keeps what its mode says in a sequential") {
  const auto make = [](const auto& ctx) {
    using D = device_of<decltype(ctx)>;
    return sequential(norm<D>(ctx, 1e-5, "norm"), up<D>(ctx, "up"), gelu_wide<D>(), down<D>(ctx, "down"));
  };
  const auto kept = [&](recompute policy) {
    return dry_run(two{1, 2}.shape(), transformer_sizes(), 0, make, policy).kept_bytes;
  };
  const std::int64_t rows = 4 * 8, split = rows / 2 * 8 * 8, whole = rows * 8 * 8, inner = rows * 16 / 2 * 8;
  const std::int64_t inv_rms = rows / 2 * 8;
  CHECK(kept(recompute::none) == inv_rms + split + whole + 2 * inner);  // normalised, gathered, before and after gelu
  CHECK(kept(recompute::selective) == inv_rms + inner);
  CHECK(kept(recompute::full) == 0);
}

TEST_CASE("residual, with and without dropout") {
  for (const double p : {0.0, 0.25})
    check([p](const auto& ctx) {
      using D = device_of<decltype(ctx)>;
      return residual<norm<D>, mlp<D>>(norm<D>(ctx, 1e-5, "norm"), make_mlp(ctx), {p, "branch"});
    });
}

TEST_CASE("a stack of any depth") {
  for (const int depth : {0, 1, 3})
    check([depth](const auto& ctx) {
      using D = device_of<decltype(ctx)>;
      using block = residual<norm<D>, mlp<D>>;
      std::vector<block> blocks;
      for (int i = 0; i < depth; ++i) {
        const std::string name = "layers." + std::to_string(i) + ".";
        blocks.push_back(block(norm<D>(ctx, 1e-5, name + "norm"), make_mlp(ctx, name)));
      }
      return stack<block>(std::move(blocks));
    });
}

namespace {

/// Branches of a sum take the gathered rows and return partial sums: one gather and one reduction for all.
using up_inside = policy<rows_replicated, column, wide, true>;
using down_inside = policy<wide, row, rows_pending>;

}  // namespace

TEST_CASE("a sum of branches gathers once and reduces once") {
  const auto make = [](const auto& ctx) {
    using D = device_of<decltype(ctx)>;
    using one = linear<double, up_inside, D>;
    using other = linear<double, down_inside, D>;
    using branch = sequential<one, activation<double, gelu_tanh, wide, D>, other>;
    const auto make_branch = [&](const std::string& name) {
      return branch(one(ctx, name + ".up"), activation<double, gelu_tanh, wide, D>(), other(ctx, name + ".down"));
    };
    return sum<rows_split, rows_split, branch, branch>(ctx, "block", make_branch("a"), make_branch("b"));
  };
  check(make);
  const layer_plan plan = dry_run(two{1, 4}.shape(), transformer_sizes(), 0, make);
  for (const auto& [book, kind, times] : {std::tuple{&plan.forward, collective::all_gather, 1u},
                                          std::tuple{&plan.forward, collective::reduce_scatter, 1u},
                                          std::tuple{&plan.backward, collective::all_gather, 1u},
                                          std::tuple{&plan.backward, collective::reduce_scatter, 1u}})
    CHECK(book->total("tp", kind).calls == times);
  CHECK(plan.forward.total("tp").calls == 2);
  CHECK(plan.backward.total("tp").calls == 2);
}

namespace {

template <class From, class To>
void check_redistribution() {
  check([](const auto& ctx) { return redistribution<double, From, To, device_of<decltype(ctx)>>(ctx); });
}

}  // namespace

TEST_CASE("redistribution is a layer, and its adjoint is a redistribution of duals") {
  check_redistribution<rows_split, spec<shard<batch, dp>, seq, shard<hidden, tp>>>();
  check_redistribution<rows_split, rows_replicated>();
  check_redistribution<rows_whole, rows_split>();
  check_redistribution<rows_pending, rows_split>();
  check_redistribution<spec<batch, seq, hidden, partial<dp, tp>>, spec<batch, seq, hidden, invariant<dp, tp>>>();
}

TEST_CASE_TEMPLATE("activations", Function, gelu, gelu_tanh, silu, relu) {
  check([](const auto& ctx) { return activation<double, Function, wide, device_of<decltype(ctx)>>(); });
}
