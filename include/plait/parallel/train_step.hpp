// An optimizer step over any number of microbatches, for a whole model or a pipeline.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/parallel/gradient_norm.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/optim/optimizer.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/step_result.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/sequence_order.hpp"

namespace plait {

/// This rank's part of one number per token of a microbatch, in host memory for loading. The part has some of the
/// samples, and some of the positions of each sample, in the order of the sequence's dim.
///
///     for (std::int64_t row = 0; row < ids.rows(); ++row)
///       for (const token_run& run : ids.runs())
///         read(ids.sample(row), run.position, run.length, ids.row(row) + run.at);
template <class T>
class host_numbers {
 public:
  /// `part` is this rank's part of tokens [samples, positions]. `order` is the order of their sequence's dim, which a
  /// model knows; without a length, it is the text's order.
  host_numbers(const box& part, const sequence_order& order)
      : part_(part),
        runs_((order.length() == 0 ? sequence_order::original(part.global[1]) : order)
                  .runs(part.offset[1], part.local[1])),
        values_(static_cast<std::size_t>(part.local_size()), unfilled) {}

  T* data() { return values_.data(); }
  const T* data() const { return values_.data(); }
  std::int64_t size() const { return part_.local_size(); }
  /// The number of samples on this rank.
  std::int64_t rows() const { return part_.local[0]; }
  /// The index of a row's sample in the microbatch over the whole mesh.
  std::int64_t sample(std::int64_t row) const { return part_.offset[0] + row; }
  /// The positions in the text of a row's tokens: one run, or two if the sequence has zigzag order.
  std::span<const token_run> runs() const { return runs_; }
  T* row(std::int64_t row) { return values_.data() + row * part_.local[1]; }
  const T* row(std::int64_t row) const { return values_.data() + row * part_.local[1]; }
  /// Sets each token's number to f(sample, position), with the index of `sample(row)`.
  template <class F>
  void fill(F&& f) {
    for (std::int64_t r = 0; r < rows(); ++r)
      for (const token_run& run : runs_)
        for (std::int64_t i = 0; i < run.length; ++i)
          row(r)[run.at + i] = static_cast<T>(f(sample(r), run.position + i));
  }
  /// This part's place in the microbatch over the whole mesh, in indices along the dims. In zigzag order these are not
  /// positions in the text.
  const box& stored_part() const { return part_; }

 private:
  /// No token and, unlike -1, hardly an ignored label. So an embedding and a loss refuse tokens that were never filled.
  /// Kernels can subtract from it without overflow. Document starts begin as 0, a legal start.
  static constexpr T unfilled = std::is_same_v<T, std::int64_t> ? std::numeric_limits<T>::min() / 2 : T{};

  box part_;
  std::vector<token_run> runs_;
  std::vector<T> values_;
};
/// Token ids or labels. If a fill leaves one out, the model's forward pass refuses it.
using host_tokens = host_numbers<std::int64_t>;
/// The position where each token's document begins (see `microbatch::document_starts`).
using host_starts = host_numbers<std::int32_t>;

namespace detail {

/// Throws unless each token's document begins at this token or equals the document of the previous token.
void check_starts(const host_starts& starts);
#ifndef PLAIT_COMPILED
PLAIT_INLINE void check_starts(const host_starts& starts) {
  for (std::int64_t row = 0; row < starts.rows(); ++row) {
    std::int64_t before = 0;
    for (const token_run& run : starts.runs())
      for (std::int64_t i = 0; i < run.length; ++i) {
        const std::int64_t position = run.position + i, start = starts.row(row)[run.at + i];
        const bool follows = i == 0 ? start >= before && start <= position : start == before || start == position;
        if (!follows)
          fail({"training step: the token at position ", position, " of sample ", starts.sample(row),
                " has the document start ", start, "; legal is its own position, where a document begins, ",
                i == 0 ? "or one before it, from " : "or that of the token before, ", before});
        before = start;
      }
  }
}
#endif

}  // namespace detail

/// Copies `from` to memory that the model reads.
template <class T, class To, compute_device Device>
void upload(const context<Device>& ctx, const host_numbers<T>& from, To& to) {
  ctx.device.upload(to.data(), from.data(), static_cast<std::size_t>(from.size()) * sizeof(T),
                    ctx.device.main_stream());
}

/// One optimizer step over any number of microbatches, in three parts:
///
///     step.load(ctx, first_sample, fill);     // data to the device
///     optimizer.begin_step(ctx, learning_rate);
///     step.run(ctx);                          // all other work; does not wait, and is equal in every step
///     step.result(ctx);                       // the numbers of the step; waits for it
///
/// The loss is the sum over all tokens of the global batch divided by their number, for every layout and number of
/// microbatches (`token_mean`). No other scale is applied. If gradients are not finite, the step changes no weight and
/// no state of the optimizer on any rank, and reports this.
///
/// `Stage` is a `model`. The step runs a pipeline of it, or a whole model, which is a pipeline of one stage.
/// `optimizer` is the caller's `adamw`, `muon` or another class that models the concept.
template <model Stage>
class training_step {
  using device = typename Stage::device;
  using precision = typename Stage::precision_type;
  using tokens = typename Stage::tokens;
  using pipeline_type = pipeline<Stage>;

