// Single collectives on the caller's own pointers, with the specs before and after in the types. A wrong collective
// does not compile; a right one is the raw call (tests/codegen). For several steps use tensor/redistribution.hpp.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

#include "plait/comm/communicator.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/plan.hpp"

namespace plait {

namespace detail {

template <class From, class To>
struct plan_between {
  static constexpr plan steps = make_plan(layout_v<From>, layout_v<To>);
  static constexpr verdict value = steps.verdict;
};

/// Whether a step runs over `axes`. Their order matters for parts of a dim, and not for reductions in place.
constexpr bool runs_over(const redistribution_step& s, const axis_list& axes) {
  if (s.kind != transition_kind::all_reduce) return s.axes == axes;
  for (axis_id axis : s.axes)
    if (!axes.contains(axis)) return false;
  return s.axes.size() == axes.size();
}

/// Refuses to compile unless the plan from `From` to `To` is one collective of kind `Kind` over `Axes`, on whole
/// blocks.
template <transition_kind Kind, spec_like From, spec_like To, axis_like... Axes>
constexpr bool is_one_collective() {
  static_assert(enforced<plan_between<From, To>, among<From, To>, From, To>);
  if constexpr (plan_between<From, To>::value.ok()) {
    constexpr const plan& way = plan_between<From, To>::steps;
    constexpr bool one = way.steps.size() == 1 && way.steps[0].kind == Kind;
    static_assert(one,
                  "this one collective does not convert between these specs: use redistribute, which plans the steps");
    if constexpr (one) {
      static_assert(runs_over(way.steps[0], axis_list(axis_of<Axes>...)),
                    "the collective between these specs runs over other axes than the group's, or in another order");
      static_assert(Kind == transition_kind::all_reduce || way.steps[0].dim == layout_v<From>.dims[0].dim,
                    "only parts of a first dim are contiguous: use redistribute to gather or scatter another dim");
    }
  }
  return true;
}

template <spec_like Spec, axis_like... Axes>
constexpr bool is_one_stage() {
  constexpr bool without_axes = !(layout_v<Spec>.mentions(axis_of<Axes>) || ...);
  static_assert(without_axes,
                "a message goes along an axis that the spec does not mention: a stage's tensors lie on the mesh "
                "without the axis of the stages");
  return true;
}
template <spec_like Spec, axis_like... Axes>
constexpr bool is_equal_over() {
  constexpr bool equal = ((layout_v<Spec>.state_of(axis_of<Axes>) == state::invariant ||
                           layout_v<Spec>.state_of(axis_of<Axes>) == state::replicated) &&
                          ...);
  static_assert(equal,
                "a broadcast makes a value equal on the ranks of its group: its spec must be invariant or "
                "replicated over these axes");
  return true;
}

}  // namespace detail

/// A non-owning reference to a communicator, with the axes that it spans (the first one major). A collective compiles
/// if it is the whole plan between the two specs. It is then the communicator's own call with equal arguments, without
/// overhead. Reductions are sums, because a partial value is a pending sum.
///
///     using product = spec<shard<batch, dp>, hidden, partial<tp>>;     // of a row-parallel weight
///     using rows    = spec<shard<batch, dp>, hidden, invariant<tp>>;
///     typed_group<nccl::bare_communicator, tp> over_tp(comm);          // or group_over<tp>(world)
///     const part<float, product> y(here, pointer);                     // here: a context, or a rank_place
///     const part<float, rows> sum = over_tp.all_reduce<rows>(y);       // in place
template <class Comm, axis_like... Axes>
  requires(sizeof...(Axes) > 0)
class typed_group {
 public:
  constexpr explicit typed_group(Comm& comm) : comm_(&comm) {}

  constexpr Comm& communicator() const { return *comm_; }

