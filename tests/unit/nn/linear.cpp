// program: layers
// Linears with strategies of the library and of a user: finite differences on one rank, and meshes equal one rank.
#include "plait/nn/linear.hpp"

#include "support/layer_check.hpp"
#include "support/linear_policies.hpp"
#include "support/on_mesh.hpp"
#include "support/on_pointers.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using whole_weight = spec<ffn, hidden>;

template <class Policy, class Mesh = two>
void check_linear() {
  const auto make = [](const auto& ctx) { return linear<double, Policy, device_of<decltype(ctx)>>(ctx, "layer"); };
  const dim_sizes sizes = transformer_sizes();
  const layer_values& one = check_once(name_on_one_rank<Policy>(), Mesh{1, 1}, sizes, make);
  check_meshes({Mesh{1, 1}, Mesh{2, 1}, Mesh{1, 8}, Mesh{2, 2}, Mesh{4, 2}}, sizes, one, make);
}

}  // namespace

TEST_CASE("column-parallel") {
  check_linear<policy<rows_split, column, wide, false>>();
  check_linear<policy<rows_split, column, wide, true>>();
  check_linear<policy<rows_whole, column, wide, true>>();
  check_linear<policy<rows_replicated, column, wide, true>>();
}

TEST_CASE("row-parallel") {
  check_linear<policy<wide, row, rows_split, false>>();
  check_linear<policy<wide, row, rows_split, true>>();
  check_linear<policy<wide, row, rows_whole, true>>();
  check_linear<policy<wide, row, rows_replicated, true>>();
  check_linear<policy<wide, row, rows_pending, false>>();
}

TEST_CASE("a weight stored as [in, out]") {
  check_linear<policy<rows_split, spec<hidden, shard<ffn, tp>>, wide, true>>();
  check_linear<policy<rows_whole, spec<hidden, shard<ffn, tp>>, wide, false>>();
  check_linear<policy<wide, spec<shard<ffn, tp>, hidden>, rows_split, true>>();
  check_linear<policy<rows_whole, spec<hidden, ffn>, spec<shard<batch, dp>, seq, ffn, invariant<tp>>, true>>();
  // The transposed weight gives the same numbers.
  on_mesh(two{1, 2}, transformer_sizes(), 5, [](const context<cpu>& ctx) {
    using out_in = policy<rows_split, column, wide, true>;
    using in_out = policy<rows_split, spec<hidden, shard<ffn, tp>>, wide, true>;
    linear<double, out_in> usual(ctx, "usual");
    linear<double, in_out> other(ctx, "other");
    for (auto* p : {usual.weight().get(), usual.bias().get()}) p->initialize(ctx);
    const double* const w = std::as_const(*usual.weight()).value();
    double* const transposed = other.weight()->value();
    const std::int64_t out = usual.weight()->part().local[0], in = usual.weight()->part().local[1];
    for (std::int64_t o = 0; o < out; ++o)
      for (std::int64_t i = 0; i < in; ++i) transposed[i * out + o] = w[o * in + i];
    std::copy_n(std::as_const(*usual.bias()).value(), out, other.bias()->value());
    gather_parameters(ctx, usual, other);
    zero_gradients(ctx, usual, other);
    tensor<double, rows_split> x(ctx);
    kernels::fill_normal(ctx.device, x.data(), x.part(), 1, 1, 0.0, 1.0);
    linear<double, out_in>::saved kept;
    linear<double, in_out>::saved kept_other;
    auto y = usual.forward(ctx, x, &kept), y_other = other.forward(ctx, x, &kept_other);
    const auto dx = usual.backward(ctx, x, kept, std::move(y).into_dual());
    const auto dx_other = other.backward(ctx, x, kept_other, std::move(y_other).into_dual());
    for (std::int64_t i = 0; i < dx.size(); ++i)
      CHECK(dx_other.data()[i] == doctest::Approx(dx.data()[i]).epsilon(1e-13));
    const auto dw = usual.weight()->reduce(ctx), dw_other = other.weight()->reduce(ctx);
    for (std::int64_t o = 0; o < out; ++o)
      for (std::int64_t i = 0; i < in; ++i)
        CHECK(dw_other.data()[i * out + o] == doctest::Approx(dw.data()[o * in + i]).epsilon(1e-13));
  });
}

