// A strategy on two axes that the program defines, `row` and `column`: two-dimensional tensor parallelism. Both dims of
// a weight are sharded, and so is the hidden dim of values between layers.
#include <cstdio>
#include <exception>

#include "plait/layout/check.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/testing/layer_parity.hpp"

namespace pl = plait;

struct row : pl::axis_tag<"row"> {};
struct column : pl::axis_tag<"column"> {};

struct grid {
  using mesh = pl::mesh<pl::axis<pl::dp>, pl::axis<row>, pl::axis<column>>;
  using residual = pl::spec<pl::shard<pl::batch, pl::dp>, pl::seq, pl::shard<pl::hidden, column>, pl::invariant<row>>;
  using query_heads = pl::shard<pl::heads, row>;
  using key_heads = pl::shard<pl::kv_heads, row>;
  using feed_forward = pl::shard<pl::ffn, row>;
  using vocabulary = pl::shard<pl::vocab, row>;
};

template <class Device>
using norm = pl::rms_norm<double, grid::residual, Device>;
template <class Device>
using block = pl::sequential<pl::residual<norm<Device>, pl::self_attention<double, grid, Device>>,
                             pl::residual<norm<Device>, pl::swiglu_mlp<double, grid, Device>>>;

int main() try {
  const auto sizes =
      pl::sizes_of<pl::batch, pl::seq, pl::hidden, pl::heads, pl::kv_heads, pl::head_dim, pl::ffn>(2, 3, 6, 4, 2, 4, 8);
  const auto make = [](const auto& ctx) {
    using device = pl::testing::device_of<decltype(ctx)>;
    return block<device>({norm<device>(ctx, 1e-5, "norm1"), {ctx, "attention"}},
                         {norm<device>(ctx, 1e-5, "norm2"), {ctx, "mlp"}});
  };
  const grid::mesh shape(2, 2, 3);
  pl::world counted = pl::world::counting(shape.shape(), 0);
  pl::counting_device device;
  make(pl::context<pl::counting_device>{device, counted, sizes}).visit([](auto& p) {
    std::printf("%-24s stored %s\n%24s gradient %s\n", p.name().c_str(), pl::describe(p.stored()).c_str(), "",
                pl::describe(pl::dual(p.used())).c_str());
  });

  const auto found = pl::testing::check_layer(grid::mesh(1, 1, 1), {shape}, sizes, make);
  std::printf("%s\n", found.empty() ? "twelve ranks equal one" : found.text().c_str());
  return found.empty() ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "12_strategy: %s\n", e.what());
  return 1;
}
