// The layer after attention in a transformer with experts: a mixture, with or without a shared expert, or a plain MLP.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/moe.hpp"
#include "plait/nn/moe/shared_expert.hpp"
#include "plait/nn/strategy.hpp"

namespace plait {

/// A mixture of experts under a strategy. It may have a shared expert, which runs while rows travel; each token's
/// result is then the sum of both. In layers without experts it is a SwiGLU MLP of the width `dense_ffn`.
template <class Precision, mixture_strategy S, compute_device Device = cpu>
class expert_mlp : public layer_types<activation_of<Precision>, typename S::residual, typename S::residual, Device> {
  using T = activation_of<Precision>;
  using routed = moe<Precision, mixture_policy<S>, Device>;
  using shared = shared_expert<Precision, S, Device>;
  using dense = swiglu_mlp<Precision, detail::with_width<S, dense_ffn>, Device>;

 public:
  using input = typename S::residual;
  using output = typename S::residual;
  static constexpr bool ragged = true;  ///< see `moe`

  struct saved {
    typename routed::saved routed_experts;
    typename shared::saved shared_expert;
    typename dense::saved mlp;

    template <class F>
    void visit(F&& f) {
      routed_experts.visit(f);
      shared_expert.visit(f);
      mlp.visit(f);
    }
  };

  expert_mlp(const context<Device>& ctx, const std::string& name, const moe_options& how,
             bool has_shared_expert = false, const shared_expert_options& shared_how = {}) {
    routed_.emplace(ctx, name, how);
    if (has_shared_expert) shared_.emplace(ctx, name, shared_how);
  }
  /// Constructs the layer without experts.
  expert_mlp(const context<Device>& ctx, const std::string& name, const initializer& init, const mlp_lora& lora = {}) {
    dense_.emplace(ctx, name, init, false, lora);
  }

  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                    saved* keep = nullptr) {
    if (dense_) return dense_->forward(mb, x, keep ? &keep->mlp : nullptr);
    auto* const kept = keep ? &keep->routed_experts : nullptr;
    if (!shared_) return routed_->forward(mb, x, kept);
    tensor<T, output, Device> of_shared;
    auto y = routed_->forward(mb, x, kept,
                              [&] { of_shared = shared_->forward(mb, x, keep ? &keep->shared_expert : nullptr); });
    kernels::accumulate(mb.ctx.device, of_shared.data(), y.data(), y.size());
    return y;
  }
  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, saved& s,
                                            const tensor<T, Gradient, Device>& dy) {
    if (dense_) return dense_->backward(mb, x, s.mlp, dy);
    if (!shared_) return routed_->backward(mb, x, s.routed_experts, dy);
    tensor<T, dual_t<input>, Device> of_shared;
    auto dx = routed_->backward(mb, x, s.routed_experts, dy,
                                [&] { of_shared = shared_->backward(mb, x, s.shared_expert, dy); });
    kernels::accumulate(mb.ctx.device, of_shared.data(), dx.data(), dx.size());
    return dx;
  }

  /// Returns `moe::statistics`; empty without experts. Collective over the mesh.
  router_statistics statistics(const context<Device>& ctx) const {
    return routed_ ? routed_->statistics(ctx) : router_statistics{};
  }
  /// Prepares the layer for the batches and lengths of this context (`linear::resize`).
  void resize(const context<Device>& ctx) {
    each([&](auto& part) { part.resize(ctx); });
  }
  template <class F>
  void visit(F&& f) {
    each([&](auto& part) { part.visit(f); });
  }

 private:
  template <class F>
  void each(F&& f) {
    if (routed_) f(*routed_);
    if (shared_) f(*shared_);
    if (dense_) f(*dense_);
  }

  std::optional<routed> routed_;
  std::optional<shared> shared_;
  std::optional<dense> dense_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
