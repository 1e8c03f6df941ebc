// Redistributions of arrays: `ready_plan` prepares a plan for one rank and runs it; `redistribute` plans at each call.
// The layer with a backward pass is `redistribution` in nn/combinators.hpp.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/plan.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {

/// Throws, with the text of a boundary's error, if the layout names an axis that the mesh lacks. Otherwise a sum over
/// this axis would be lost silently.
void enforce_axes(const layout& a, const mesh_shape& mesh, std::string_view where);

/// Returns `a` without the axes that have one rank, since they need no data movement. It also removes axes that the
/// mesh lacks, so `enforce_axes` must run first.
layout prune(const layout& a, const world& w);

/// Returns the steps of a plan in words: "all_gather over tp".
std::string describe_steps(const plan& moves);

/// A collective on arrays [outer, rows, inner], where `rows` is the gathered or scattered dim. `begins` has the first
/// row of each rank's part, then the end of the last part. For an all-reduce, `inner` is the whole array and there is
/// one part.
struct single_collective {
  transition_kind kind;
  any_communicator* comm;
  std::int64_t ranks, outer, inner;
  std::vector<std::int64_t> begins;
};

/// A redistribution prepared for one rank: the plan for the actual extents and sizes, its groups and its boxes. It runs
/// on contiguous row-major local arrays of any dtype.
class ready_plan {
 public:
  ready_plan() = default;
  /// Throws `plait::error` that names `where` in three cases: a dim has fewer elements than ranks, the dims differ, or
  /// the mesh lacks an axis of a layout.
  ready_plan(const layout& from, const layout& to, world& w, const dim_sizes& sizes, std::string_view where);

  /// Prepares a given plan, such as the mirror of another.
  ready_plan(const plan& p, world& w, const dim_sizes& sizes, std::string_view where);

  const plan& planned() const { return plan_; }
  plan backward() const;
  const box& source() const { return source_; }
  const box& target() const { return target_; }
  /// True if no data moves: the input array equals the output array.
  bool trivial() const {
    for (const ready_step& s : ready_)
      if (s.kind != transition_kind::relabel) return false;
    return true;
  }

  /// The plan's only data movement, if this is one all-gather, reduce-scatter or all-reduce; otherwise none.
  std::optional<single_collective> single() const;

  /// Moves `in`, the local part in the source layout, to `out`, in the target layout; elements are of `type`. `in` and
  /// `out` may be equal if the plan is trivial or consists of reductions; otherwise they must not overlap.
  template <compute_device Device>
  void run(Device& device, const void* in, void* out, dtype type) const;

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  /// A box of a row-major array seen as [outer, rows, inner] around dimension `dim`.
  struct view {
    std::int64_t outer = 1, rows = 1, inner = 1;
  };
  static view around(const box& b, int dim);

  /// The exchange with one rank of an all-to-all: boxes in the coordinates of the global tensor.
  struct peer {
    box send, receive;
  };
  struct ready_step {
    transition_kind kind;
    int dim;
    std::int64_t ranks, index;
    any_communicator* comm;
    box before, after;
    std::vector<peer> peers;
    /// Where each rank's part begins along the gathered or scattered dim of `after` or `before`, then the end of the
    /// last part. Empty if parts are equal.
    std::vector<std::int64_t> begins;

    /// The gathered array, or the array to scatter, seen around `dim`.
    view whole() const { return around(kind == transition_kind::all_gather ? after : before, dim); }
    /// Elements of the largest part, and so of a padded message.
    std::size_t message() const {
      std::int64_t rows = 0;
      for (std::size_t r = 0; r + 1 < begins.size(); ++r) rows = std::max(rows, begins[r + 1] - begins[r]);
      return static_cast<std::size_t>(rows * whole().outer * whole().inner);
    }
    /// Whether every message has the size of the largest part, because the communicator cannot send parts of unequal
    /// sizes.
    bool padded(std::size_t element) const { return !begins.empty() && !comm->unequal_parts(message() * element); }
  };

