// The typing rules of operations: each returns the layout of a result, or a verdict that refuses the operands.
// tests/static/theorems.cpp has worked examples.
#pragma once

#include <initializer_list>

#include "plait/layout/errors.hpp"

namespace plait {

/// How an operation combines its operands. `sum` is linear in all of them jointly (add, subtract; with one operand:
/// scale, cast). `product` is linear in each of them. `nonlinear` is neither.
enum class combine : std::uint8_t { sum, product, nonlinear };

namespace detail {

using operands = std::initializer_list<const layout*>;

template <class Operands = operands>
constexpr axis_list axes_of(const Operands& all) {
  axis_list axes;
  for (const layout* a : all) axes = union_of(axes, a->mentioned());
  return axes;
}

/// Operands that share a dim must hold equal parts of it: equal axes in equal order.
constexpr verdict same_parts(const layout& a, const layout& b) {
  verdict worst;
  for (const dim_placement& p : a.dims) {
    if (!b.has(p.dim)) continue;
    const axis_list other = b.axes_of(p.dim);
    if (p.axes == other) continue;
    verdict v{layout_error::axis_order_differs, p.axes.empty() ? other[0] : p.axes[0], p.dim, state::varying,
              state::varying};
    for (axis_id axis : union_of(p.axes, other))
      if (p.axes.contains(axis) != other.contains(axis))
        v = {layout_error::sharded_and_whole, axis, p.dim, a.state_of(axis), b.state_of(axis)};
    worst.worsen(v);
  }
  return worst;
}

/// The state on one axis of an elementwise combination of values that hold equal parts; `varying` stands for any dim. A
/// replicated value combines with a varying one only if it lacks the sharded dim; `same_parts` checks this.
struct axis_outcome {
  state result;
  layout_error code;
};
constexpr axis_outcome combine_states(combine how, state a, state b) {
  using enum state;
  if (a == partial || b == partial) {
    const state other = a == partial ? b : a;
    if (how == combine::nonlinear) return {replicated, layout_error::partial_nonlinear};
    if (how == combine::sum) return {partial, other == partial ? layout_error::ok : layout_error::partial_plus_other};
    if (other == partial) return {partial, layout_error::partial_times_partial};
    if (other == varying) return {varying, layout_error::partial_times_varying};
    return {partial, other == invariant ? layout_error::meets_invariant : layout_error::ok};
  }
  if (a == b) return {a, layout_error::ok};
  if (a == invariant || b == invariant) return {a == invariant ? b : a, layout_error::meets_invariant};
  return {varying, layout_error::ok};
}

constexpr verdict outcome(layout_error code, axis_id axis, dim_id dim, state a, state b) {
  return code == layout_error::ok ? verdict{} : verdict{code, axis, dim, a, b};
}

/// Sets the state of `axis` in a result whose dims are already placed, unless the state is varying.
constexpr void settle(layout& result, axis_id axis, state s) {
  if (s != state::varying && !result.sharded_by(axis)) result.set(axis, s);
}

}  // namespace detail

/// Contraction of two tensors by dim names (einsum). `out` lists the dims of the result in order. A shared dim in `out`
/// is a batch dim; every dim outside `out` is summed. On each axis: a summed dim that both operands shard alike leaves
/// a partial result. A sharded or partial operand needs a replicated (not invariant) partner.
constexpr derived_layout contract(const layout& a, const layout& b, const dim_list& out) {
  derived_layout r;
  r.verdict = detail::same_parts(a, b);
  for (dim_id dim : out) {
    if (!a.has(dim) && !b.has(dim)) r.verdict.worsen({layout_error::dims_differ, {}, dim});
    r.result.dims.push_back({dim, a.has(dim) ? a.axes_of(dim) : b.axes_of(dim)});
  }
  for (axis_id axis : detail::axes_of({&a, &b})) {
    const state sa = a.state_of(axis), sb = b.state_of(axis);
    const dim_id da = a.sharded_by(axis), db = b.sharded_by(axis);
    if (da && db && !(da == db)) {
      r.verdict.worsen({layout_error::one_axis_two_dims, axis, db, sa, sb});
      for (dim_placement& p : r.result.dims)
        if (p.dim == db)
          if (const int at = p.axes.find(axis); at >= 0) p.axes.erase(static_cast<std::size_t>(at));
      continue;
    }
    const auto [s, code] = detail::combine_states(combine::product, sa, sb);
    r.verdict.worsen(detail::outcome(code, axis, da ? da : db, sa, sb));
    detail::settle(r.result, axis, s == state::varying ? state::partial : s);
  }
  return r;
}

/// An elementwise operation on one or more operands. The first has all dims of the result; others may lack some
/// (broadcast). Operands must hold equal parts of shared dims. States must agree, except that a replicated value may be
/// broadcast into a sharded one.
template <class Operands = detail::operands>
constexpr derived_layout pointwise(combine how, const Operands& operands) {
  const layout& first = **operands.begin();
  derived_layout r;
  r.result.dims = first.dims;
  for (const layout* b : operands) {
    r.verdict.worsen(detail::same_parts(first, *b));
    for (const dim_placement& p : b->dims)
      if (!first.has(p.dim)) r.verdict.worsen({layout_error::dims_differ, {}, p.dim});
  }
  for (axis_id axis : detail::axes_of(operands)) {
    state s = first.state_of(axis);
    if (s == state::partial && how == combine::nonlinear)
      r.verdict.worsen({layout_error::partial_nonlinear, axis, {}, s, s}), s = state::replicated;
    for (auto at = operands.begin() + 1; at != operands.end(); ++at) {
      const layout* b = *at;  // may be the first operand again: x * x
      const state sb = b->state_of(axis);
      const dim_id da = first.sharded_by(axis), db = b->sharded_by(axis);
      if (da && db && !(da == db)) {
        r.verdict.worsen({layout_error::one_axis_two_dims, axis, db, s, sb});
        continue;
      }
      if (db && !da) {  // `same_parts` has reported this: the result has the dim, so the first operand holds all of it
        r.verdict.worsen({layout_error::sharded_and_whole, axis, db, s, sb});
        continue;
      }
      const auto [next, code] = detail::combine_states(how, s, sb);
      r.verdict.worsen(detail::outcome(code, axis, da, s, sb));
      s = next;
    }
    detail::settle(r.result, axis, s);
  }
  return r;
}

/// Sum (or mean) over `dim`, which the result lacks. The result is partial over the axes that sharded it.
constexpr derived_layout reduce_sum(const layout& a, dim_id dim) {
  derived_layout r{a, {}};
  const int at = a.find(dim);
  if (at < 0) return {a, {layout_error::dims_differ, {}, dim}};
  const axis_list axes = a.axes_of(dim);
  r.result.dims.erase(static_cast<std::size_t>(at));
  for (axis_id axis : axes) r.result.set(axis, state::partial);
  return r;
}

/// The layout after the all-reduce of a pending sum: invariant where it was partial.
constexpr layout completed(layout a) {
  const axis_list pending = a.partial;
  for (axis_id axis : pending) a.set(axis, state::invariant);
  return a;
}

/// A nonlinear reduction over `dim` (max). The dim must be whole and the value complete.
constexpr derived_layout reduce_nonlinear(const layout& a, dim_id dim) {
  derived_layout r = reduce_sum(a, dim);
  for (axis_id axis : a.axes_of(dim)) {
    r.verdict.worsen({layout_error::reduced_over_shard, axis, dim, state::varying, state::varying});
    r.result.set(axis, state::replicated);
  }
  for (axis_id axis : a.partial)
    r.verdict.worsen({layout_error::partial_nonlinear, axis, dim, state::partial, state::partial});
  return r;
}

/// RMSNorm or LayerNorm of `x` over `dim`, times `weight`. `dim` may be sharded: the operation reduces its statistics
/// itself.
constexpr derived_layout normalize(const layout& x, const layout& weight, dim_id dim) {
  derived_layout r = pointwise(combine::product, {&x, &weight});
  if (!x.has(dim)) r.verdict.worsen({layout_error::dims_differ, {}, dim});
  for (axis_id axis : x.partial)
    r.verdict.worsen({layout_error::partial_nonlinear, axis, dim, state::partial, weight.state_of(axis)});
  return r;
}

namespace detail {

/// Checks an operand without a gradient (token ids, labels). A rank only needs the right part of it, so invariant and
/// replicated are equivalent. `must_vary` is the dim that this axis must shard, if any.
constexpr verdict index_operand(const layout& indices, axis_id axis, dim_id must_vary, state partner) {
  const state s = indices.state_of(axis);
  const dim_id d = indices.sharded_by(axis);
  if (s == state::partial) return {layout_error::partial_nonlinear, axis, {}, partner, s};
  if (must_vary && indices.has(must_vary) && !(d == must_vary))
    return {layout_error::sharded_and_whole, axis, must_vary, partner, s};
  if (d && !(d == must_vary)) return {layout_error::sharded_and_whole, axis, d, partner, s};
  return {};
}

}  // namespace detail

/// Looks up `ids` in the rows (dim `rows`) of `table`. The result has the dims of `ids`, then the table's other dims.
/// If an axis shards rows, ranks give zeros for rows that they lack, so the result is partial there.
constexpr derived_layout lookup(const layout& table, const layout& ids, dim_id rows) {
  derived_layout r;
  if (!table.has(rows)) r.verdict.worsen({layout_error::dims_differ, {}, rows});
  r.result.dims = ids.dims;
  for (const dim_placement& p : table.dims)
    if (!(p.dim == rows)) r.result.dims.push_back(p);
  for (axis_id axis : detail::axes_of({&table, &ids})) {
    const state st = table.state_of(axis), si = ids.state_of(axis);
    const dim_id dt = table.sharded_by(axis), di = ids.sharded_by(axis);
    if (si == state::partial) {
      r.verdict.worsen({layout_error::partial_nonlinear, axis, {}, st, si});
    } else if (dt && di) {
      r.verdict.worsen({layout_error::one_axis_two_dims, axis, di, st, si});
    } else if (di) {
      const layout_error code = st == state::invariant ? layout_error::meets_invariant
                                : st == state::partial ? layout_error::partial_times_varying
                                                       : layout_error::ok;
      r.verdict.worsen(detail::outcome(code, axis, di, st, si));
    } else {
      detail::settle(r.result, axis, dt == rows && dt ? state::partial : st);
    }
  }
  return r;
}

/// Softmax cross-entropy of `logits` against integer `labels` over the dim `classes`, which may be sharded. The
/// operation reduces its statistics itself, so its result (one loss per row) is invariant over the axes of `classes`.
constexpr derived_layout cross_entropy(const layout& logits, const layout& labels, dim_id classes) {
  derived_layout r;
  const int at = logits.find(classes);
  if (at < 0) return {logits, {layout_error::dims_differ, {}, classes}};
  const axis_list over = logits.axes_of(classes);
  r.result = logits;
  r.result.dims.erase(static_cast<std::size_t>(at));
  r.verdict.worsen(compare_dims(operand::labels, r.result.dim_order(), labels.dim_order()));
  for (axis_id axis : over) r.result.set(axis, state::invariant);
  for (axis_id axis : detail::axes_of({&logits, &labels})) {
    const state s = logits.state_of(axis);
    if (s == state::partial)
      r.verdict.worsen({layout_error::partial_nonlinear, axis, classes, s, labels.state_of(axis)});
    r.verdict.worsen(detail::index_operand(labels, axis, r.result.sharded_by(axis), s));
  }
  for (const dim_placement& p : r.result.dims)
    if (labels.has(p.dim) && !(labels.axes_of(p.dim) == p.axes) && r.verdict.ok())
      r.verdict.worsen({layout_error::axis_order_differs, p.axes.empty() ? axis_id{} : p.axes[0], p.dim});
  return r;
}

/// The dims of attention. The last dim of q, k and v, over which the scores sum, needs no name. `context` are the axes
/// over which the sequence stays sharded; the operation communicates over them itself.
struct attention_dims {
  dim_id seq, heads, kv_heads;
  axis_list context = {};
};

namespace detail {

/// The rule of attention on one axis for the operand `kv`: k, or v if `is_v`. Attention is linear in v only.
constexpr verdict attend_on_axis(const layout& q, const layout& kv, const attention_dims& dims, axis_id axis,
                                 bool is_v) {
  const state sq = q.state_of(axis), sk = kv.state_of(axis);
  const dim_id dq = q.sharded_by(axis), dk = kv.sharded_by(axis);
  const dim_id depth = q.dims.empty() ? dim_id{} : q.dims.back().dim;
  const auto refuse = [&](layout_error code, dim_id dim) { return verdict{code, axis, dim, sq, sk}; };
  if (sq == state::partial || (sk == state::partial && !is_v)) return refuse(layout_error::partial_nonlinear, {});
  if ((dq && dq == dims.seq) || (dk && dk == dims.seq)) {
    if (dq == dk && dims.context.contains(axis)) return {};
    return refuse(layout_error::seq_must_be_whole, dims.seq);
  }
  if ((dq && dq == depth) || (dk && dk == depth)) return refuse(layout_error::head_dim_must_be_whole, depth);
  if (dq && dq == dims.heads && ((dk && dk == dims.kv_heads) || sk == state::replicated)) return {};
  if (dq && sk == state::replicated && !kv.has(dq) && !q.has(dims.seq)) return {};  // queries of another sequence
  if (dq && dk && !(dq == dk)) return refuse(layout_error::one_axis_two_dims, dk);
  if (sk != state::partial && (sq == state::invariant) != (sk == state::invariant))
    return refuse(layout_error::meets_invariant, dq ? dq : dk);
  if (sk == state::partial) return outcome(combine_states(combine::product, sq, sk).code, axis, dq, sq, sk);
  if (static_cast<bool>(dq) != static_cast<bool>(dk)) return refuse(layout_error::sharded_and_whole, dq ? dq : dk);
  return {};
}

}  // namespace detail

/// Grouped-query attention on local heads: q [.., seq, heads, d], k and v [.., seq, kv_heads, d]. The sequence is
/// whole, or sharded over exactly the axes `dims.context`, in that order. In cross-attention, axes that replicate k and
/// v may shard the queries' own sequence. kv heads may be sharded over the leading axes of heads only, and are
/// replicated over the rest. The operation is linear in v, so a partial v with replicated q and k gives a partial
/// result.
constexpr derived_layout attend(const layout& q, const layout& k, const layout& v, const attention_dims& dims) {
  derived_layout r{q, {}};
  for (const layout* kv : {&k, &v}) {
    for (axis_id axis : detail::axes_of({&q, kv}))
      r.verdict.worsen(detail::attend_on_axis(q, *kv, dims, axis, kv == &v));
    const axis_list outer = kv->axes_of(dims.kv_heads), all = q.axes_of(dims.heads);
    for (std::size_t i = 0; i < outer.size(); ++i)
      if (i >= all.size() || !(all[i] == outer[i]))
        r.verdict.worsen(
            {layout_error::kv_heads_must_lead, outer[i], dims.kv_heads, q.state_of(outer[i]), state::varying});
    for (const dim_placement& p : q.dims)
      if (kv->has(p.dim) && !(kv->axes_of(p.dim) == p.axes) && r.verdict.ok())
        r.verdict.worsen({layout_error::axis_order_differs, p.axes.empty() ? axis_id{} : p.axes[0], p.dim});
  }
  const axis_list over = q.axes_of(dims.seq);
  for (std::size_t i = 0; i < dims.context.size(); ++i) {
    const axis_id axis = dims.context[i];
    if (i >= over.size() || !(over[i] == axis))
      r.verdict.worsen({layout_error::context_axes_differ, axis, dims.seq, q.state_of(axis), k.state_of(axis)});
  }
  for (axis_id axis : v.partial) {
    if (k.state_of(axis) != state::replicated)
      r.verdict.worsen({layout_error::partial_nonlinear, axis, {}, k.state_of(axis), state::partial});
    detail::settle(r.result, axis, state::partial);
  }
  return r;
}

/// Checks a spec at a layer's boundary: it must mention every axis of the mesh, so that none is forgotten. The mesh
/// must have every axis that the spec mentions.
constexpr verdict check_boundary(const layout& a, const mesh_shape& mesh) {
  verdict worst;
  for (axis_id axis : mesh.axes)
    if (!a.mentions(axis)) worst.worsen({layout_error::axis_unmentioned, axis, {}});
  for (axis_id axis : a.mentioned())
    if (!mesh.has(axis))
      worst.worsen({layout_error::axis_unknown, axis, a.sharded_by(axis), a.state_of(axis), a.state_of(axis)});
  return worst;
}

}  // namespace plait
