// The sizes of a transformer on which its time and memory depend, and facts about the program that computes it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "plait/core/error.hpp"
#include "plait/plan/hardware.hpp"

namespace plait::planner {

/// A decoder of `layers` blocks between an embedding and an output projection. Blocks are equal, except the first ones
/// of a model with experts.
struct transformer_shape {
  std::int64_t vocab = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0;
  bool gated = true;            ///< the MLP has a gate and a wide projection (SwiGLU); else one projection (GeLU)
  bool tied = false;            ///< the output projection is the embedding
  bool biases = false;          ///< on all products, and in norms (GPT)
  bool dropout = false;         ///< after attention's scores, and before each residual addition
  std::int64_t positions = 0;   ///< learned embeddings of positions; 0: rotary
  std::int64_t window = 0;      ///< position i sees j if i - window < j <= i; 0: all j <= i
  std::int64_t experts = 0;     ///< MLPs of a block, each `ffn` wide, with a router before them; 0: one for all tokens
  std::int64_t chosen = 0;      ///< experts that a token passes
  std::int64_t shared_ffn = 0;  ///< the width of a shared expert, an MLP that all tokens pass; 0: there is none
  bool shared_gate = false;     ///< a gate multiplies the shared expert's output
  bool limited = false;         ///< experts have a limit of their even share or more
  std::int64_t dense_layers = 0, first_ffn = 0;  ///< the first blocks, with an MLP of this width in place of experts
  bool qk_norm = false;                          ///< each head's query and key are normalised
  bool qk_norm_over_heads = false;               ///< all queries of a token are normalised together, and all keys

  double query_width() const { return static_cast<double>(heads * head_dim); }
  double kv_width() const { return static_cast<double>(kv_heads * head_dim); }
  /// Returns the number of an MLP's wide projections.
  double wide_products() const { return gated ? 2 : 1; }

  /// Trained values of one MLP, or of one expert.
  double mlp_matrices() const { return static_cast<double>(hidden) * (wide_products() + 1) * static_cast<double>(ffn); }
  /// The width of the MLP that all tokens pass.
  std::int64_t dense_ffn() const { return experts == 0 ? ffn : shared_ffn; }
  /// Trained values of the matrices of one block, without experts. Tensor parallelism cuts them.
  double layer_matrices() const {
    const double attention = static_cast<double>(hidden) * (2 * query_width() + 2 * kv_width());
    return attention + static_cast<double>(hidden) * (wide_products() + 1) * static_cast<double>(dense_ffn());
  }
  /// Returns a model all of whose blocks are like the first ones.
  transformer_shape of_first_blocks() const {
    transformer_shape m = *this;
    m.experts = m.chosen = m.shared_ffn = m.dense_layers = m.first_ffn = 0;
    m.shared_gate = m.limited = false, m.ffn = first_ffn;
    return m;
  }
  /// Trained values of all experts of a block, and of its router.
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

  /// Returns the part of the square of attention's scores that is visible: half for a causal mask, less for a window.
  double visible(std::int64_t seq) const {
    const double width = window == 0 || window >= seq ? 1 : static_cast<double>(window) / static_cast<double>(seq);
    return width - width * width / 2;
  }