  /// The messages of all ranks, one after another: their elements, and where each begins.
  struct messages {
    std::vector<std::size_t> counts, offsets;
    std::size_t size = 0;
  };
  static messages messages_of(const ready_step& s, bool padded);

  std::size_t last_active() const;

  std::vector<peer> peers(const redistribution_step& s, std::size_t i, const world& w, const dim_sizes& sizes) const;

  /// `ready_step::begins` of step i for the group of this rank.
  std::vector<std::int64_t> begins(const redistribution_step& s, std::size_t i, const world& w,
                                   const dim_sizes& sizes) const;

  template <class Device>
  static void apply(Device& device, const ready_step& s, const void* in, void* out, dtype type) {
    const auto element = static_cast<std::int64_t>(size_of(type));
    const auto whole = static_cast<std::size_t>(s.before.local_size());
    switch (s.kind) {
      case transition_kind::relabel:
        return;
      case transition_kind::slice:
      case transition_kind::pad: {
        const bool slicing = s.kind == transition_kind::slice;
        const view large = around(slicing ? s.before : s.after, s.dim),
                   small = around(slicing ? s.after : s.before, s.dim);
        const std::int64_t row = small.rows * small.inner * element, stride = large.rows * large.inner * element;
        const std::int64_t first = (slicing ? s.after.offset[s.dim] - s.before.offset[s.dim]
                                            : s.before.offset[s.dim] - s.after.offset[s.dim]) *
                                   small.inner * element;
        if (slicing) {
          kernels::copy_2d(device, at(in, first), out, small.outer, row, stride, row);
        } else {
          device.zero(out, static_cast<std::size_t>(s.after.local_size() * element), device.main_stream());
          kernels::copy_2d(device, in, at(out, first), small.outer, row, row, stride);
        }
        return;
      }
      case transition_kind::keep_one:
        if (s.index == 0) return device.copy(out, in, whole * size_of(type), device.main_stream());
        return device.zero(out, whole * size_of(type), device.main_stream());
      case transition_kind::all_reduce:
        return s.comm->run({.kind = collective::all_reduce, .in = in, .out = out, .count = whole, .type = type});
      case transition_kind::all_gather: {
        if (!s.begins.empty()) return gather_unequal(device, s, in, out, type);
        const view small = around(s.before, s.dim);
        if (small.outer == 1)
          return s.comm->run({.kind = collective::all_gather, .in = in, .out = out, .count = whole, .type = type});
        auto parts = buffer<Device>::for_collectives(device, whole * size_of(type) * static_cast<std::size_t>(s.ranks));
        s.comm->run({.kind = collective::all_gather, .in = in, .out = parts.data(), .count = whole, .type = type});
        const std::int64_t row = small.rows * small.inner * element;
        kernels::copy_3d(device, parts.data(), out, s.ranks, small.outer, row, small.outer * row, row, row,
                         s.ranks * row);
        return;
      }
      case transition_kind::reduce_scatter: {
        if (!s.begins.empty()) return scatter_unequal(device, s, in, out, type);
        const view small = around(s.after, s.dim);
        const auto part = static_cast<std::size_t>(s.after.local_size());
        if (small.outer == 1)
          return s.comm->run({.kind = collective::reduce_scatter, .in = in, .out = out, .count = part, .type = type});
        auto parts = buffer<Device>::for_collectives(device, whole * size_of(type));
        const std::int64_t row = small.rows * small.inner * element;
        kernels::copy_3d(device, in, parts.data(), s.ranks, small.outer, row, row, s.ranks * row, small.outer * row,
                         row);
        return s.comm->run(
            {.kind = collective::reduce_scatter, .in = parts.data(), .out = out, .count = part, .type = type});
      }
      case transition_kind::all_to_all:
        return exchange(device, s, in, out, type);
    }
  }

  // Handles parts of unequal sizes. Each message holds a part in its rank's order; a padded message has room for the
  // largest part.

