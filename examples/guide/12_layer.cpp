// A layer with its own kernels and its own weight: y = scale * max(x, 0)^2, with one scale for each feature.
#include <cstdio>
#include <exception>
#include <string>

#include "plait/nn/layer.hpp"
#include "plait/nn/parameter/free.hpp"
#include "plait/plan/dry_run.hpp"
#include "plait/testing/layer_parity.hpp"

namespace pl = plait;
using pl::batch, pl::dp, pl::ffn, pl::tp;

using mesh = pl::mesh<pl::axis<dp>, pl::axis<tp>>;
using wide = pl::spec<pl::shard<batch, dp>, pl::shard<ffn, tp>>;

// Kernels get the sizes of their rank as `local_sizes`, and need to know nothing else about ranks.
void forward_kernel(double* y, const double* x, const double* scale, const pl::local_sizes& n) {
  const std::int64_t rows = n[pl::dim_of<batch>], columns = n[pl::dim_of<ffn>];
  for (std::int64_t i = 0; i < rows * columns; ++i) y[i] = x[i] > 0 ? scale[i % columns] * x[i] * x[i] : 0;
}
void input_gradient(double* dx, const double* dy, const double* x, const double* scale, const pl::local_sizes& n) {
  const std::int64_t rows = n[pl::dim_of<batch>], columns = n[pl::dim_of<ffn>];
  for (std::int64_t i = 0; i < rows * columns; ++i) dx[i] = x[i] > 0 ? 2 * scale[i % columns] * x[i] * dy[i] : 0;
}
void add_scale_gradient(double* dscale, const double* dy, const double* x, const pl::local_sizes& n) {
  const std::int64_t rows = n[pl::dim_of<batch>], columns = n[pl::dim_of<ffn>];
  for (std::int64_t i = 0; i < rows * columns; ++i) dscale[i % columns] += x[i] > 0 ? x[i] * x[i] * dy[i] : 0;
}

template <class Device>
class squared_relu : public pl::layer_types<double, wide, wide, Device> {
  using scale = pl::spec<pl::shard<ffn, tp>>;  // the scale meets rows that dp shards: its gradient is a sum over dp
  using rows = pl::tensor<double, wide, Device>;
  using gradient = pl::tensor<double, pl::dual_t<wide>, Device>;

 public:
  struct saved {};  // the backward pass needs only the input, which the caller keeps

  squared_relu(const pl::context<Device>& ctx, const std::string& name) : scale_(ctx, name + ".scale", {}, {1, 0}) {}

  rows forward(const pl::microbatch<Device>& mb, const rows& x, saved* = nullptr) {
    rows y(mb.ctx);
    apply(mb.ctx, pl::rule::nonlinear, forward_kernel, pl::part<double, wide>(y), pl::part<const double, wide>(x),
          scale_.values(mb.ctx));
    return y;
  }
  gradient backward(const pl::microbatch<Device>& mb, const rows& x, saved&, const gradient& dy) {
    gradient dx(mb.ctx);
    const pl::part<const double, wide> in(x);
    const pl::part<const double, pl::dual_t<wide>> from(dy);
    apply(mb.ctx, pl::rule::product, input_gradient, pl::part<double, pl::dual_t<wide>>(dx), from, in,
          scale_.values(mb.ctx));
    apply(mb.ctx, pl::rule::contraction, add_scale_gradient, scale_.gradients(mb.ctx), from, in);
    return dx;
  }
  template <class F>
  void visit(F&& f) {
    scale_.visit(f);
  }

 private:
  pl::free_parameter<double, scale, wide, scale, Device> scale_;
};
static_assert(pl::layer<squared_relu<pl::cpu>>);

int main() try {
  const pl::dim_sizes sizes = pl::sizes_of<batch, ffn>(8, 16);
  const auto make = [](const auto& ctx) { return squared_relu<pl::testing::device_of<decltype(ctx)>>(ctx, "act"); };

  // Finite differences on one rank, then every rank of each mesh against it.
  const pl::testing::findings found =
      pl::testing::check_layer(mesh(1, 1), {mesh(2, 1), mesh(1, 4), mesh(2, 2)}, sizes, make);
  std::printf("%s\n", found.empty() ? "the layer is right on all meshes" : found.text().c_str());

  const pl::layer_plan plan = pl::dry_run(mesh(2, 2).shape(), sizes, 0, make);
  std::printf("on dp=2, tp=2 a rank has at most %d bytes in use, and the passes send %d\n",
              static_cast<int>(plan.peak_bytes),
              static_cast<int>(plan.forward.total().wire + plan.backward.total().wire));
  return found.empty() ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "12_layer: %s\n", e.what());
  return 1;
}
