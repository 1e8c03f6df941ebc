// Plans of redistributions: their steps, the sixteen transitions, the mirror of a plan (its backward plan), and the
// search for the plan with the fewest bytes. tensor/redistribution.hpp runs plans.
#pragma once

#include <vector>

#include "plait/layout/errors.hpp"

namespace plait {

/// The kinds of steps. `keep_one` keeps the value on the group's first rank and zeros on the others. `pad` surrounds
/// the local part with zeros. `relabel` moves no data: only the value's meaning changes.
enum class transition_kind : std::uint8_t {
  slice,
  pad,
  keep_one,
  relabel,
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all
};

constexpr const char* name_of(transition_kind m) {
  constexpr const char* names[] = {"slice",      "pad",        "keep_one",       "relabel",
                                   "all_reduce", "all_gather", "reduce_scatter", "all_to_all"};
  return names[static_cast<std::size_t>(m)];
}
constexpr bool communicates(transition_kind m) { return m >= transition_kind::all_reduce; }

struct redistribution_step {
  transition_kind kind = transition_kind::relabel;
  axis_list axes;  ///< the group, major first; for moves of a dim: the order in which the axes shard it
  dim_id dim;      ///< the dim that is sliced, gathered, scattered or padded; none for other moves
  state from = state::invariant, to = state::invariant;  ///< of every axis in `axes`
  layout after;
};

/// The steps between two layouts with equal dims. There are no steps if the layouts are equivalent.
struct plan {
  layout from, to;
  static_vector<redistribution_step, 12> steps;
  plait::verdict verdict;

  constexpr const layout& before(std::size_t i) const { return i == 0 ? from : steps[i - 1].after; }
  /// The axes over which some step communicates.
  constexpr axis_list communicating_axes() const {
    axis_list axes;
    for (const redistribution_step& s : steps)
      if (communicates(s.kind)) axes = union_of(axes, s.axes);
    return axes;
  }
};

/// The transition from `from` to `to` for a value that changes on one axis only: one of sixteen.
constexpr transition_kind transition(state from, state to) {
  using enum state;
  switch (from) {
    case invariant:
    case replicated:
      return to == varying   ? transition_kind::slice
             : to == partial ? transition_kind::keep_one
                             : transition_kind::relabel;
    case varying:
      return to == varying   ? transition_kind::all_to_all
             : to == partial ? transition_kind::pad
                             : transition_kind::all_gather;
    case partial:
      return to == varying   ? transition_kind::reduce_scatter
             : to == partial ? transition_kind::relabel
                             : transition_kind::all_reduce;
  }
  return transition_kind::relabel;
}

/// The adjoint of one step: from the dual of its result to the dual of its input.
constexpr redistribution_step mirror(const redistribution_step& s, const layout& before) {
  redistribution_step back = s;
  back.from = dual(s.to);
  back.to = dual(s.from);
  back.kind = transition(back.from, back.to);
  back.after = dual(before);
  return back;
}

/// The backward plan: the mirrored forward steps in reverse order. It is the exact adjoint, so it needs no search.
constexpr plan mirror(const plan& forward) {
  plan back;
  back.from = dual(forward.to);
  back.to = dual(forward.from);
  back.verdict = forward.verdict;
  for (std::size_t i = forward.steps.size(); i-- > 0;)
    back.steps.push_back(mirror(forward.steps[i], forward.before(i)));
  return back;
}

/// The axes on which a rank's local data or its meaning differs between two layouts with equal dims. An axis differs if
/// its state or dim changes, or if the axes outside it on its dim change.
constexpr axis_list differing_axes(const layout& a, const layout& b) {
  axis_list axes;
  for (axis_id axis : union_of(a.mentioned(), b.mentioned())) {
    bool same = a.state_of(axis) == b.state_of(axis) && a.sharded_by(axis) == b.sharded_by(axis);
    if (const dim_id dim = a.sharded_by(axis); same && dim) {
      const axis_list x = a.axes_of(dim), y = b.axes_of(dim);
      for (std::size_t i = 0; same && !(x[i] == axis); ++i) same = i < y.size() && x[i] == y[i];
      same = same && y[static_cast<std::size_t>(x.find(axis))] == axis;
    }
    if (!same) axes.push_back(axis);
  }
  return axes;
}

namespace detail {

/// Where the moving axes of a plan are: a node of the search. Places: 0 invariant, 1 replicated, 2 partial, 3 + i:
/// shards dim i. `order` is the axis's position among the moving axes of that dim. Axes that do not move stay outside
/// them.
struct arrangement {
  std::int8_t place[max_axes]{};
  std::int8_t order[max_axes]{};
  friend constexpr bool operator==(const arrangement&, const arrangement&) = default;
};
inline constexpr std::int8_t first_dim = 3;
constexpr std::int8_t place_of(std::size_t dim) { return static_cast<std::int8_t>(first_dim + static_cast<int>(dim)); }

constexpr state state_at(std::int8_t place) {
  return place == 0 ? state::invariant : place == 1 ? state::replicated : place == 2 ? state::partial : state::varying;
}

struct search_node {
  arrangement at;
  double bytes = 0;  ///< forward and backward, summed over the world, in units of the whole tensor
  int moves = 0;
  int parent = -1;
  bool closed = false;
  bool exchanged = false;  ///< reached by an all-to-all
};

/// Finds the shortest path over arrangements of the moving axes. A move costs its wire bytes plus those of its mirror;
/// paths with equal bytes are compared by their number of moves. Let V be the total volume over the world. An
/// all-gather costs the growth of V, a reduce-scatter its shrinkage, and an all-reduce both. An all-to-all costs the
/// volume that changes ranks.
class plan_search {
 public:
  constexpr plan_search(const layout& from, const layout& to, const axis_list& moving, const mesh_shape& mesh,
                        const dim_sizes& sizes)
      : from_(from), moving_(moving), count_(moving.size()) {
    for (std::size_t i = 0; i < count_; ++i) {
      known_[i] = is_known(mesh, moving[i]);
      extent_[i] = known_[i] ? mesh.extent(moving[i]) : 2;
      for (std::size_t d = 0; d < from.dims.size(); ++d)
        may_shard_[i][d] = from.dims[d].axes.contains(moving[i]) || to.axes_of(from.dims[d].dim).contains(moving[i]);
    }
    for (std::size_t d = 0; d < from.dims.size(); ++d) {
      size_[d] = sizes.of(from.dims[d].dim);
      sizes_of_blocks_[d] = sizes.block_of(from.dims[d].dim);
      for (axis_id axis : from.dims[d].axes)
        if (!moving.contains(axis) && is_known(mesh, axis)) fixed_parts_[d] *= mesh.extent(axis);
    }
    goal_ = arrange(to);
  }

