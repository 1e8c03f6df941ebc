// Single collectives on the caller's own pointers, with the specs before and after in the types: a wrong one does not
// compile, a right one is the raw call (tests/codegen). For a way of several steps use tensor/redistribution.hpp.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

#include "plait/comm/communicator.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/plan.hpp"

namespace plait {

/// Where a rank's part of a tensor with spec `Spec` begins, row-major and without gaps. It owns nothing and is passed
/// in a register, as the pointer is.
template <class T, spec_like Spec>
struct local_part {
  T* data;
};

namespace detail {

// The call that a collective needs of a communicator; it need not be one that can also be started.
template <class C>
concept calls_all_reduce =
    requires(C& c, const void* in, void* out, std::size_t n) { c.all_reduce(in, out, n, dtype::f32, reduce_op::sum); };
template <class C>
concept calls_all_gather =
    requires(C& c, const void* in, void* out, std::size_t n) { c.all_gather(in, out, n, dtype::f32); };
template <class C>
concept calls_reduce_scatter = requires(C& c, const void* in, void* out, std::size_t n) {
  c.reduce_scatter(in, out, n, dtype::f32, reduce_op::sum);
};

template <class From, class To>
struct plan_between {
  static constexpr plan steps = make_plan(layout_v<From>, layout_v<To>);
  static constexpr verdict value = steps.verdict;
};

/// Whether a step runs over `axes`. A reduction in place does not care for their order; parts of a dim lie in it.
constexpr bool runs_over(const redistribution_step& s, const axis_list& axes) {
  if (s.kind != transition_kind::all_reduce) return s.axes == axes;
  for (axis_id axis : s.axes)
    if (!axes.contains(axis)) return false;
  return s.axes.size() == axes.size();
}

/// Refuses to compile unless the plan from `From` to `To` is one collective of kind `Kind` over `Axes`, of whole
/// blocks.
template <transition_kind Kind, spec_like From, spec_like To, axis_like... Axes>
constexpr bool is_one_collective() {
  static_assert(enforced<plan_between<From, To>, among<From, To>, From, To>);
  if constexpr (plan_between<From, To>::value.ok()) {
    constexpr const plan& way = plan_between<From, To>::steps;
    constexpr bool one = way.steps.size() == 1 && way.steps[0].kind == Kind;
    static_assert(one, "these specs are not this one collective apart: let redistribute find the way between them");
    if constexpr (one) {
      static_assert(runs_over(way.steps[0], axis_list(axis_of<Axes>...)),
                    "the collective between these specs runs over other axes than the group's, or in another order");
      static_assert(
          Kind == transition_kind::all_reduce || way.steps[0].dim == layout_v<From>.dims[0].dim,
          "only the parts of a first dim lie one after the other: let redistribute gather and scatter the rest");
    }
  }
  return true;
}

}  // namespace detail

/// A communicator together with the axes it spans, the first one major; it refers to the communicator and owns nothing.
/// Each collective is admitted where it is exactly the way between the two specs. It is then the communicator's own
/// call with equal arguments: the types cost nothing. Sums only, since a partial value is a pending sum.
///
///     using product = spec<shard<batch, dp>, hidden, partial<tp>>;     // of a row-parallel weight
///     using rows    = spec<shard<batch, dp>, hidden, invariant<tp>>;
///     typed_group<nccl::bare_communicator, tp> over_tp(comm);          // or group_over<tp>(world)
///     over_tp.all_reduce<rows>(local_part<float, product>{y}, tokens * width);
template <class Comm, axis_like... Axes>
  requires(sizeof...(Axes) > 0)
class typed_group {
 public:
  constexpr explicit typed_group(Comm& comm) : comm_(&comm) {}

  constexpr Comm& communicator() const { return *comm_; }

  /// Partial to replicated or invariant. `n`: elements of `in` and of `out`, which may be one array.
  template <class In, class T, spec_like From, spec_like To>
    requires std::same_as<std::remove_const_t<In>, T> && detail::calls_all_reduce<Comm>
  local_part<T, To> all_reduce(local_part<In, From> in, local_part<T, To> out, std::size_t n) const {
    static_assert(detail::is_one_collective<transition_kind::all_reduce, From, To, Axes...>());
    comm_->all_reduce(in.data, out.data, n, dtype_of<T>, reduce_op::sum);
    return out;
  }
  /// Does so in place: `x` has spec `To` afterwards.
  template <spec_like To, class T, spec_like From>
  local_part<T, To> all_reduce(local_part<T, From> x, std::size_t n) const {
    return all_reduce(x, local_part<T, To>{x.data}, n);
  }

  /// A sharded first dim to a whole one, replicated or invariant. `n`: elements of `in`; `out` has n per rank.
  template <class In, class T, spec_like From, spec_like To>
    requires std::same_as<std::remove_const_t<In>, T> && detail::calls_all_gather<Comm>
  local_part<T, To> all_gather(local_part<In, From> in, local_part<T, To> out, std::size_t n) const {
    static_assert(detail::is_one_collective<transition_kind::all_gather, From, To, Axes...>());
    comm_->all_gather(in.data, out.data, n, dtype_of<T>);
    return out;
  }

  /// Partial to a sharded first dim. `n`: elements of `out`; `in` has n per rank.
  template <class In, class T, spec_like From, spec_like To>
    requires std::same_as<std::remove_const_t<In>, T> && detail::calls_reduce_scatter<Comm>
  local_part<T, To> reduce_scatter(local_part<In, From> in, local_part<T, To> out, std::size_t n) const {
    static_assert(detail::is_one_collective<transition_kind::reduce_scatter, From, To, Axes...>());
    comm_->reduce_scatter(in.data, out.data, n, dtype_of<T>, reduce_op::sum);
    return out;
  }

 private:
  Comm* comm_;
};

/// The group of a world's rank over `Axes`; valid as long as the world.
template <axis_like... Axes, class World>
  requires(sizeof...(Axes) > 0)
auto group_over(World& ranks) {
  auto& comm = ranks.group(axis_list(axis_of<Axes>...));
  return typed_group<std::remove_reference_t<decltype(comm)>, Axes...>(comm);
}

}  // namespace plait
