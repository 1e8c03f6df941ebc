// The sizes of a transformer, as far as its time and memory depend on them, and how a program computes it. It is no
// model: llama_shape.hpp makes a shape from a Llama's configuration.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "plait/core/error.hpp"
#include "plait/plan/hardware.hpp"

namespace plait::planner {

/// A decoder of `layers` blocks between an embedding and an output projection. Blocks are equal, but for the first ones
/// of a model with experts.
struct transformer_shape {
  std::int64_t vocab = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0;
  bool gated = true;            ///< the MLP has a gate beside its wide projection (SwiGLU); else one projection (GeLU)
  bool tied = false;            ///< the output projection is the embedding
  bool biases = false;          ///< on all products, and in norms (GPT)
  bool dropout = false;         ///< after attention's scores, and before each residual addition
  std::int64_t positions = 0;   ///< learned embeddings of positions; 0: rotary
  std::int64_t window = 0;      ///< position i sees j if i - window < j <= i; 0: all j <= i
  std::int64_t experts = 0;     ///< MLPs of a block, each `ffn` wide, with a router before them; 0: one for all tokens
  std::int64_t chosen = 0;      ///< of them, those that a token passes
  std::int64_t shared_ffn = 0;  ///< the width of an MLP beside experts, which all tokens pass; 0: there is none
  bool shared_gate = false;     ///< what that MLP makes of a token is multiplied by a gate
  bool limited = false;         ///< experts have a limit, of their even share or more
  std::int64_t dense_layers = 0, first_ffn = 0;  ///< the first blocks, with an MLP of this width in place of experts
  bool qk_norm = false;                          ///< each head's query and key are normalised
  bool qk_norm_over_heads = false;               ///< or all queries of a token, and all keys, which ranks gather

  double query_width() const { return static_cast<double>(heads * head_dim); }
  double kv_width() const { return static_cast<double>(kv_heads * head_dim); }
  /// Wide projections of an MLP.
  double wide_products() const { return gated ? 2 : 1; }

  /// Trained values of one MLP, or of one expert.
  double mlp_matrices() const { return static_cast<double>(hidden) * (wide_products() + 1) * static_cast<double>(ffn); }
  /// The width of the MLP that all tokens pass.
  std::int64_t dense_ffn() const { return experts == 0 ? ffn : shared_ffn; }
  /// Trained values of one block without its experts: matrices alone, as they are cut by tensor parallelism.
  double layer_matrices() const {
    const double attention = static_cast<double>(hidden) * (2 * query_width() + 2 * kv_width());
    return attention + static_cast<double>(hidden) * (wide_products() + 1) * static_cast<double>(dense_ffn());
  }
  /// The model of blocks as the first ones are.
  transformer_shape of_first_blocks() const {
    transformer_shape m = *this;
    m.experts = m.chosen = m.shared_ffn = m.dense_layers = m.first_ffn = 0;
    m.shared_gate = m.limited = false, m.ffn = first_ffn;
    return m;
  }
  /// Those of all experts of a block, and of its router.
  double layer_experts() const { return static_cast<double>(experts) * mlp_matrices(); }
  double layer_router() const { return static_cast<double>(experts * hidden); }
  /// Trained values of one block that every tensor-parallel rank has: norms, the biases of row-parallel products, a
  /// router and a gate.
  double layer_vectors() const {
    return static_cast<double>(hidden) * ((biases ? 6 : 2) + (shared_gate ? 1 : 0)) + layer_router() +
           (qk_norm_over_heads ? query_width() + kv_width() : static_cast<double>(qk_norm ? 2 * head_dim : 0));
  }
  /// Biases of a block that are cut by tensor parallelism.
  double layer_cut_biases() const {
    const double wide = wide_products() * static_cast<double>(dense_ffn());
    return biases ? query_width() + 2 * kv_width() + wide : 0;
  }
  double layer_parameters() const { return layer_matrices() + layer_vectors() + layer_cut_biases(); }
  double embedding_parameters() const { return static_cast<double>((vocab + positions) * hidden); }
  /// Trained values of the whole model. A tied output projection counts once.
  double parameters() const {
    const double first = dense_layers > 0 ? of_first_blocks().layer_parameters() : 0;
    return static_cast<double>(layers - dense_layers) * (layer_parameters() + layer_experts()) +
           static_cast<double>(dense_layers) * first + embedding_parameters() +
           (tied ? 0 : static_cast<double>(vocab * hidden)) + static_cast<double>(hidden) * (biases ? 2 : 1);
  }

  /// Part of the square of attention's scores that is computed: half of it for a causal mask, less for a window.
  double visible(std::int64_t seq) const {
    const double width = window == 0 || window >= seq ? 1 : static_cast<double>(window) / static_cast<double>(seq);
    return width - width * width / 2;
  }

