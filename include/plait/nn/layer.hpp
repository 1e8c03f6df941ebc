// The concept of a layer: typed tensors in and out, forward and backward.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/tensor.hpp"
#include "plait/tensor/view.hpp"

namespace plait {

// A layer with the `saved` of its forward pass, for programs with one microbatch under way.

/// A linear or a norm that keeps the `saved` of its last forward pass, so that its calls take nothing but the program's
/// pointers. A forward pass forgets what the one before it has kept, and a backward pass uses it up. One that takes the
/// input of a forward pass before the last throws.
template <class Layer>
class with_saved : public Layer {
  using mb = microbatch<typename Layer::device>;
  using T = typename Layer::value_type;

 public:
  using Layer::Layer;
  /// As the layer's own on the caller's memory; `more` may follow, such as an addend.
  template <class... More>
  void forward(const mb& in, const T* x, T* y, More&&... more) {
    Layer::forward(in, x, y, &saved_, std::forward<More>(more)...);
  }
  template <class... More>
  void backward(const mb& in, const T* x, const T* dy, T* dx, More&&... more) {
    Layer::backward(in, x, saved_, dy, dx, std::forward<More>(more)...);
  }
  /// As the layer's own; what was kept is forgotten.
  void resize(const context<typename Layer::device>& ctx) {
    Layer::resize(ctx);
    saved_ = {};
  }
  /// As above, on arrays of a type with the same bits.
  template <class Other, class... More>
    requires same_bits<std::remove_const_t<Other>, T>
  void forward(const mb& in, Other* x, More&&... more) {
    forward(in, elements_of<T>(x), elements_of<T>(std::forward<More>(more))...);
  }
  template <class Other, class... More>
    requires same_bits<std::remove_const_t<Other>, T>
  void backward(const mb& in, Other* x, More&&... more) {
    backward(in, elements_of<T>(x), elements_of<T>(std::forward<More>(more))...);
  }

