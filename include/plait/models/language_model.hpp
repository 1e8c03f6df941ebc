// A language model with any embedding, blocks, head and loss, whole or one pipeline stage.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/layout/errors.hpp"
#include "plait/models/token_chunks.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/loss.hpp"
#include "plait/parallel/model.hpp"

namespace plait {

/// Options of a language model, in addition to its layers.
struct language_model_options {
  layer_recompute keep{};
  bool documents = false;  ///< whether sequences are packed from documents (`attention_options::documents`)
  double dropout = 0;      ///< of its blocks; a step with dropout is not replayed as a graph
  cross_entropy_settings loss{};
  sequence_order order{};  ///< of the tokens; default: the text's order
  /// The most chunks of a microbatch's tokens. The head and the loss process one chunk after another, so only the
  /// logits of one chunk exist at a time. The head must process each token independently, without dropout. If a
  /// schedule defers weight gradients, the gradients of all logits are kept for them.
  std::int64_t loss_chunks = 1;
};

/// A language model, or one pipeline stage of it. `Embedding` takes token ids, then comes a `stack` of `Block`s; `Head`
/// computes scores, and `Loss` is a `cross_entropy_loss`. The concept `model` describes its use in a pipeline.
/// llama.hpp defines one; examples/gpt2.hpp is a user's own.
template <class Embedding, layer Block, layer Head, class Loss>
class language_model {
  using T = typename Block::value_type;

 public:
  using precision_type = typename Loss::precision_type;
  using device = typename Block::device;
  using block = Block;
  using head = Head;
  using tokens = tensor<std::int64_t, typename Embedding::input, device>;
  /// For each token, the position where its document begins in its sequence: see `microbatch::document_starts`.
  using document_starts = tensor<std::int32_t, typename Embedding::input, device>;
  using logits = tensor<T, typename Head::output, device>;
  using loss_sum = tensor<double, typename Loss::output, device>;
  using mean = token_mean<typename Loss::output, typename Loss::labels_spec, device>;
  using activation = tensor<T, typename Block::input, device>;
  using gradient = tensor<T, dual_t<typename Block::input>, device>;
  using table_ptr = parameter_ptr<precision_type, device>;

  /// The values that a pass through the head keeps of one chunk of tokens.
  struct head_pass {
    activation x;
    typename Head::saved head;
  };
  /// The values that a forward pass keeps.
  struct saved {
    activation input;  ///< of the first block
    typename stack<Block>::saved blocks;
    activation output;  ///< of the last block, in the last stage
    typename Head::saved head;
    logits scores;
    typename Loss::saved loss;
    std::deque<head_pass> chunks;  ///< chunks with deferred weight gradients; tasks refer to them
  };

  /// `part` is the range of layers of this stage. The first stage calls `make_embedding()`, and each stage calls
  /// `make_block(i)` for its blocks. The last stage calls `make_head(ctx, table)` with the context of a chunk of
  /// `loss_chunks`. For a head that is tied to the embedding, `table` is the embedding's parameter. It is null if the
  /// first stage is on another rank; the head then makes a copy with that name (both with `tied_across_stages`).
  /// `first_stage` is this rank's stage with the embedding, if it is another one. `vocab` is the true size of the
  /// vocabulary.
  template <class MakeEmbedding, class MakeBlock, class MakeHead>
  language_model(const context<device>& ctx, std::int64_t vocab, stage_layers part, language_model_options how,
                 const language_model* first_stage, MakeEmbedding&& make_embedding, MakeBlock&& make_block,
                 MakeHead&& make_head)
      : part_(part), how_(std::move(how)) {
    if (part.begin < 0 || part.begin > part.end) fail({"a stage of layers ", part.begin, " to ", part.end});
    if (how_.order.length() == 0 && layout_v<typename Embedding::input>.has(dim_of<zseq>))
      fail(
          "language model: its tokens lie in zigzag order (zseq), and language_model_options::order does not say "
          "which");
    set_recompute(how_.keep);
    if (part.first) embedding_.emplace(make_embedding());
    std::vector<Block> blocks;
    blocks.reserve(static_cast<std::size_t>(part.size()));
    for (std::int64_t i = part.begin; i < part.end; ++i) blocks.push_back(make_block(i));
    blocks_ = stack<Block>(std::move(blocks));
    if (!part.last) return;
    const language_model* const owner = part.first ? this : first_stage;
    const table_ptr table = owner && owner->embedding_ ? owner->embedding_->weight() : table_ptr();
    table_ = table.get();
    chunks_ = {ctx, how_.loss_chunks, layout_v<typename Head::input>};
    chunk_context_ = std::make_shared<const context<device>>(chunks_.context_of_one(ctx));
    head_.emplace(make_head(*chunk_context_, table));
    check_tie();
    loss_.emplace(*chunk_context_, vocab, how_.loss);
  }

