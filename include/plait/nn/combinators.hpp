#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "plait/layout/errors.hpp"
#include "plait/nn/dropout.hpp"
#include "plait/nn/layer_requirements.hpp"
#include "plait/nn/layers_fit.hpp"
#include "plait/tensor/redistribute.hpp"

namespace plait {

/// What the combinators compose. A layer takes `input` and makes `output`; `saved` is what a forward pass keeps for the
/// backward pass besides the input, which the caller holds.
template <class L>
concept layer =
    spec_like<typename L::input> && spec_like<typename L::output> && std::default_initializable<typename L::saved> &&
    requires(L& l, context<typename L::device>& ctx,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, dual_t<typename L::output>, typename L::device>& dy) {
      {
        l.forward(ctx, x, &saved, recompute::none)
      } -> std::same_as<tensor<typename L::value_type, typename L::output, typename L::device>>;
      {
        l.backward(ctx, x, saved, dy)
      } -> std::same_as<tensor<typename L::value_type, dual_t<typename L::input>, typename L::device>>;
      { l.saved_bytes(ctx, recompute::none) } -> std::convertible_to<std::int64_t>;
    };

/// A layer whose forward pass adds a tensor to its output, without a pass over memory of its own where the device can.
template <class L>
concept adds_to_output =
    layer<L> &&
    requires(L& l, context<typename L::device>& ctx,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, typename L::output, typename L::device>& addend) {
      l.forward(ctx, x, &saved, recompute::none, &addend);
    };

/// A layer whose backward pass adds a tensor to its input's gradient in the same way.
template <class L>
concept adds_to_gradient =
    layer<L> &&
    requires(L& l, context<typename L::device>& ctx,
             const tensor<typename L::value_type, typename L::input, typename L::device>& x, typename L::saved& saved,
             const tensor<typename L::value_type, dual_t<typename L::output>, typename L::device>& dy,
             const tensor<typename L::value_type, dual_t<typename L::input>, typename L::device>& addend) {
      l.backward(ctx, x, saved, dy, &addend);
    };

namespace detail {
/// The layer's input gradient plus `addend`.
template <layer L, class Input, class Gradient, class Addend>
auto backward_plus(L& l, context<typename L::device>& ctx, const Input& x, typename L::saved& kept, const Gradient& dy,
                   const Addend& addend) {
  if constexpr (adds_to_gradient<L>) {
    return l.backward(ctx, x, kept, dy, &addend);
  } else {
    auto dx = l.backward(ctx, x, kept, dy);
    kernels::accumulate(ctx.device, addend.data(), dx.data(), dx.size());
    return dx;
  }
}

template <class T, class Spec, class Device>
std::int64_t tensor_bytes(const context<Device>& ctx) {
  return local_elements(layout_v<Spec>, ctx.ranks.shape(), ctx.sizes) * static_cast<std::int64_t>(sizeof(T));
}
/// Where a combinator is given what is no layer: says what it lacks.
template <class... Layers>
inline constexpr bool all_layers = (sizeof(layer_consequence<layer<Layers>, Layers>) + ...) > 0;
}  // namespace detail

/// Layers one after the other.
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
    std::tuple<tensor_of<typename Layers::output>...> outputs;  ///< of all but the last
  };

  explicit sequential(Layers... layers) : layers_(std::move(layers)...) {}

  tensor_of<output> forward(context<device>& ctx, const tensor_of<input>& x, saved* keep = nullptr,
                            recompute policy = recompute::none) {
    saved scratch;
    return forward_from<0>(ctx, x, keep ? *keep : scratch, keep != nullptr, policy, nullptr);
  }
  /// The same, plus `addend` where that is not null, if the last layer can do that.
  tensor_of<output> forward(context<device>& ctx, const tensor_of<input>& x, saved* keep, recompute policy,
                            const tensor_of<output>* addend)
    requires adds_to_output<nth<count - 1>>
  {
    saved scratch;
    return forward_from<0>(ctx, x, keep ? *keep : scratch, keep != nullptr, policy, addend);
  }
  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(context<device>& ctx, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    return backward_from<count - 1>(ctx, x, kept, dy, nullptr);
  }
  /// The same, plus `addend` where that is not null, if the first layer can do that.
  template <spec_like Gradient>
    requires adds_to_gradient<nth<0>>
  tensor_of<dual_t<input>> backward(context<device>& ctx, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy, const tensor_of<dual_t<input>>* addend) {
    return backward_from<count - 1>(ctx, x, kept, dy, addend);
  }

  std::int64_t saved_bytes(const context<device>& ctx, recompute policy = recompute::none) const {
    const std::int64_t between =
        (std::int64_t{0} + ... + detail::tensor_bytes<value_type, typename Layers::output>(ctx)) -
        detail::tensor_bytes<value_type, output>(ctx);
    return std::apply([&](const auto&... l) { return (between + ... + l.saved_bytes(ctx, policy)); }, layers_);
  }
  template <class F>
  void visit(F&& f) {
    std::apply([&](auto&... l) { (l.visit(f), ...); }, layers_);
  }
  template <class F>
  void visit_collectives(F&& f, recompute policy = recompute::none) const {
    std::apply([&](const auto&... l) { (l.visit_collectives(f, policy), ...); }, layers_);
  }
  template <std::size_t I>
  auto& get() {
    return std::get<I>(layers_);
  }

 private:
  template <std::size_t I, class X>
  tensor_of<output> forward_from(context<device>& ctx, const X& x, saved& kept, bool keeping, recompute policy,
                                 const tensor_of<output>* addend) {
    auto* const keep = keeping ? &std::get<I>(kept.layers) : nullptr;
    if constexpr (I + 1 == count) {
      if constexpr (adds_to_output<nth<I>>)
        return std::get<I>(layers_).forward(ctx, x, keep, policy, addend);
      else
        return std::get<I>(layers_).forward(ctx, x, keep, policy);
    } else {
      auto y = std::get<I>(layers_).forward(ctx, x, keep, policy);
      auto& held = std::get<I>(kept.outputs);
      held = std::move(y);
      auto next = std::move(held).template as<typename nth<I + 1>::input>();
      auto result = forward_from<I + 1>(ctx, next, kept, keeping, policy, addend);
      if (keeping) held = std::move(next).template as<typename nth<I>::output>();
      return result;
    }
  }
  template <std::size_t I, class Gradient>
  tensor_of<dual_t<input>> backward_from(context<device>& ctx, const tensor_of<input>& x, saved& kept,
                                         const Gradient& dy, const tensor_of<dual_t<input>>* addend) {
    if constexpr (I == 0) {
      if constexpr (adds_to_gradient<nth<0>>)
        return std::get<0>(layers_).backward(ctx, x, std::get<0>(kept.layers), dy, addend);
      else
        return std::get<0>(layers_).backward(ctx, x, std::get<0>(kept.layers), dy);
    } else {
      auto& held = std::get<I - 1>(kept.outputs);
      auto in = std::move(held).template as<typename nth<I>::input>();
      auto dx = std::get<I>(layers_).backward(ctx, in, std::get<I>(kept.layers), dy);
      held = std::move(in).template as<typename nth<I - 1>::output>();  // put-off weight gradients still read it
      return backward_from<I - 1>(ctx, x, kept, dx, addend);
    }
  }

  std::tuple<Layers...> layers_;
};

