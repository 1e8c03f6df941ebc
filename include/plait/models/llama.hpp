// Llama and related models under any strategy, for training and scoring.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/models/language_model.hpp"
#include "plait/models/llama_config.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/moe/router_losses.hpp"
#include "plait/nn/norm.hpp"
#include "plait/parallel/placement.hpp"

namespace plait {

/// Options of a model, in addition to its configuration.
struct llama_options {
  layer_recompute keep{};  ///< one mode for all layers, or one per layer
  double dropout = 0;      ///< on the output of each residual branch
  cross_entropy_settings loss{};
  std::int64_t loss_chunks = 1;  ///< `language_model_options::loss_chunks`
  /// The context-parallel policy and adapters. The configuration determines its frequencies, biases, norms and
  /// initialisers.
  attention_options attention{};
  mlp_lora mlp{};      ///< of MLPs and shared experts; attention's adapters are in `attention`
  mlp_lora experts{};  ///< of a mixture's experts
  router_losses mixture_losses{};
  double expert_limit = 0;      ///< `expert_limit::factor` of each mixture
  bool padded_experts = false;  ///< `moe_options::padded` of each mixture
  double expert_bias_rate = 0;  ///< `moe_options::bias_rate` of each mixture whose configuration has a bias
  /// The number of chunks in which collectives of all linears overlap their products (nn/linear/policy.hpp), if it is
  /// chosen at run time; 0: the strategy's.
  std::int64_t overlap = 0;
};

/// The padded size of the vocabulary: the next multiple of the number of ranks that shard it.
inline std::int64_t padded_vocab(std::int64_t vocab, std::int64_t ranks) { return (vocab + ranks - 1) / ranks * ranks; }

/// Global sizes of all dims of a Llama. `microbatch` is the number of sequences in a microbatch over the whole mesh.
/// With `leaves` for deterministic sums, the vocabulary is a multiple of them on every mesh. Ranks then have whole
/// leaves of features and of the sequence (`in_whole_leaves`). Throws if the vocabulary has fewer leaves than ranks.
template <strategy S>
dim_sizes llama_sizes(const llama_config& c, const mesh_shape& mesh, std::int64_t microbatch, std::int64_t sequence,
                      const deterministic_leaves& leaves = {}) {
  dim_sizes sizes;
  sizes.set(dim_of<batch>, microbatch);
  sizes.set(dim_of<seq>, sequence);
  sizes.set(dim_of<zseq>, sequence);
  sizes.set(dim_of<hidden>, c.hidden);
  // If ranks hold different numbers of kv heads, the query heads of one kv head stay together.
  const std::int64_t key_ranks = mesh.size(layout_v<spec<typename S::key_heads>>.dims[0].axes);
  sizes.set(dim_of<heads>, c.heads, c.kv_heads % key_ranks == 0 ? 1 : c.heads / c.kv_heads);
  sizes.set(dim_of<kv_heads>, c.kv_heads);
  sizes.set(dim_of<head_dim>, c.head_dim);
  sizes.set(dim_of<ffn>, c.ffn);
  if (c.mixture.experts > 0) sizes.set(dim_of<experts>, c.mixture.experts);
  if (c.mixture.shared_ffn > 0) sizes.set(dim_of<shared_ffn>, c.mixture.shared_ffn), sizes.set(dim_of<shared_gate>, 1);
  if (c.mixture.dense_layers > 0) sizes.set(dim_of<dense_ffn>, c.mixture.dense_ffn);
  const axis_list by_vocab = layout_v<spec<typename S::vocabulary>>.dims[0].axes;
  if (leaves && leaves.features < mesh.size(by_vocab))
    fail({"llama: deterministic_leaves::features = ", leaves.features, " leaves of the vocabulary, which ",
          mesh.size(by_vocab), " ranks of ", describe(by_vocab), " cannot divide; legal are ", mesh.size(by_vocab),
          " or more"});
  sizes.set(dim_of<vocab>, padded_vocab(c.vocab, leaves ? leaves.features : mesh.size(by_vocab)));
  return in_whole_leaves<S>(sizes, leaves, mesh, c.mixture.experts > 0);
}

namespace detail {

/// The layers of a Llama under a strategy, with `FeedForward` after attention.
template <class Precision, class S, compute_device Device, class FeedForward>
struct llama_layers {
  using specs = transformer_specs<S>;
  using norm = rms_norm<Precision, typename specs::residual, Device>;
  using attention = self_attention<Precision, S, Device>;
  using block = sequential<residual<norm, attention>, residual<norm, FeedForward>>;
  using embedding = plait::embedding<Precision, typename specs::embedding, Device>;
  using output = linear<Precision, typename specs::head, Device>;
  using head = sequential<norm, output>;
  using loss = cross_entropy_loss<Precision, typename specs::logits, typename specs::tokens, Device>;
  using model = language_model<embedding, block, head, loss>;
};

/// A Llama whose blocks have a `FeedForward`, made by `make(ctx, name, config, options, layer)`: see `llama`.
template <class Precision, class S, compute_device Device, class FeedForward>
class llama_of : public llama_layers<Precision, S, Device, typename FeedForward::layer>::model {
  using layers = llama_layers<Precision, S, Device, typename FeedForward::layer>;
  using base = typename layers::model;