  const stage_layers& part() const { return part_; }
  std::int64_t ignore_index() const { return how_.loss.ignore_index; }
  bool documents() const { return how_.documents; }
  double dropout() const { return how_.dropout; }
  const sequence_order& order() const { return how_.order; }
  /// Changes how much layers keep, from the next forward pass on. Throws if a list does not match the layers of this
  /// stage.
  void set_recompute(const layer_recompute& keep) {
    std::vector<recompute> policies;
    for (std::int64_t i = part_.begin; i < part_.end; ++i) policies.push_back(keep.of_layer(i));
    how_.keep = keep;
    policies_ = std::move(policies);
  }

  /// Returns the next-token scores of the whole model, without dropout; nothing is kept.
  logits score(const microbatch<device>& mb, const tokens& ids) {
    microbatch<device> scored = mb;
    scored.drops = false;
    return forward_scores(scored, forward_layers(scored, ids, {}, nullptr));
  }
  /// Returns the sum of the losses of the counted tokens, partial over the axes that shard them. `kept` holds values
  /// for `backward`; null: no backward pass follows.
  loss_sum forward(const microbatch<device>& mb, const tokens& ids, const tokens& labels, saved* kept) {
    return forward_loss(mb, forward_layers(mb, ids, {}, kept), labels, kept);
  }
  /// Adds to every parameter's gradient.
  void backward(const microbatch<device>& mb, const tokens& ids, const tokens& labels, saved& kept,
                const typename mean::seed_type& seed) {
    backward_layers(mb, ids, kept, backward_loss(mb, labels, kept, seed));
  }

  activation forward_layers(const microbatch<device>& mb, const tokens& ids, activation x, saved* kept) {
    const microbatch<device> here = mb.keeping(policies_);
    if (embedding_) x = embedding_->forward(here.enter(0), ids);
    if (kept) kept->input = std::move(x);
    return blocks_.forward(here.units_from(first_block()), kept ? kept->input : x, kept ? &kept->blocks : nullptr);
  }
  gradient backward_layers(const microbatch<device>& mb, const tokens& ids, saved& kept, gradient dy) {
    const microbatch<device> here = mb.keeping(policies_);
    dy = blocks_.backward(here.units_from(first_block()), kept.input, kept.blocks, dy);
    if (!embedding_) return dy;
    embedding_->backward(here.enter(0), ids, dy);
    return {};
  }
  logits forward_scores(const microbatch<device>& mb, activation x) {
    const microbatch<device> here = mb.enter(units() - 1);
    if (chunks_.count() == 1) return head_->forward(here, x, nullptr);
    logits all(mb.ctx);
    const context<device>& ctx = *chunk_context_;
    activation part(ctx);
    for (std::int64_t i = 0; i < chunks_.count(); ++i) {
      chunks_.take(ctx.device, i, x, part);
      chunks_.put(ctx.device, i, head_->forward(ctx, part, nullptr), all);
    }
    return all;
  }
  /// Whether a training step computes the loss in the backward pass, so that each chunk's logits are computed only
  /// once.
  bool loss_in_backward() const { return chunks_.count() > 1; }
  /// Keeps the input of `backward_loss` in such a step.
  void keep_for_loss(const microbatch<device>& mb, activation x, saved& kept) {
    mb.enter(units() - 1);
    kept.output = std::move(x);
  }
  loss_sum forward_loss(const microbatch<device>& mb, activation x, const tokens& labels, saved* kept) {
    const microbatch<device> here = of_head(mb.enter(units() - 1));
    if (loss_in_backward()) {
      loss_sum sum = run_chunks(here, x, labels, nullptr, nullptr, nullptr);
      if (kept) kept->output = std::move(x);
      return sum;
    }
    logits scores = head_->forward(here, x, kept ? &kept->head : nullptr);
    loss_sum sum = loss_->forward(here, scores, labels, kept ? &kept->loss : nullptr);
    if (kept) {
      kept->output = std::move(x);
      kept->scores = std::move(scores);
    }
    return sum;
  }
  /// `sum`, unless it is null, receives the summed loss if the loss is computed here.
  gradient backward_loss(const microbatch<device>& mb, const tokens& labels, saved& kept,
                         const typename mean::seed_type& seed, loss_sum* sum = nullptr) {
    const microbatch<device> here = of_head(mb.enter(units() - 1));
    if (loss_in_backward()) {
      gradient dx(mb.ctx);
      kept.chunks.clear();
      loss_sum made = run_chunks(here, kept.output, labels, &seed, &dx, &kept.chunks);
      if (sum) *sum = std::move(made);
      return dx;
    }
    const auto dscores = loss_->backward(here, std::move(kept.scores), labels, kept.loss, seed);
    return head_->backward(here, kept.output, kept.head, dscores);
  }

