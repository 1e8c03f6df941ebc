// The definitions of redistribution.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <optional>
#include <string>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/plan.hpp"

namespace plait {

PLAIT_INLINE void enforce_axes(const layout& a, const mesh_shape& mesh, std::string_view where) {
  for (axis_id axis : a.mentioned()) {
    if (mesh.has(axis)) continue;
    const state s = a.state_of(axis);
    enforce(verdict{layout_error::axis_unknown, axis, a.sharded_by(axis), s, s}, where);
  }
}

PLAIT_INLINE layout prune(const layout& a, const world& w) {
  layout b;
  for (const dim_placement& p : a.dims) b.dims.push_back({p.dim, w.pruned(p.axes)});
  b.replicated = w.pruned(a.replicated);
  b.partial = w.pruned(a.partial);
  b.invariant = w.pruned(a.invariant);
  return b;
}

PLAIT_INLINE std::string describe_steps(const plan& moves) {
  std::string text;
  for (const redistribution_step& s : moves.steps)
    if (s.kind != transition_kind::relabel)
      append(text, {text.empty() ? "" : ", then ", name_of(s.kind), " over ", label_of(s.axes)});
  return text.empty() ? "nothing" : text;
}

PLAIT_INLINE ready_plan::ready_plan(const layout& from, const layout& to, world& w, const dim_sizes& sizes,
                                    std::string_view where)
    : ready_plan((enforce_axes(from, w.shape(), where), enforce_axes(to, w.shape(), where),
                  make_plan(prune(from, w), prune(to, w), w.shape(), sizes)),
                 w, sizes, where) {}

PLAIT_INLINE ready_plan::ready_plan(const plan& p, world& w, const dim_sizes& sizes, std::string_view where)
    : plan_(p) {
  enforce(plan_.verdict, where);
  enforce_axes(plan_.from, w.shape(), where);
  enforce_axes(plan_.to, w.shape(), where);
  enforce_divides(plan_.from, w.shape(), sizes, where);
  enforce_divides(plan_.to, w.shape(), sizes, where);
  // The order of a sum's ranks means nothing: it takes the communicator that the world has anyway.
  for (redistribution_step& s : plan_.steps)
    if (s.kind == transition_kind::all_reduce) s.axes = w.shape().in_order(s.axes);
  const std::int64_t rank = w.rank();
  source_ = local_box(plan_.from, w.shape(), sizes, rank);
  box before = source_;
  for (const redistribution_step& s : plan_.steps) {
    ready_step g{s.kind,
                 -1,
                 w.shape().size(s.axes),
                 w.shape().index_in(rank, s.axes),
                 communicates(s.kind) ? &w.group(s.axes) : nullptr,
                 before,
                 local_box(s.after, w.shape(), sizes, rank),
                 {}};
    if (s.dim) g.dim = plan_.from.find(s.dim);
    if (s.kind == transition_kind::all_to_all)
      g.peers = peers(s, static_cast<std::size_t>(&s - plan_.steps.begin()), w, sizes);
    before = g.after;
    if (communicates(s.kind))
      costs_.push_back(cost(plan_, static_cast<std::size_t>(&s - plan_.steps.begin()), w.shape(), sizes, 1));
    ready_.push_back(std::move(g));
  }
  target_ = before;
}

PLAIT_INLINE plan ready_plan::backward() const { return mirror(plan_); }

PLAIT_INLINE std::optional<single_collective> ready_plan::single() const {
  const ready_step* only = nullptr;
  for (const ready_step& s : ready_) {
    if (s.kind == transition_kind::relabel) continue;
    if (only != nullptr || !communicates(s.kind) || s.kind == transition_kind::all_to_all) return {};
    only = &s;
  }
  if (only == nullptr) return {};
  if (only->kind == transition_kind::all_reduce)
    return single_collective{only->kind, only->comm, only->ranks, 1, 1, only->before.local_size()};
  const view part = around(only->kind == transition_kind::all_gather ? only->before : only->after, only->dim);
  return single_collective{only->kind, only->comm, only->ranks, part.outer, part.rows, part.inner};
}

PLAIT_INLINE std::size_t ready_plan::last_active() const {
  for (std::size_t i = ready_.size(); i-- > 0;)
    if (ready_[i].kind != transition_kind::relabel) return i;
  return none;
}

PLAIT_INLINE std::vector<ready_plan::peer> ready_plan::peers(const redistribution_step& s, std::size_t i,
                                                             const world& w, const dim_sizes& sizes) const {
  std::vector<peer> all(static_cast<std::size_t>(w.shape().size(s.axes)));
  const std::int64_t own = w.rank();
  const box mine_before = local_box(plan_.before(i), w.shape(), sizes, own);
  const box mine_after = local_box(s.after, w.shape(), sizes, own);
  const auto common = [](const box& a, const box& b) {  // without elements if nothing is common
    box out = a;
    if (const std::optional<box> both = intersect(a, b))
      out = *both;
    else
      out.local[0] = 0;
    return out;
  };
  for (std::int64_t r = 0; r < w.size(); ++r)
    if (w.shape().group_of(r, s.axes) == w.shape().group_of(own, s.axes))
      all[static_cast<std::size_t>(w.shape().index_in(r, s.axes))] = {
          common(mine_before, local_box(s.after, w.shape(), sizes, r)),
          common(mine_after, local_box(plan_.before(i), w.shape(), sizes, r))};
  return all;
}

PLAIT_INLINE ready_plan::view ready_plan::around(const box& b, int dim) {
  view v;
  for (int d = 0; d < b.dims; ++d) {
    const std::int64_t n = b.local[static_cast<std::size_t>(d)];
    (d < dim ? v.outer : d == dim ? v.rows : v.inner) *= n;
  }
  return v;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