TEST_CASE("a weight on every rank") {
  check_linear<policy<rows_split, whole_weight, spec<shard<batch, dp>, shard<seq, tp>, ffn>, true>>();
  check_linear<policy<rows_whole, whole_weight, spec<shard<batch, dp>, seq, ffn, invariant<tp>>, true>>();
}

namespace {

/// Stored sharded over dp between steps, and gathered for use: the parameters of ZeRO-3.
struct stored_policy : policy<rows_split, column, wide, true> {
  using stored = spec<shard<ffn, tp>, shard<hidden, dp>>;
};
struct stored_elsewhere_policy : policy<rows_split, column, wide, true> {
  using stored = spec<ffn, shard<hidden, tp, dp>>;  // not the layout of its use
};

}  // namespace

TEST_CASE("a weight with a separate stored layout") {
  check_linear<stored_policy>();
  const auto make = [](const auto& ctx) {
    return linear<double, stored_elsewhere_policy, device_of<decltype(ctx)>>(ctx, "layer");
  };
  const layer_values& one =
      check_once(name_on_one_rank<stored_elsewhere_policy>(), two{1, 1}, transformer_sizes(), make);
  check_meshes({two{1, 2}, two{2, 2}, two{2, 4}}, transformer_sizes(), one, make);
}

namespace {

// Two-dimensional tensor parallelism, which the library does not have: the weight is sharded over `across` on its
// output dim and over `down` on the contracted one.
struct across : axis_tag<"across"> {};
struct down : axis_tag<"down"> {};
using grid = plait::mesh<axis<down>, axis<across>>;
struct grid_policy {
  using mesh = grid;
  using input = spec<batch, seq, shard<hidden, down>, invariant<across>>;
  using weight = spec<shard<ffn, across>, shard<hidden, down>>;
  using output = spec<batch, seq, shard<ffn, across>, invariant<down>>;
  static constexpr bool bias = true;
};
struct grid_scatter_policy : grid_policy {
  using input = spec<batch, shard<seq, across>, shard<hidden, down>>;
  using output = spec<batch, seq, shard<ffn, across, down>>;
};

}  // namespace

TEST_CASE("a user's own axes and strategy: a weight sharded on both of its dims") {
  check_linear<grid_policy, grid>();
  const auto make = [](const auto& ctx) {
    return linear<double, grid_scatter_policy, device_of<decltype(ctx)>>(ctx, "layer");
  };
  const layer_values& one = check_once(name_on_one_rank<grid_scatter_policy>(), grid{1, 1}, transformer_sizes(), make);
  check_meshes({grid{2, 1}, grid{1, 4}, grid{2, 2}, grid{2, 8}}, transformer_sizes(), one, make);
}

TEST_CASE("a linear on the caller's memory owns no weights") {
  on_mesh(two{2, 2}, transformer_sizes(), 99, [](const context<cpu>& ctx) {
    using column_linear = linear<double, policy<rows_whole, column, wide, false>>;
    std::vector<double> weight(8 * 8), gradient(8 * 8), x(2 * 8 * 8), y(2 * 8 * 8), expected(2 * 8 * 8);
    for (std::size_t i = 0; i < weight.size(); ++i)
      weight[i] = random_at(7, static_cast<std::int64_t>(i) + 64 * ctx.ranks.coordinate(axis_of<tp>));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = random_at(8, static_cast<std::int64_t>(i));
    for (std::size_t r = 0; r < 16; ++r)
      for (std::size_t o = 0; o < 8; ++o)
        for (std::size_t k = 0; k < 8; ++k) expected[r * 8 + o] += x[r * 8 + k] * weight[o * 8 + k];
    const std::vector<double> weight_before = weight;
    column_linear layer(ctx, "layer", {.memory = {weight.data(), gradient.data()}});
    CHECK(ctx.device.bytes_in_use() == 0);
    CHECK(std::as_const(*layer.weight()).value() == weight.data());
    CHECK(layer.weight()->gradient() == gradient.data());
    forward_on(layer, ctx, x.data(), y.data());
    CHECK(ctx.device.bytes_in_use() == 0);
    check_near(y, expected, 1e-14, "output");
    column_linear::saved kept;
    std::vector<double> dx(x.size());
    backward_on(layer, ctx, x.data(), kept, y.data(), dx.data());
    CHECK(gradient[0] != 0);
    const auto reduced = layer.weight()->reduce(ctx);
    CHECK(reduced.data() == gradient.data());
    CHECK(weight == weight_before);
  });
}
