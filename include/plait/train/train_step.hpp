// One optimizer step over any number of microbatches, for a whole model or a pipeline.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/nn/sequence_order.hpp"
#include "plait/pipeline/pipeline.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/train/optim/adamw.hpp"
#include "plait/train/optim/gradient_norm.hpp"
#include "plait/train/optim/optimizer.hpp"
#include "plait/train/step_result.hpp"

namespace plait {

/// This rank's part of the numbers of a microbatch's tokens, in host memory, where data comes from: some of the
/// samples, and of each some of the positions, in the order of the sequence's dim.
///
///     for (std::int64_t row = 0; row < ids.rows(); ++row)
///       for (const token_run& run : ids.runs())
///         read(ids.sample(row), run.position, run.length, ids.row(row) + run.at);
template <class T>
class host_numbers {
 public:
  /// `part` is that of tokens [samples, positions], `order` that of their sequence's dim, which a model knows; without
  /// a length, that of the text.
  host_numbers(const box& part, const sequence_order& order)
      : part_(part),
        runs_((order.length() == 0 ? sequence_order::original(part.global[1]) : order)
                  .runs(part.offset[1], part.local[1])),
        values_(static_cast<std::size_t>(part.local_size())) {}

  T* data() { return values_.data(); }
  const T* data() const { return values_.data(); }
  std::int64_t size() const { return part_.local_size(); }
  /// The samples that this rank has.
  std::int64_t rows() const { return part_.local[0]; }
  /// The number of a row's sample in the microbatch over the whole mesh.
  std::int64_t sample(std::int64_t row) const { return part_.offset[0] + row; }
  /// The positions in the text of a row's tokens: one run, or two where a sequence lies in zigzag order.
  std::span<const token_run> runs() const { return runs_; }
  T* row(std::int64_t row) { return values_.data() + row * part_.local[1]; }
  const T* row(std::int64_t row) const { return values_.data() + row * part_.local[1]; }
  /// Sets each token's number to f(sample, position), where `sample` is as that function's.
  template <class F>
  void fill(F&& f) {
    for (std::int64_t r = 0; r < rows(); ++r)
      for (const token_run& run : runs_)
        for (std::int64_t i = 0; i < run.length; ++i)
          row(r)[run.at + i] = static_cast<T>(f(sample(r), run.position + i));
  }
  /// Where this part lies in the microbatch over the whole mesh, by places along the dims, which in zigzag order are no
  /// positions.
  const box& stored_part() const { return part_; }

 private:
  box part_;
  std::vector<token_run> runs_;
  std::vector<T> values_;
};
/// Token ids or labels.
using host_tokens = host_numbers<std::int64_t>;
/// Where the document of each token begins (see `microbatch::document_starts`).
using host_starts = host_numbers<std::int32_t>;

namespace detail {

/// Throws unless each token's document begins at that token or is the document of the token before.
inline void check_starts(const host_starts& starts) {
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

}  // namespace detail

/// Puts `from` where the model can read it.
template <class T, class To, compute_device Device>
void upload(const context<Device>& ctx, const host_numbers<T>& from, To& to) {
  ctx.device.upload(to.data(), from.data(), static_cast<std::size_t>(from.size()) * sizeof(T),
                    ctx.device.main_stream());
}

/// One optimizer step over any number of microbatches, in three parts:
///
///     step.load(ctx, first_sample, fill);     // data to the device
///     optimizer.begin_step(ctx, learning_rate);
///     step.run(ctx);                          // everything else; waits for nothing, the same work in every step
///     step.result(ctx);                       // the numbers of the step, which waits for it
///
/// The loss is the sum over all tokens of the global batch divided by their number, whatever the layout and the number
/// of microbatches (`token_mean`); there is no other scale anywhere. A step whose gradients are not finite changes no
/// weight and no state of the optimizer, on all ranks alike, and says so. With `data_parallel::delayed_norm`, a step
/// clips by the norm of the step before, but the first, which clips by its own; updates then begin before it is known
/// that all gradients are finite, so that where they are not, `result` throws, on all ranks alike: the weights are
/// spoilt. Where nothing is clipped, with a limit of 0, that is no other algorithm: no update, and none of the first
/// step, waits for anything but its own gradient. Such a step ends with the sums of its norm and loss under way: the
/// first update of the next step waits for them, or whoever asks for the result before. Stages of a pipeline wait for
/// the sums over their own ranks, and leave those over the stages, for which they have a communicator of their own, so
/// that a step is made on all stages together.
///
/// `Stage` is a `model`: a pipeline of it is run, or a whole model, which is a pipeline of one stage. `optimizer` is
/// the caller's `adamw`, `muon` or any other that models the concept.
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

