// The shared expert of a mixture, which processes all tokens: a SwiGLU MLP, with or without a gate.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/strategy.hpp"

namespace plait {
namespace detail {

template <class FeedForward, class Width>
struct sharded_alike {
  using type = Width;
};
template <class Dim, class... Axes, class Width>
struct sharded_alike<shard<Dim, Axes...>, Width> {
  using type = shard<Width, Axes...>;
};
/// `S` with another dim as the width of its MLP.
template <class S, class Width>
struct with_width : S {
  using feed_forward = typename sharded_alike<typename S::feed_forward, Width>::type;
};

/// The spec of one number per token: the residual with `shared_gate` in place of its last dim.
template <class Residual>
struct gate_of_tokens {
  static constexpr layout value = [] {
    layout a = layout_v<Residual>;
    a.dims.back() = {dim_of<shared_gate>, {}};
    return a;
  }();
};

}  // namespace detail

struct shared_expert_options {
  initializer init{};
  bool gated = false;  ///< multiply the output by a sigmoid of one product per token, as in Qwen2-MoE
  mlp_lora lora{};     ///< of the MLP's linears; the gate has no adapter
};

/// The shared expert of a mixture (DeepSeek-MoE, Dai et al. 2024), under a strategy. It is a SwiGLU MLP of the width
/// `shared_ffn`, sharded over the axes of `feed_forward`. The context gives the size of `shared_ffn`, and of
/// `shared_gate`, which is 1. Parameters are those of a `swiglu_mlp` named `NAME.shared_expert`, and the gate's,
/// `NAME.shared_expert_gate.weight` [1, hidden].
template <class Precision, class S, compute_device Device = cpu>
class shared_expert : public layer_types<activation_of<Precision>, typename S::residual, typename S::residual, Device> {
  using T = activation_of<Precision>;
  using mlp = swiglu_mlp<Precision, detail::with_width<S, shared_ffn>, Device>;
  using gates = spec_from<detail::gate_of_tokens<typename S::residual>, typename S::residual, spec<shared_gate>>;
  using gate_layer = linear<Precision, layer_policy<typename S::residual, spec<shared_gate, hidden>, gates>, Device>;

 public:
  using input = typename S::residual;
  using output = typename S::residual;
  static_assert(layout_v<input>.dims.back().axes.empty(),
                "a shared expert multiplies whole rows by its gate: the residual must not shard its last dim");

  struct saved {
    typename mlp::saved inner;
    typename gate_layer::saved gate;
    tensor<T, output, Device> made;   ///< the MLP's output
    tensor<T, gates, Device> scores;  ///< the gate's products, if there is a gate

    template <class F>
    void visit(F&& f) {
      inner.visit(f);
      gate.visit(f);
      f(made);
      f(scores);
    }
  };

  shared_expert(const context<Device>& ctx, const std::string& name, const shared_expert_options& how = {})
      : mlp_(ctx, name + ".shared_expert", how.init, false, how.lora) {
    if (how.gated)
      gate_.emplace(ctx, name + ".shared_expert_gate", linear_options<Precision, Device>{.init = how.init});
  }

  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                    saved* keep = nullptr) {
    if (!gate_) return mlp_.forward(mb, x, keep ? &keep->inner : nullptr);
    auto scores = gate_->forward(mb, x, keep ? &keep->gate : nullptr);
    auto made = mlp_.forward(mb, x, keep ? &keep->inner : nullptr);
    tensor<T, output, Device> y(mb.ctx);
    kernels::multiply_by_gates(mb.ctx.device, made.data(), scores.data(), y.data(), scores.size(), width(made, scores));
    if (keep) keep->made = std::move(made), keep->scores = std::move(scores);
    return y;
  }

  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                            saved& kept, const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, S, Gradient, output>);
    if (!gate_) return mlp_.backward(mb, x, kept.inner, dy);
    tensor<T, dual_t<output>, Device> dmade(mb.ctx);
    tensor<T, dual_t<gates>, Device> dscores(mb.ctx);
    kernels::multiply_by_gates_backward(mb.ctx.device, kept.made.data(), kept.scores.data(), dy.data(), dmade.data(),
                                        dscores.data(), kept.scores.size(), width(kept.made, kept.scores));
    const auto dx = mlp_.backward(mb, x, kept.inner, dmade);
    return gate_->backward(mb, x, kept.gate, dscores, &dx);
  }

  /// Prepares the layer for the batches and lengths of this context (`linear::resize`).
  void resize(const context<Device>& ctx) {
    mlp_.resize(ctx);
    if (gate_) gate_->resize(ctx);
  }
  template <class F>
  void visit(F&& f) {
    mlp_.visit(f);
    if (gate_) gate_->visit(f);
  }

 private:
  template <class Rows, class Gates>
  static std::int64_t width(const Rows& rows, const Gates& gates) {
    return gates.size() == 0 ? 0 : rows.size() / gates.size();
  }

  mlp mlp_;
  std::optional<gate_layer> gate_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