  constexpr void run(plan& result) {
    nodes_.push_back({arrange(from_), 0, 0, -1});
    for (;;) {
      const int current = cheapest_open();
      if (current < 0) {  // a dim of too few elements blocks every path, so it has too few at an end too
        result.verdict.code = layout_error::too_few_elements;
        return;
      }
      const std::size_t c = static_cast<std::size_t>(current);
      nodes_[c].closed = true;
      if (nodes_[c].at == goal_) return trace(current, result);
      expand(current);
    }
  }

 private:
  static constexpr bool is_known(const mesh_shape& mesh, axis_id axis) {
    return mesh.has(axis) && mesh.extent(axis) != dynamic;
  }
  /// Whether every dim of known size has elements for each known rank that shards it.
  constexpr bool fits(const arrangement& x) const {
    for (std::size_t d = 0; d < from_.dims.size(); ++d) {
      std::int64_t parts = fixed_parts_[d];
      for (std::size_t i = 0; i < count_; ++i)
        if (x.place[i] == place_of(d) && known_[i]) parts *= extent_[i];
      if (size_[d] >= 0 && size_[d] / sizes_of_blocks_[d] < parts) return false;
    }
    return true;
  }
  constexpr arrangement arrange(const layout& a) const {
    arrangement x;
    for (std::size_t d = 0; d < a.dims.size(); ++d) {
      std::int8_t order = 0;
      for (axis_id axis : a.dims[d].axes)
        if (const int i = moving_.find(axis); i >= 0) {
          x.place[i] = place_of(d);
          x.order[i] = order++;
        }
    }
    for (std::size_t i = 0; i < max_axes && i < count_; ++i) {  // g++ 12 warns of an overflow without this bound
      const state s = a.state_of(moving_[i]);
      if (s != state::varying) x.place[i] = s == state::invariant ? 0 : s == state::replicated ? 1 : 2;
    }
    return x;
  }