  /// Calls f(first byte in the messages, first byte in the array, bytes of a row of the part) for each rank's part.
  template <class F>
  static void each_message(const ready_step& s, const messages& all, std::int64_t element, F&& f) {
    const std::int64_t row = s.whole().inner * element;
    for (std::size_t r = 0; r + 1 < s.begins.size(); ++r)
      f(static_cast<std::int64_t>(all.offsets[r]) * element, s.begins[r] * row, (s.begins[r + 1] - s.begins[r]) * row);
  }
  template <class Device>
  static void gather_unequal(Device& device, const ready_step& s, const void* in, void* out, dtype type) {
    const std::size_t element = size_of(type);
    const bool padded = s.padded(element);
    const view whole = s.whole();
    const messages all = messages_of(s, padded);
    if (!padded && whole.outer == 1) return s.comm->all_gather_v(in, out, all.counts, all.offsets, type);
    auto parts = buffer<Device>::for_collectives(device, all.size * element);
    if (padded) {
      auto own = buffer<Device>::for_collectives(device, s.message() * element);
      device.zero(own.data(), own.bytes(), device.main_stream());
      device.copy(own.data(), in, static_cast<std::size_t>(s.before.local_size()) * element, device.main_stream());
      s.comm->all_gather(own.data(), parts.data(), s.message(), type);
    } else {
      s.comm->all_gather_v(in, parts.data(), all.counts, all.offsets, type);
    }
    const auto bytes = static_cast<std::int64_t>(element);
    each_message(s, all, bytes, [&](std::int64_t message, std::int64_t first, std::int64_t row) {
      kernels::copy_2d(device, at(parts.data(), message), at(out, first), whole.outer, row, row,
                       whole.rows * whole.inner * bytes);
    });
  }
  template <class Device>
  static void scatter_unequal(Device& device, const ready_step& s, const void* in, void* out, dtype type) {
    const std::size_t element = size_of(type);
    const bool padded = s.padded(element);
    const view whole = s.whole();
    const messages all = messages_of(s, padded);
    if (!padded && whole.outer == 1)
      return s.comm->reduce_scatter_v(in, out, all.counts, all.offsets, type, reduce_op::sum);
    auto parts = buffer<Device>::for_collectives(device, all.size * element);
    if (padded) device.zero(parts.data(), parts.bytes(), device.main_stream());
    const auto bytes = static_cast<std::int64_t>(element);
    each_message(s, all, bytes, [&](std::int64_t message, std::int64_t first, std::int64_t row) {
      kernels::copy_2d(device, at(in, first), at(parts.data(), message), whole.outer, row,
                       whole.rows * whole.inner * bytes, row);
    });
    if (!padded) return s.comm->reduce_scatter_v(parts.data(), out, all.counts, all.offsets, type, reduce_op::sum);
    auto own = buffer<Device>::for_collectives(device, s.message() * element);
    s.comm->reduce_scatter(parts.data(), own.data(), s.message(), type, reduce_op::sum);
    device.copy(out, own.data(), static_cast<std::size_t>(s.after.local_size()) * element, device.main_stream());
  }

  template <class Device>
  static void exchange(Device& device, const ready_step& s, const void* in, void* out, dtype type) {
    const std::size_t ranks = s.peers.size();
    std::vector<std::size_t> send(ranks), send_at(ranks), receive(ranks), receive_at(ranks);
    std::size_t sent = 0, received = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      send_at[r] = sent, receive_at[r] = received;
      sent += send[r] = static_cast<std::size_t>(s.peers[r].send.local_size());
      received += receive[r] = static_cast<std::size_t>(s.peers[r].receive.local_size());
    }
    auto outgoing = buffer<Device>::for_collectives(device, sent * size_of(type)),
         incoming = buffer<Device>::for_collectives(device, received * size_of(type));
    const auto element = static_cast<std::int64_t>(size_of(type));
    for (std::size_t r = 0; r < ranks; ++r)
      kernels::copy_box(device, in, s.before, at(outgoing.data(), static_cast<std::int64_t>(send_at[r]) * element),
                        s.peers[r].send, s.peers[r].send, element);
    s.comm->all_to_all_v(outgoing.data(), send, send_at, incoming.data(), receive, receive_at, type);
    for (std::size_t r = 0; r < ranks; ++r)
      kernels::copy_box(device, at(incoming.data(), static_cast<std::int64_t>(receive_at[r]) * element),
                        s.peers[r].receive, out, s.after, s.peers[r].receive, element);
  }

  static const void* at(const void* p, std::int64_t bytes) { return static_cast<const char*>(p) + bytes; }
  static void* at(void* p, std::int64_t bytes) { return static_cast<char*>(p) + bytes; }

  plan plan_;
  box source_, target_;
  std::vector<ready_step> ready_;
};

