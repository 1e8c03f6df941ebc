#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/kernels/rope_frequencies.hpp"
#include "plait/layout/errors.hpp"
#include "plait/models/llama_config.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/cross_entropy.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/parallel/stage.hpp"

namespace plait {

/// What may be chosen for a model beside its configuration.
struct llama_options {
  recompute keep = recompute::none;
  double dropout = 0;  ///< on the output of each residual branch
  cross_entropy_settings loss{};
  attention_options attention{};
};

/// The vocabulary as it is laid out: the next multiple of the ranks that shard it.
inline std::int64_t padded_vocab(std::int64_t vocab, std::int64_t ranks) { return (vocab + ranks - 1) / ranks * ranks; }

/// Global sizes of all dims of a Llama. `microbatch` is the number of sequences in a microbatch over the whole mesh.
template <strategy S>
dim_sizes llama_sizes(const llama_config& c, const mesh_shape& mesh, std::int64_t microbatch, std::int64_t sequence) {
  dim_sizes sizes;
  sizes.set(dim_of<batch>, microbatch);
  sizes.set(dim_of<seq>, sequence);
  sizes.set(dim_of<zseq>, sequence);
  sizes.set(dim_of<hidden>, c.hidden);
  sizes.set(dim_of<heads>, c.heads);
  sizes.set(dim_of<kv_heads>, c.kv_heads);
  sizes.set(dim_of<head_dim>, c.head_dim);
  sizes.set(dim_of<ffn>, c.ffn);
  sizes.set(dim_of<vocab>, padded_vocab(c.vocab, mesh.size(layout_v<spec<typename S::vocab>>.dims[0].axes)));
  return sizes;
}

/// Llama (Touvron et al. 2023) under a strategy, from token ids to the summed loss: embedding, blocks of attention and
/// SwiGLU MLP on a residual stream, final norm, output projection (the embedding's table if tied), cross-entropy.
/// Parameters have Hugging Face's names and shapes. An object is a whole model, or one stage of a pipeline.
template <class Precision, class S, compute_device Device = cpu>
class llama {
  using T = activation_of<Precision>;

 public:
  using precision_type = Precision;
  using specs = transformer_specs<S>;
  using residual_spec = typename specs::residual;
  using attention_branch = residual<rms_norm<Precision, residual_spec, Device>, self_attention<Precision, S, Device>>;
  using mlp_branch = residual<rms_norm<Precision, residual_spec, Device>, swiglu_mlp<Precision, S, Device>>;
  using block = sequential<attention_branch, mlp_branch>;
  using embedding_layer = plait::embedding<Precision, typename specs::embedding, Device>;
  using head = linear<Precision, typename specs::head, Device>;
  using loss_layer = cross_entropy_loss<Precision, typename specs::logits, typename specs::tokens, Device>;
  using tokens = tensor<std::int64_t, typename specs::tokens, Device>;
  /// Where the document of each token begins, as a position in its sequence: see `context::document_starts`.
  using documents = tensor<std::int32_t, typename specs::tokens, Device>;
  using logits = tensor<T, typename specs::logits, Device>;
  using loss_sum = tensor<double, typename loss_layer::output, Device>;
  using loss_seed = tensor<double, dual_t<typename loss_layer::output>, Device>;
  using activation = tensor<T, residual_spec, Device>;
  using slope = tensor<T, dual_t<residual_spec>, Device>;

  /// Everything that a forward pass keeps.
  struct saved {
    std::vector<activation> inputs;  ///< of each block, then, in the last stage, of the final norm
    std::vector<typename block::saved> blocks;
    typename rms_norm<Precision, residual_spec, Device>::saved norm;
    activation normalized;
    typename head::saved out;
    logits scores;
    typename loss_layer::saved loss;
    const std::int32_t* document_starts = nullptr;  ///< the caller's
  };

  llama(context<Device>& ctx, const llama_config& config, llama_options options = {})
      : llama(ctx, config, options, {0, config.layers, true, true}) {}

