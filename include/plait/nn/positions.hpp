// Learned positions, and an embedding of tokens that adds them. Rotary positions are not here: self-attention rotates
// queries and keys itself (nn/attention.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/layer_checks.hpp"
#include "plait/nn/other_arrays.hpp"
#include "plait/nn/sequence_order.hpp"

namespace plait {

/// y = x + table[position of the token]: learned positions (GPT-2). `Spec` has samples, tokens and features; the table
/// is [position, features], its features placed as those of `Spec`, and a rank's gradient has the rows of its own
/// tokens: its type says over which axes they are summed.
template <class Precision, spec_like Spec, compute_device Device = cpu>
class learned_positions
    : public layer_types<activation_of<Precision>, Spec, Spec, Device>,
      public other_arrays<learned_positions<Precision, Spec, Device>, activation_of<Precision>, Spec, Spec, Device> {
  using T = activation_of<Precision>;
  static_assert(layout_v<Spec>.dims.size() == 3, "learned positions take [samples, tokens, features]");

 public:
  using other_arrays<learned_positions, T, Spec, Spec, Device>::forward;
  using other_arrays<learned_positions, T, Spec, Spec, Device>::backward;
  struct saved {};

  /// The context gives the size of the dim `position`, at least that of the sequence. `order` is that of the sequence.
  learned_positions(const context<Device>& ctx, const std::string& name, sequence_order order = {},
                    initializer init = {})
      : names_(name) {
    const layout& lies = layout_v<Spec>;
    made_for_ = detail::made_for(ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&lies});
    layout placed;
    placed.dims.push_back({dim_of<position>, {}});
    placed.dims.push_back(lies.dims.back());
    const box part = local_box(lies, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    rows_ = ctx.sizes.of(dim_of<position>);
    if (rows_ < part.global[1])
      fail({name, ": the context gives the dim position the size ", rows_, ", and the sequence has ", part.global[1],
            " tokens; at least as many positions are legal"});
    width_ = part.local[2];
    table_ = std::make_shared<parameter<Precision, Device>>(
        ctx, parameter_info{name + ".weight", {rows_, part.global[2]}, init, true, false, false}, placed, placed, lies);
    if (order.length() == 0 && lies.dims[1].dim == dim_of<zseq>)
      fail({name, ": learned positions of tokens in zigzag order need their sequence_order"});
    if (order.length() == 0) order = sequence_order::original(part.global[1]);
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i < part.local[0]; ++i)
      for (const std::int64_t p : order.positions(part.offset[1], part.local[1])) positions.push_back(p);
    tokens_ = static_cast<std::int64_t>(positions.size());
    positions_ = make_buffer<std::int64_t>(ctx.device, positions.size());
    ctx.device.upload(positions_.data(), positions.data(), positions_.bytes(), ctx.device.main_stream());
  }

  tensor<T, Spec, Device> forward(const microbatch<Device>& mb, const tensor<T, Spec, Device>& x, saved* = nullptr) {
    const range profiled(mb.ctx.device, names_.forward());
    made_for_.require(table_->name(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    tensor<T, Spec, Device> y(mb.ctx);
    detail::require_size(table_->name(), "x", x.size(), y.size());
    kernels::embedding_forward(mb.ctx.device, ids(), table_->used_value(), y.data(), tokens_, width_, std::int64_t{0},
                               rows_, rows_);
    kernels::accumulate(mb.ctx.device, x.data(), y.data(), x.size());
    return y;
  }
  template <spec_like Gradient>
  tensor<T, dual_t<Spec>, Device> backward(const microbatch<Device>& mb, const tensor<T, Spec, Device>&, saved&,
                                           const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, Spec>, among<Spec>, Gradient, Spec>);
    const range profiled(mb.ctx.device, names_.backward());
    made_for_.require(table_->name(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    Device& on = mb.ctx.device;
    tensor<T, dual_t<Spec>, Device> dx(mb.ctx);
    detail::require_size(table_->name(), "dy", dy.size(), dx.size());
    on.copy(dx.data(), dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(T), on.main_stream());
    if (!table_->trainable()) return dx;
    buffer<Device> kept;
    const T* d = dy.data();
    if (mb.deferred) {
      kept = make_buffer<T>(on, static_cast<std::size_t>(dy.size()));
      on.copy(kept.data(), dy.data(), kept.bytes(), on.main_stream());
      d = kept.template data<T>();
    }
    mb.on_weights([this, &on, d, kept = std::move(kept)] {
      const range weights_shown(on, names_.weights());
      detail::with_kernel_sum<T>(on, table_->used_gradient(on), rows_ * width_, [&](auto* sums) {
        kernels::embedding_backward(on, ids(), d, sums, tokens_, width_, std::int64_t{0}, rows_, rows_);
      });
    });
    return dx;
  }
  template <class F>
  void visit(F&& f) {
    f(*names_.checked(table_));
  }

 private:
  const std::int64_t* ids() const { return positions_.template data<std::int64_t>(); }

  detail::layer_names names_;
  detail::made_for made_for_;
  std::int64_t rows_ = 0, width_ = 0, tokens_ = 0;
  buffer<Device> positions_;
  parameter_ptr<Precision, Device> table_;
};

/// An embedding of tokens and then of positions, as a `language_model` takes it.
template <class Precision, class Policy, compute_device Device = cpu>
class positioned_embedding {
 public:
  using input = typename Policy::input;
  using output = typename Policy::output;
  using tokens = embedding<Precision, Policy, Device>;
  using positions = learned_positions<Precision, output, Device>;

  positioned_embedding(tokens t, positions p) : tokens_(std::move(t)), positions_(std::move(p)) {}

  auto forward(const microbatch<Device>& mb, const tensor<std::int64_t, input, Device>& ids) {
    return positions_.forward(mb, tokens_.forward(mb, ids));
  }
  template <class Gradient>
  void backward(const microbatch<Device>& mb, const tensor<std::int64_t, input, Device>& ids, const Gradient& dy) {
    typename positions::saved nothing;
    const tensor<activation_of<Precision>, output, Device> unused;
    tokens_.backward(mb, ids, positions_.backward(mb, unused, nothing, dy));
  }
  const parameter_ptr<Precision, Device>& weight() const { return tokens_.weight(); }
  template <class F>
  void visit(F&& f) {
    tokens_.visit(f);
    positions_.visit(f);
  }

 private:
  tokens tokens_;
  positions positions_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
