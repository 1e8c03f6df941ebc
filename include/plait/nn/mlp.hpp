// The gated MLP of Llama, as a layer under a strategy. An MLP without a gate is a `sequential`, as in
// examples/gpt2.hpp.
#pragma once

#include <string>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {

/// Low-rank adapters of an MLP's linears.
struct mlp_lora {
  lora_options gate{}, up{}, down{};

  constexpr bool any() const { return gate.rank != 0 || up.rank != 0 || down.rank != 0; }
};

/// The caller's memory for an MLP's weights (`parameter_memory`), this rank's part. The weights of gate and up are
/// contiguous, [2 ffn local, hidden], and so are their biases.
template <class Precision>
struct mlp_memory {
  parameter_memory<Precision> gate_up{}, down{};
};

/// SwiGLU MLP (Shazeer 2020), down(silu(gate x) * up x), under a strategy. Gate and up are one product on one gathered
/// input. Parameters are named `NAME.gate_proj.weight`, `NAME.up_proj.weight`, `NAME.down_proj.weight`.
template <class Precision, class S, compute_device Device = cpu>
class swiglu_mlp : public layer_types<activation_of<Precision>, typename transformer_specs<S>::branch_input,
                                      typename transformer_specs<S>::branch_output, Device>,
                   public other_arrays<swiglu_mlp<Precision, S, Device>, activation_of<Precision>,
                                       typename transformer_specs<S>::branch_input,
                                       typename transformer_specs<S>::branch_output, Device> {
  using T = activation_of<Precision>;
  using specs = transformer_specs<S>;
  using gate_up_value = detail::linear_value<typename specs::up, typename specs::up>;
  using down_value = detail::linear_value<typename specs::down>;

 public:
  using input = typename specs::branch_input;
  using output = typename specs::branch_output;
  using other_arrays<swiglu_mlp, T, input, output, Device>::forward;
  using other_arrays<swiglu_mlp, T, input, output, Device>::backward;
  static_assert(enforced<gate_up_value, S, input, typename specs::up::weight>);
  static_assert(enforced<down_value, S, input, typename specs::down::weight>);

  struct saved {
    linear_saved<Device> in, out;
    buffer<Device> gate_up;    ///< [rows, 2, ffn local]
    buffer<Device> activated;  ///< [rows, ffn local]; empty if recomputed

    template <class F>
    void visit(F&& f) {
      in.visit(f);
      out.visit(f);
      f(gate_up);
      f(activated);
    }
  };

  /// `overlap` is that of `linear_options`; `memory` is the caller's memory, if it gives any.
  swiglu_mlp(const context<Device>& ctx, const std::string& name, initializer init = {}, bool bias = false,
             const mlp_lora& lora = {}, std::int64_t overlap = 0, const mlp_memory<Precision>& memory = {})
      : names_(name),
        gate_up_(ctx, gate_up_value::derivation,
                 {detail::describe_branch<typename specs::up>(ctx, name + ".gate_proj", init, bias, lora.gate),
                  detail::describe_branch<typename specs::up>(ctx, name + ".up_proj", init, bias, lora.up)},
                 memory.gate_up, {}, detail::chosen_overlap<typename specs::up>(overlap, name)),
        down_(ctx, down_value::derivation,
              {detail::describe_branch<typename specs::down>(ctx, name + ".down_proj", init, bias, lora.down)},
              memory.down, {}, detail::chosen_overlap<typename specs::up>(overlap, name)) {
    enforce_boundary<input>(ctx, name + ": input");
    detail::require_all_parts(name, {{"gate_up", memory.gate_up.names_any()}, {"down", memory.down.names_any()}});
  }

  /// Adds `addend`, such as the residual stream, to the output unless it is null.
  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                    saved* keep = nullptr, const tensor<T, output, Device>* addend = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.forward());
    detail::require_size(gate_up_.weight(0)->name(), "x", x.size(), gate_up_.input_size());
    if (keep) *keep = {};  // drops the values of an earlier pass
    const std::int64_t rows = gate_up_.rows(), width = gate_up_.columns() / 2;
    auto gate_up = make_buffer<T>(ctx.device, static_cast<std::size_t>(2 * rows * width));
    auto activated = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows * width));
    gate_up_.forward(mb, x.data(), gate_up.template data<T>(), keep ? &keep->in : nullptr);
    kernels::swiglu_forward(ctx.device, gate_up.template data<T>(), activated.template data<T>(), rows, width);
    tensor<T, output, Device> y(ctx);
    down_.forward(mb, activated.template data<T>(), y.data(), keep ? &keep->out : nullptr,
                  detail::addend_array(down_.weight(0)->name(), addend, down_.output_size()));
    if (keep) {
      keep->gate_up = std::move(gate_up);
      if (mb.policy == recompute::none) keep->activated = std::move(activated);
    }
    detail::note_forward(mb, *this, layout_v<input>, gate_up_.weight(0)->name(), x.data(), x.size());
    return y;
  }

  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                            saved& kept, const tensor<T, Gradient, Device>& dy) {
    const context<Device>& ctx = mb.ctx;
    static_assert(enforced<detail::dual_value_check<Gradient, output>, S, Gradient, output>);
    const range profiled(ctx.device, names_.backward());
    detail::require_size(gate_up_.weight(0)->name(), "x", x.size(), gate_up_.input_size());
    detail::require_size(gate_up_.weight(0)->name(), "dy", dy.size(), down_.output_size());
    detail::note_backward(mb, detail::dual_v<output>, down_.weight(0)->name(), dy.data(), dy.size());
    const std::int64_t rows = gate_up_.rows(), width = gate_up_.columns() / 2;
    if (kept.gate_up.empty() && rows * width != 0)
      fail(
          {names_.layer(), ": backward without what forward keeps: give forward a `saved`, and backward the same one"});
    if (kept.activated.empty()) {
      kept.activated = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows * width));
      kernels::swiglu_forward(ctx.device, kept.gate_up.template data<T>(), kept.activated.template data<T>(), rows,
                              width);
    }
    auto dactivated = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows * width));
    down_.backward(mb, kept.activated.template data<T>(), kept.out, dy.data(), dactivated.template data<T>());
    auto dgate_up = make_buffer<T>(ctx.device, static_cast<std::size_t>(2 * rows * width));
    kernels::swiglu_backward(ctx.device, kept.gate_up.template data<T>(), dactivated.template data<T>(),
                             dgate_up.template data<T>(), rows, width);
    tensor<T, dual_t<input>, Device> dx(ctx);
    gate_up_.backward(mb, x.data(), kept.in, dgate_up.template data<T>(), dx.data());
    return dx;
  }

  /// Prepares the MLP for the batches and lengths of this context (`linear::resize`).
  void resize(const context<Device>& ctx) {
    gate_up_.resize(ctx, gate_up_value::derivation);
    down_.resize(ctx, down_value::derivation);
  }
  /// Binds all weights to other memory that the caller owns (`linear::rebind`).
  void rebind(const mlp_memory<Precision>& memory) {
    gate_up_.rebind(memory.gate_up, detail::rebinding::checked);
    down_.rebind(memory.down);
    gate_up_.rebind(memory.gate_up);
  }

  bool adds_in_product() const { return down_.adds_in_product(); }
  template <class F>
  void visit(F&& f) {
    gate_up_.visit(f);
    down_.visit(f);
  }

 private:
  detail::layer_names names_;
  linear_core<Precision, Device> gate_up_;
  linear_core<Precision, Device> down_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