/// y = x + dropout(layer(norm(x))): the residual branch of a transformer.
template <class Norm, class Layer>
class residual {
  static_assert(detail::all_layers<Norm, Layer>);

 public:
  template <class... Dropout>
  residual(Norm, Layer, const Dropout&...) {}
};

template <layer Norm, layer Layer>
class residual<Norm, Layer> {
 public:
  using value_type = typename Norm::value_type;
  using device = typename Norm::device;
  using input = typename Norm::input;
  using output = input;
  static_assert(detail::fits<rule::branch_ends_elsewhere, 0, Norm, 1, Layer>);
  static_assert(detail::fits<rule::branch_ends_elsewhere, 1, Layer, 0, Norm>);
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;

  struct saved {
    typename Norm::saved norm;
    tensor_of<input> normalized;  ///< empty if it is computed again
    typename Layer::saved inner;
  };

  residual(Norm norm, Layer inner, dropout<value_type, input, device> drop = {0.0, ""})
      : norm_(std::move(norm)), inner_(std::move(inner)), drop_(drop) {}

  tensor_of<output> forward(context<device>& ctx, const tensor_of<input>& x, saved* keep = nullptr,
                            recompute policy = recompute::none) {
    tensor_of<input> normalized = norm_.forward(ctx, x, keep ? &keep->norm : nullptr, policy);
    tensor_of<output> y = branch(ctx, normalized, x, keep ? &keep->inner : nullptr, policy);
    if (keep && policy == recompute::none) keep->normalized = std::move(normalized);
    return y;
  }

  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(context<device>& ctx, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<input>, Gradient, output>);
    if (!kept.normalized) kept.normalized = norm_.forward(ctx, x);
    const tensor_of<dual_t<output>>* branch = &dy;
    tensor_of<dual_t<output>> dropped;
    if (drop_.probability() > 0) {
      dropped = tensor_of<dual_t<output>>(ctx);
      ctx.device.copy(dropped.data(), dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(value_type),
                      ctx.device.main_stream());
      drop_.backward(ctx, dropped);
      branch = &dropped;
    }
    auto dnormalized = inner_.backward(ctx, kept.normalized, kept.inner, *branch);
    return detail::backward_plus(norm_, ctx, x, kept.norm, dnormalized, dy);
  }

  /// Includes the normalised input where it is kept.
  std::int64_t saved_bytes(const context<device>& ctx, recompute policy = recompute::none) const {
    return norm_.saved_bytes(ctx, policy) + inner_.saved_bytes(ctx, policy) +
           (policy == recompute::none ? detail::tensor_bytes<value_type, input>(ctx) : 0);
  }
  template <class F>
  void visit(F&& f) {
    norm_.visit(f);
    inner_.visit(f);
  }
  template <class F>
  void visit_collectives(F&& f, recompute policy = recompute::none) const {
    norm_.visit_collectives(f, policy);
    inner_.visit_collectives(f, policy);
    if (policy != recompute::none)
      norm_.visit_collectives([&](const char* pass, const collective_cost& c) {
        if (pass[0] == 'f') f("backward", c);
      });
  }
  Norm& norm() { return norm_; }
  Layer& inner() { return inner_; }

 private:
  /// x + dropout(layer(normalized))
  tensor_of<output> branch(context<device>& ctx, const tensor_of<input>& normalized, const tensor_of<input>& x,
                           typename Layer::saved* keep, recompute policy) {
    if constexpr (adds_to_output<Layer>) {
      if (drop_.probability() == 0) return inner_.forward(ctx, normalized, keep, policy, &x);
    }
    tensor_of<output> y = inner_.forward(ctx, normalized, keep, policy);
    drop_.forward(ctx, y);
    kernels::accumulate(ctx.device, x.data(), y.data(), y.size());
    return y;
  }

  Norm norm_;
  Layer inner_;
  dropout<value_type, input, device> drop_;
};

