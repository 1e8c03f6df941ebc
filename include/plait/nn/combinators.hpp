// The combinators of layers: `sequential`, `residual`, `stack`, `sum`, and `redistribution` between specs.
#pragma once

#include <cstddef>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/open_sum.hpp"
#include "plait/nn/pointwise.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait {

/// Whether a layer accepts other batches and lengths after its construction (`linear::resize`).
template <class Layer>
concept resizes = requires(Layer& l, const context<typename Layer::device>& ctx) { l.resize(ctx); };

/// Layers in sequence. Under `recompute::selective` the outputs of cheap layers (`is_cheap`) are not kept, and under
/// `recompute::full` nothing is kept. The backward pass recomputes them.
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
    std::tuple<tensor_of<typename Layers::output>...> outputs;  ///< of all layers but the last; empty if recomputed
    bool again = false;                                         ///< whether the backward pass repeats the whole forward
                                                                ///< pass

    template <class F>
    void visit(F&& f) {
      std::apply([&](auto&... kept) { (visit_saved(kept, f), ...); }, layers);
      std::apply([&](auto&... kept) { (f(kept), ...); }, outputs);
    }
  };

  explicit sequential(Layers... layers) : layers_(std::move(layers)...) {}

  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    return taken(mb, forward_from<0>(mb, x, kept_by_pass(mb, keep), nullptr));
  }
  /// Takes an open sum, if the first layer does so. Returns one, if the last layer does so; the memory of x must live
  /// until that sum is closed.
  auto forward(const microbatch<device>& mb, open_sum<value_type, input, device>& x, saved* keep = nullptr)
    requires accepts_open_sum<nth<0>>
  {
    return forward_from<0>(mb, x, kept_by_pass(mb, keep), nullptr);
  }
  /// Forward; adds `addend` to the output unless it is null. Requires a last layer that can add it.
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
    return backward_from<count - 1>(made_again(mb, x, kept), x, kept, dy, nullptr);
  }
  /// Backward; adds `addend` to the input's gradient unless it is null. Requires a first layer that can add it.
  template <spec_like Gradient>
    requires adds_to_gradient<nth<0>>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy, const tensor_of<dual_t<input>>* addend) {
    return backward_from<count - 1>(made_again(mb, x, kept), x, kept, dy, addend);
  }

  template <class F>
  void visit(F&& f) {
    std::apply([&](auto&... l) { (l.visit(f), ...); }, layers_);
  }
  /// Resizes all layers for the batches and lengths of this context (`linear::resize`), if all can be resized.
  void resize(const context<device>& ctx)
    requires(resizes<Layers> && ...)
  {
    std::apply([&](auto&... l) { (l.resize(ctx), ...); }, layers_);
  }
  template <std::size_t I>
  auto& get() {
    return std::get<I>(layers_);
  }

 private:
  template <class Spec>
  using sum_of = open_sum<value_type, Spec, device>;
  /// The tensor itself, or the tensor that an open sum becomes.
  template <class Spec>
  static tensor_of<Spec> taken(const microbatch<device>&, tensor_of<Spec> y) {
    return y;
  }
  template <class Spec>
  static tensor_of<Spec> taken(const microbatch<device>& mb, sum_of<Spec> y) {
    return std::move(y).take(mb.ctx.device);
  }

  /// Clears `keep`, and returns where the layers of this pass keep their values. It returns null if the backward pass
  /// repeats the whole pass.
  static saved* kept_by_pass(const microbatch<device>& mb, saved* keep) {
    if (keep) *keep = {}, keep->again = mb.policy == recompute::full;
    return keep && keep->again ? nullptr : keep;
  }
  /// Repeats the forward pass if it kept nothing, and returns the microbatch of the backward pass.
  microbatch<device> made_again(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept) {
    if (!std::exchange(kept.again, false)) return mb;
    const microbatch<device> now = mb.keeping(recompute::none);
    forward_from<0>(now.repeated(), x, &kept, nullptr);
    return now;
  }

  /// Runs layers I to the last. X is a tensor or an open sum.
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
  /// Whether layer I returns an open sum that the next layer takes.
  template <std::size_t I>
  static constexpr bool passes_sum = returns_open_sum<nth<I>> && accepts_open_sum<nth<I + 1>>;
  /// The input of a layer that returns an open sum: x itself, or the tensor x as a closed sum.
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
  /// The input of layer I, recomputed if it was not kept.
  template <std::size_t I>
  const auto& input_of(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept) {
    if constexpr (I == 0) {
      return x;
    } else {
      auto& held = std::get<I - 1>(kept.outputs);
      if (!held) {
        const auto& before = input_of<I - 1>(mb, x, kept);
        held = std::get<I - 1>(layers_).forward(mb.repeated(), before.template view_as<typename nth<I - 1>::input>(),
                                                nullptr);
      }
      return held;
    }
  }

  std::tuple<Layers...> layers_;
};