  /// Calls f(parameter) for each parameter, in the order of the forward pass. A parameter that several layers share is
  /// visited once, with the embedding.
  template <class F>
  void visit(F&& f) {
    if (embedding_) embedding_->visit(f);
    blocks_.visit(f);
    if (!head_) return;
    head_->visit([&](auto& p) {
      if (&p != table_) f(p);
    });
  }

  /// The units of parameters that this stage announces: the embedding, each block, the head.
  int units() const { return first_block() + static_cast<int>(blocks_.size()) + (head_ ? 1 : 0); }
  /// Calls f(parameter) for each parameter that passes of a unit use. For a tied head this includes the embedding's
  /// table, if it is on this rank.
  template <class F>
  void visit_unit(int unit, F&& f) {
    const int i = unit - first_block();
    if (i < 0) return embedding_->visit(f);
    if (i < static_cast<int>(blocks_.size())) return blocks_[static_cast<std::size_t>(i)].visit(f);
    head_->visit(f);
  }

  /// Calls f(memory) for the values that passes of a unit keep in `kept`: the input of its block, and the values of its
  /// layers. The loss's values stay on the device: two numbers per row of logits.
  template <class F>
  void visit_kept(int unit, saved& kept, F&& f) {
    const int i = unit - first_block();
    if (i < 0) return;
    if (i < static_cast<int>(blocks_.size())) {
      const auto at = static_cast<std::size_t>(i);
      f(at == 0 ? kept.input : kept.blocks.inputs[at - 1]);
      return visit_saved(kept.blocks.blocks[at], f);
    }
    f(kept.output);
    f(kept.scores);
    visit_saved(kept.head, f);
  }

  Block& block_at(std::size_t i) { return blocks_[i]; }

 private:
  int first_block() const { return embedding_ ? 1 : 0; }
  /// Checks that a tied head uses the embedding's table if it is on this rank, and makes no copy.
  void check_tie() {
    if (!table_) return;
    bool used = false;
    head_->visit([&](auto& p) {
      used |= &p == table_;
      if (&p != table_ && p.info().tied_across_stages)
        fail({"language_model: the head makes the parameter ", p.name(),
              " with tied_across_stages, and the embedding's ", table_->name(),
              " is on this rank: use the table that make_head is given"});
    });
    if (table_->info().tied_across_stages && !used)
      fail(
          {"language_model: the embedding makes ", table_->name(),
           " with tied_across_stages, and the head does not use it; use the table that make_head is given, or make the "
           "embedding without"});
  }
  /// Computes the summed loss chunk by chunk, and with a seed its gradients. `dx` receives the gradient of x. If weight
  /// gradients are deferred, `held` keeps the values for them.
  loss_sum run_chunks(const microbatch<device>& mb, const activation& x, const tokens& labels,
                      const typename mean::seed_type* seed, gradient* dx, std::deque<head_pass>* held) {
    const context<device>& ctx = *chunk_context_;
    device& on = ctx.device;
    microbatch<device> part(ctx);
    part.policy = mb.policy;
    part.deferred = mb.deferred;
    part.count = mb.count * chunks_.count();
    loss_sum sum(mb.ctx);
    on.zero(sum.data(), sizeof(double), on.main_stream());
    tokens its_labels(ctx);
    for (std::int64_t i = 0; i < chunks_.count(); ++i) {
      head_pass own;
      head_pass& pass = seed && mb.deferred ? held->emplace_back() : own;
      pass.x = activation(ctx);
      part.index = mb.index * chunks_.count() + i;
      typename Loss::saved of_loss;
      chunks_.take(on, i, x, pass.x);
      chunks_.take_labels(on, i, labels, ignore_index(), its_labels);
      logits scores = head_->forward(part, pass.x, seed ? &pass.head : nullptr);
      const loss_sum more = loss_->forward(part, scores, its_labels, seed ? &of_loss : nullptr);
      kernels::accumulate(on, more.data(), sum.data(), 1);
      if (!seed) continue;
      const auto dscores = loss_->backward(part, std::move(scores), its_labels, of_loss, *seed);
      chunks_.put(on, i, head_->backward(part, pass.x, pass.head, dscores), *dx);
    }
    return sum;
  }
  microbatch<device> of_head(const microbatch<device>& mb) const { return mb.keeping(how_.keep.of_head()); }

  stage_layers part_;
  language_model_options how_;
  std::vector<recompute> policies_;  ///< of the blocks of this stage
  std::optional<Embedding> embedding_;
  stack<Block> blocks_;
  std::optional<Head> head_;
  std::optional<Loss> loss_;
  detail::token_chunks chunks_;                               ///< of the head and the loss
  std::shared_ptr<const context<device>> chunk_context_;      ///< of one chunk; deferred tasks refer to it
  const parameter<precision_type, device>* table_ = nullptr;  ///< of the embedding, if the embedding and the head are
                                                              ///< on this rank
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
