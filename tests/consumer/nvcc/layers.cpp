// Layers on GPUs in a file that nvcc does not compile. Their headers are included, and none of their kernels is
// compiled.
#include "plait/device/cuda.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/norm.hpp"

using namespace plait;

#ifndef DEVICE
#define DEVICE cuda
#endif
using rows = spec<shard<batch, dp>, hidden>;
struct up {
  using input = rows;
  using weight = spec<ffn, hidden>;
  using output = spec<shard<batch, dp>, ffn>;
};

void forward(context<DEVICE>& ctx, part<const float, rows> x, part<float, rows> y, part<float, up::output> z) {
  rms_norm<float, rows, DEVICE> norm(ctx);
  linear<float, up, DEVICE> layer(ctx, "up");
  norm.forward(ctx, x, y);
  layer.forward(ctx, y, z);
}