// A residual branch that begins with a norm. examples/encoder_decoder.hpp has a branch whose norm follows the sum.

/// y = x + dropout(layer(norm(x))): the residual branch of a transformer. If no product of the layer can add x, the
/// branch returns an open sum. The next norm then adds its terms in the same pass in which it reads them.
template <class Norm, class Layer>
class residual : public detail::refused_layer<Norm, Norm> {
  static_assert(detail::all_layers<Norm, Layer>);

 public:
  template <class... Dropout>
  residual(Norm, Layer, const Dropout&...) {}
};

template <layer Norm, layer Layer>
class residual<Norm, Layer> : public other_arrays_between<residual<Norm, Layer>, Norm, Norm> {
  using arrays = other_arrays_between<residual, Norm, Norm>;

 public:
  using arrays::backward;
  using arrays::forward;
  using first_layer = Norm;
  using value_type = typename Norm::value_type;
  using device = typename Norm::device;
  using input = typename Norm::input;
  using output = input;
  static_assert(detail::fits<layout_error::branch_ends_elsewhere, 0, Norm, 1, Layer>);
  static_assert(detail::fits<layout_error::branch_ends_elsewhere, 1, Layer, 0, Norm>);
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;
  using stream_sum = open_sum<value_type, output, device>;

  struct saved {
    typename Norm::saved norm;
    tensor_of<input> normalized;  ///< empty if recomputed
    typename Layer::saved inner;

    template <class F>
    void visit(F&& f) {
      visit_saved(norm, f);
      f(normalized);
      visit_saved(inner, f);
    }
  };

