// The description of a parameter, its states, and the rule that determines its use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tensor_names.hpp"
#include "plait/core/text.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/rules.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// The initial values of a parameter: normal numbers with a standard deviation, or a constant.
struct initializer {
  double mean = 0;
  double std = 0.02;
};

/// The description of a parameter.
struct parameter_info {
  std::string name;                 ///< unique in a model; in models the name of Hugging Face
  std::vector<std::int64_t> shape;  ///< logical and global, without padding; only the leading dim may be padded
  initializer init;
  bool decays = true;  ///< whether weight decay applies: matrices yes, norm weights and biases no
  /// Whether the first and the last stage of a pipeline share this parameter, such as a tied embedding. Its gradient is
  /// then summed over the two stages.
  bool tied_across_stages = false;
  /// Whether it belongs to a hidden layer. Each row of an embedding, of learned positions or of a model's head belongs
  /// to one token or position. Such layers set this to false, and optimizers of matrices skip them
  /// (parallel/optim/muon.hpp).
  bool hidden_layer = true;
  double adapter_scale = 0;           ///< for an adapter's second matrix: the factor of the adapter's product
  std::int64_t adapter_matrices = 1;  ///< also for an adapter: how many stacked weights have their own adapters
  bool stack = false;                 ///< whether the first dim of the shape counts matrices, such as those of experts
};

/// Whether a parameter is a matrix of a hidden layer or a stack of such matrices, by its logical shape; Muon updates
/// them. `parameter_info::hidden_layer` excludes embeddings and heads. Norms and biases are not matrices.
inline bool is_hidden_matrix(const parameter_info& info) {
  return info.hidden_layer && info.shape.size() == (info.stack ? 3 : 2);
}

/// Returns the relative cost of a parameter's update if one rank updates it. For a matrix that is orthogonalised this
/// is rows x columns x min(rows, columns); for others it is negligible.
inline double update_cost(const parameter_info& info) {
  double cost = 1;
  for (const std::int64_t extent : info.shape) cost *= static_cast<double>(extent);
  if (!is_hidden_matrix(info)) return cost;
  const std::size_t last = info.shape.size() - 1;
  return cost * static_cast<double>(std::min(info.shape[last - 1], info.shape[last]));
}

namespace detail {
/// Whether dims are placed differently in storage and in use.
constexpr bool stored_differently(const layout& stored, const layout& placed) {
  for (const dim_placement& p : stored.dims)
    if (!(p.axes == placed.axes_of(p.dim))) return true;
  return false;
}
}  // namespace detail

/// The state of a parameter. The calls of a step are: `gather`; `zero_gradient`; any number of passes; `reduce`; the
/// optimizer's `update` with the result of `reduce`.
enum class parameter_state : std::uint8_t {
  stale,         ///< values have changed or are absent: layers must not read them before `gather`
  gathered,      ///< layers may read it
  accumulating,  ///< backward passes add to its gradient
  reduced,       ///< the gradient is complete, ready for an optimizer
  updated        ///< changed by an optimizer
};

constexpr const char* name_of(parameter_state s) {
  constexpr const char* names[] = {"stale", "gathered", "accumulating", "reduced", "updated"};
  return names[static_cast<std::size_t>(s)];
}

}  // namespace plait

namespace plait::detail {

// The initial values of a parameter on this rank, and its padding.

/// Fills `values`, which has the size of `part`, with the mean or with normal numbers, according to `info`. The numbers
/// come from the random stream `stream` of the context's seed, keyed by the global index.
template <class T, compute_device Device>
void fill_initial(const context<Device>& ctx, const parameter_info& info, const box& part, std::uint64_t stream,
                  T* values) {
  if (info.init.std == 0)
    kernels::fill(ctx.device, values, part.local_size(), converted<T>(info.init.mean));
  else
    kernels::fill_normal(ctx.device, values, part, ctx.seed, stream, info.init.mean, info.init.std);
}

/// Returns the number of padding rows at the end of the whole parameter: rows beyond its logical shape. Throws if the
/// logical shape does not consist of its first rows.
inline std::int64_t padding_of(const parameter_info& info, const box& part) {
  std::int64_t logical = 1;
  std::string shape;
  for (const std::int64_t n : info.shape) logical *= n, append(shape, {shape.empty() ? "" : " x ", n});
  const std::int64_t rows = part.dims > 0 ? part.global[0] : 1, all = part.global_size();
  if (logical == all) return 0;
  if (logical < 1 || logical > all || logical % (all / rows) != 0)  // 1 <= logical <= all, so there are rows
    fail({"parameter ", info.name, ": its shape ", shape, " has ", logical, " elements, which are not the first of ",
          rows, " rows of ", all / rows, ", as the context's sizes give; only the leading dim may be padded"});
  return rows - logical / (all / rows);
}

}  // namespace plait::detail

namespace plait {

// The rule that derives a parameter's use from its placement and its partner's layout, as constexpr functions.

/// Returns the layout of a parameter in use. `placed` is the placement of its dims. `met` is the layout of its partner:
/// the input of a product, the rows of a norm, or the output to which a bias is added. The parameter is replicated over
/// every axis that does not shard it and on which its partner varies or is replicated. So its gradient is partial
/// there, which determines the reduction. A parameter's use always comes from this rule.
constexpr layout use_of(layout placed, const layout& met) {
  for (axis_id axis : met.mentioned()) {
    if (placed.state_of(axis) != state::invariant) continue;
    const state s = met.state_of(axis);
    if (s != state::invariant) placed.set(axis, state::replicated);
  }
  return placed;
}

/// Requires a stored layout that is sharded or invariant. A stored parameter that is replicated would give the
/// optimizer a gradient that is still partial.
constexpr verdict check_stored(const layout& stored) {
  verdict v;
  for (axis_id axis : stored.replicated)
    v.worsen({layout_error::unresolved_partial, axis, {}, state::partial, state::replicated});
  for (axis_id axis : stored.partial)
    v.worsen({layout_error::unresolved_partial, axis, {}, state::replicated, state::partial});
  return v;
}

namespace detail {
/// `use_of` on a mesh; `met` must mention every axis of the mesh.
inline layout checked_use(const mesh_shape& mesh, const std::string& name, const layout& placed, const layout& met) {
  enforce(check_boundary(met, mesh), cat({"parameter ", name, ": its partner, ", describe(met)}));
  return use_of(placed, met);
}

template <class Placed, class Met>
struct use_value {
  static constexpr layout value = use_of(layout_v<Placed>, layout_v<Met>);
};
}  // namespace detail

/// The layout in use as a type: `use_t<spec<hidden>, residual>` is the spec in use of a norm's weight.
template <spec_like Placed, spec_like Met>
using use_t = spec_from<detail::use_value<Placed, Met>, Placed, Met>;

}  // namespace plait

#include "plait/core/macros_on.hpp"