  constexpr layout layout_of(const arrangement& x) const {
    layout a = from_;
    for (std::int8_t order = 0; order < static_cast<std::int8_t>(count_); ++order)
      for (std::size_t i = 0; i < count_; ++i)
        if (x.place[i] >= first_dim && x.order[i] == order)
          a.append(a.dims[static_cast<std::size_t>(x.place[i] - first_dim)].dim, moving_[i]);
    for (std::size_t i = 0; i < count_; ++i)
      if (x.place[i] < first_dim) a.set(moving_[i], state_at(x.place[i]));
    return a;
  }

  constexpr int cheapest_open() const {
    int best = -1;
    for (std::size_t i = 0; i < nodes_.size(); ++i)
      if (!nodes_[i].closed && (best < 0 || cheaper(nodes_[i], nodes_[static_cast<std::size_t>(best)])))
        best = static_cast<int>(i);
    return best;
  }
  static constexpr bool cheaper(const search_node& a, const search_node& b) {
    const double slack = 1e-9 * (a.bytes + b.bytes);
    if (a.bytes < b.bytes - slack) return true;
    if (b.bytes < a.bytes - slack) return false;
    return a.moves < b.moves;
  }

  /// Total local volume over the world, in units of the tensor. Every axis that shards no dim multiplies it.
  constexpr double volume(const arrangement& x) const {
    double v = 1;
    for (std::size_t i = 0; i < count_; ++i)
      if (x.place[i] < first_dim) v *= static_cast<double>(extent_[i]);
    return v;
  }
  constexpr int sharding(const arrangement& x, std::int8_t place) const {
    int n = 0;
    for (std::size_t i = 0; i < count_; ++i) n += x.place[i] == place;
    return n;
  }

  constexpr void reach(int parent, const arrangement& x, double cost, bool exchanged = false) {
    if (!fits(x) && !(x == goal_)) return;
    const search_node next{x,
                           nodes_[static_cast<std::size_t>(parent)].bytes + cost,
                           nodes_[static_cast<std::size_t>(parent)].moves + 1,
                           parent,
                           false,
                           exchanged};
    for (search_node& n : nodes_)
      if (n.at == x) {
        if (!n.closed && cheaper(next, n)) n = next;
        return;
      }
    nodes_.push_back(next);
  }

  constexpr void expand(int current) {
    const arrangement x = nodes_[static_cast<std::size_t>(current)].at;
    const double v = volume(x);
    reduce_sets(current, x, v);
    for (std::size_t i = 0; i < count_; ++i) {
      const double n = static_cast<double>(extent_[i]);
      const state s = state_at(x.place[i]);
      if (s == state::varying) {
        if (x.order[i] + 1 != sharding(x, x.place[i])) continue;  // only the innermost axis moves without an exchange
        const double growth = v * n - v;
        step_to(current, x, i, 0, growth);
        step_to(current, x, i, 1, 2 * growth);
        step_to(current, x, i, 2, 0);
        continue;
      }
      const double shrinkage = v - v / n;
      const double cost = s == state::partial ? 2 * shrinkage : s == state::invariant ? shrinkage : 0;
      for (std::size_t d = 0; d < from_.dims.size(); ++d)
        if (may_shard_[i][d]) step_to(current, x, i, place_of(d), cost);
      if (s != state::partial) step_to(current, x, i, 2, 0);
      if (s == state::replicated) step_to(current, x, i, 0, 0);
    }
    // Two exchanges in sequence equal one, which sends no more bytes.
    if (nodes_[static_cast<std::size_t>(current)].exchanged) return;
    arrangement bare = x;
    bool any = false;
    for (std::size_t i = 0; i < count_; ++i)
      if (x.place[i] >= first_dim) bare.place[i] = -1, any = true;
    if (any) exchange(current, x, bare, 0);
  }

  /// Moves several axes at once, which is cheaper than one after another: reductions, and invariant to replicated,
  /// whose mirror is a reduction.
  constexpr void reduce_sets(int current, const arrangement& x, double v) {
    for (unsigned set = 1; set < (1u << count_); ++set) {
      double n = 1;
      const state s = state_at(x.place[lowest(set)]);
      bool alike = s == state::partial || s == state::invariant;
      for (std::size_t i = 0; i < count_; ++i)
        if (set >> i & 1u) {
          n *= static_cast<double>(extent_[i]);
          alike = alike && state_at(x.place[i]) == s;
        }
      if (!alike) continue;
      const double all_reduce = 2 * (v - v / n);
      if (s == state::partial) reach(current, with(x, set, 0), all_reduce);
      reach(current, with(x, set, 1), s == state::partial ? 2 * all_reduce : all_reduce);
    }
  }
  static constexpr std::size_t lowest(unsigned set) {
    std::size_t i = 0;
    while (!(set >> i & 1u)) ++i;
    return i;
  }
  constexpr arrangement with(arrangement x, unsigned set, std::int8_t place) const {
    for (std::size_t i = 0; i < max_axes; ++i)
      if (set >> i & 1u) x.place[i] = place;
    return x;
  }

