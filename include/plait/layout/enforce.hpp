#pragma once

#include "plait/layout/plan.hpp"
#include "plait/layout/spec.hpp"

namespace plait {

/// The facts of a refusal, as types that a compiler prints.
template <class Axis>
struct on_axis {};
template <class Dim>
struct on_dim {};
template <state First, state Second>
struct states {};
template <class... Specs>
struct among {};
struct no_particular_axis {};
struct no_particular_dim {};

/// Instantiated when a layout is refused: one specialisation for each rule, whose text the run-time exception shares.
template <rule Rule, class... Facts>
struct refused {};
#define PLAIT_REFUSE(code, text)                 \
  template <class... Facts>                      \
  struct refused<rule::code, Facts...> {         \
    static_assert(always_false<Facts...>, text); \
  };
PLAIT_LAYOUT_ERRORS(PLAIT_REFUSE)
#undef PLAIT_REFUSE

namespace detail {

template <std::size_t I, class List, class None>
struct type_or {
  using type = type_at<I, List>;
};
template <std::size_t I, class List, class None>
  requires(I >= List::size)
struct type_or<I, List, None> {
  using type = None;
};

template <class Verdict, class Dims, class Axes, class Where>
constexpr bool enforce() {
  constexpr verdict v = Verdict::value;
  if constexpr (!v.ok()) {
    using axis = typename type_or<index_of_axis(v.axis, Axes{}), Axes, no_particular_axis>::type;
    using dim = typename type_or<index_of_dim(v.dim, Dims{}), Dims, no_particular_dim>::type;
    // Asking whether the class has a size instantiates it, and leaves this function valid: one mistake, one error.
    return requires { sizeof(refused<v.code, on_axis<axis>, on_dim<dim>, states<v.first, v.second>, Where>); } || true;
  }
  return true;
}

}  // namespace detail

/// Refuses to compile unless the verdict `Verdict::value` is ok; the message shows the offending axis and dim, looked
/// up among the tags of `Specs`, the states that met there, and `Where`, the policy or layer that is wrong.
template <class Verdict, class Where, class... Specs>
inline constexpr bool enforced =
    detail::enforce<Verdict, concat<typename Specs::dims...>, concat<typename Specs::axes...>, Where>();

}  // namespace plait
