// The norms of queries and keys inside self-attention (`attention_options::qk_norm_epsilon`). They are no layer; norms
// of the residual are in nn/norm.hpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/norm.hpp"

namespace plait::detail {

/// The rotary tables of a rank's tokens, [tokens, head_dim / 2] each; null: no rotation.
template <class S>
struct rotary_tables {
  const S *cosine = nullptr, *sine = nullptr;
  std::int64_t tokens = 0;
};

template <compute_device Device>
struct head_norms_saved {
  std::array<buffer<Device>, 2> before, inv_rms;  ///< of queries, then of keys
};

/// RMSNorm of each head's query and of each head's key (Dehghani et al. 2023), in rows in which queries, keys and
/// values lie side by side. One weight [head_dim] for all query heads, one for all key heads.
template <class Precision, compute_device Device>
class head_norms {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  /// `rows` of `stride` elements: `heads` queries, then `kv_heads` keys, then what else there is.
  head_norms(const context<Device>& ctx, const std::string& name, const layout& queries, const layout& keys,
             double epsilon, std::int64_t rows, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim,
             std::int64_t stride, const std::array<parameter_memory<Precision>, 2>& callers = {})
      : epsilon_(epsilon), rows_(rows), heads_{heads, kv_heads}, head_dim_(head_dim), stride_(stride) {
    if (ctx.numerics.canonical())
      fail({name, ": canonical numerics (deterministic) have no order for norms of queries and keys"});
    layout weight;
    weight.dims.push_back({queries.dims.back().dim, {}});
    for (std::size_t i = 0; i < 2; ++i) {
      const std::string norm = name + (i == 0 ? ".q_norm" : ".k_norm");
      callers[i].require_complete(norm, true, false);
      weights_[i] = std::make_shared<parameter<Precision, Device>>(
          ctx, parameter_info{norm + ".weight", {head_dim}, {1, 0}, false}, weight, weight, i == 0 ? queries : keys,
          parameter_place<Precision, Device>(ctx.device, head_dim, callers[i].weight.pointer(),
                                             callers[i].gradient.pointer(), callers[i].master.pointer()));
    }
  }

  /// Takes another number of rows.
  void resize(std::int64_t rows) { rows_ = rows; }
  void rebind(const std::array<parameter_memory<Precision>, 2>& callers, rebinding how) {
    for (std::size_t i = 0; i < 2; ++i) {
      const std::string_view name = weights_[i]->name();
      rebind_parameters<Precision, Device>(name.substr(0, name.rfind(".weight")), {weights_[i]}, {}, callers[i], false,
                                           how);
    }
  }

  /// In place; what is normalised is rotated as it is put there.
  void forward(const context<Device>& ctx, T* qkv, const rotary_tables<S>& rotation, head_norms_saved<Device>* keep) {
    for (std::size_t i = 0; i < 2; ++i) {
      auto before = make_buffer<T>(ctx.device, count(i)), after = make_buffer<T>(ctx.device, count(i));
      auto inv = make_buffer<S>(ctx.device, static_cast<std::size_t>(vectors(i)));
      take(ctx.device, qkv, i, before.template data<T>());
      kernels::rms_norm_forward(ctx.device, before.template data<T>(), weights_[i]->used_value(),
                                after.template data<T>(), inv.template data<S>(), vectors(i), head_dim_, epsilon_);
      const std::int64_t width = heads_[i] * head_dim_;
      if (rotation.cosine)
        kernels::rope_forward(ctx.device, static_cast<const T*>(after.template data<T>()), width, qkv + begin(i),
                              rotation.cosine, rotation.sine, rows_, heads_[i], head_dim_, stride_, rotation.tokens);
      else
        put(ctx.device, after.template data<T>(), i, qkv);
      if (!keep) continue;
      keep->before[i] = std::move(before);
      keep->inv_rms[i] = std::move(inv);
    }
  }

  /// Overwrites the gradients of the queries and keys that `forward` made with those of what they were before.
  void backward(const microbatch<Device>& mb, T* dqkv, const rotary_tables<S>& rotation,
                head_norms_saved<Device>& kept) {
    Device& device = mb.ctx.device;
    for (std::size_t i = 0; i < 2; ++i) {
      auto dy = make_buffer<T>(device, count(i)), dx = make_buffer<T>(device, count(i));
      const std::int64_t width = heads_[i] * head_dim_;
      if (rotation.cosine)
        kernels::rope_backward(device, static_cast<const T*>(dqkv) + begin(i), stride_, dy.template data<T>(),
                               rotation.cosine, rotation.sine, rows_, heads_[i], head_dim_, width, rotation.tokens);
      else
        take(device, dqkv, i, dy.template data<T>());
      const T* const x = kept.before[i].template data<T>();
      const S* const inv = kept.inv_rms[i].template data<S>();
      auto& weight = *weights_[i];
      kernels::rms_norm_backward(device, x, weight.used_value(), dy.template data<T>(), inv, dx.template data<T>(),
                                 static_cast<gradient_of<T>*>(nullptr), vectors(i), head_dim_);
      put(device, dx.template data<T>(), i, dqkv);
      if (weight.trainable())
        mb.on_weights([this, &device, i, x, inv, dy = std::move(dy)] {
          with_kernel_sum<T>(device, weights_[i]->used_gradient(device), head_dim_, [&](auto* sums) {
            kernels::rms_norm_backward_dweight(device, x, dy.template data<T>(), inv, sums, vectors(i), head_dim_);
          });
        });
    }
  }

  template <class F>
  void visit(F&& f) {
    for (auto& weight : weights_) f(*weight);
  }

 private:
  std::int64_t vectors(std::size_t i) const { return rows_ * heads_[i]; }
  std::size_t count(std::size_t i) const { return static_cast<std::size_t>(vectors(i) * head_dim_); }
  std::int64_t bytes(std::int64_t elements) const { return elements * static_cast<std::int64_t>(sizeof(T)); }
  std::int64_t begin(std::size_t i) const { return i == 0 ? 0 : heads_[0] * head_dim_; }

  void take(Device& device, const T* qkv, std::size_t i, T* heads) const {
    const std::int64_t width = bytes(heads_[i] * head_dim_);
    kernels::copy_2d(device, qkv + begin(i), heads, rows_, width, bytes(stride_), width);
  }
  void put(Device& device, const T* heads, std::size_t i, T* qkv) const {
    const std::int64_t width = bytes(heads_[i] * head_dim_);
    kernels::copy_2d(device, heads, qkv + begin(i), rows_, width, width, bytes(stride_));
  }

  double epsilon_;
  std::int64_t rows_;
  std::array<std::int64_t, 2> heads_;
  std::int64_t head_dim_, stride_;
  std::array<parameter_ptr<Precision, Device>, 2> weights_;
};

PLAIT_COMPILED_TEMPLATE(class head_norms<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class head_norms<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class head_norms<double, cpu>)

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