  constexpr void step_to(int current, arrangement x, std::size_t i, std::int8_t place, double cost) {
    x.order[i] = place >= first_dim ? static_cast<std::int8_t>(sharding(x, place)) : std::int8_t{0};
    x.place[i] = place;
    reach(current, x, cost);
  }

  /// Tries every arrangement of the sharding axes, built by insertion of one axis after another; each is reached by one
  /// all-to-all.
  constexpr void exchange(int current, const arrangement& before, const arrangement& partly, std::size_t i) {
    while (i < count_ && partly.place[i] != -1) ++i;
    if (i == count_) {
      if (!(partly == before)) reach(current, partly, 2 * moved(before, partly), true);
      return;
    }
    for (std::size_t d = 0; d < from_.dims.size(); ++d) {
      if (!may_shard_[i][d]) continue;
      const std::int8_t place = place_of(d);
      const int there = sharding(partly, place);
      for (int order = 0; order <= there; ++order) {
        arrangement next = partly;
        for (std::size_t j = 0; j < count_; ++j)
          if (next.place[j] == place && next.order[j] >= order) ++next.order[j];
        next.place[i] = place;
        next.order[i] = static_cast<std::int8_t>(order);
        exchange(current, before, next, i + 1);
      }
    }
  }

  /// Volume that changes ranks when shards are rearranged, summed over the world: all except the part that a rank
  /// keeps.
  constexpr double moved(const arrangement& a, const arrangement& b) const {
    std::int64_t ranks = 1;
    for (std::size_t i = 0; i < count_; ++i)
      if (a.place[i] >= first_dim) ranks *= extent_[i];
    double kept = 0, whole = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      std::int64_t at[max_axes]{}, rest = rank;
      for (std::size_t i = 0; i < count_; ++i)
        if (a.place[i] >= first_dim) at[i] = rest % extent_[i], rest /= extent_[i];
      double common = 1, own = 1;
      for (std::size_t d = 0; d < from_.dims.size(); ++d) {
        const std::int8_t place = place_of(d);
        const auto [ia, na] = part(a, place, at);
        const auto [ib, nb] = part(b, place, at);
        const std::int64_t low = ia * nb > ib * na ? ia * nb : ib * na;  // in units of 1 / (na nb) of the dim
        const std::int64_t high = (ia + 1) * nb < (ib + 1) * na ? (ia + 1) * nb : (ib + 1) * na;
        common *= high > low ? static_cast<double>(high - low) : 0;
        own *= static_cast<double>(nb);
      }
      kept += common;
      whole += own;
    }
    return volume(a) * (1 - kept / whole);
  }
  struct piece {
    std::int64_t index, pieces;
  };
  constexpr piece part(const arrangement& x, std::int8_t place, const std::int64_t* at) const {
    piece p{0, 1};
    for (int order = 0; order < sharding(x, place); ++order)
      for (std::size_t i = 0; i < count_; ++i)
        if (x.place[i] == place && x.order[i] == order) p = {p.index * extent_[i] + at[i], p.pieces * extent_[i]};
    return p;
  }

  constexpr void trace(int last, plan& result) const {
    std::vector<int> path;
    for (int i = last; i >= 0; i = nodes_[static_cast<std::size_t>(i)].parent) path.push_back(i);
    for (std::size_t i = path.size() - 1; i-- > 0;)
      add(result, nodes_[static_cast<std::size_t>(path[i + 1])].at, nodes_[static_cast<std::size_t>(path[i])].at);
  }

  /// Describes the axes outside a sharding axis on its dim: the number of parts, and the axes of unknown extent. If
  /// both are equal before and after a step, the axis selects the same part of the dim. Its ranks then need no data
  /// from each other.
  struct outer_parts {
    std::int64_t parts = 1;
    unsigned unknown = 0;
    friend constexpr bool operator==(const outer_parts&, const outer_parts&) = default;
  };
  constexpr outer_parts outside(const arrangement& x, std::size_t i) const {
    outer_parts outer;
    if (x.place[i] < first_dim) return outer;
    for (std::size_t j = 0; j < count_; ++j)
      if (x.place[j] == x.place[i] && x.order[j] < x.order[i]) {
        if (known_[j])
          outer.parts *= extent_[j];
        else
          outer.unknown |= 1u << j;
      }
    return outer;
  }