  /// `fill(i, ids, labels)` provides microbatch i on the host; labels equal to the loss's `ignore_index` do not count.
  /// It is called for every microbatch before the first pass, because the number of counted tokens scales the
  /// gradients. Where sequences are packed from documents, it is `fill(i, ids, labels, starts)`; throws where a token's
  /// document begins neither at it nor where that of the token before does. `first_sample` is the
  /// global index of the step's first sample, over all steps.
  template <class Fill>
  void load(const context<device>& ctx, std::int64_t first_sample, Fill&& fill) {
    const std::int64_t ignored = model_.ignore_index();
    detail::begin_checked_step(ctx);
    detail::agree_in_checked_step(ctx, "training_step::load", [&] {
      return std::vector<knob>{{"first_sample", cat({first_sample})}};
    });
    first_sample_ = first_sample;
    std::int64_t counted = 0;
    std::uint64_t all = 0;  // what this rank was given
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

  /// Throws unless there are tokens for a run, which this uses up, and the optimizer has begun one step: for who
  /// replays a run, as `graph_step` does.
  void take_loaded() {
    if (!std::exchange(loaded_, false) && !only_counts<device>)
      fail(ran_
               ? "training step: run(ctx) on the tokens of the step before; load(ctx, first_sample, fill) comes before "
                 "each run, and load_again() where the same tokens are meant"
               : "training step: run(ctx) without tokens; load(ctx, first_sample, fill) comes before it");
    if constexpr (!only_counts<device>) optimizer_.take_step();
    ran_ = true;
  }
  /// The next run is on the tokens of the one before: for benchmarks, and tests of memorising.
  void load_again() {
    if (!ran_) fail("training step: load_again() before the first run(ctx)");
    loaded_ = true;
  }

  /// Forward, backward, reduction, clipping and update, in the order of the step's program, and in a step that is
  /// checked (`value_check`) the comparison of what ranks have noted. The optimizer's
  /// `begin_step` comes before. What is updated may still be on its way to where layers read it when this returns:
  /// whoever uses the model through its pipeline waits for it.
  void run(const context<device>& ctx) {
    take_loaded();
    if (first_unasked_) look_at_first(ctx);
    mean_.begin_late(ctx);
    by_last_norm_ = delays_norm() && (has_norm_ || !clips());
    std::vector<const std::int32_t*> starts;
    for (const buffer<device>& s : starts_) starts.push_back(s.template data<std::int32_t>());
    model_.run(ctx, batch_, mean_, first_sample_, starts, updates{*this, ctx});
    detail::compare_values(ctx);
    ctx.ranks.checks().note_reduction();  // where nothing is trained, too
    first_unasked_ = delays_norm() && clips() && !by_last_norm_;
    clipped_before_norm_ = clipped_before_norm_ || by_last_norm_;
  }

  /// The numbers of the last run. Waits for its sums, and asks no rank for anything. Steps that were skipped since the
  /// last call, this one or others, are taken back from the optimizer's number of steps here, once.
  step_result result(const context<device>& ctx) {
    if (!ran_ && !only_counts<device>) fail("training step: result(ctx) before the first run(ctx)");
    settle(ctx);
    double sum = 0, counted = 0;
    ctx.device.synchronize();
    ctx.device.download(&sum, mean_.loss_sum(), sizeof sum, ctx.device.main_stream());
    ctx.device.download(&counted, mean_.tokens(), sizeof counted, ctx.device.main_stream());
    const kernels::clip_numbers clipped = this->clipped(ctx);
    const bool skipped = clipped.update == 0;
    const double skips = clipped.skips - std::exchange(skips_seen_, clipped.skips);
    for (double i = 0; i < skips; ++i) optimizer_.forget_step();
    const bool updates_came_first = std::exchange(clipped_before_norm_, false) || by_last_norm_;
    const bool spoilt = skips > 0 && updates_came_first;
    if (skipped || spoilt) has_norm_ = false;  // the next step is a first one again
    first_unasked_ = false;
    if (spoilt)
      fail({"training step: the gradient norm ",
            skipped ? cat({"is ", clipped.norm}) : "was not finite in a step before",
            ", and with delayed_norm updates came before it, so that the weights are spoilt; load the last checkpoint, "
            "or use the exact norm, with which such a step changes nothing"});
    return {counted > 0 ? sum / counted : 0.0, clipped.norm, static_cast<std::int64_t>(counted), skipped};
  }

  /// Waits for what the last run has left under way beside gathers: with `data_parallel::delayed_norm` the sums of the
  /// norm and the loss. Nothing where there is none; asks no rank for anything.
  void settle(const context<device>& ctx) {
    if (!norm_) return;
    if (stages_.size() == 1) collect_squares(ctx);
    mean_.wait();
    loss_over_stages_.wait();
    squares_over_stages_.wait();
    double* const squares = squares_.template data<double>();
    if constexpr (has_canonical_products<device>) {
      if (ctx.numerics.canonical()) kernels::sum_of_bins(ctx.device, static_cast<const std::int64_t*>(bins_), squares);
    }
    kernels::clip(ctx.device, squares, clip_, clipped_.template data<kernels::clip_numbers>());
    norm_.reset();
    if (norm_ends_) norm_ends_();
  }

  /// From here on every run calls `begin` when its gradients are reduced and their norm is about to be, and `end` when
  /// that is known. Neither may touch what a step works on. Between the two stands what the ranks of a program ask each
  /// other in every step, beside collectives that all of them wait for: where one connection carries all, as over TCP,
  /// whoever asks after the step waits for the gathers that follow the updates, which the next forward pass was to
  /// hide. With `data_parallel::delayed_norm` the norm, and so `begin`, comes behind the updates and before those
  /// gathers, and `end` when this rank waits for it: in `settle`, `result` or the next run. Not for steps that are
  /// recorded.
  void around_norm(std::function<void()> begin, std::function<void()> end) {
    norm_begins_ = std::move(begin);
    norm_ends_ = std::move(end);
  }

  pipeline_type& model() const { return model_; }
  /// Whether the next step does what all that follow do. Where it clips by a delayed norm, the first does not, nor one
  /// behind a first that nobody has asked about.
  bool steady() const { return !delays_norm() || !clips() || (has_norm_ && !first_unasked_); }

  /// Returns the numbers by which the next step clips if they are of the norm of a step before
  /// (`data_parallel::delayed_norm`), for whoever saves them; nothing otherwise, and before the first step. Waits for
  /// the device.
  std::optional<kernels::clip_numbers> kept_norm(const context<device>& ctx) {
    if (!delays_norm() || !has_norm_ || !clips()) return {};
    settle(ctx);
    return clipped(ctx);
  }
  /// Clips the next step by such numbers, to the limit of this one.
  void keep_norm(const context<device>& ctx, kernels::clip_numbers kept) {
    settle(ctx);
    if (kept.update != 0) kept.factor = kernels::clip_factor(kept.norm, clip_);
    ctx.device.upload(clipped_.data(), &kept, sizeof kept, ctx.device.main_stream());
    has_norm_ = kept.update != 0;
    skips_seen_ = kept.skips;
    first_unasked_ = clipped_before_norm_ = false;
  }

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
  bool delays_norm() const { return model_.executor().step().policy.delayed_norm; }
  bool clips() const { return clip_ > 0; }
  kernels::clip_numbers clipped(const context<device>& ctx) const {
    kernels::clip_numbers found;
    ctx.device.download(&found, clipped_.data(), sizeof found, ctx.device.main_stream());
    return found;
  }
  /// The second step clips by the norm of the first, unless that was skipped: where nobody has asked, the device is.
  void look_at_first(const context<device>& ctx) {
    settle(ctx);
    has_norm_ = clipped(ctx).skips == skips_seen_;  // as on a device that only counts, where nothing is skipped
    first_unasked_ = false;
  }

  using reduced = reduced_gradient<precision, device>;
  /// The work on gradients that are reduced.
  struct updates {
    training_step& step;
    const context<device>& ctx;
    bool has_norm = false;  ///< of this step
    bool clips = false;     ///< whether the optimizer has the numbers by which this step clips

    void norm(std::span<const reduced> gradients) {
      step.settle(ctx);  // the step before, where no update has waited for it
      if (step.by_last_norm_ && step.clips() && !clips) clip();
      if (step.norm_begins_) step.norm_begins_();
      step.start_sums(ctx, gradients, step.by_last_norm_);
      step.has_norm_ = has_norm = true;
      if (!step.by_last_norm_) clip();
    }
    bool may_update() const { return !step.delays_norm() || step.by_last_norm_ || has_norm; }
    void update(std::span<reduced> gradients) {
      if (step.clips() && !clips) clip();
      step.optimizer_.update(ctx, gradients);
    }
    /// Clips by the newest norm that there is.
    void clip() {
      step.settle(ctx);
      step.optimizer_.clip_by(ctx, step.clipped_.template data<kernels::clip_numbers>());
      clips = true;
    }
  };

  /// Sums the loss, and the squares of gradients, over all ranks. With `later` the last of the sums are under way when
  /// it returns, for `settle`: over the ranks of the stage, or over the stages, where there are several.
  void start_sums(const context<device>& ctx, std::span<const reduced> gradients, bool later) {
    const bool one_stage = stages_.size() == 1;
    if (later && one_stage)
      mean_.start_finish(ctx);
    else
      mean_.finish(ctx);
    sum_over_stages(mean_.loss_sum(), 1, dtype::f64, later, loss_over_stages_);
    norm_.emplace();
    for (const reduced& gradient : gradients) norm_->add(ctx, gradient);
    if constexpr (has_canonical_products<device>) {
      if (ctx.numerics.canonical()) {
        norm_->start_exact_squares(ctx, later && one_stage);
        if (one_stage) return;
        collect_squares(ctx);
        return sum_over_stages(bins_, kernels::exact_squares::words, dtype::i64, later, squares_over_stages_);
      }
    }
    norm_->start_squares(ctx, later && one_stage);
    if (one_stage) return;
    collect_squares(ctx);
    sum_over_stages(squares_.data(), 1, dtype::f64, later, squares_over_stages_);
  }
  /// Waits for the squares of this stage.
  void collect_squares(const context<device>& ctx) {
    if constexpr (has_canonical_products<device>) {
      if (ctx.numerics.canonical()) {
        bins_ = norm_->finish_exact_squares();
        return;
      }
    }
    ctx.device.copy(squares_.data(), norm_->finish_squares(ctx), sizeof(double), ctx.device.main_stream());
  }
  void sum_over_stages(void* values, std::size_t count, dtype type, bool later, request& under_way) {
    if (stages_.size() == 1) return;
    if (later)
      under_way = stages_.start_all_reduce(values, values, count, type, reduce_op::sum);
    else
      stages_.all_reduce(values, values, count, type, reduce_op::sum);
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
      std::vector<knob> values = detail::values_of_context(ctx.ranks.shape(), ctx.sizes, ctx.seed, ctx.numerics);
      values.push_back({"clip", exact_text(clip)});
      values.push_back({"microbatches", cat({model.shape().microbatches})});
      return values;
    });
    ctx.device.zero(clipped_.data(), clipped_.bytes(), ctx.device.main_stream());
    // Or the next step's messages would come behind a norm for which all stages have to have ended theirs.
    if (delays_norm() && stages_.size() > 1) stages_ = stages_.split(0, stages_.rank(), stages_.label());
    if (!model.executor().step().policy.clip)
      fail(
          "training step: data_parallel::clip = 0 leaves out the norm, by which a step knows that its gradients are "
          "finite; legal is 1, with a limit of 0 where nothing is to be clipped, and with delayed_norm where no update "
          "is to wait for it");
    model.visit([&](const auto& p) { optimizer_.prepare(ctx, p); });
    for (int i = 0; i < model.shape().microbatches; ++i) {
      batch_.emplace_back(tokens(ctx), tokens(ctx));
      if (model.documents())
        starts_.push_back(make_buffer<std::int32_t>(ctx.device, static_cast<std::size_t>(batch_[0].first.size())));
    }
  }