 public:
  training_step(const context<device>& ctx, pipeline_type& model, optimizer_ref<precision, device> optimizer,
                double clip)
      : training_step(ctx, model, nullptr, optimizer, clip) {}
  training_step(const context<device>& ctx, Stage& whole, optimizer_ref<precision, device> optimizer,
                std::int64_t microbatches, double clip, const pipeline_options& options = {})
      : training_step(ctx, std::make_unique<pipeline_type>(ctx, whole, static_cast<int>(microbatches), options),
                      optimizer, clip) {}

  /// Loads the data of a step. `fill(i, ids, labels)` provides microbatch i on the host; labels equal to the loss's
  /// `ignore_index` do not count. It is called for every microbatch before the first pass, because the number of
  /// counted tokens scales the gradients. `first_sample` is the global index of the step's first sample, over all
  /// steps.
  ///
  /// If sequences are packed from documents, the call is `fill(i, ids, labels, starts)`. Throws unless each token's
  /// document begins at this token or equals the document of the previous token.
  template <class Fill>
  void load(const context<device>& ctx, std::int64_t first_sample, Fill&& fill) {
    const std::int64_t ignored = model_.ignore_index();
    detail::begin_checked_step(ctx);
    detail::agree_in_checked_step(ctx, "training_step::load", [&] {
      return std::vector<setting>{{"first_sample", cat({first_sample})}};
    });
    first_sample_ = first_sample;
    std::int64_t counted = 0;
    std::uint64_t all = 0;  // the hash of all data of this rank
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      host_tokens ids(batch_[i].first.part(), model_.order()), labels(batch_[i].second.part(), model_.order());
      if constexpr (std::invocable<Fill&, std::int64_t, host_tokens&, host_tokens&, host_starts&>) {
        host_starts starts(batch_[i].first.part(), model_.order());
        fill(static_cast<std::int64_t>(i), ids, labels, starts);
        note_loaded(ctx, "document starts", i, starts, all);
        if (model_.documents()) {
          detail::check_starts(starts);
          upload(ctx, starts, starts_[i]);
        }
      } else {
        if (model_.documents())
          fail("training_step: attention_options::documents is set, so fill must take (i, ids, labels, starts)");
        fill(static_cast<std::int64_t>(i), ids, labels);
      }
      note_loaded(ctx, "ids", i, ids, all);
      note_loaded(ctx, "labels", i, labels, all);
      for (std::int64_t t = 0; t < labels.size(); ++t) counted += labels.data()[t] != ignored;
      upload(ctx, ids, batch_[i].first);
      upload(ctx, labels, batch_[i].second);
    }
    detail::agree_over_stages(ctx, "training_step::load", "ids, labels and document starts whose hash is", all);
    mean_.count(ctx, counted);
    loaded_ = true;
  }