template <compute_device Device>
void ready_plan::run(Device& device, const void* in, void* out, dtype type) const {
  const std::size_t last = last_active();
  const std::size_t element = size_of(type);
  const void* current = in;
  buffer<Device> held;
  for (std::size_t i = 0; i < ready_.size(); ++i) {
    const ready_step& s = ready_[i];
    if (s.kind == transition_kind::relabel) continue;
    buffer<Device> next;
    void* target = out;
    if (i != last) {
      next = buffer<Device>::for_collectives(device, static_cast<std::size_t>(s.after.local_size()) * element);
      target = next.data();
    }
    apply(device, s, current, target, type);
    held = std::move(next);
    current = target;
  }
  if (last == none && in != out)
    device.copy(out, in, static_cast<std::size_t>(source_.local_size()) * element, device.main_stream());
}

PLAIT_COMPILED_TEMPLATE(void ready_plan::run<cpu>(cpu&, const void*, void*, dtype) const)

namespace detail {
template <class From, class To>
struct redistribution_value {
  static constexpr verdict value = compare_dims(operand::output, layout_v<From>.dim_order(), layout_v<To>.dim_order());
};
/// Throws like `require_any_order` if a step of the plan sums over ranks, since the backend chooses the order of that
/// sum.
template <compute_device Device>
void require_no_sum(const context<Device>& ctx, const ready_plan& moves, const std::string& name) {
  if (!sums_in_order(ctx)) return;
  for (const redistribution_step& s : moves.planned().steps)
    if (s.kind == transition_kind::all_reduce || s.kind == transition_kind::reduce_scatter)
      require_any_order(ctx, name, "this sum over ranks: " + describe_steps(moves.planned()));
}
}  // namespace detail

/// Moves an array from its spec to that of `out`, which has equal dims in equal order, by the plan with the fewest
/// bytes. Both specs may shard any dim. The adjoint is `redistribute` from `dual_t<To>` to `dual_t<From>`. The arrays
/// must not overlap, except that they may be the same array if the plan consists of all-reduces. It plans at each call;
/// `ready_plan` plans once.
template <class In, class T, spec_like From, spec_like To, compute_device Device>
  requires std::same_as<std::remove_const_t<In>, T>
part<T, To> redistribute(const context<Device>& ctx, const part<In, From>& in, const part<T, To>& out) {
  static_assert(enforced<detail::redistribution_value<From, To>, among<From, To>, From, To>);
  const ready_plan moves(layout_v<From>, layout_v<To>, ctx.ranks, ctx.sizes, "redistribute");
  detail::require_no_sum(ctx, moves, "redistribute");
  if (in.size() != moves.source().local_size())
    fail(
        {"redistribute: in has ", in.size(), " elements, and in this context there are ", moves.source().local_size()});
  detail::require_one_shape("redistribute", in.where(), out.where());
  bool in_place = true;
  for (const redistribution_step& s : moves.planned().steps)
    in_place = in_place && s.kind == transition_kind::all_reduce;
  const std::less<const void*> before;
  if (!only_counts<Device> && before(in.unchecked(), out.unchecked() + out.size()) &&
      before(out.unchecked(), in.unchecked() + in.size()) && !(in_place && in.unchecked() == out.unchecked()))
    fail({"redistribute: in and out overlap, and the plan between them is ", describe_steps(moves.planned()),
          ": give them memory of their own"});
  moves.run(ctx.device, in.unchecked(), out.unchecked(), dtype_of<T>);
  return out;
}
/// Redistributes a tensor into a new one.
template <spec_like To, class T, spec_like From, compute_device Device>
tensor<T, To, Device> redistribute(const context<Device>& ctx, const tensor<T, From, Device>& x) {
  tensor<T, To, Device> y(ctx);
  redistribute(ctx, part<const T, From>(x), part<T, To>(y));
  return y;
}

}  // namespace plait