  std::unique_ptr<pipeline_type> own_;  ///< around a whole model
  pipeline_type& model_;
  optimizer_ref<precision, device> optimizer_;  ///< the caller's
  double clip_;
  bool loaded_ = false;               ///< whether there are tokens for the next run
  bool ran_ = false;                  ///< whether there was one
  bool has_norm_ = false;             ///< of a step before
  bool by_last_norm_ = false;         ///< whether the last step clipped by that
  bool first_unasked_ = false;        ///< whether that one clipped by its own, and nobody knows whether it was skipped
  bool clipped_before_norm_ = false;  ///< whether a step since the last `result` clipped by the one before it
  double skips_seen_ = 0;             ///< of `clip_numbers::skips`, when they were asked for
  std::function<void()> norm_begins_, norm_ends_;
  std::int64_t first_sample_ = 0;
  typename pipeline_type::batch batch_;
  std::vector<buffer<device>> starts_;  ///< of the documents, for each microbatch, if there are any
  typename pipeline_type::mean mean_;
  buffer<device> squares_, clipped_;
  any_communicator stages_;                               ///< over which norms are summed
  std::optional<gradient_norm<precision, device>> norm_;  ///< from its sums' start until they are there
  std::int64_t* bins_ = nullptr;                          ///< its squares under canonical numerics
  request loss_over_stages_, squares_over_stages_;        // after what they sum: a request that goes waits
};

template <class Stage, class... Rest>
training_step(const context<typename Stage::device>&, pipeline<Stage>&, Rest&&...) -> training_step<Stage>;
template <model Stage, class... Rest>
training_step(const context<typename Stage::device>&, Stage&, Rest&&...) -> training_step<Stage>;

/// One step of a whole model, with what `training_step` says.
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