  constexpr void add(plan& result, const arrangement& a, const arrangement& b) const {
    redistribution_step s;
    s.after = layout_of(b);
    for (std::size_t i = 0; i < count_; ++i) {
      if (a.place[i] == b.place[i] && outside(a, i) == outside(b, i)) continue;
      s.from = state_at(a.place[i]);
      s.to = state_at(b.place[i]);
      s.kind = transition(s.from, s.to);
      s.axes.push_back(moving_[i]);
      if (s.from != s.to && (s.from == state::varying || s.to == state::varying))
        s.dim = from_.dims[static_cast<std::size_t>((s.from == state::varying ? a : b).place[i] - first_dim)].dim;
    }
    if (!result.steps.empty()) {
      redistribution_step& last = result.steps.back();
      if (last.kind == s.kind && last.dim == s.dim && last.from == s.from && last.to == s.to && s.dim) {
        const bool inwards = s.to == state::varying;  // slices and scatters append axes; gathers and pads remove the
                                                      // innermost
        last.axes = union_of(inwards ? last.axes : s.axes, inwards ? s.axes : last.axes);
        last.after = s.after;
        return;
      }
    }
    result.steps.push_back(s);
  }

  layout from_;
  axis_list moving_;
  std::size_t count_;
  std::int64_t extent_[max_axes]{};
  bool known_[max_axes]{};
  bool may_shard_[max_axes][max_dims]{};
  std::int64_t fixed_parts_[max_dims]{1, 1, 1, 1, 1, 1};
  std::int64_t size_[max_dims]{}, sizes_of_blocks_[max_dims]{};
  arrangement goal_;
  std::vector<search_node> nodes_;
};

/// Plans without a search if all axes make the same kind of transition: one move per dim, or one in total. Returns true
/// if `result` is planned.
constexpr bool plan_alike(plan& result, const axis_list& moving) {
  const state s = result.from.state_of(moving[0]), t = result.to.state_of(moving[0]);
  for (axis_id axis : moving)
    if (result.from.state_of(axis) != s || result.to.state_of(axis) != t) return false;
  if (s == state::varying && t == state::varying) {
    result.steps.push_back({transition_kind::all_to_all, moving, {}, s, t, result.to});
    return true;
  }
  layout current = result.from;
  if (s != state::varying && t != state::varying) {
    for (axis_id axis : moving) current.set(axis, t);
    result.steps.push_back({transition(s, t), moving, {}, s, t, current});
    return true;
  }
  for (const dim_placement& p : (s == state::varying ? result.from : result.to).dims) {
    axis_list axes;
    for (axis_id axis : p.axes)
      if (moving.contains(axis)) axes.push_back(axis);
    if (axes.empty()) continue;
    for (axis_id axis : axes) {
      if (t == state::varying)
        current.append(p.dim, axis);
      else
        current.set(axis, t);
    }
    result.steps.push_back({transition(s, t), axes, p.dim, s, t, current});
  }
  return true;
}

}  // namespace detail

/// Returns the plan with the fewest wire bytes, forward and backward together. Only axes on which the two layouts
/// differ move, and an axis shards only dims that it shards in one of the layouts. So a plan sends nothing along axes
/// that the specs do not name. Both layouts must have equal dims in equal order. `dynamic` or unknown extents count as
/// 2 in the comparison of plans. No step leaves a rank without elements of a dim of known size; `check_parts` checks
/// the two layouts. The verdict is `dims_differ` if the dims differ, and `too_few_elements` if no path is left.
constexpr plan make_plan(const layout& from, const layout& to, const mesh_shape& mesh = {},
                         const dim_sizes& sizes = {}) {
  plan result;
  result.from = from;
  result.to = to;
  if (!(from.dim_order() == to.dim_order())) {
    result.verdict = compare_dims(operand::output, from.dim_order(), to.dim_order());
    return result;
  }
  const axis_list moving = differing_axes(from, to);
  if (moving.empty()) return result;
  if (!detail::plan_alike(result, moving)) detail::plan_search(from, to, moving, mesh, sizes).run(result);
  if (!result.steps.empty()) result.steps.back().after = to;
  return result;
}

}  // namespace plait
