// The messages for a class that is used as a layer and is none, one for each member that is missing or does not fit.
// Refusals of specs are not here: layout/enforce.hpp.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>

#include "plait/layout/errors.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {
namespace detail {

// Whether a class has a member of a name, whatever it takes: a derived class that inherits the name twice cannot tell.
struct named_forward {
  int forward;
};
struct named_backward {
  int backward;
};
struct named_visit {
  int visit;
};
template <class L, class Name>
struct named_twice : L, Name {};
template <class L>
concept can_derive = std::is_class_v<L> && !std::is_final_v<L>;
template <class L>
concept lacks_forward = can_derive<L> && requires { &named_twice<L, named_forward>::forward; };
template <class L>
concept lacks_backward = can_derive<L> && requires { &named_twice<L, named_backward>::backward; };
template <class L>
concept lacks_visit = can_derive<L> && requires { &named_twice<L, named_visit>::visit; };

/// Whether the types are there with which the rest can be asked.
template <class L>
concept names_layer_types = spec_like<typename L::input> && spec_like<typename L::output> && requires {
  typename L::value_type;
  typename L::device;
  typename L::saved;
} && compute_device<typename L::device>;

template <class L>
concept forwards =
    requires(L& l, const microbatch<typename L::device>& mb,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved) {
      {
        l.forward(mb, x, &saved)
      } -> std::same_as<tensor<typename L::value_type, typename L::output, typename L::device>>;
    };
template <class L>
concept backwards =
    requires(L& l, const microbatch<typename L::device>& mb,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, dual_t<typename L::output>, typename L::device>& dy) {
      {
        l.backward(mb, x, saved, dy)
      } -> std::same_as<tensor<typename L::value_type, dual_t<typename L::input>, typename L::device>>;
    };

/// Anybody who visits parameters: nvcc takes no generic lambda in a concept.
struct any_visitor {
  template <class Parameter>
  void operator()(Parameter&) const {}
};

}  // namespace detail

/// Says what a class lacks to be a layer, member by member: instantiated where a combinator is given one that is none.
template <class L>
struct layer_requirements {
  static_assert(
      requires { typename L::value_type; }, "a layer names its `value_type`, the numbers of its tensors");
  static_assert(
      requires { typename L::device; }, "a layer names its `device`, such as plait::cpu");
  static_assert(
      requires { requires spec_like<typename L::input>; }, "a layer names its `input`, a plait::spec");
  static_assert(
      requires { requires spec_like<typename L::output>; }, "a layer names its `output`, a plait::spec");
  static_assert(
      requires { requires std::is_default_constructible_v<typename L::saved>; },
      "a layer names its `saved`, what a forward pass keeps beside the input: a type that can be made of nothing");
  static_assert(!detail::lacks_forward<L>,
                "a layer needs a member `forward(mb, x, saved)` that returns a tensor of its `output`");
  static_assert(!detail::lacks_backward<L>,
                "a layer needs a member `backward(mb, x, saved, dy)` that returns a tensor of dual_t<input>");
  static_assert(!detail::lacks_visit<L>, "a layer needs a member `visit(f)` that calls f with each of its parameters");
  static constexpr bool askable = detail::names_layer_types<L>;
  static constexpr bool forward_fits = [] {
    if constexpr (askable && !detail::lacks_forward<L>) return detail::forwards<L>;
    return true;
  }();
  static constexpr bool backward_fits = [] {
    if constexpr (askable && !detail::lacks_backward<L>) return detail::backwards<L>;
    return true;
  }();
  static_assert(forward_fits,
                "a layer's `forward(mb, x, saved)` takes a tensor of its `input` and returns one of its `output`");
  static_assert(backward_fits,
                "a layer's `backward(mb, x, saved, dy)` takes dy as a tensor of dual_t<output> and returns one of "
                "dual_t<input>");
};

namespace detail {

template <std::size_t Number, class... Layers>
struct nth_layer_of {
  using type = void;
};
template <std::size_t Number, class... Layers>
  requires(Number < sizeof...(Layers))
struct nth_layer_of<Number, Layers...> : std::tuple_element<Number, std::tuple<Layers...>> {};
template <std::size_t Number, class... Layers>
using nth_layer = typename nth_layer_of<Number, Layers...>::type;

/// A base of combinators that are refused: it has the calls of a layer, so that what a program does with them is no
/// error after the one.
template <class First, class Last>
struct refused_layer {};
template <names_layer_types First, names_layer_types Last>
struct refused_layer<First, Last> {
  using value_type = typename First::value_type;
  using device = typename First::device;
  using input = typename First::input;
  using output = typename Last::output;
  struct saved {};
  template <class... Arguments>
  tensor<value_type, output, device> forward(Arguments&&...) {
    return {};
  }
  template <class... Arguments>
  tensor<value_type, dual_t<input>, device> backward(Arguments&&...) {
    return {};
  }
  template <class F>
  void visit(F&&) {}
};

template <bool Ok, class L>
struct layer_consequence {};
template <class L>
struct layer_consequence<false, L> : layer_requirements<L> {};
}  // namespace detail
}  // namespace plait