#ifndef PLAIT_COMPILED
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
  enforce_parts(plan_.from, w.shape(), sizes, where);
  enforce_parts(plan_.to, w.shape(), sizes, where);
  // The order of ranks does not matter for a sum, so it uses the communicator that the world already has.
  for (redistribution_step& s : plan_.steps)
    if (s.kind == transition_kind::all_reduce) s.axes = w.shape().in_order(s.axes);
  const std::int64_t rank = w.rank();
  source_ = local_box(plan_.from, w.shape(), sizes, rank);
  box before = source_;
  for (std::size_t i = 0; i < plan_.steps.size(); ++i) {
    const redistribution_step& s = plan_.steps[i];
    ready_step g{s.kind,
                 -1,
                 w.shape().size(s.axes),
                 w.shape().index_in(rank, s.axes),
                 communicates(s.kind) ? &w.group(s.axes) : nullptr,
                 before,
                 local_box(s.after, w.shape(), sizes, rank),
                 {},
                 {}};
    if (s.dim) g.dim = plan_.from.find(s.dim);
    if (s.kind == transition_kind::all_to_all) g.peers = peers(s, i, w, sizes);
    if (s.kind == transition_kind::all_gather || s.kind == transition_kind::reduce_scatter)
      g.begins = begins(s, i, w, sizes);
    before = g.after;
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
    return single_collective{only->kind, only->comm, only->ranks, 1, only->before.local_size(), {0, 1}};
  const view whole = only->whole();
  single_collective found{only->kind, only->comm, only->ranks, whole.outer, whole.inner, only->begins};
  if (found.begins.empty())
    for (std::int64_t k = 0; k <= only->ranks; ++k) found.begins.push_back(k * whole.rows / only->ranks);
  return found;
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
  const auto common = [](const box& a, const box& b) {  // without elements if the boxes do not overlap
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

PLAIT_INLINE std::vector<std::int64_t> ready_plan::begins(const redistribution_step& s, std::size_t i, const world& w,
                                                          const dim_sizes& sizes) const {
  const mesh_shape& mesh = w.shape();
  const bool gathers = s.kind == transition_kind::all_gather;
  const layout& parts = gathers ? plan_.before(i) : s.after;
  const int d = plan_.from.find(s.dim);
  if (even(parts.dims[static_cast<std::size_t>(d)], mesh, sizes)) return {};
  const box whole = local_box(gathers ? s.after : plan_.before(i), mesh, sizes, w.rank());
  std::vector<std::int64_t> all(static_cast<std::size_t>(mesh.size(s.axes)) + 1, whole.local[d]);
  for (std::int64_t r = 0; r < mesh.size(); ++r)
    if (mesh.group_of(r, s.axes) == mesh.group_of(w.rank(), s.axes))
      all[static_cast<std::size_t>(mesh.index_in(r, s.axes))] =
          local_box(parts, mesh, sizes, r).offset[d] - whole.offset[d];
  return all;
}

PLAIT_INLINE ready_plan::messages ready_plan::messages_of(const ready_step& s, bool padded) {
  messages all;
  const view whole = s.whole();
  for (std::size_t r = 0; r + 1 < s.begins.size(); ++r) {
    const std::int64_t part = (s.begins[r + 1] - s.begins[r]) * whole.outer * whole.inner;
    all.counts.push_back(padded ? s.message() : static_cast<std::size_t>(part));
    all.offsets.push_back(all.size);
    all.size += all.counts.back();
  }
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
#endif

#include "plait/core/macros_on.hpp"
