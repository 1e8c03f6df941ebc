#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/error.hpp"
#include "plait/device/buffer.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/bytes.hpp"
#include "plait/layout/describe.hpp"
#include "plait/layout/make_plan.hpp"

namespace plait {

/// `a` without the axes along which there is one rank: they cost nothing and mean nothing.
inline layout prune(const layout& a, const world& w) {
  layout b;
  for (const dim_placement& p : a.dims) b.dims.push_back({p.dim, w.pruned(p.axes)});
  b.replicated = w.pruned(a.replicated);
  b.partial = w.pruned(a.partial);
  b.invariant = w.pruned(a.invariant);
  return b;
}

/// Throws unless every dim divides by the ranks that shard it; the text names the dim, its size, the axes and their
/// extents.
inline void enforce_divides(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes, std::string_view where) {
  for (const dim_placement& p : a.dims) {
    const std::int64_t size = sizes.of(p.dim), ranks = mesh.size(p.axes);
    if (size < 0) fail({where, ": the context gives no size for the dim ", p.dim.text()});
    if (size % ranks == 0) continue;
    std::string extents;
    for (axis_id axis : p.axes) append(extents, {extents.empty() ? "" : " x ", axis.text(), "=", mesh.extent(axis)});
    fail({where, ": ", text_of(rule::does_not_divide), ": ", p.dim.text(), " is ", size, ", sharded over ", extents,
          " = ", ranks, " ranks; the nearest sizes that divide are ", size / ranks * ranks, " and ",
          (size / ranks + 1) * ranks});
  }
}

/// A redistribution made ready for one rank: the plan for the actual extents and sizes, its groups and its boxes. Runs
/// on contiguous row-major local arrays of any dtype.
class executor {
 public:
  executor() = default;
  /// Throws `plait::error` that names `where` if a dim does not divide or the dims differ.
  executor(const layout& from, const layout& to, world& w, const dim_sizes& sizes, std::string_view where)
      : executor(make_plan(prune(from, w), prune(to, w), w.shape(), sizes), w, sizes, where) {}

  /// Runs a given plan, such as the mirror of another.
  executor(const plan& p, world& w, const dim_sizes& sizes, std::string_view where) : plan_(p) {
    enforce(plan_.verdict, where);
    enforce_divides(plan_.from, w.shape(), sizes, where);
    enforce_divides(plan_.to, w.shape(), sizes, where);
    const std::int64_t rank = w.rank();
    source_ = local_box(plan_.from, w.shape(), sizes, rank);
    box before = source_;
    for (const step& s : plan_.steps) {
      stage g{s.kind,
              -1,
              w.shape().size(s.axes),
              w.shape().index_in(rank, s.axes),
              communicates(s.kind) ? &w.group(s.axes) : nullptr,
              before,
              local_box(s.after, w.shape(), sizes, rank),
              {}};
      if (s.dim) g.dim = plan_.from.find(s.dim);
      if (s.kind == move::all_to_all) g.peers = peers(s, static_cast<std::size_t>(&s - plan_.steps.begin()), w, sizes);
      before = g.after;
      if (communicates(s.kind))
        costs_.push_back(cost(plan_, static_cast<std::size_t>(&s - plan_.steps.begin()), w.shape(), sizes, 1));
      stages_.push_back(std::move(g));
    }
    target_ = before;
  }

  const plan& steps() const { return plan_; }
  plan backward() const { return mirror(plan_); }
  const box& from() const { return source_; }
  const box& to() const { return target_; }
  /// True if no data moves: input and output are the same local array.
  bool trivial() const {
    for (const stage& s : stages_)
      if (s.kind != move::relabel) return false;
    return true;
  }

  /// Calls f(cost) for each collective that a run issues, in order, for elements of `element_bytes`: what a ledger will
  /// count.
  template <class F>
  void visit_collectives(F&& f, std::size_t element_bytes) const {
    for (collective_cost c : costs_) {
      c.payload *= element_bytes;
      c.wire *= element_bytes;
      f(c);
    }
  }

  /// From `in`, the local part in the plan's source layout, to `out`, in its target layout, elements of `type`. `in`
  /// and `out` may be equal if the plan is trivial or consists of reductions; otherwise they must not overlap.
  template <compute_device Device>
  void run(Device& device, const void* in, void* out, dtype type) const {
    const std::size_t last = last_active();
    const std::size_t element = size_of(type);
    const void* current = in;
    buffer<Device> held;
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      const stage& s = stages_[i];
      if (s.kind == move::relabel) continue;
      buffer<Device> next;
      void* target = out;
      if (i != last) {
        next = buffer<Device>(device, static_cast<std::size_t>(s.after.local_size()) * element);
        target = next.data();
      }
      apply(device, s, current, target, type);
      held = std::move(next);
      current = target;
    }
    if (last == none && in != out)
      device.copy(out, in, static_cast<std::size_t>(source_.local_size()) * element, device.main_stream());
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  /// What an all-to-all exchanges with one rank of its group: boxes in the coordinates of the global tensor.
  struct peer {
    box send, receive;
  };
  struct stage {
    move kind;
    int dim;
    std::int64_t ranks, index;
    any_communicator* comm;
    box before, after;
    std::vector<peer> peers;
  };

