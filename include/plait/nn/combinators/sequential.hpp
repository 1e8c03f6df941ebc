// Layers in a row, of types known at compile time, with recomputation. A number of layers that is known at run time is
// a stack: nn/combinators/stack.hpp. Next: nn/combinators/layers_fit.hpp for the check of neighbours.
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

#include "plait/layout/errors.hpp"
#include "plait/nn/combinators/layers_fit.hpp"
#include "plait/nn/layer.hpp"

namespace plait {
namespace detail {
/// Where a combinator is given what is no layer: says what it lacks.
template <class... Layers>
inline constexpr bool all_layers = (sizeof(layer_consequence<layer<Layers>, Layers>) + ...) > 0;
}  // namespace detail

/// Layers one after the other. Under `recompute::selective` the outputs of cheap layers (`is_cheap`) are not kept,
/// under `recompute::full` nothing is: the backward pass makes them again.
template <class... Layers>
class sequential {
  static_assert(sizeof...(Layers) > 0, "a sequential needs at least one layer");
  static_assert(detail::all_layers<Layers...>);

 public:
  explicit sequential(Layers...) {}
};
template <class... Layers>
sequential(Layers...) -> sequential<Layers...>;

template <layer... Layers>
  requires(sizeof...(Layers) > 0)
class sequential<Layers...> {
  static constexpr std::size_t count = sizeof...(Layers);
  static_assert(detail::fit_together<0, Layers...>);
  template <std::size_t I>
  using nth = std::tuple_element_t<I, std::tuple<Layers...>>;

 public:
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
    return forward_all(mb, x, keep, nullptr);
  }
  /// Forward, with `addend` added where it is not null, if the last layer can do that.
  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep,
                            const tensor_of<output>* addend)
    requires adds_to_output<nth<count - 1>>
  {
    return forward_all(mb, x, keep, addend);
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
  tensor_of<output> forward_all(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep,
                                const tensor_of<output>* addend) {
    if (keep) keep->again = mb.policy == recompute::full;
    saved* const kept = keep && keep->again ? nullptr : keep;
    return forward_from<0>(mb, x, kept, addend);
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

  template <std::size_t I, class X>
  tensor_of<output> forward_from(const microbatch<device>& mb, const X& x, saved* kept,
                                 const tensor_of<output>* addend) {
    auto* const keep = kept ? &std::get<I>(kept->layers) : nullptr;
    if constexpr (I + 1 == count) {
      if constexpr (adds_to_output<nth<I>>)
        return std::get<I>(layers_).forward(mb, x, keep, addend);
      else
        return std::get<I>(layers_).forward(mb, x, keep);
    } else {
      auto y = std::get<I>(layers_).forward(mb, x, keep);
      auto result = forward_from<I + 1>(mb, y.template view_as<typename nth<I + 1>::input>(), kept, addend);
      if (kept && (mb.policy == recompute::none || !is_cheap<nth<I>>)) std::get<I>(kept->outputs) = std::move(y);
      return result;
    }
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
