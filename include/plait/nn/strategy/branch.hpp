// The description of one linear inside attention or an MLP, filled in from a strategy. Branch means a linear beside
// others here, not a residual branch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plait/nn/linear.hpp"
#include "plait/nn/strategy.hpp"

namespace plait::detail {

/// The dims of a weight as a matrix: Hugging Face stores the output's dims as one and the contracted ones as one.
template <class Policy, compute_device Device>
std::vector<std::int64_t> matrix_shape(const context<Device>& ctx) {
  std::int64_t own = 1, summed = 1;
  for (const dim_placement& p : layout_v<typename Policy::weight>.dims)
    (layout_v<typename Policy::input>.has(p.dim) ? summed : own) *= ctx.sizes.of(p.dim);
  return {own, summed};
}

/// One branch of a sublayer's linears: its weight and bias as a checkpoint names them, and how they are stored.
template <class Policy, compute_device Device>
linear_branch describe_branch(const context<Device>& ctx, const std::string& name, initializer init, bool bias,
                              const lora_options& lora = {}) {
  const std::vector<std::int64_t> shape = matrix_shape<Policy>(ctx);
  return {{name + ".weight", shape, init, true},       layout_v<typename Policy::stored>, bias,
          {name + ".bias", {shape[0]}, {0, 0}, false}, stored_bias<Policy>::value,        lora};
}

}  // namespace plait::detail