 public:
  using specs = transformer_specs<S>;

  llama_of(const context<Device>& ctx, const llama_config& config, llama_options options = {})
      : llama_of(ctx, config, options, {0, config.layers, true, true}) {}

  /// Constructs one pipeline stage with the layers `part`; `first_stage` is that of `language_model`.
  llama_of(const context<Device>& ctx, const llama_config& config, llama_options options, stage_layers part,
           const llama_of* first_stage = nullptr)
      : base(
            ctx, config.vocab, checked(ctx, config, options, part),
            {options.keep, options.attention.documents, options.dropout, options.loss,
             sequence_order_of<S>(ctx.ranks.shape(), ctx.sizes), options.loss_chunks},
            first_stage,
            [&] {
              return typename layers::embedding(ctx, config.vocab, table_name,
                                                {.init = {0, config.initializer_range},
                                                 .tied_across_stages = config.tie_embeddings && !part.last,
                                                 .padding_row = config.pad_token});
            },
            [&](std::int64_t i) { return make_block(ctx, config, options, i); },
            [&](const context<Device>& of_head, const parameter_ptr<Precision, Device>& table) {
              return make_head(of_head, config, options, table);
            }),
        config_(config),
        options_(options) {}

  const llama_config& config() const { return config_; }
  const llama_options& options() const { return options_; }

 private:
  static constexpr const char* table_name = "model.embed_tokens";
  /// Whether a rank has the token ids of exactly the tokens whose queries it has.
  static constexpr bool documents_fit =
      layout_v<typename specs::tokens>.dims[0] == layout_v<typename specs::queries>.dims[0] &&
      layout_v<typename specs::tokens>.dims[1] == layout_v<typename specs::queries>.dims[1];

  static stage_layers checked(const context<Device>& ctx, const llama_config& config, const llama_options& options,
                              const stage_layers& part) {
    validate(config, "llama");
    FeedForward::check(config);
    if (part.begin < 0 || part.begin > part.end || part.end > config.layers)
      fail({"llama: layers ", part.begin, " to ", part.end, " of a model of ", config.layers});
    if (options.attention.documents && !documents_fit)
      fail("llama: packed documents need a strategy that shards the vocabulary over the axes of the heads");
    const axis_list by_heads = detail::sharding_axes(layout_v<typename specs::query_dims>),
                    by_ffn = detail::sharding_axes(layout_v<typename FeedForward::width>),
                    axes = union_of(by_heads, by_ffn);
    if (by_heads == by_ffn) check_tensor_ranks(config, ctx.ranks.shape().size(axes), "llama");
    if (options.overlap > 1 && ctx.ranks.shape().size(axes) == 1)
      fail({"llama: overlap in ", options.overlap, " chunks hides nothing: there is one rank along ", describe(axes),
            ", so that linears send nothing; legal is 1, or more ranks there"});
    return part;
  }