  std::size_t last_active() const {
    for (std::size_t i = stages_.size(); i-- > 0;)
      if (stages_[i].kind != move::relabel) return i;
    return none;
  }

  std::vector<peer> peers(const step& s, std::size_t i, const world& w, const dim_sizes& sizes) const {
    std::vector<peer> all(static_cast<std::size_t>(w.shape().size(s.axes)));
    const std::int64_t own = w.rank();
    const box mine_before = local_box(plan_.before(i), w.shape(), sizes, own);
    const box mine_after = local_box(s.after, w.shape(), sizes, own);
    for (std::int64_t r = 0; r < w.size(); ++r)
      if (w.shape().group_of(r, s.axes) == w.shape().group_of(own, s.axes))
        all[static_cast<std::size_t>(w.shape().index_in(r, s.axes))] = {
            intersect(mine_before, local_box(s.after, w.shape(), sizes, r)),
            intersect(mine_after, local_box(plan_.before(i), w.shape(), sizes, r))};
    return all;
  }

  /// A box of a row-major array seen as [outer, rows, inner] around dimension `dim`.
  struct view {
    std::int64_t outer = 1, rows = 1, inner = 1;
  };
  static view around(const box& b, int dim) {
    view v;
    for (int d = 0; d < b.dims; ++d) {
      const std::int64_t n = b.local[static_cast<std::size_t>(d)];
      (d < dim ? v.outer : d == dim ? v.rows : v.inner) *= n;
    }
    return v;
  }

  template <class Device>
  static void apply(Device& device, const stage& s, const void* in, void* out, dtype type) {
    const auto element = static_cast<std::int64_t>(size_of(type));
    const auto whole = static_cast<std::size_t>(s.before.local_size());
    switch (s.kind) {
      case move::relabel:
        return;
      case move::slice:
      case move::pad: {
        const bool slicing = s.kind == move::slice;
        const view large = around(slicing ? s.before : s.after, s.dim),
                   small = around(slicing ? s.after : s.before, s.dim);
        const std::int64_t row = small.rows * small.inner * element, stride = large.rows * large.inner * element;
        if (slicing) {
          kernels::copy_2d(device, at(in, s.index * row), out, small.outer, row, stride, row);
        } else {
          device.zero(out, static_cast<std::size_t>(s.after.local_size() * element), device.main_stream());
          kernels::copy_2d(device, in, at(out, s.index * row), small.outer, row, row, stride);
        }
        return;
      }
      case move::keep_one:
        if (s.index == 0) return device.copy(out, in, whole * size_of(type), device.main_stream());
        return device.zero(out, whole * size_of(type), device.main_stream());
      case move::all_reduce:
        return s.comm->all_reduce(in, out, whole, type, reduce_op::sum);
      case move::all_gather: {
        const view small = around(s.before, s.dim);
        if (small.outer == 1) return s.comm->all_gather(in, out, whole, type);
        buffer<Device> parts(device, whole * size_of(type) * static_cast<std::size_t>(s.ranks));
        s.comm->all_gather(in, parts.data(), whole, type);
        const std::int64_t row = small.rows * small.inner * element;
        kernels::copy_3d(device, parts.data(), out, s.ranks, small.outer, row, small.outer * row, row, row,
                         s.ranks * row);
        return;
      }
      case move::reduce_scatter: {
        const view small = around(s.after, s.dim);
        const auto part = static_cast<std::size_t>(s.after.local_size());
        if (small.outer == 1) return s.comm->reduce_scatter(in, out, part, type, reduce_op::sum);
        buffer<Device> parts(device, whole * size_of(type));
        const std::int64_t row = small.rows * small.inner * element;
        kernels::copy_3d(device, in, parts.data(), s.ranks, small.outer, row, row, s.ranks * row, small.outer * row,
                         row);
        s.comm->reduce_scatter(parts.data(), out, part, type, reduce_op::sum);
        return;
      }
      case move::all_to_all:
        return exchange(device, s, in, out, type);
    }
  }

  template <class Device>
  static void exchange(Device& device, const stage& s, const void* in, void* out, dtype type) {
    const std::size_t ranks = s.peers.size();
    std::vector<std::size_t> send(ranks), send_at(ranks), receive(ranks), receive_at(ranks);
    std::size_t sent = 0, received = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      send_at[r] = sent, receive_at[r] = received;
      sent += send[r] = static_cast<std::size_t>(s.peers[r].send.local_size());
      received += receive[r] = static_cast<std::size_t>(s.peers[r].receive.local_size());
    }
    buffer<Device> outgoing(device, sent * size_of(type)), incoming(device, received * size_of(type));
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
  std::vector<stage> stages_;
  std::vector<collective_cost> costs_;  ///< in elements
};

}  // namespace plait
