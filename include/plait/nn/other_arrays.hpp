// A layer's calls with arrays of other types: equal bits are taken; another spec, precision or kind is refused in
// words.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/make_plan.hpp"
#include "plait/tensor/microbatch.hpp"
#include "plait/tensor/tensor.hpp"

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

namespace detail {

template <class X>
concept any_tensor = requires {
  typename X::value_type;
  requires spec_like<typename X::spec>;
};
template <class X>
concept any_range = !any_tensor<X> && requires(const X& x) {
  x.data();
  x.size();
  x.begin();
};

template <class X>
struct number_of {
  using type = std::remove_const_t<std::remove_pointer_t<X>>;
};
template <any_tensor X>
struct number_of<X> {
  using type = typename X::value_type;
};
/// Whether an argument has numbers of another type than T. Pointers to token ids may be of 32 or 64 bits, and labels
/// stand beside numbers of T.
template <class X, class T>
concept other_numbers = (any_tensor<X> || std::is_pointer_v<X>)&&!std::same_as<typename number_of<X>::type, T> &&
                        (std::floating_point<typename number_of<X>::type> ||
                         std::same_as<typename number_of<X>::type, bf16> || (any_tensor<X> && std::integral<T>));
template <class X, class T>
concept no_numbers = other_numbers<X, T> || any_range<X>;
template <class X, class Spec>
concept other_spec = any_tensor<X> && !std::same_as<typename X::spec, Spec>;
template <class X, class Layer>
concept other_saved = std::is_class_v<X> && !any_tensor<X> && !any_range<X> &&
                      requires { requires !std::same_as<X, typename Layer::saved>; };

/// The refusal of numbers of another type: compilers print the two types, and the layer.
template <class Given, class Expected, class Layer>
struct numbers_of_one_type {
  static_assert(std::is_same_v<Given, Expected>,
                "an array has numbers of another type than the layer's: make the layer of that precision, as in "
                "linear<double, ...>, or convert the numbers");
};
template <class Range, class Layer>
struct array_of_layer {
  static_assert(!any_range<Range>,
                "a layer takes tensors, or pointers to this rank's part: write x.data() for a span or a vector");
};
template <class Saved, class Layer>
struct saved_of_layer {
  static_assert(std::is_same_v<Saved, typename Layer::saved>,
                "a backward pass takes the `saved` that a forward pass of the same layer has made");
};

/// The layer that is named in a refusal: the first of a combinator's.
template <class Layer>
struct named_layer {
  using type = Layer;
};
template <class Layer>
  requires requires { typename Layer::first_layer; }
struct named_layer<Layer> : named_layer<typename Layer::first_layer> {};

/// Says what does not fit in an argument of a layer whose numbers are T.
template <class Layer, class T, class X>
constexpr void refuse_array() {
  if constexpr (any_range<X>)
    static_assert(sizeof(array_of_layer<X, Layer>) > 0);
  else if constexpr (other_numbers<X, T>)
    static_assert(sizeof(numbers_of_one_type<typename number_of<X>::type, T, Layer>) > 0);
}
/// Says what does not fit in the first argument.
template <class Layer, class T, class Input, class X>
constexpr void refuse_input() {
  using named = typename named_layer<Layer>::type;
  refuse_array<named, T, X>();
  if constexpr (!no_numbers<X, T> && other_spec<X, Input>) static_assert(takes<typename X::spec, named>);
}

}  // namespace detail

/// A base of layers: `forward` and `backward` whose first array is of a type with the bits of T are those of `Layer`,
/// with each such pointer taken as one to T; with other arrays they do not compile, and say why. The layer has them by
/// `using`.
template <class Layer, class T, spec_like Input, spec_like Output, compute_device Device, class Made = T>
class other_arrays {
 public:
  template <class Other, class... More>
    requires same_bits<std::remove_const_t<Other>, T>
  decltype(auto) forward(const microbatch<Device>& mb, Other* x, More&&... more) {
    return static_cast<Layer&>(*this).forward(mb, elements_of<T>(x), elements_of<T>(std::forward<More>(more))...);
  }
  template <class Other, class... More>
    requires same_bits<std::remove_const_t<Other>, T>
  decltype(auto) backward(const microbatch<Device>& mb, Other* x, More&&... more) {
    return static_cast<Layer&>(*this).backward(mb, elements_of<T>(x), elements_of<T>(std::forward<More>(more))...);
  }

  template <class X, class... More>
    requires(detail::no_numbers<X, T> || detail::other_spec<X, Input> || (detail::no_numbers<More, Made> || ...))
  tensor<Made, Output, Device> forward(const microbatch<Device>&, const X&, const More&...) {
    detail::refuse_input<Layer, T, Input, X>();
    if constexpr (!detail::no_numbers<X, T> && !detail::other_spec<X, Input>)
      (detail::refuse_array<Layer, Made, More>(), ...);
    return {};
  }
  template <class X, class Saved, class Gradient, class... More>
    requires(detail::no_numbers<X, T> || detail::other_spec<X, Input> || detail::other_saved<Saved, Layer> ||
             detail::no_numbers<Gradient, Made> || (detail::no_numbers<More, T> || ...))
  tensor<T, dual_t<Input>, Device> backward(const microbatch<Device>&, const X&, const Saved&, const Gradient&,
                                            const More&...) {
    detail::refuse_input<Layer, T, Input, X>();
    if constexpr (!detail::no_numbers<X, T> && !detail::other_spec<X, Input>) {
      if constexpr (detail::other_saved<Saved, Layer>)
        static_assert(sizeof(detail::saved_of_layer<Saved, Layer>) > 0);
      else if constexpr (detail::no_numbers<Gradient, Made>)
        detail::refuse_array<Layer, Made, Gradient>();
      else
        (detail::refuse_array<Layer, T, More>(), ...);
    }
    return {};
  }
  /// Backward of what keeps nothing.
  template <class X, class Gradient>
    requires(!requires { typename Layer::saved; } &&
             (detail::no_numbers<X, T> || detail::other_spec<X, Input> || detail::no_numbers<Gradient, Made>))
  void backward(const microbatch<Device>&, const X&, const Gradient&) {
    detail::refuse_input<Layer, T, Input, X>();
    if constexpr (!detail::no_numbers<X, T> && !detail::other_spec<X, Input>)
      detail::refuse_array<Layer, Made, Gradient>();
  }
};

/// That of a combinator.
template <class Layer, class First, class Last>
using other_arrays_between = other_arrays<Layer, typename First::value_type, typename First::input,
                                          typename Last::output, typename First::device>;

}  // namespace plait

#include "plait/core/macros_on.hpp"