  residual(Norm norm, Layer inner, dropout<value_type, input, device> drop = {0.0, ""})
      : norm_(std::move(norm)), inner_(std::move(inner)), drop_(drop) {}

  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    stream_sum in = detail::closed_view(mb, x);
    return forward(mb, in, keep).take(mb.ctx.device);
  }
  /// Takes an open sum and returns one. It closes x, whose memory must live until y is closed.
  stream_sum forward(const microbatch<device>& mb, stream_sum& x, saved* keep = nullptr) {
    if (keep) *keep = {};  // drops the values of an earlier pass
    tensor_of<input> normalized = normalize(mb, x, keep ? &keep->norm : nullptr);
    const tensor_of<input>& stream = x.close(mb.ctx.device);
    const auto in = normalized.template view_as<typename Layer::input>();
    auto* const kept = keep ? &keep->inner : nullptr;
    const bool in_product = !drop_.drops(mb) && detail::adds_in_product(inner_);
    tensor_of<output> y =
        (in_product ? detail::forward_plus(inner_, mb, in, kept, stream.template view_as<typename Layer::output>())
                    : inner_.forward(mb, in, kept))
            .template as<output>();
    drop_.forward(mb, y);
    if (keep && mb.policy == recompute::none) keep->normalized = std::move(normalized);
    if (in_product) return stream_sum(std::move(y));
    return stream_sum(std::move(y), tensor_of<output>(mb.ctx, const_cast<value_type*>(stream.data())));
  }

  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<input>, Gradient, output>);
    if (!kept.normalized) kept.normalized = norm_.forward(mb.repeated(), x, nullptr);
    const tensor_of<dual_t<output>>* into_branch = &dy;
    tensor_of<dual_t<output>> dropped;
    if (drop_.drops(mb)) {
      device& d = mb.ctx.device;
      dropped = tensor_of<dual_t<output>>(mb.ctx);
      d.copy(dropped.data(), dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(value_type), d.main_stream());
      drop_.backward(mb, dropped);
      into_branch = &dropped;
    }
    auto dnormalized = inner_.backward(mb, kept.normalized.template view_as<typename Layer::input>(), kept.inner,
                                       into_branch->template view_as<dual_t<typename Layer::output>>());
    return detail::backward_plus(norm_, mb, x, kept.norm, dnormalized.template view_as<dual_t<typename Norm::output>>(),
                                 dy);
  }

  template <class F>
  void visit(F&& f) {
    norm_.visit(f);
    inner_.visit(f);
  }
  Norm& norm() { return norm_; }
  Layer& inner() { return inner_; }

 private:
  tensor_of<input> normalize(const microbatch<device>& mb, stream_sum& x, typename Norm::saved* keep) {
    if constexpr (accepts_open_sum<Norm>)
      return norm_.forward(mb, x, keep);
    else
      return norm_.forward(mb, x.close(mb.ctx.device), keep);
  }

  Norm norm_;
  Layer inner_;
  dropout<value_type, input, device> drop_;
};

// Layers of one type in sequence, with a number that is known at run time, such as the blocks of a model.

/// Any number of layers of one type, known at run time: y = block_n(... block_1(x)). Each block is a parameter unit,
/// and is announced as one (`microbatch::enter`). Each block has its own recompute policy (`microbatch::policies`).
/// Under `recompute::full` it keeps nothing, and the backward pass repeats its forward pass.
template <class Block>
class stack : public detail::refused_layer<Block, Block> {
  static_assert(detail::all_layers<Block>);

 public:
  stack() = default;
  explicit stack(std::vector<Block>) {}
};
template <class Block>
stack(std::vector<Block>) -> stack<Block>;

template <layer Block>
class stack<Block> : public other_arrays_between<stack<Block>, Block, Block> {
  using arrays = other_arrays_between<stack, Block, Block>;

 public:
  using arrays::backward;
  using arrays::forward;
  using first_layer = Block;
  using value_type = typename Block::value_type;
  using device = typename Block::device;
  using input = typename Block::input;
  using output = typename Block::input;
  static_assert(equivalent(layout_v<input>, layout_v<typename Block::output>),
                "the blocks of a stack must end as they begin: input and output need one spec");
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;

  struct saved {
    std::vector<tensor_of<input>> inputs;  ///< of all blocks but the first, whose input the caller holds
    std::vector<typename Block::saved> blocks;
  };

  stack() = default;
  explicit stack(std::vector<Block> blocks) : blocks_(std::move(blocks)) {}

  std::size_t size() const { return names_.checked(blocks_).size(); }
  Block& operator[](std::size_t i) { return names_.checked(blocks_)[i]; }