  /// One stage of a pipeline: `part` of the layers. Where embeddings are tied, the last stage shares the table of
  /// `first_stage`, the stage of this rank that has it; without one it owns a copy, whose gradient has to be added to
  /// that of the first stage (see `tied_table`).
  llama(context<Device>& ctx, const llama_config& config, llama_options options, stage_layers part,
        llama* first_stage = nullptr)
      : config_(config), options_(options), part_(part) {
    if (part.begin < 0 || part.begin > part.end || part.end > config.layers)
      fail("llama: layers " + std::to_string(part.begin) + " to " + std::to_string(part.end) + " of a model of " +
           std::to_string(config.layers));
    if (options.attention.documents && !documents_fit)
      fail("llama: packed documents need a strategy that shards the vocabulary over the axes of the heads");
    std::optional<kernels::llama3_rope_scaling> scaling;
    if (config.rope.kind == rope_kind::llama3)
      scaling = {config.rope.factor, config.rope.low_freq_factor, config.rope.high_freq_factor,
                 static_cast<double>(config.rope.original_max_position)};
    const std::vector<double> frequencies =
        kernels::rope_inverse_frequencies(config.head_dim, config.rope_theta, scaling);
    const initializer init{0, config.initializer_range};
    if (part.first) embed_ = std::make_unique<embedding_layer>(ctx, config.vocab, table_name, init);
    for (std::int64_t i = part.begin; i < part.end; ++i) blocks_.push_back(make_block(ctx, i, frequencies));
    if (!part.last) return;
    const std::vector<std::int64_t> shape{config.vocab, config.hidden};
    llama* const owner = part.first ? this : first_stage;
    if (!config.tie_embeddings) {
      head_ = std::make_unique<head>(ctx, "lm_head", shape, nullptr, nullptr, init);
    } else if (owner == nullptr) {
      head_ = std::make_unique<head>(ctx, table_name, shape, nullptr, nullptr, init);
    } else {
      parameter_base<Precision, Device>& table = owner->embed_->weight();
      head_ = std::make_unique<head>(ctx, "lm_head", shape, table.used_value(), table.used_gradient());
      shares_table_ = true;
      if (!equivalent(head_->parameter().used(), table.used()))
        fail("lm_head: the tied embedding is used in two layouts, " + describe(table.used()) + " and " +
             describe(head_->parameter().used()) + "; the strategy must shard the vocabulary alike");
    }
    norm_.emplace(ctx, config.rms_eps, "model.norm", layout_v<typename specs::norm_weight>);
    loss_.emplace(ctx, config.vocab, options.loss);
  }

  const llama_config& config() const { return config_; }
  const llama_options& options() const { return options_; }
  const stage_layers& part() const { return part_; }

  /// Next-token scores [batch, seq, vocab] of the whole model; nothing is kept.
  logits score(context<Device>& ctx, const tokens& ids) {
    return forward_scores(ctx, forward_layers(ctx, ids, {}, nullptr), nullptr);
  }

  /// The sum of the losses of the counted tokens, partial over the axes that shard them. `kept` is for `backward`; null
  /// if there will be none. `starts` is for sequences packed from documents (`attention_options::documents`), and lives
  /// as long as the ids.
  loss_sum forward(context<Device>& ctx, const tokens& ids, const tokens& labels, saved* kept,
                   const documents* starts = nullptr) {
    const with_documents scope(ctx, starts ? starts->data() : ctx.document_starts);
    return forward_loss(ctx, forward_layers(ctx, ids, {}, kept), labels, kept);
  }

  /// Adds to every parameter's `used_gradient`. `seed` is the gradient of the summed loss: 1 / (counted tokens of the
  /// global batch).
  void backward(context<Device>& ctx, const tokens& ids, const tokens& labels, saved& kept, const loss_seed& seed) {
    backward_layers(ctx, ids, kept, backward_loss(ctx, labels, kept, seed));
  }