  /// Throws unless data is loaded for a run, which this call uses up, and the optimizer has begun one step. Callers
  /// that replay runs need it, such as `graph_step`.
  void take_loaded() {
    if (!std::exchange(loaded_, false) && !only_counts<device>)
      fail(ran_
               ? "training step: run(ctx) on the tokens of the step before; load(ctx, first_sample, fill) comes before "
                 "each run, and load_again() where the same tokens are meant"
               : "training step: run(ctx) without tokens; load(ctx, first_sample, fill) comes before it");
    if constexpr (!only_counts<device>) optimizer_.take_step();
    ran_ = true;
  }
  /// Makes the next run use the data of the last one again, for benchmarks and tests of memorisation.
  void load_again() {
    if (!ran_) fail("training step: load_again() before the first run(ctx)");
    loaded_ = true;
  }

  /// Runs forward, backward, reduction, clipping and update, in the order of the step's program. In a checked step
  /// (`value_check`) it also compares the noted values. Call the optimizer's `begin_step` first. When this returns,
  /// gathers of updated values may be in flight; calls of the model's pipeline wait for them.
  void run(const context<device>& ctx) {
    take_loaded();
    mean_.begin_late(ctx);
    std::vector<const std::int32_t*> starts;
    for (const buffer<device>& s : starts_) starts.push_back(s.template data<std::int32_t>());
    model_.run(ctx, batch_, mean_, first_sample_, starts, updates{*this, ctx});
    detail::compare_values(ctx);
    ctx.ranks.checks().note_reduction();  // also if no parameter is trained
    for (auto* p : changed_at_end_) p->end_step(ctx, clipped_.template data<kernels::clip_numbers>());
  }

  /// Returns the numbers of the last run. Waits for the device, without communication. It removes skipped steps since
  /// the last call, of this or other objects, from the optimizer's number of steps once.
  step_result result(const context<device>& ctx) {
    if (!ran_ && !only_counts<device>) fail("training step: result(ctx) before the first run(ctx)");
    double sums[2] = {}, counted = 0;  // the loss and the auxiliary losses
    ctx.device.synchronize();
    ctx.device.download(sums, mean_.loss_sum(), sizeof sums, ctx.device.main_stream());
    ctx.device.download(&counted, mean_.tokens(), sizeof counted, ctx.device.main_stream());
    kernels::clip_numbers clipped;
    ctx.device.download(&clipped, clipped_.data(), sizeof clipped, ctx.device.main_stream());
    const bool skipped = clipped.update == 0;
    const double skips = clipped.skips - std::exchange(skips_seen_, clipped.skips);
    for (double i = 0; i < skips; ++i) optimizer_.forget_step();
    return {counted > 0 ? sums[0] / counted : 0.0, clipped.norm, static_cast<std::int64_t>(counted), skipped, sums[1]};
  }

  /// Sets callbacks around the norm's all-reduce, so host values can travel with it. `begin` runs when the gradients
  /// are reduced, `end` when the norm is known. Neither may use data of the step, and recorded steps call neither.
  /// Communication after a step would instead wait for the parameter gathers that the next forward pass overlaps.
  void on_norm(std::function<void()> begin, std::function<void()> end) {
    norm_begins_ = std::move(begin);
    norm_ends_ = std::move(end);
  }

  pipeline_type& model() const { return model_; }

 private:
  template <class T>
  static void note_loaded(const context<device>& ctx, std::string_view what, std::size_t i, const host_numbers<T>& of,
                          std::uint64_t& all) {
    if (ctx.ranks.checks().on())
      all = kernels::detail::hash_of_word(all, kernels::digest_of(of.data(), of.size()).hash);
    if (detail::notes_values(ctx))
      detail::note_on_host(ctx, layout_v<typename tokens::spec>,
                           cat({"the ", what, " of microbatch ", static_cast<std::int64_t>(i)}), of.data(), of.size());
  }
  using reduced = reduced_gradient<precision, device>;
  /// The work on reduced gradients.
  struct updates {
    training_step& step;
    const context<device>& ctx;

    void norm(std::span<const reduced> gradients) {
      if (step.norm_begins_) step.norm_begins_();
      step.clip_by_norm(ctx, gradients);
      if (step.norm_ends_) step.norm_ends_();
    }
    void update(std::span<reduced> gradients) { step.optimizer_.update(ctx, gradients); }
  };

