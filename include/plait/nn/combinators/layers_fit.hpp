// The check that one layer's output lies as the next one's input, with the facts of its message. A mismatch is refused;
// a `redistribution` (nn/combinators/sum.hpp) mends it.
#pragma once

#include <cstddef>

#include "plait/core/macros_off.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/layout/make_plan.hpp"

namespace plait {

/// Facts of a refusal: which layer of a combinator, counted from 0, and the spec of its output or input.
template <std::size_t Number, class Layer, class Spec>
struct output_of_layer {};
template <std::size_t Number, class Layer, class Spec>
struct input_of_layer {};
/// Such a fact: the spec of a tensor that a program gives to a layer.
template <class Spec>
struct given_tensor {};

namespace detail {

/// Whether a layer's output lies as the next one's input: an axis that is invariant by mention or by default is one.
constexpr verdict check_fit(layout_error code, const layout& output, const layout& input) {
  if (equivalent(output, input)) return {};
  verdict v = compare_dims(operand::none, input.dim_order(), output.dim_order());
  if (!v.ok()) {
    v.code = code;
    return v;
  }
  for (axis_id axis : differing_axes(output, input)) {
    const dim_id dim = output.sharded_by(axis) ? output.sharded_by(axis) : input.sharded_by(axis);
    return {code, axis, dim, output.state_of(axis), input.state_of(axis)};
  }
  for (const dim_placement& p : output.dims)  // the same axes in another order
    if (!(p.axes == input.axes_of(p.dim))) return {code, p.axes[0], p.dim, state::varying, state::varying};
  return {code, {}, {}};
}

template <layout_error Error, class A, class B>
struct fit_value {
  static constexpr verdict value = check_fit(Error, layout_v<typename A::output>, layout_v<typename B::input>);
};

/// Refuses to compile unless layer I, which is `A`, makes what layer J, which is `B`, takes.
template <layout_error Error, std::size_t I, class A, std::size_t J, class B>
inline constexpr bool fits =
    sizeof(consequence<fit_value<Error, A, B>,
                       among<output_of_layer<I, A, typename A::output>, input_of_layer<J, B, typename B::input>>,
                       typename A::output, typename B::input>) > 0;

/// Specs that are equivalent and not equal are refused too: `view_as` is for them.
template <class Given, class Layer>
struct input_value {
  static constexpr verdict value = [] {
    verdict v = check_fit(layout_error::input_does_not_fit, layout_v<Given>, layout_v<typename Layer::input>);
    v.code = layout_error::input_does_not_fit;
    return v;
  }();
};

/// Refuses a tensor of another spec than `Layer`, alone or the first of a combinator, takes.
template <class Given, class Layer>
inline constexpr bool takes =
    sizeof(consequence<input_value<Given, Layer>,
                       among<given_tensor<Given>, input_of_layer<0, Layer, typename Layer::input>>, Given,
                       typename Layer::input>) > 0;

template <std::size_t First, class... Layers>
inline constexpr bool fit_together = true;
template <std::size_t First, class A, class B, class... Rest>
inline constexpr bool fit_together<First, A, B, Rest...> =
    fits<layout_error::layers_do_not_fit, First, A, First + 1, B> && fit_together<First + 1, B, Rest...>;

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