/// Several layers with one input, which is redistributed once, from `Boundary` to the spec that all of them take. Going
/// back, their gradients, which are partial where that spec is replicated, are added first and reduced once.
template <spec_like Boundary, class First, class... Rest>
class fan_out {
  static_assert(detail::all_layers<First, Rest...>);

 public:
  template <class Context>
  fan_out(Context&, First, Rest...) {}
};

template <spec_like Boundary, layer First, layer... Rest>
class fan_out<Boundary, First, Rest...> {
 public:
  using value_type = typename First::value_type;
  using device = typename First::device;
  using input = Boundary;
  using gathered = typename First::input;
  static_assert((std::is_same_v<typename Rest::input, gathered> && ...),
                "the layers of a fan-out take one input: let their policies name the same input spec");
  static_assert(enforced<detail::redistribution<Boundary, gathered>, among<Boundary, gathered>, Boundary, gathered>);
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;
  using outputs = std::tuple<tensor_of<typename First::output>, tensor_of<typename Rest::output>...>;
  using gradients = std::tuple<tensor_of<dual_t<typename First::output>>, tensor_of<dual_t<typename Rest::output>>...>;

  struct saved {
    tensor_of<gathered> shared;
    std::tuple<typename First::saved, typename Rest::saved...> layers;
  };

  fan_out(context<device>& ctx, First first, Rest... rest)
      : gather_(layout_v<Boundary>, layout_v<gathered>, ctx.ranks, ctx.sizes, "fan_out"),
        reduce_(gather_.backward(), ctx.ranks, ctx.sizes, "gradient of fan_out"),
        layers_(std::move(first), std::move(rest)...) {
    enforce_boundary<Boundary>(ctx, "fan_out: input");
  }

  outputs forward(context<device>& ctx, const tensor_of<input>& x, saved* keep = nullptr,
                  recompute policy = recompute::none) {
    tensor_of<gathered> shared(ctx);
    gather_.run(ctx.device, x.data(), shared.data(), dtype_of<value_type>);
    outputs y = each([&]<std::size_t I>() {
      return std::get<I>(layers_).forward(ctx, shared, keep ? &std::get<I>(keep->layers) : nullptr, policy);
    });
    if (keep) keep->shared = std::move(shared);
    return y;
  }

  tensor_of<dual_t<input>> backward(context<device>& ctx, saved& kept, const gradients& dy) {
    auto sum = std::get<0>(layers_).backward(ctx, kept.shared, std::get<0>(kept.layers), std::get<0>(dy));
    [&]<std::size_t... Is>(std::index_sequence<Is...>) {
      ((sum = detail::backward_plus(std::get<Is + 1>(layers_), ctx, kept.shared, std::get<Is + 1>(kept.layers),
                                    std::get<Is + 1>(dy), sum)),
       ...);
    }(std::index_sequence_for<Rest...>{});
    tensor_of<dual_t<input>> dx(ctx);
    reduce_.run(ctx.device, sum.data(), dx.data(), dtype_of<value_type>);
    return dx;
  }

  template <class F>
  void visit(F&& f) {
    std::apply([&](auto&... l) { (l.visit(f), ...); }, layers_);
  }
  template <class F>
  void visit_collectives(F&& f, recompute policy = recompute::none) const {
    gather_.visit_collectives([&](const collective_cost& c) { f("forward", c); }, sizeof(value_type));
    std::apply([&](const auto&... l) { (l.visit_collectives(f, policy), ...); }, layers_);
    reduce_.visit_collectives([&](const collective_cost& c) { f("backward", c); }, sizeof(value_type));
  }

 private:
  template <class F>
  outputs each(F&& f) {
    return [&]<std::size_t... Is>(std::index_sequence<Is...>) {
      return outputs{f.template operator()<Is>()...};
    }(std::index_sequence_for<First, Rest...>{});
  }

  executor gather_, reduce_;
  std::tuple<First, Rest...> layers_;
};

}  // namespace plait