  /// Partial to replicated or invariant; `in` and `out` may be one array. This function and the following ones throw if
  /// `in` and `out` were made for different sizes.
  template <class In, class T, spec_like From, spec_like To>
    requires std::same_as<std::remove_const_t<In>, T>
  part<T, To> all_reduce(const part<In, From>& in, const part<T, To>& out) const {
    static_assert(detail::is_one_collective<transition_kind::all_reduce, From, To, Axes...>());
    detail::require_one_shape("all_reduce", in.where(), out.where());
    comm_->all_reduce(in.unchecked(), out.unchecked(), count(in), dtype_of<T>, reduce_op::sum);
    return out;
  }
  /// Does the same in place: `x` has spec `To` afterwards.
  template <spec_like To, class T, spec_like From>
  part<T, To> all_reduce(const part<T, From>& x) const {
    static_assert(detail::is_one_collective<transition_kind::all_reduce, From, To, Axes...>());
    comm_->all_reduce(x.unchecked(), x.unchecked(), count(x), dtype_of<T>, reduce_op::sum);
    return detail::part_access::with_spec<To>(x);
  }

  /// A sharded first dim to a whole one, replicated or invariant.
  template <class In, class T, spec_like From, spec_like To>
    requires std::same_as<std::remove_const_t<In>, T>
  part<T, To> all_gather(const part<In, From>& in, const part<T, To>& out) const {
    static_assert(detail::is_one_collective<transition_kind::all_gather, From, To, Axes...>());
    detail::require_one_shape("all_gather", in.where(), out.where());
    comm_->all_gather(in.unchecked(), out.unchecked(), count(in), dtype_of<T>);
    return out;
  }

  /// Partial to a sharded first dim.
  template <class In, class T, spec_like From, spec_like To>
    requires std::same_as<std::remove_const_t<In>, T>
  part<T, To> reduce_scatter(const part<In, From>& in, const part<T, To>& out) const {
    static_assert(detail::is_one_collective<transition_kind::reduce_scatter, From, To, Axes...>());
    detail::require_one_shape("reduce_scatter", in.where(), out.where());
    comm_->reduce_scatter(in.unchecked(), out.unchecked(), count(out), dtype_of<T>, reduce_op::sum);
    return out;
  }

  /// A message between two ranks of the group, as between two stages. Both stages lie on the mesh without this axis, so
  /// the spec may not mention it. `peer`: the other rank in the group.
  template <class T, spec_like Spec>
  void send(const part<T, Spec>& x, int peer, int tag = 0) const {
    static_assert(detail::is_one_stage<Spec, Axes...>());
    comm_->send(x.unchecked(), count(x), dtype_of<std::remove_const_t<T>>, peer, tag);
  }
  template <class T, spec_like Spec>
  part<T, Spec> receive(const part<T, Spec>& x, int peer, int tag = 0) const {
    static_assert(detail::is_one_stage<Spec, Axes...>());
    comm_->receive(x.unchecked(), count(x), dtype_of<T>, peer, tag);
    return x;
  }
  /// Copies the root's numbers to all ranks of the group. The value is then equal on them: invariant or replicated.
  template <class T, spec_like Spec>
  part<T, Spec> broadcast(const part<T, Spec>& x, int root) const {
    static_assert(detail::is_equal_over<Spec, Axes...>());
    comm_->broadcast(x.unchecked(), count(x), dtype_of<T>, root);
    return x;
  }

 private:
  template <class T, class Spec>
  static constexpr std::size_t count(const part<T, Spec>& x) {
    return static_cast<std::size_t>(x.size());
  }

  Comm* comm_;
};

/// The group over `Axes` of the world's rank. It is valid as long as the world.
template <axis_like... Axes, class World>
  requires(sizeof...(Axes) > 0)
auto group_over(World& ranks) {
  auto& comm = ranks.group(axis_list(axis_of<Axes>...));
  return typed_group<std::remove_reference_t<decltype(comm)>, Axes...>(comm);
}

}  // namespace plait
