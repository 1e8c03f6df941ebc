// The description of a parameter, the states of its life, and the rule of its use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/rules.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// How a parameter starts: normal with a deviation, or a constant.
struct initializer {
  double mean = 0;
  double std = 0.02;
};

/// Describes a parameter to its users.
struct parameter_info {
  std::string name;                 ///< unique in a model; Hugging Face's, in models
  std::vector<std::int64_t> shape;  ///< logical and global, without padding; only the leading dim may be padded
  initializer init;
  bool decays = true;  ///< whether weight decay applies: matrices yes, norm weights and biases no
  /// Whether the first and the last stage of a pipeline both have this parameter, as a tied embedding: its gradient is
  /// summed over the two.
  bool tied_across_stages = false;
  /// Whether it belongs to a hidden layer. The rows of embeddings, of learned positions and of a model's head stand for
  /// one token or place each. They set it to false, and optimizers of matrices leave them alone
  /// (parallel/optim/muon.hpp).
  bool hidden_layer = true;
  double adapter_scale = 0;  ///< of an adapter's second matrix: the factor of the adapter's product
  std::int64_t adapter_matrices =
      1;  ///< of the same: how many weights, one above the other, have adapters of their own
};

/// Whether a parameter of this name belongs to a low-rank adapter.
inline bool is_of_adapter(std::string_view name) { return name.find(".lora_") != name.npos; }

/// Whether a parameter is a matrix of a hidden layer, by its logical shape: what Muon takes. Embeddings and heads are
/// excluded by `parameter_info::hidden_layer`. Norms, biases, and experts' weights that lie in one parameter are no
/// matrices.
inline bool is_hidden_matrix(const parameter_info& info) { return info.hidden_layer && info.shape.size() == 2; }

/// Returns what the update of a parameter costs, in any unit, where each has one owner: rows x columns x min(rows,
/// columns) of a matrix that is made orthogonal. Compared to that, the elements of others count for little.
inline double update_cost(const parameter_info& info) {
  double cost = 1;
  for (const std::int64_t extent : info.shape) cost *= static_cast<double>(extent);
  return is_hidden_matrix(info) ? cost * static_cast<double>(std::min(info.shape[0], info.shape[1])) : cost;
}

namespace detail {
/// Whether dims lie otherwise where a parameter is stored than where it is used.
constexpr bool stored_apart(const layout& stored, const layout& placed) {
  for (const dim_placement& p : stored.dims)
    if (!(p.axes == placed.axes_of(p.dim))) return true;
  return false;
}
}  // namespace detail

/// Where a parameter stands. A step is: `gather`; `zero_gradient`; any number of passes; `reduce`; the optimizer's
/// `update` with what `reduce` returned.
enum class parameter_state : std::uint8_t {
  stale,         ///< the stored values have changed, or are away: layers must not read it before `gather`
  gathered,      ///< layers may read it
  accumulating,  ///< backward passes add to its gradient
  reduced,       ///< the gradient is complete, and waits for an optimizer
  updated        ///< stale, by an optimizer
};

constexpr const char* name_of(parameter_state s) {
  constexpr const char* names[] = {"stale", "gathered", "accumulating", "reduced", "updated"};
  return names[static_cast<std::size_t>(s)];
}

}  // namespace plait

namespace plait::detail {

// The first values of a parameter on this rank, and its padding.

/// Fills `values`, of the size of `part`, with the mean or with normal numbers, as in `info`. The numbers are from
/// number `stream` of the random streams of the context's seed, keyed by the global index.
template <class T, compute_device Device>
void fill_initial(const context<Device>& ctx, const parameter_info& info, const box& part, std::uint64_t stream,
                  T* values) {
  if (info.init.std == 0)
    kernels::fill(ctx.device, values, part.local_size(), converted<T>(info.init.mean));
  else
    kernels::fill_normal(ctx.device, values, part, ctx.seed, stream, info.init.mean, info.init.std);
}

/// Returns how many rows at the end of the parameter that `part` is of are padding: those beyond its logical shape.
/// Throws where the logical shape is not that of the first rows.
inline std::int64_t padding_of(const parameter_info& info, const box& part) {
  std::int64_t logical = 1;
  std::string shape;
  for (const std::int64_t n : info.shape) logical *= n, append(shape, {shape.empty() ? "" : " x ", n});
  const std::int64_t rows = part.dims > 0 ? part.global[0] : 1, all = part.global_size();
  if (logical == all) return 0;
  if (logical < 1 || logical > all || logical % (all / rows) != 0)  // 1 <= logical <= all: there are rows
    fail({"parameter ", info.name, ": its shape ", shape, " has ", logical, " elements, which are not the first of ",
          rows, " rows of ", all / rows, ", as the context's sizes give; only the leading dim may be padded"});
  return rows - logical / (all / rows);
}

}  // namespace plait::detail

namespace plait {

// The rule by which the use of a parameter follows from its placement and its partner's layout, as constexpr functions.

/// How a parameter is used, given how its dims are placed and the layout of its partner: the input of a product, the
/// rows of a norm, the output that a bias is added to. It is replicated over every axis on which its partner varies or
/// is replicated, and which does not shard it. So its gradient is partial there, and the reduction follows. This rule
/// is the only source of a parameter's use.
constexpr layout use_of(layout placed, const layout& met) {
  for (axis_id axis : met.mentioned()) {
    if (placed.state_of(axis) != state::invariant) continue;
    const state s = met.state_of(axis);
    if (s != state::invariant) placed.set(axis, state::replicated);
  }
  return placed;
}

/// Parameters are stored sharded or invariant: one stored replicated would reach the optimizer with a gradient that is
/// still partial.
constexpr verdict check_stored(const layout& stored) {
  verdict v;
  for (axis_id axis : stored.replicated)
    v.worsen({layout_error::unresolved_partial, axis, {}, state::partial, state::replicated});
  for (axis_id axis : stored.partial)
    v.worsen({layout_error::unresolved_partial, axis, {}, state::replicated, state::partial});
  return v;
}

namespace detail {
/// `use_of` on a mesh; `met` has to mention every axis of it.
inline layout checked_use(const mesh_shape& mesh, const std::string& name, const layout& placed, const layout& met) {
  enforce(check_boundary(met, mesh), cat({"parameter ", name, ": what it meets, ", describe(met)}));
  return use_of(placed, met);
}

template <class Placed, class Met>
struct use_value {
  static constexpr layout value = use_of(layout_v<Placed>, layout_v<Met>);
};
}  // namespace detail

/// The use as a type: `use_t<spec<hidden>, residual>` is the spec of a norm's weight where it is used.
template <spec_like Placed, spec_like Met>
using use_t = spec_from<detail::use_value<Placed, Met>, Placed, Met>;

}  // namespace plait

#include "plait/core/macros_on.hpp"
