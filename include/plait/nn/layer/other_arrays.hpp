// A layer's calls with arrays that are not its own: those of a type with the same bits are taken, those of another
// spec, another precision or another kind are refused in words.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "plait/core/dtype.hpp"
#include "plait/core/same_bits.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/combinators/layers_fit.hpp"
#include "plait/tensor/microbatch.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {
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