  /// Without any block, the output is a copy of x.
  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    if (keep) *keep = {}, keep->blocks.resize(size());
    if (size() == 0) return copy(mb, x);
    const auto kept = [&](std::size_t i, const microbatch<device>& here) {
      return keep && here.policy != recompute::full ? &keep->blocks[i] : nullptr;
    };
    if constexpr (returns_open_sum<Block>) {  // the next block adds its terms
      auto current = detail::closed_view(mb, x);
      for (std::size_t i = 0; i < blocks_.size(); ++i) {
        const microbatch<device> here = mb.at_block(i);
        auto y = blocks_[i].forward(here, current, kept(i, here)).template as<input>();
        tensor_of<input> in = std::move(current).take(mb.ctx.device);
        if (keep && i > 0)
          keep->inputs.push_back(std::move(in));
        else if (i > 0)
          y.hold(std::move(in));
        current = std::move(y);
      }
      return std::move(current).take(mb.ctx.device);
    } else {
      tensor_of<input> current;
      for (std::size_t i = 0; i < blocks_.size(); ++i) {
        const microbatch<device> here = mb.at_block(i);
        auto y = blocks_[i].forward(here, i == 0 ? x : current, kept(i, here)).template as<input>();
        if (keep && i > 0) keep->inputs.push_back(std::move(current));
        current = std::move(y);
      }
      return current;
    }
  }
  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    if (size() == 0) return copy(mb, dy);
    tensor_of<dual_t<input>> d;
    for (std::size_t i = blocks_.size(); i-- > 0;) {
      const tensor_of<input>& in = i == 0 ? x : kept.inputs[i - 1];
      const microbatch<device> mine = mb.at_block(i);
      const bool again = mine.policy == recompute::full;
      const microbatch<device> here = again ? mine.keeping(recompute::none) : mine;
      if (again) blocks_[i].forward(here.repeated(), in, &kept.blocks[i]);
      d = (i + 1 == blocks_.size()
               ? blocks_[i].backward(here, in, kept.blocks[i], dy.template view_as<dual_t<typename Block::output>>())
               : blocks_[i].backward(here, in, kept.blocks[i], d.template view_as<dual_t<typename Block::output>>()));
      if (mb.deferred) continue;  // deferred tasks read the values later
      kept.blocks[i] = {};
      if (i > 0) kept.inputs[i - 1].reset();
    }
    return d;
  }
  template <class F>
  void visit(F&& f) {
    for (Block& b : names_.checked(blocks_)) b.visit(f);
  }

 private:
  template <class Spec>
  static tensor_of<Spec> copy(const microbatch<device>& mb, const tensor_of<Spec>& x) {
    tensor_of<Spec> y(mb.ctx);
    device& d = mb.ctx.device;
    d.copy(y.data(), x.data(), static_cast<std::size_t>(x.size()) * sizeof(value_type), d.main_stream());
    return y;
  }

  detail::layer_names names_{"a stack of layers"};
  std::vector<Block> blocks_;
};

// A redistribution as a layer, and the sum of branches that share one gather and one reduction.

