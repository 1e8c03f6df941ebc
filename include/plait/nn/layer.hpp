// The concept of a layer: typed tensors in and out, forward and backward. A pipeline asks for more than a layer, namely
// a model (pipeline/model.hpp).
#pragma once

#include <concepts>
#include <cstdint>

#include "plait/kernels/kernels.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/layer/kernel.hpp"
#include "plait/nn/layer/requirements.hpp"
#include "plait/tensor/tensor.hpp"
#include "plait/tensor/view.hpp"

namespace plait {

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

/// A layer of one's own calls kernels of its own by `kernel(ctx, cost, f)` (nn/layer/kernel.hpp), so that it can be
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
/// (testing/layer_parity.hpp sees to it). What a layer sends, keeps and allocates nobody has to write down: `dry_run`
/// finds out. A class that lacks something is told what, where it is used as a layer (`layer_requirements`).
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
/// Under `recompute::selective` nobody keeps it.
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
