// Layers in a row, of types known at compile time, with recomputation. A number of layers that is known at run time is
// a stack: nn/combinators/stack.hpp.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/combinators/layers_fit.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/layer/open_sum.hpp"
#include "plait/nn/layer/other_arrays.hpp"

namespace plait {

/// Layers one after the other. Under `recompute::selective` the outputs of cheap layers (`is_cheap`) are not kept,
/// under `recompute::full` nothing is: the backward pass makes them again.
template <class... Layers>
class sequential : public detail::refused_layer<detail::nth_layer<0, Layers...>,
                                                detail::nth_layer<sizeof...(Layers) - 1, Layers...>> {
  static_assert(sizeof...(Layers) > 0, "a sequential needs at least one layer");
  static_assert(detail::all_layers<Layers...>);

 public:
  explicit sequential(Layers...) {}
};
template <class... Layers>
sequential(Layers...) -> sequential<Layers...>;

template <layer... Layers>
  requires(sizeof...(Layers) > 0)
class sequential<Layers...> : public other_arrays_between<sequential<Layers...>, detail::nth_layer<0, Layers...>,
                                                          detail::nth_layer<sizeof...(Layers) - 1, Layers...>> {
  static constexpr std::size_t count = sizeof...(Layers);
  static_assert(detail::fit_together<0, Layers...>);
  template <std::size_t I>
  using nth = detail::nth_layer<I, Layers...>;
  using arrays = other_arrays_between<sequential, nth<0>, nth<count - 1>>;

 public:
  using arrays::backward;
  using arrays::forward;
  using first_layer = nth<0>;
  using value_type = typename nth<0>::value_type;
  using device = typename nth<0>::device;
  using input = typename nth<0>::input;
  using output = typename nth<count - 1>::output;
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;

  struct saved {
    std::tuple<typename Layers::saved...> layers;
    std::tuple<tensor_of<typename Layers::output>...> outputs;  ///< of all but the last; empty where made again
    bool again = false;                                         ///< whether the whole forward pass runs again
  };

  explicit sequential(Layers... layers) : layers_(std::move(layers)...) {}

  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    return taken(mb, forward_from<0>(mb, x, kept_by_pass(mb, keep), nullptr));
  }
  /// From a sum, if the first layer takes one; then to one, if the last layer leaves one. The memory of x must live
  /// until that is closed.
  auto forward(const microbatch<device>& mb, open_sum<value_type, input, device>& x, saved* keep = nullptr)
    requires closes_sums<nth<0>>
  {
    return forward_from<0>(mb, x, kept_by_pass(mb, keep), nullptr);
  }
  /// Forward, with `addend` added where it is not null, if the last layer can do that.
  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep,
                            const tensor_of<output>* addend)
    requires adds_to_output<nth<count - 1>>
  {
    return forward_from<0>(mb, x, kept_by_pass(mb, keep), addend);
  }
  bool adds_in_product() const
    requires adds_to_output<nth<count - 1>>
  {
    return detail::adds_in_product(std::get<count - 1>(layers_));
  }
  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    return backward_all(mb, x, kept, dy, nullptr);
  }
  /// Backward, with `addend` added where it is not null, if the first layer can do that.
  template <spec_like Gradient>
    requires adds_to_gradient<nth<0>>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy, const tensor_of<dual_t<input>>* addend) {
    return backward_all(mb, x, kept, dy, addend);
  }

  template <class F>
  void visit(F&& f) {
    std::apply([&](auto&... l) { (l.visit(f), ...); }, layers_);
  }
  template <std::size_t I>
  auto& get() {
    return std::get<I>(layers_);
  }

 private:
  template <class Spec>
  using sum_of = open_sum<value_type, Spec, device>;
  /// The tensor, of one or of a sum.
  template <class Spec>
  static tensor_of<Spec> taken(const microbatch<device>&, tensor_of<Spec> y) {
    return y;
  }
  template <class Spec>
  static tensor_of<Spec> taken(const microbatch<device>& mb, sum_of<Spec> y) {
    return std::move(y).take(mb.ctx.device);
  }

  /// Returns where the layers of a forward pass keep what they keep: null if the whole pass runs again. What an earlier
  /// pass has kept there is forgotten.
  static saved* kept_by_pass(const microbatch<device>& mb, saved* keep) {
    if (keep) *keep = {}, keep->again = mb.policy == recompute::full;
    return keep && keep->again ? nullptr : keep;
  }
  template <class Gradient>
  tensor_of<dual_t<input>> backward_all(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                        const Gradient& dy, const tensor_of<dual_t<input>>* addend) {
    if (!kept.again) return backward_from<count - 1>(mb, x, kept, dy, addend);
    kept.again = false;
    const microbatch<device> now = mb.keeping(recompute::none);
    forward_from<0>(now, x, &kept, nullptr);
    return backward_from<count - 1>(now, x, kept, dy, addend);
  }

  /// Layers I to the last. X: a tensor, or an open sum.
  template <std::size_t I, class X>
  auto forward_from(const microbatch<device>& mb, X& x, saved* kept, const tensor_of<output>* addend) {
    auto* const keep = kept ? &std::get<I>(kept->layers) : nullptr;
    if constexpr (I + 1 == count) {
      if constexpr (adds_to_output<nth<I>> && !std::is_const_v<X>)
        return std::get<I>(layers_).forward(mb, x.close(mb.ctx.device), keep, addend);
      else if constexpr (adds_to_output<nth<I>>)
        return std::get<I>(layers_).forward(mb, x, keep, addend);
      else
        return std::get<I>(layers_).forward(mb, x, keep);
    } else {
      const bool keeps = kept && (mb.policy == recompute::none || !is_cheap<nth<I>>);
      nth<I>& first = std::get<I>(layers_);
      if constexpr (passes_sum<I>) {
        auto&& in = opened<I>(mb, x);
        auto y = first.forward(mb, in, keep).template as<typename nth<I + 1>::input>();
        auto result = forward_from<I + 1>(mb, y, kept, addend);
        auto value = std::move(y).take(mb.ctx.device).template as<typename nth<I>::output>();
        if (keeps)
          std::get<I>(kept->outputs) = std::move(value);
        else if constexpr (std::is_same_v<decltype(result), sum_of<output>> && I + 2 == count)
          result.hold(std::move(value).template as<output>());
        return result;
      } else {
        auto y = taken(mb, first.forward(mb, x, keep));
        const auto in = y.template view_as<typename nth<I + 1>::input>();
        auto result = forward_from<I + 1>(mb, in, kept, addend);
        if (keeps) std::get<I>(kept->outputs) = std::move(y);
        return result;
      }
    }
  }
  /// Whether layer I leaves a sum that the next one takes.
  template <std::size_t I>
  static constexpr bool passes_sum = leaves_sums<nth<I>> && closes_sums<nth<I + 1>>;
  /// A layer that leaves a sum takes one: x itself, or the tensor x as a closed one.
  template <std::size_t I, class X>
  static decltype(auto) opened(const microbatch<device>& mb, X& x) {
    if constexpr (std::is_const_v<X>)
      return detail::closed_view(mb, x);
    else
      return (x);
  }
  template <std::size_t I, class Gradient>
  tensor_of<dual_t<input>> backward_from(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                         const Gradient& dy, const tensor_of<dual_t<input>>* addend) {
    const auto& in = input_of<I>(mb, x, kept);
    if constexpr (I == 0) {
      if constexpr (adds_to_gradient<nth<0>>)
        return std::get<0>(layers_).backward(mb, in, std::get<0>(kept.layers), dy, addend);
      else
        return std::get<0>(layers_).backward(mb, in, std::get<0>(kept.layers), dy);
    } else {
      auto dx = std::get<I>(layers_).backward(mb, in.template view_as<typename nth<I>::input>(),
                                              std::get<I>(kept.layers), dy);
      return backward_from<I - 1>(mb, x, kept, dx, addend);
    }
  }
  /// The input of layer I, made again if it was not kept.
  template <std::size_t I>
  const auto& input_of(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept) {
    if constexpr (I == 0) {
      return x;
    } else {
      auto& held = std::get<I - 1>(kept.outputs);
      if (!held) {
        const auto& before = input_of<I - 1>(mb, x, kept);
        held = std::get<I - 1>(layers_).forward(mb, before.template view_as<typename nth<I - 1>::input>(), nullptr);
      }
      return held;
    }
  }

  std::tuple<Layers...> layers_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
