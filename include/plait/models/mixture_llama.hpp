// Llama with a mixture of experts instead of MLPs, under any strategy: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and
// dots.llm1.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/moe/expert_mlp.hpp"
#include "plait/nn/strategy.hpp"

namespace plait {
namespace detail {

/// The mixture of a Llama's blocks.
template <class Precision, class S, compute_device Device>
struct llama_mixture {
  using layer = expert_mlp<Precision, S, Device>;
  using width = spec<typename expert_width<S>::type>;
  static void check(const llama_config& config) {
    if (config.mixture.experts < 1) fail("mixture_llama: num_experts is 0; legal is at least 1, and llama has none");
  }
  static layer make(const context<Device>& ctx, const std::string& name, const llama_config& config,
                    const llama_options& options, std::int64_t layer_index) {
    const mixture_config& m = config.mixture;
    const initializer init{0, config.initializer_range};
    if (layer_index < m.dense_layers) return layer(ctx, name, init, options.mlp);
    if (options.expert_bias_rate != 0 && !m.correction_bias)
      fail({"mixture_llama: llama_options::expert_bias_rate is ", options.expert_bias_rate,
            ", and the configuration has no correction bias; legal is 0"});
    return layer(ctx, name,
                 {.router = m.router,
                  .init = init,
                  .losses = options.mixture_losses,
                  .limit = {options.expert_limit, sequence_order_of<S>(ctx.ranks.shape(), ctx.sizes)},
                  .padded = options.padded_experts,
                  .bias_rate = m.correction_bias ? std::optional(options.expert_bias_rate) : std::nullopt,
                  .lora = options.experts},
                 m.shared_ffn > 0, {init, m.shared_gate, options.mlp});
  }
};

}  // namespace detail

/// A `llama` with a mixture of experts after attention (`llama_config::mixture`), in all layers except the first
/// `dense_layers`. Parameters have Hugging Face's names. The experts of a layer are one tensor, such as
/// `model.layers.0.mlp.experts.gate_proj.weight` [experts, width, hidden]; directories store each expert separately.
/// `llama_options::mlp` gives adapters to the shared experts and to the MLPs of the first layers.
/// `llama_options::experts` gives them to each expert of a mixture.
template <class Precision, mixture_strategy S, compute_device Device = cpu>
class mixture_llama : public detail::llama_of<Precision, S, Device, detail::llama_mixture<Precision, S, Device>> {
 public:
  using mixture_llama::llama_of::llama_of;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