  /// The layers of this stage: `x` is the output of the stage before, and empty in the first one, which takes the ids.
  activation forward_layers(context<Device>& ctx, const tokens& ids, activation x, saved* kept) {
    const recompute policy = options_.keep;
    if (embed_) x = embed_->forward(ctx, ids);
    if (kept) {
      kept->blocks.resize(blocks_.size());
      kept->document_starts = ctx.document_starts;
    }
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      activation y = blocks_[i].forward(ctx, x, kept && policy != recompute::full ? &kept->blocks[i] : nullptr, policy);
      if (kept) kept->inputs.push_back(std::move(x));
      x = std::move(y);
    }
    return x;
  }
  /// What the last stage does with the output of its layers: the scores.
  logits forward_scores(context<Device>& ctx, activation x, saved* kept) {
    const recompute policy = options_.keep;
    activation normalized = norm_->forward(ctx, x, kept ? &kept->norm : nullptr);
    logits scores = head_->forward(ctx, normalized, kept ? &kept->out : nullptr, policy);
    if (kept) {
      kept->inputs.push_back(std::move(x));
      if (policy == recompute::none) kept->normalized = std::move(normalized);
    }
    return scores;
  }
  /// The same as far as the loss.
  loss_sum forward_loss(context<Device>& ctx, activation x, const tokens& labels, saved* kept) {
    logits scores = forward_scores(ctx, std::move(x), kept);
    loss_sum sum = loss_->forward(ctx, scores, labels, kept ? &kept->loss : nullptr);
    if (kept) kept->scores = std::move(scores);
    return sum;
  }
  /// The mirror of `forward_loss`: the gradient of the output of the last stage's layers.
  slope backward_loss(context<Device>& ctx, const tokens& labels, saved& kept, const loss_seed& seed) {
    auto dscores = loss_->backward(ctx, std::move(kept.scores), labels, kept.loss, seed);
    if (!kept.normalized) kept.normalized = norm_->forward(ctx, kept.inputs.back(), nullptr);
    slope dnormalized = head_->backward(ctx, kept.normalized, kept.out, dscores);
    dscores.reset();
    return norm_->backward(ctx, kept.inputs.back(), kept.norm, dnormalized);
  }
  /// The mirror of `forward_layers`: from the gradient of its output to that of its input, which is empty in the first
  /// stage.
  slope backward_layers(context<Device>& ctx, const tokens& ids, saved& kept, slope dy) {
    const with_documents scope(ctx, kept.document_starts);  // for what is computed again
    for (std::size_t i = blocks_.size(); i-- > 0;) {
      if (options_.keep == recompute::full) blocks_[i].forward(ctx, kept.inputs[i], &kept.blocks[i], recompute::none);
      dy = blocks_[i].backward(ctx, kept.inputs[i], kept.blocks[i], dy);
      if (!ctx.deferred) kept.blocks[i] = {};
    }
    if (!embed_) return dy;
    embed_->backward(ctx, ids, dy);
    return {};
  }

  /// The table of tied embeddings as this stage has it: the first stage's own, or the last one's copy of it. Null where
  /// there is none, or no other stage has to know.
  parameter_base<Precision, Device>* tied_table() {
    if (!config_.tie_embeddings || (part_.first && part_.last) || shares_table_) return nullptr;
    return part_.first ? &embed_->weight() : part_.last ? &head_->parameter() : nullptr;
  }

  /// Calls f(parameter) for each, in the order of the forward pass; a tied output projection is the embedding.
  template <class F>
  void visit(F&& f) {
    if (embed_) embed_->visit(f);
    for (block& b : blocks_) b.visit(f);
    if (!part_.last) return;
    norm_->visit(f);
    if (!shares_table_) head_->visit(f);
  }

