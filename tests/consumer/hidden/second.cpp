#include "tags.hpp"

namespace {

struct up {
  using mesh = house::grid;
  using input = house::residual;
  using weight = plait::spec<plait::shard<house::wide, house::column>, house::width>;
  using output = plait::spec<plait::shard<house::points, house::row>, plait::shard<house::wide, house::column>>;
};

using other = plait::spec<plait::shard<house::points, plait::dp>, house::width>;

template <class Tensor>
Tensor ones(const plait::context<plait::cpu>& ctx) {
  Tensor t(ctx);
  std::fill_n(t.data(), t.size(), 1);
  return t;
}

/// The first element of the gradient of `layer`'s weight. Inputs and gradients are 1, the weight is 1.
template <class T, class Layer>
double gradient_of(const plait::context<plait::cpu>& ctx, Layer& layer) {
  layer.visit([&](auto& p) {
    std::fill_n(p.value(), p.size(), 1);
    p.gather(ctx);
    p.zero_gradient(ctx);
  });
  const auto x = ones<plait::tensor<T, typename Layer::input>>(ctx);
  typename Layer::saved kept;
  layer.forward(ctx, x, &kept);
  layer.backward(ctx, x, kept, ones<plait::tensor<T, plait::dual_t<typename Layer::output>>>(ctx));
  double gradient = 0;
  layer.visit([&](auto& p) { gradient = p.reduce(ctx).data()[0]; });
  return gradient;
}

}  // namespace

double norm_gradient(const plait::context<plait::cpu>& ctx) {
  plait::rms_norm<double, house::residual> norm(ctx, 0.0);
  return gradient_of<double>(ctx, norm);
}

double linear_gradient(const plait::context<plait::cpu>& ctx) {
  plait::linear<double, up> linear(ctx);
  return gradient_of<double>(ctx, linear);
}

double float_linear_gradient(const plait::context<plait::cpu>& ctx) {
  plait::linear<float, up> linear(ctx);
  return gradient_of<float>(ctx, linear);
}

void on_other_axes(const plait::context<plait::cpu>& ctx) { plait::rms_norm<double, other> norm(ctx, 0.0); }