  static typename layers::block make_block(const context<Device>& ctx, const llama_config& config,
                                           const llama_options& options, std::int64_t i) {
    const std::string name = cat({"model.layers.", i});
    const layout stored = layout_v<typename specs::norm_weight>;
    const initializer init{0, config.initializer_range};
    const sequence_order order = sequence_order_of<S>(ctx.ranks.shape(), ctx.sizes);
    attention_options attention = options.attention;
    attention.frequencies = rotary_frequencies(config);
    attention.qkv_bias = config.attention_bias || config.qkv_bias;
    attention.output_bias = config.attention_bias;
    attention.qk_norm_epsilon = config.qk_norm ? config.rms_eps : 0;
    attention.qk_norm_over_heads = config.qk_norm_over_heads;
    if (attention.mask == kernels::attention_mask{})
      attention.mask = kernels::attention_mask::window_or_causal(config.sliding_window);
    attention.init = attention.output_init = init;
    attention.overlap = options.overlap;
    using norm = typename layers::norm;
    return typename layers::block({norm(ctx, config.rms_eps, name + ".input_layernorm", stored),
                                   typename layers::attention(ctx, name + ".self_attn", std::move(attention)),
                                   {options.dropout, name + ".self_attn", order}},
                                  {norm(ctx, config.rms_eps, name + ".post_attention_layernorm", stored),
                                   FeedForward::make(ctx, name + ".mlp", config, options, i),
                                   {options.dropout, name + ".mlp", order}});
  }

  static typename layers::head make_head(const context<Device>& ctx, const llama_config& config,
                                         const llama_options& options, const parameter_ptr<Precision, Device>& table) {
    using output = typename layers::output;
    typename output::options how{.shape = {config.vocab, config.hidden},
                                 .init = {0, config.initializer_range},
                                 .hidden_layer = false,
                                 .overlap = options.overlap};
    if (config.tie_embeddings) how.tied = table, how.tied_across_stages = true;
    return typename layers::head(
        typename layers::norm(ctx, config.rms_eps, "model.norm", layout_v<typename specs::norm_weight>),
        output(ctx, config.tie_embeddings ? table_name : "lm_head", std::move(how)));
  }

  llama_config config_;
  llama_options options_;
};

/// The SwiGLU MLP of a Llama.
template <class Precision, class S, compute_device Device>
struct llama_mlp {
  using layer = swiglu_mlp<Precision, S, Device>;
  using width = typename transformer_specs<S>::ffn_dims;
  static void check(const llama_config& config) {
    if (config.mixture.experts > 0)
      fail({"llama: num_experts is ", config.mixture.experts, "; legal is 0, and mixture_llama has experts"});
  }
  static layer make(const context<Device>& ctx, const std::string& name, const llama_config& config,
                    const llama_options& options, std::int64_t) {
    if (options.mixture_losses.any())
      fail({"llama: llama_options::mixture_losses, and ", name, " is not a mixture; legal is none of them"});
    if (options.experts.any())
      fail({"llama: llama_options::experts, and ", name, " is not a mixture; legal is a lora of rank 0"});
    return layer(ctx, name, {0, config.initializer_range}, config.mlp_bias, options.mlp, options.overlap);
  }
};

}  // namespace detail

/// Llama (Touvron et al. 2023) and related models (Mistral, Qwen2, Qwen3) under a strategy, from token ids to the
/// summed loss. Its layers are: embedding, blocks of attention and SwiGLU MLP on a residual stream, final norm, output
/// projection (the embedding's table if tied), cross-entropy. Parameters have Hugging Face's names and shapes. An
/// object is a whole model, or one pipeline stage.
template <class Precision, class S, compute_device Device = cpu>
class llama : public detail::llama_of<Precision, S, Device, detail::llama_mlp<Precision, S, Device>> {
 public:
  using llama::llama_of::llama_of;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