 private:
  typename Layer::saved saved_;
};

// A program's own kernel, as its layer calls it: a device runs it, a counting device counts it.

/// The work of a kernel on this rank, as dry runs count and price it.
struct kernel_cost {
  double bytes = 0;        ///< read and written
  double operations = 0;   ///< multiplications and additions at the rate of products of `of`
  dtype of = dtype::bf16;  ///< the numbers that these are of
};

/// Calls f(), which computes on this rank's part of tensors, or launches what does. In a dry run f is not called, since
/// there are no numbers: the kernel counts as `cost` says. Throws where that is negative or no number.
template <compute_device Device, class F>
void kernel(const context<Device>& ctx, const kernel_cost& cost, F&& f) {
  if (!(cost.bytes >= 0 && cost.operations >= 0))
    fail({"kernel_cost: ", cost.bytes, " bytes and ", cost.operations, " operations; legal are 0 or more"});
  if constexpr (only_counts<Device>)
    ctx.device.count_kernel(cost.of, cost.operations, cost.bytes);
  else
    std::forward<F>(f)();
}

// The messages for a class that is used as a layer and is none, one for each member that is missing or does not fit.

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

namespace detail {

/// Refuses a layer on GPUs in a file that has no kernels for it, in the words of plait/cuda.hpp.
template <class Device>
struct kernels_there {
  static_assert(has_kernels<Device>,
                "plait: the kernels of layers on GPUs are neither compiled here nor elsewhere: let nvcc compile this "
                "file, or define PLAIT_COMPILED_CUDA and link with include/plait/compiled_cuda*.cu (CMake: "
                "plait::compiled_cuda)");
  static constexpr bool said = true;
};

}  // namespace detail

/// The types of a layer: it takes a `tensor<T, Input, Device>` and makes a `tensor<T, Output, Device>`. A base for
/// layers, which adds nothing to an object.
template <class T, spec_like Input, spec_like Output, compute_device Device>
struct layer_types {
  static_assert(detail::kernels_there<Device>::said);
  using value_type = T;
  using device = Device;
  using input = Input;
  using output = Output;
  template <class Spec>
  using tensor_of = tensor<T, Spec, Device>;
};

/// A program's own layer calls its own kernels by `kernel(ctx, cost, f)` (nn/layer.hpp), so that it can be
/// planned, too: a dry run counts them, and ends a program that touches its memory otherwise.
///
/// Combinators, language models and dry runs ask this of a layer, beside the types of `layer_types`:
///
///     struct saved;                          // what `forward` keeps, besides its input
///     tensor_of<output> forward(mb, const tensor_of<input>& x, saved* keep);            // null: no backward pass
///     tensor_of<dual_t<input>> backward(mb, const tensor_of<input>& x, saved&, const tensor_of<dual_t<output>>& dy);
///     template <class F> void visit(F&& f);  // f(parameter) for each parameter
///
/// `mb` is a `const microbatch<Device>&`. The caller holds a layer's input until the backward pass is over, deferred
/// weight gradients included. A forward pass forgets what an earlier one has kept in the same `saved`
/// (testing/layer_parity.hpp checks it). What a layer sends, keeps and allocates is not written down: `dry_run`
/// finds out. What a class lacks is named where it is used as a layer (`layer_requirements`).
template <class L>
concept layer = detail::names_layer_types<L> && std::default_initializable<typename L::saved> && detail::forwards<L> &&
                detail::backwards<L> && requires(L& l) { l.visit(detail::any_visitor{}); };

/// A layer whose forward pass adds a tensor to its output, without a pass over memory of its own where the device can.
template <class L>
concept adds_to_output =
    layer<L> &&
    requires(L& l, const microbatch<typename L::device>& mb,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, typename L::output, typename L::device>& addend) {
      l.forward(mb, x, &saved, &addend);
    };

/// A layer whose backward pass adds a tensor to its input's gradient in the same way.
template <class L>
concept adds_to_gradient =
    layer<L> &&
    requires(L& l, const microbatch<typename L::device>& mb,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, dual_t<typename L::output>, typename L::device>& dy,
             const tensor<typename L::value_type, dual_t<typename L::input>, typename L::device>& addend) {
      l.backward(mb, x, saved, dy, &addend);
    };

/// A layer whose output is cheap to make again, such as a norm or an activation: `static constexpr bool cheap = true;`.
/// It is not kept under `recompute::selective`.
template <class L>
inline constexpr bool is_cheap = [] {
  if constexpr (requires { L::cheap; })
    return bool{L::cheap};
  else
    return false;
}();

namespace detail {

/// Where a combinator is given what is no layer: says what it lacks.
template <class... Layers>
inline constexpr bool all_layers = (sizeof(layer_consequence<layer<Layers>, Layers>) + ...) > 0;

/// Refuses a gradient that is not of the dual spec.
template <class Given, class Expected>
struct dual_value_check {
  static constexpr verdict value = [] {
    const layout given = layout_v<Given>, expected = dual(layout_v<Expected>);
    if (const verdict v = compare_dims(operand::gradient, expected.dim_order(), given.dim_order()); !v.ok()) return v;
    for (axis_id axis : differing_axes(given, expected))
      return verdict{layout_error::wrong_dual, axis, given.sharded_by(axis), given.state_of(axis),
                     expected.state_of(axis)};
    return verdict{};
  }();
};

/// y = layer(x) plus `addend`, in one pass where the layer can.
template <layer L, class Input, class Addend>
auto forward_plus(L& l, const microbatch<typename L::device>& mb, const Input& x, typename L::saved* keep,
                  const Addend& addend) {
  if constexpr (adds_to_output<L>) {
    return l.forward(mb, x, keep, &addend);
  } else {
    auto y = l.forward(mb, x, keep);
    kernels::accumulate(mb.ctx.device, addend.data(), y.data(), y.size());
    return y;
  }
}
/// The layer's input gradient plus `addend`.
template <layer L, class Input, class Gradient, class Addend>
auto backward_plus(L& l, const microbatch<typename L::device>& mb, const Input& x, typename L::saved& kept,
                   const Gradient& dy, const Addend& addend) {
  if constexpr (adds_to_gradient<L>) {
    return l.backward(mb, x, kept, dy, &addend);
  } else {
    auto dx = l.backward(mb, x, kept, dy);
    kernels::accumulate(mb.ctx.device, addend.data(), dx.data(), dx.size());
    return dx;
  }
}

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