  /// Bytes that `forward` keeps for one microbatch, known before it runs.
  std::int64_t saved_bytes(const context<Device>& ctx) const {
    const recompute policy = options_.keep;
    std::int64_t bytes = static_cast<std::int64_t>(blocks_.size()) * detail::tensor_bytes<T, residual_spec>(ctx);
    if (policy != recompute::full)
      for (const block& b : blocks_) bytes += b.saved_bytes(ctx, policy);
    if (!part_.last) return bytes;
    bytes += (policy == recompute::none ? 2 : 1) * detail::tensor_bytes<T, residual_spec>(ctx);
    return bytes + norm_->saved_bytes(ctx) + head_->saved_bytes(ctx, policy) +
           detail::tensor_bytes<T, typename specs::logits>(ctx) + loss_->saved_bytes();
  }

  /// Calls f(pass, cost) for every collective of one microbatch, in no particular order.
  template <class F>
  void visit_collectives(F&& f) const {
    const recompute policy = options_.keep;
    if (embed_) embed_->visit_collectives(f);
    for (const block& b : blocks_) {
      b.visit_collectives(f, policy == recompute::full ? recompute::none : policy);
      if (policy == recompute::full)
        b.visit_collectives([&](const char* pass, const collective_cost& c) {
          if (pass[0] == 'f') f("backward", c);
        });
    }
    if (!part_.last) return;
    norm_->visit_collectives(f);
    if (policy != recompute::none)
      norm_->visit_collectives([&](const char* pass, const collective_cost& c) {
        if (pass[0] == 'f') f("backward", c);
      });
    head_->visit_collectives(f, policy);
    loss_->visit_collectives(f);
  }

 private:
  static constexpr const char* table_name = "model.embed_tokens";
  /// Whether a rank has token ids for just the tokens that it has queries for.
  static constexpr bool documents_fit =
      layout_v<typename specs::tokens>.dims[0] == layout_v<typename specs::queries>.dims[0] &&
      layout_v<typename specs::tokens>.dims[1] == layout_v<typename specs::queries>.dims[1];

  /// Puts the documents of a microbatch into the context for a while.
  struct with_documents {
    with_documents(context<Device>& ctx, const std::int32_t* starts) : place(ctx.document_starts), before(place) {
      place = starts;
    }
    with_documents(const with_documents&) = delete;
    ~with_documents() { place = before; }
    const std::int32_t*& place;
    const std::int32_t* before;
  };

  block make_block(context<Device>& ctx, std::int64_t i, const std::vector<double>& frequencies) {
    const std::string name = "model.layers." + std::to_string(i);
    const layout norm_weight = layout_v<typename specs::norm_weight>;
    const initializer init{0, config_.initializer_range};
    using norm = rms_norm<Precision, residual_spec, Device>;
    const sequence_order order = sequence_order_of<S>(ctx.ranks.shape(), ctx.sizes);
    attention_branch attention(norm(ctx, config_.rms_eps, name + ".input_layernorm", norm_weight),
                               self_attention<Precision, S, Device>(ctx, name + ".self_attn", frequencies, init, init,
                                                                    config_.attention_bias, options_.attention),
                               {options_.dropout, name + ".self_attn", order});
    mlp_branch mlp(norm(ctx, config_.rms_eps, name + ".post_attention_layernorm", norm_weight),
                   swiglu_mlp<Precision, S, Device>(ctx, name + ".mlp", init, config_.mlp_bias),
                   {options_.dropout, name + ".mlp", order});
    return block(std::move(attention), std::move(mlp));
  }

  llama_config config_;
  llama_options options_;
  stage_layers part_;
  bool shares_table_ = false;  ///< whether the output projection is the table of an embedding on this rank
  std::unique_ptr<embedding_layer> embed_;
  std::vector<block> blocks_;
  std::optional<rms_norm<Precision, residual_spec, Device>> norm_;
  std::unique_ptr<head> head_;
  std::optional<loss_layer> loss_;
};

}  // namespace plait