  /// Sums the losses and the squares of gradients over all ranks, and passes the factor of clipping to the optimizer.
  void clip_by_norm(const context<device>& ctx, std::span<const reduced> gradients) {
    mean_.finish(ctx);
    if (stages_.size() > 1) stages_.all_reduce(mean_.loss_sum(), mean_.loss_sum(), 2, dtype::f64, reduce_op::sum);
    gradient_norm<precision, device> norm;
    for (const reduced& gradient : gradients) norm.add(ctx, gradient);
    auto* const squares = squares_.template data<double>();
    norm.sum_over(ctx, stages_, squares);
    auto* const clipped = clipped_.template data<kernels::clip_numbers>();
    kernels::clip(ctx.device, squares, clip_, clipped);
    optimizer_.clip_by(ctx, clipped);
  }
  training_step(const context<device>& ctx, std::unique_ptr<pipeline_type> own,
                optimizer_ref<precision, device> optimizer, double clip)
      : training_step(ctx, *own, nullptr, optimizer, clip) {
    own_ = std::move(own);
  }
  training_step(const context<device>& ctx, pipeline_type& model, std::nullptr_t,
                optimizer_ref<precision, device> optimizer, double clip)
      : model_(model),
        optimizer_(optimizer),
        clip_(clip),
        mean_(ctx),
        squares_(make_buffer<double>(ctx.device, 1)),
        clipped_(make_buffer<kernels::clip_numbers>(ctx.device, 1)),
        stages_(model.along()) {
    if (!(clip >= 0)) fail({"training step: the limit of the gradient norm is ", clip, "; legal is 0 (none) or more"});
    detail::agree_in_checked_step(ctx, "training step", [&] {
      std::vector<setting> values = detail::values_of_context(ctx);
      values.push_back({"clip", exact_text(clip)});
      values.push_back({"microbatches", cat({model.shape().microbatches})});
      return values;
    });
    ctx.device.zero(clipped_.data(), clipped_.bytes(), ctx.device.main_stream());
    if (!model.executor().step().policy.clip)
      fail(
          "training step: data_parallel::clip = 0 leaves out the norm, by which a step knows that its gradients are "
          "finite; legal is 1, with a limit of 0 where nothing is to be clipped");
    model.visit([&](auto& p) {
      optimizer_.prepare(ctx, p);
      if (p.changes_at_end_of_step()) changed_at_end_.push_back(&p);
    });
    for (int i = 0; i < model.shape().microbatches; ++i) {
      batch_.emplace_back(tokens(ctx), tokens(ctx));
      if (model.documents())
        starts_.push_back(make_buffer<std::int32_t>(ctx.device, static_cast<std::size_t>(batch_[0].first.size())));
    }
  }

  std::unique_ptr<pipeline_type> own_;  ///< the pipeline around a whole model
  pipeline_type& model_;
  optimizer_ref<precision, device> optimizer_;  ///< the caller's
  double clip_;
  bool loaded_ = false;    ///< whether data is loaded for the next run
  bool ran_ = false;       ///< whether a run has happened
  double skips_seen_ = 0;  ///< `clip_numbers::skips` at the last `result`
  std::function<void()> norm_begins_, norm_ends_;
  std::int64_t first_sample_ = 0;
  std::vector<parameter<precision, device>*> changed_at_end_;
  typename pipeline_type::batch batch_;
  std::vector<buffer<device>> starts_;  ///< document starts of each microbatch, if sequences are packed
  typename pipeline_type::mean mean_;
  buffer<device> squares_, clipped_;
  any_communicator stages_;  ///< the ranks over which norms are summed
};

template <class Stage, class... Rest>
training_step(const context<typename Stage::device>&, pipeline<Stage>&, Rest&&...) -> training_step<Stage>;
template <model Stage, class... Rest>
training_step(const context<typename Stage::device>&, Stage&, Rest&&...) -> training_step<Stage>;

/// One step of a whole model, as `training_step` describes it.
template <model Stage, class Fill>
step_result train_step(const context<typename Stage::device>& ctx, Stage& model,
                       optimizer_ref<typename Stage::precision_type, typename Stage::device> optimizer,
                       std::int64_t microbatches, double learning_rate, double clip, std::int64_t first_sample,
                       Fill&& fill) {
  training_step step(ctx, model, optimizer, microbatches, clip);
  step.load(ctx, first_sample, fill);
  optimizer.begin_step(ctx, learning_rate);
  step.run(ctx);
  return step.result(ctx);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