  /// Returns the operations of a training step for one token, forward and backward, without recomputation: 6 for each
  /// value of a matrix in a product, and 12 heads head_dim seq for the square of scores. `counted` is the part of the
  /// square that counts (1: all, as in PaLM, appendix B; `visible(seq)`: the part that a causal kernel computes).
  double operations_per_token(std::int64_t seq, double counted) const {
    const double routed = static_cast<double>(chosen) * (experts == 0 ? 0 : mlp_matrices()) + layer_router();
    const double first = dense_layers > 0 ? of_first_blocks().layer_matrices() : 0;
    const double multiplied = static_cast<double>(layers - dense_layers) * (layer_matrices() + routed) +
                              static_cast<double>(dense_layers) * first + static_cast<double>(vocab * hidden);
    return 6 * multiplied + 12 * static_cast<double>(layers) * query_width() * static_cast<double>(seq) * counted;
  }
};

/// Throws `error`, which begins with `source` and names the size, unless all sizes can make a model.
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

/// The kernel of attention. Fused kernels keep no scores. Their generations reach different shares of the peak
/// (FlashAttention 1, 2, 3; cuDNN's is as fast as the third).
enum class attention_kernel : std::uint8_t { unfused, flash1, flash2, flash3 };

/// Facts about the program that trains: what it stores, fuses and overlaps. None is fitted.
struct software {
  std::string name = "plait";
  number_kind products = number_kind::bf16;  ///< type of the linears' operands; attention uses bf16 for narrower types
  attention_kernel attention = attention_kernel::flash3;
  bool fixed_order_attention = false;  ///< cuDNN's gradients in a fixed order, which hold a gradient of each score
  bool fused = true;  ///< norms, rotary positions and activations are one kernel each; else one for each operation
  bool fused_norms = false;     ///< norms are one kernel each even if other operations are not fused
  double loss_bytes = 10;       ///< bytes of memory traffic for each logit in its loss, forward and backward
  double weight_bytes = 2;      ///< bytes of a parameter as products read it
  double gradient_bytes = 4;    ///< bytes of a gradient while microbatches add to it
  double optimizer_bytes = 12;  ///< bytes of a parameter's master copy and two moments
  double reduced_bytes = 4;     ///< bytes of a gradient on the wire
  double logit_bytes = 2;       ///< bytes of all copies of a logit on the rank with the head
  bool overlaps_tensor = true;  ///< tensor-parallel communication runs in chunks during the products
  bool async_tensor = true;     ///< input gradients are reduced during the products of weight gradients
  bool overlaps_data = true;    ///< data-parallel communication runs during the first forward and last backward passes
  bool overlaps_pipeline = true;             ///< messages between stages travel during computation
  bool selective_drops_scores_only = false;  ///< `recompute::selective` computes only attention's scores again
  bool delayed_norm = false;                 ///< a step begins before all ranks know the last one's gradient norm
  bool reduces_each_microbatch = false;      ///< with gradients cut, they are reduced after each microbatch
  bool gathers_again = false;    ///< with the sequence cut, inputs are gathered again backward, without overlap
  bool gathers_late = false;     ///< with parameters cut, a backward pass gathers a layer when the one before has ended
  bool packs_gradients = false;  ///< gradients of a microbatch are copied together, cast and divided before a reduction
  bool reduces_whole = false;    ///< with the optimizer's state cut, every rank gets the whole sums of gradients
  bool broadcasts_slices = false;  ///< updated pieces are broadcast one after the other before the next step
  bool keeps_gathered = true;      ///< products keep their gathered inputs in addition to the norms' outputs
  bool keeps_fp8 = false;          ///< products in fp8 keep their inputs in fp8 only
  bool gathers_masters = false;    ///< with parameters cut, the master copies are gathered: there is no other copy
  bool folds_experts = false;      ///< experts are whole, over ranks of tp, cp and dp (`training_layout`)
  bool sends_tokens_once = false;  ///< a token is sent once into a unit of the network for all experts there (DeepEP)
  bool packs = true;               ///< gathers and scatters along a sequence that is not the outermost dim also copy
  bool bare_ends = false;          ///< the first and the last stage of a pipeline may have no block
  bool chunks_loss = true;         ///< head and loss can be computed for one chunk of tokens after the other
  bool offloads = true;            ///< activations and the optimizer's state can be in host memory
  double host_seconds = 0;         ///< least time of a layer's forward or backward pass, in which the host starts it

  /// Bytes of an activation.
  double activation_bytes() const { return products == number_kind::f32 ? 4 : 2; }
};

}  // namespace plait::planner