/// Redistributes a tensor to another spec with equal dims, as a layer whose backward pass is the adjoint.
template <class T, spec_like From, spec_like To, compute_device Device = cpu>
class redistribution : public layer_types<T, From, To, Device>,
                       public other_arrays<redistribution<T, From, To, Device>, T, From, To, Device> {
  static_assert(enforced<detail::redistribution_value<From, To>, among<From, To>, From, To>);

 public:
  using other_arrays<redistribution, T, From, To, Device>::forward;
  using other_arrays<redistribution, T, From, To, Device>::backward;
  struct saved {};

  explicit redistribution(const context<Device>& ctx, const std::string& name = "redistribution")
      : names_(name),
        made_for_(ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&layout_v<From>, &layout_v<To>}),
        there_(layout_v<From>, layout_v<To>, ctx.ranks, ctx.sizes, name),
        back_(there_.backward(), ctx.ranks, ctx.sizes, "gradient of " + name) {
    enforce(check_boundary(layout_v<From>, ctx.ranks.shape()), name + ": input");
    enforce(check_boundary(layout_v<To>, ctx.ranks.shape()), name + ": output");
    detail::require_no_sum(ctx, there_, name);
    detail::require_no_sum(ctx, back_, "gradient of " + name);
  }
  tensor<T, To, Device> forward(const microbatch<Device>& mb, const tensor<T, From, Device>& x, saved* = nullptr) {
    made_for_.require(names_.layer(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    detail::require_size(names_.layer(), "x", x.size(), input_size());
    tensor<T, To, Device> y(mb.ctx);
    there_.run(mb.ctx.device, x.data(), y.data(), dtype_of<T>);
    return y;
  }
  template <spec_like Gradient>
  tensor<T, dual_t<From>, Device> backward(const microbatch<Device>& mb, const tensor<T, From, Device>&, saved&,
                                           const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, To>, among<From, To>, Gradient, To>);
    made_for_.require(names_.layer(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    detail::require_size(names_.layer(), "dy", dy.size(), back_.source().local_size());
    tensor<T, dual_t<From>, Device> dx(mb.ctx);
    back_.run(mb.ctx.device, dy.data(), dx.data(), dtype_of<T>);
    return dx;
  }
  template <class F>
  void visit(F&&) {}
  /// Local elements.
  std::int64_t input_size() const { return there_.source().local_size(); }
  /// Whether no data moves.
  bool trivial() const { return there_.trivial() && back_.trivial(); }

 private:
  detail::layer_names names_;
  detail::made_for made_for_;
  ready_plan there_, back_;
};

/// The sum of branches that share their input, such as the parallel block of PaLM (Chowdhery et al. 2022) or a linear
/// with a low-rank adapter. One redistribution brings the input from `Input` to the spec that all branches take. The
/// branches' outputs, which may be partial, are added, and one redistribution brings the sum to `Output`. Gradients
/// take the reverse way.
template <spec_like Input, spec_like Output, class First, class... Rest>
class sum : public detail::refused_layer<First, First> {
  static_assert(detail::all_layers<First, Rest...>);

 public:
  template <class Device>
  sum(const context<Device>&, const std::string&, First, Rest...) {}
};

template <spec_like Input, spec_like Output, layer First, layer... Rest>
class sum<Input, Output, First, Rest...>
    : public other_arrays<sum<Input, Output, First, Rest...>, typename First::value_type, Input, Output,
                          typename First::device> {
  using arrays = other_arrays<sum, typename First::value_type, Input, Output, typename First::device>;

 public:
  using arrays::backward;
  using arrays::forward;
  using value_type = typename First::value_type;
  using device = typename First::device;
  using input = Input;
  using output = Output;
  using shared = typename First::input;
  using pending = typename First::output;
  static_assert((equivalent(layout_v<typename Rest::input>, layout_v<shared>) && ...),
                "the branches of a sum take one input: let their policies name the same input spec");
  static_assert((equivalent(layout_v<typename Rest::output>, layout_v<pending>) && ...),
                "the branches of a sum end alike: let their policies name the same output spec");
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;

  struct saved {
    tensor_of<shared> gathered;  ///< empty if it is the input itself or is recomputed
    std::tuple<typename First::saved, typename Rest::saved...> branches;

    template <class F>
    void visit(F&& f) {
      f(gathered);
      std::apply([&](auto&... kept) { (visit_saved(kept, f), ...); }, branches);
    }
  };

  sum(const context<device>& ctx, const std::string& name, First first, Rest... rest)
      : gather_(ctx, "input of " + name),
        resolve_(ctx, "output of " + name),
        branches_(std::move(first), std::move(rest)...) {}

  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    if (keep) *keep = {};  // drops the values of an earlier pass
    tensor_of<shared> gathered = gather(mb, x);
    tensor_of<pending> y = add_up(mb, gathered, keep, std::index_sequence_for<Rest...>{});
    if (keep && !gather_.trivial() && mb.policy == recompute::none) keep->gathered = std::move(gathered);
    if constexpr (resolved)
      return std::move(y).template as<output>();
    else
      return resolve_.forward(mb, y);
  }
  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<input, output>, Gradient, output>);
    const tensor_of<dual_t<pending>> dpending = unresolve(mb, dy);
    if (!kept.gathered) kept.gathered = gather(mb, x);
    tensor_of<dual_t<shared>> dshared = back(mb, kept, dpending, std::index_sequence_for<Rest...>{});
    if constexpr (taken) {
      return std::move(dshared).template as<dual_t<input>>();
    } else {
      typename redistribution<value_type, input, shared, device>::saved nothing;
      return gather_.backward(mb, x, nothing, dshared);
    }
  }
  template <class F>
  void visit(F&& f) {
    std::apply([&](auto&... b) { (b.visit(f), ...); }, branches_);
  }
  template <std::size_t I>
  auto& get() {
    return std::get<I>(branches_);
  }

 private:
  /// Whether neither the input nor the output needs a redistribution, so that nothing is copied.
  static constexpr bool taken = equivalent(layout_v<input>, layout_v<shared>);
  static constexpr bool resolved = equivalent(layout_v<pending>, layout_v<output>);

  /// Returns dy in the layout that the branches take; a view of dy if no data moves.
  template <spec_like Gradient>
  tensor_of<dual_t<pending>> unresolve(const microbatch<device>& mb, const tensor_of<Gradient>& dy) {
    if constexpr (resolved) {
      return tensor_of<dual_t<pending>>(mb.ctx, const_cast<value_type*>(dy.data()));
    } else {
      typename redistribution<value_type, pending, output, device>::saved none;
      const tensor_of<pending> no_output;
      return resolve_.backward(mb, no_output, none, dy);
    }
  }
  /// Returns x in the layout that the branches take; a view of x if no data moves.
  tensor_of<shared> gather(const microbatch<device>& mb, const tensor_of<input>& x) {
    if (gather_.trivial()) return tensor_of<shared>(mb.ctx, const_cast<value_type*>(x.data()));
    return gather_.forward(mb, x);
  }
  template <std::size_t... Is>
  tensor_of<pending> add_up(const microbatch<device>& mb, const tensor_of<shared>& x, saved* keep,
                            std::index_sequence<Is...>) {
    tensor_of<pending> y = std::get<0>(branches_).forward(mb, x, keep ? &std::get<0>(keep->branches) : nullptr);
    ((y = one_more<Is + 1>(mb, x, keep, y)), ...);
    return y;
  }
  template <std::size_t I>
  tensor_of<pending> one_more(const microbatch<device>& mb, const tensor_of<shared>& x, saved* keep,
                              const tensor_of<pending>& before) {
    using branch = std::tuple_element_t<I, std::tuple<First, Rest...>>;
    return detail::forward_plus(std::get<I>(branches_), mb, x.template view_as<typename branch::input>(),
                                keep ? &std::get<I>(keep->branches) : nullptr,
                                before.template view_as<typename branch::output>())
        .template as<pending>();
  }
  template <class Gradient, std::size_t... Is>
  tensor_of<dual_t<shared>> back(const microbatch<device>& mb, saved& kept, const Gradient& dy,
                                 std::index_sequence<Is...>) {
    tensor_of<dual_t<shared>> dx = std::get<0>(branches_).backward(mb, kept.gathered, std::get<0>(kept.branches), dy);
    ((dx = one_more_back<Is + 1>(mb, kept, dy, dx)), ...);
    return dx;
  }
  template <std::size_t I, class Gradient>
  tensor_of<dual_t<shared>> one_more_back(const microbatch<device>& mb, saved& kept, const Gradient& dy,
                                          const tensor_of<dual_t<shared>>& before) {
    using branch = std::tuple_element_t<I, std::tuple<First, Rest...>>;
    return detail::backward_plus(std::get<I>(branches_), mb, kept.gathered.template view_as<typename branch::input>(),
                                 std::get<I>(kept.branches), dy.template view_as<dual_t<typename branch::output>>(),
                                 before.template view_as<dual_t<typename branch::input>>())
        .template as<dual_t<shared>>();
  }

  redistribution<value_type, input, shared, device> gather_;
  redistribution<value_type, pending, output, device> resolve_;
  std::tuple<First, Rest...> branches_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