  /// Operations of a training step for one token, forward and backward, without what is recomputed: 6 for each value of
  /// a matrix that is multiplied with, and 12 heads head_dim seq for the square of scores, of which `counted` counts
  /// (1: all, as in PaLM, appendix B; `visible(seq)`: what a causal kernel computes).
  double operations_per_token(std::int64_t seq, double counted) const {
    const double routed = static_cast<double>(chosen) * (experts == 0 ? 0 : mlp_matrices()) + layer_router();
    const double first = dense_layers > 0 ? of_first_blocks().layer_matrices() : 0;
    const double multiplied = static_cast<double>(layers - dense_layers) * (layer_matrices() + routed) +
                              static_cast<double>(dense_layers) * first + static_cast<double>(vocab * hidden);
    return 6 * multiplied + 12 * static_cast<double>(layers) * query_width() * static_cast<double>(seq) * counted;
  }
};

/// Throws `error` naming the size, its text starting with `source`, unless all sizes can make a model.
inline void validate(const transformer_shape& m, const std::string& source) {
  const auto positive = [&](const char* key, std::int64_t value) {
    if (value < 1 || value > std::numeric_limits<std::int32_t>::max())
      fail({source, ": ", key, " is ", value, "; legal are 1 to ", std::numeric_limits<std::int32_t>::max()});
  };
  positive("vocab", m.vocab);
  positive("hidden", m.hidden);
  positive("layers", m.layers);
  positive("heads", m.heads);
  positive("kv_heads", m.kv_heads);
  positive("head_dim", m.head_dim);
  positive("ffn", m.ffn);
  if (m.heads % m.kv_heads != 0)
    fail(
        {source, ": heads is ", m.heads, " and kv_heads ", m.kv_heads, "; the first must be a multiple of the second"});
  if (m.experts < 0 || (m.experts == 0) != (m.chosen == 0) || m.chosen > m.experts)
    fail({source, ": experts is ", m.experts, " and chosen ", m.chosen,
          "; legal are 0 and 0, or some experts of which a token passes 1 to all"});
  if (m.shared_ffn < 0 || (m.experts == 0 && m.shared_ffn > 0))
    fail({source, ": shared_ffn is ", m.shared_ffn, " and experts ", m.experts,
          "; legal is 0 or more, and 0 without experts"});
  if (m.dense_layers < 0 || m.dense_layers > m.layers || (m.dense_layers == 0) != (m.first_ffn == 0) ||
      m.first_ffn < 0 || (m.experts == 0 && m.dense_layers > 0))
    fail({source, ": dense_layers is ", m.dense_layers, " and first_ffn ", m.first_ffn,
          "; legal are 0 and 0, or up to ", m.layers, " layers in a model of experts and the width of their MLPs"});
  if (m.window < 0 || m.positions < 0)
    fail({source, ": window is ", m.window, " and positions ", m.positions, "; legal is 0 or more"});
}

/// How scores and weighted values are computed. Fused kernels keep no scores; the generations differ in their share of
/// the peak (FlashAttention 1, 2, 3; cuDNN's is as fast as the third).
enum class attention_kernel : std::uint8_t { unfused, flash1, flash2, flash3 };

/// Facts about the program that trains: what it stores, fuses and overlaps. None is fitted.
struct software {
  std::string name = "plait";
  number_kind products = number_kind::bf16;  ///< of the linears' operands; attention has bf16 at most
  attention_kernel attention = attention_kernel::flash3;
  bool fixed_order_attention = false;  ///< cuDNN's gradients in a fixed order, which hold a gradient of each score
  bool fused = true;         ///< norms, rotary positions and activations are a kernel each; else one for each operation
  bool fused_norms = false;  ///< norms are a kernel each even where other operations are not fused
  double loss_bytes = 10;    ///< that pass memory of each logit in its loss, forward and backward
  double weight_bytes = 2;   ///< of a parameter as products read it
  double gradient_bytes = 4;      ///< of a gradient while microbatches add to it
  double optimizer_bytes = 12;    ///< of a parameter's master copy and two moments
  double reduced_bytes = 4;       ///< of a gradient on the wire
  double logit_bytes = 2;         ///< that a logit takes on the rank with the head, of all its copies in its loss
  bool overlaps_tensor = true;    ///< tensor-parallel communication in chunks beside the products
  bool async_tensor = true;       ///< reductions of input gradients beside the products of weight gradients
  bool overlaps_data = true;      ///< data-parallel communication beside the first forward and the last backward passes
  bool overlaps_pipeline = true;  ///< messages between stages beside computation
  bool selective_drops_scores_only = false;  ///< `recompute::selective` makes attention's scores again and no more
  bool delayed_norm = false;                 ///< a step begins before all ranks know the last one's gradient norm
  bool reduces_each_microbatch = false;  ///< with gradients cut, they are reduced after each microbatch and not once
  bool gathers_again =
      false;                  ///< with the sequence cut, inputs of products are gathered again backward, beside nothing
  bool gathers_late = false;  ///< with parameters cut, a backward pass gathers a layer's when the one before is over
  bool packs_gradients = false;  ///< what is reduced after a microbatch is first put side by side, cast and divided
  bool reduces_whole = false;    ///< with the optimizer's state cut, gradients are summed whole, and not into pieces
  bool broadcasts_slices =
      false;  ///< updated pieces come as a broadcast of each, one after the other, before the next step
  bool keeps_gathered = true;      ///< products keep their gathered inputs beside the norms' outputs
  bool keeps_fp8 = false;          ///< of inputs of products in fp8, the fp8 form is kept, not the one it was made from
  bool gathers_masters = false;    ///< with parameters cut, the master copies are gathered: there is no other share
  bool folds_experts = false;      ///< experts are whole, over ranks of tp, cp and dp (`training_layout`)
  bool sends_tokens_once = false;  ///< into a unit of the network, whichever of its experts they are for (DeepEP)
  bool packs =
      true;  ///< what is gathered or scattered along a sequence that is not the outermost dim is copied besides
  bool bare_ends = false;   ///< the first and the last stage of a pipeline may have no block
  bool offloads = true;     ///< activations and the optimizer's state can be in the host's memory
  double host_seconds = 0;  ///< of a layer's forward or backward pass at least, which the host takes to start it

  /// Bytes of an activation.
  double activation_bytes() const { return products == number_kind::f32 ? 4 : 2; }
};

}  // namespace plait::planner
