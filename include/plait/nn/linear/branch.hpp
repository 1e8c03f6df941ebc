// Descriptions of linears that share an input: names, stored layouts, bias, adapter, and the caller's memory. Nothing
// is computed here. Next: nn/linear/core.hpp for the linears, nn/strategy/branch.hpp for a strategy's.
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

/// What linears compute, what they give, and the sizes of both; of several, the layouts of the outputs side by side.
struct linear_resolution {
  layout product, output;
  dim_sizes sizes;
};
/// Throws where linears that share an input do not resolve their outputs alike. `total` are the columns of all.
inline linear_resolution resolution_of(const shared_linears& d, dim_sizes sizes, std::int64_t total,
                                       const std::string& name) {
  layout product = d.branches[0].product, output = d.branches[0].output;
  if (d.branches.size() == 1) return {product, output, sizes};
  const axis_list moving = differing_axes(product, output);
  product = side_by_side(product, d.input, moving);
  output = side_by_side(output, d.input, moving);
  sizes.set(dim_of<columns>, total);
  for (const linear_layouts& b : d.branches) {
    if (differing_axes(b.product, b.output) == moving && side_by_side(b.product, d.input, moving) == product &&
        side_by_side(b.output, d.input, moving) == output)
      continue;
    fail({"output of ", name, ": linears that share an input must be resolved alike; one goes from ",
          describe(d.branches[0].product), " to ", describe(d.branches[0].output), ", another from ",
          describe(b.product), " to ", describe(b.output)});
  }
  return {product, output, sizes};
}

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
