// Descriptions of linears that share an input: names, stored layouts, bias, adapter, and the caller's memory.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/macros_off.hpp"
#include "plait/nn/linear/lora.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// One of the linears that share an input: its weight and bias as a checkpoint names them, and how they are stored.
struct linear_branch {
  parameter_info weight;
  layout stored_weight;
  bool bias = false;
  parameter_info bias_info;
  layout stored_bias;
  lora_options lora{};
};

namespace detail {

/// The dim of outputs that lie side by side.
struct columns : dim_tag<"columns"> {};

/// `a`, an output of one of several linears with this input, with its own dims as one dim that is whole here, and with
/// the states of the axes in `moving` alone: what is left is what all of them share.
inline layout side_by_side(const layout& a, const layout& input, const axis_list& moving) {
  layout shared;
  for (const dim_placement& p : a.dims)
    if (input.has(p.dim)) shared.dims.push_back(p);
  shared.dims.push_back({dim_of<columns>, {}});
  for (axis_id axis : moving)
    if (!a.sharded_by(axis)) shared.set(axis, a.state_of(axis));
  return shared;
}

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
