#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/ledger.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/pipeline_executor.hpp"
#include "plait/parallel/stage.hpp"

namespace plait {

/// The forward passes of `microbatches` microbatches alone, as an evaluation runs them: every stage takes them in
/// order, later stages first where two could run.
constexpr schedule forward_schedule(pipeline_shape shape, int microbatches) {
  shape.microbatches = microbatches;
  schedule plan{"forward", shape, std::vector<std::vector<action>>(static_cast<std::size_t>(shape.ranks))};
  // In each wave, stage s runs microbatch wave - s.
  for (int wave = 0; wave < microbatches + shape.stages() - 1; ++wave)
    for (int stage = std::min(wave, shape.stages() - 1); stage >= 0; --stage)
      if (const int microbatch = wave - stage; microbatch < microbatches)
        plan.order[static_cast<std::size_t>(shape.rank_of(stage))].push_back(
            forward_of(shape.chunk_of(stage), microbatch));
  return plan;
}

/// A model whose layers are shared out over the ranks of a pipeline, run by a schedule. To `training_step` and whoever
/// visits parameters it is a model like any other, with this rank's parameters.
///
/// `Model` is the type of one stage, such as `llama`: the whole model where there is one stage.
template <class Model, compute_device Device = cpu>
class pipeline {
 public:
  using precision_type = typename Model::precision_type;
  using tokens = typename Model::tokens;
  using logits = typename Model::logits;
  using loss_sum = typename Model::loss_sum;
  using loss_seed = typename Model::loss_seed;
  using batch = std::vector<std::pair<tokens, tokens>>;  ///< ids and labels of each microbatch
  using parameter = parameter_base<precision_type, Device>;

  /// Collective along the pipeline. `make(part, first_stage)` makes this rank's stages, in the order of their chunks,
  /// as `std::unique_ptr<Model>`; `first_stage` is the model's first stage if this rank has it, and null otherwise.
  template <class Make>
  pipeline(any_communicator along, const schedule& plan, std::span<const stage_layers> parts, Make&& make,
           const schedule_costs& costs = {})
      : executor_(along, plan, costs), shape_(plan.shape) {
    if (static_cast<int>(parts.size()) != shape_.stages())
      fail("pipeline: the layers are split into " + std::to_string(parts.size()) + " stages, and the schedule " +
           plan.name.str() + " has " + std::to_string(shape_.stages()));
    for (int chunk = 0; chunk < shape_.chunks; ++chunk) {
      const stage_layers& part = parts[static_cast<std::size_t>(shape_.stage_of(along.rank(), chunk))];
      Model* const first = !stages_.empty() && stages_[0]->part().first ? stages_[0].get() : nullptr;
      stages_.push_back(make(part, first));
    }
    // The ranks of the two stages that have the table of tied embeddings sum its gradients.
    const int first = shape_.rank_of(0), last = shape_.rank_of(shape_.stages() - 1);
    if (first != last && shape_.ranks > 1)
      ends_ = along.split(along.rank() == first || along.rank() == last ? 0 : -1, along.rank(), "pp ends");
  }

  const pipeline_shape& shape() const { return shape_; }
  const auto& options() const { return stages_[0]->options(); }
  pipeline_executor<Device>& executor() { return executor_; }
  std::span<const std::unique_ptr<Model>> stages() const { return stages_; }
  bool has_last_stage() const { return stages_.back()->part().last; }

  /// Forward and backward passes of all microbatches; adds their losses to `*loss`, in the device's memory, on the rank
  /// that has the last stage. Gradients of a chunk are reduced as soon as its last microbatch is through. `starts` are
  /// the `context::document_starts` of each microbatch, where sequences are packed from documents.
  void run(context<Device>& ctx, batch& data, const loss_seed& seed, double* loss,
           std::span<const std::int32_t* const> starts = {}) {
    if (static_cast<int>(data.size()) != shape_.microbatches)
      fail("pipeline: " + std::to_string(data.size()) + " microbatches, and the schedule is for " +
           std::to_string(shape_.microbatches));
    training work{*this, data, seed, loss, ctx.first_sample, starts};
    const std::int32_t* const outside = ctx.document_starts;
    executor_.run(ctx, work);
    ctx.first_sample = work.first_sample;
    ctx.document_starts = outside;
  }
  /// Adds the losses of all microbatches to `*loss` as `run` does, without gradients.
  void evaluate(context<Device>& ctx, batch& data, double* loss) {
    const auto add = [&](activation x, std::size_t i) {
      const auto sum = stages_.back()->forward_loss(ctx, std::move(x), data[i].second, nullptr);
      kernels::accumulate(ctx.device, sum.data(), loss, 1);
    };
    run_forward(
        ctx, data.size(), [&](std::size_t i) -> const tokens& { return data[i].first; }, add);
  }
  /// The scores of one microbatch, on the ranks that have the last stage; empty on the others.
  logits score(context<Device>& ctx, const tokens& ids) {
    logits scores;
    const auto take = [&](activation x, std::size_t) {
      scores = stages_.back()->forward_scores(ctx, std::move(x), nullptr);
    };
    run_forward(
        ctx, 1, [&](std::size_t) -> const tokens& { return ids; }, take);
    return scores;
  }

  /// What `run` has left: the gradients of a tied table, of which two stages have one each.
  void reduce_gradients(context<Device>& ctx) {
    for (auto& stage : stages_) {
      parameter* const table = stage->tied_table();
      if (table == nullptr) continue;
      table->reduce(ctx);
      if (ends_)
        ends_.all_reduce(table->gradient(), table->gradient(), static_cast<std::size_t>(table->size()),
                         dtype_of<gradient_of<precision_type>>, reduce_op::sum);
    }
  }
  void sum_over_stages(context<Device>&, double* value) {
    if (shape_.ranks > 1) executor_.along().all_reduce(value, value, 1, dtype::f64, reduce_op::sum);
  }

  /// Calls f(parameter) for each that this rank has.
  template <class F>
  void visit(F&& f) {
    for (auto& stage : stages_) stage->visit(f);
  }
  /// The same without the copy of a tied table that another rank has too: over all stages, each parameter once.
  template <class F>
  void visit_once(F&& f) {
    for (auto& stage : stages_) {
      const parameter* const copy = stage->part().first ? nullptr : stage->tied_table();
      stage->visit([&](parameter& p) {
        if (&p != copy) f(p);
      });
    }
  }
  /// Calls f(pass, cost) for every collective of one microbatch within this rank's stages.
  template <class F>
  void visit_collectives(F&& f) const {
    for (const auto& stage : stages_) stage->visit_collectives(f);
  }
  /// Adds to a ledger what a step sends along the pipeline.
  void add_traffic(context<Device>& ctx, ledger& book) const {
    if (shape_.ranks == 1) return;
    const auto add = [&](const std::string& label, collective kind, int ranks, std::uint64_t bytes) {
      book.of(label).kinds[static_cast<std::size_t>(kind)] += {1, bytes, wire_bytes(kind, ranks, bytes), 0.0};
    };
    const std::string label = executor_.along().label();
    const auto bytes =
        static_cast<std::uint64_t>(local_elements(layout_v<typename activation::spec>, ctx.ranks.shape(), ctx.sizes)) *
        sizeof(value_type);
    for (const program_step& step : executor_.program())
      if (step.kind != step_kind::compute)
        add(label, step.kind == step_kind::send ? collective::send : collective::receive, shape_.ranks, bytes);
    for (int sum = 0; sum < 2; ++sum) add(label, collective::all_reduce, shape_.ranks, sizeof(double));
    for (const auto& stage : stages_)
      if (parameter* const table = stage->tied_table(); table && ends_)
        add(ends_.label(), collective::all_reduce, 2,
            static_cast<std::uint64_t>(table->size()) * sizeof(gradient_of<precision_type>));
  }

  /// The most bytes that this rank's microbatches keep at a time, between forward and backward passes.
  std::int64_t saved_bytes(const context<Device>& ctx) const {
    std::int64_t now = 0, most = 0;
    for (const program_step& step : executor_.program()) {
      if (step.kind != step_kind::compute) continue;
      const std::int64_t bytes = stages_[step.action.chunk]->saved_bytes(ctx);
      if (step.action.kind == action_kind::forward) most = std::max(most, now += bytes);
      if (frees_activations(step.action.kind)) now -= bytes;
    }
    return most;
  }

 private:
  using activation = typename Model::activation;
  using slope = typename Model::slope;
  using value_type = typename activation::value_type;

  /// A training step as the executor sees it.
  struct training {
    using activation = typename Model::activation;
    using slope = typename Model::slope;
    using saved = typename Model::saved;

    activation input(context<Device>& ctx, int) { return activation(ctx); }
    slope output_slope(context<Device>& ctx, int) { return slope(ctx); }
    activation forward(context<Device>& ctx, int chunk, int microbatch, activation x, saved* kept) {
      auto& [ids, labels] = select(ctx, microbatch);
      Model& stage = owner.at(chunk);
      x = stage.forward_layers(ctx, ids, std::move(x), kept);
      if (!stage.part().last) return x;
      const auto sum = stage.forward_loss(ctx, std::move(x), labels, kept);
      kernels::accumulate(ctx.device, sum.data(), loss, 1);
      return {};
    }
    slope backward(context<Device>& ctx, int chunk, int microbatch, saved& kept, slope dy) {
      auto& [ids, labels] = select(ctx, microbatch);
      Model& stage = owner.at(chunk);
      if (stage.part().last) dy = stage.backward_loss(ctx, labels, kept, seed);
      return stage.backward_layers(ctx, ids, kept, std::move(dy));
    }
    void finished(context<Device>& ctx, int chunk) {
      Model& stage = owner.at(chunk);
      const parameter* const later = stage.tied_table();
      stage.visit([&](parameter& p) {
        if (&p != later) p.reduce(ctx);
      });
    }
    std::pair<tokens, tokens>& select(context<Device>& ctx, int microbatch) {
      ctx.first_sample = first_sample + microbatch * ctx.sizes.of(layout_v<typename tokens::spec>.dims[0].dim);
      if (!starts.empty()) ctx.document_starts = starts[static_cast<std::size_t>(microbatch)];
      return data[static_cast<std::size_t>(microbatch)];
    }

    pipeline& owner;
    batch& data;
    const loss_seed& seed;
    double* loss;
    std::int64_t first_sample;
    std::span<const std::int32_t* const> starts;
  };

  /// Forward passes alone: `ids(i)` are the tokens of microbatch i, `last(x, i)` takes what leaves the layers.
  template <class Ids, class Last>
  struct inference {
    using activation = typename Model::activation;
    using slope = typename Model::slope;
    using saved = typename Model::saved;

    activation input(context<Device>& ctx, int) { return activation(ctx); }
    slope output_slope(context<Device>&, int) { return {}; }
    activation forward(context<Device>& ctx, int chunk, int microbatch, activation x, saved*) {
      Model& stage = owner.at(chunk);
      const auto i = static_cast<std::size_t>(microbatch);
      x = stage.forward_layers(ctx, ids(i), std::move(x), nullptr);
      if (!stage.part().last) return x;
      last(std::move(x), i);
      return {};
    }
    slope backward(context<Device>&, int, int, saved&, slope) { return {}; }
    void finished(context<Device>&, int) {}

    pipeline& owner;
    Ids& ids;
    Last& last;
  };

  template <class Ids, class Last>
  void run_forward(context<Device>& ctx, std::size_t microbatches, Ids ids, Last last) {
    if (!forward_ || forward_->shape().microbatches != static_cast<int>(microbatches))
      forward_.emplace(executor_.along(), forward_schedule(shape_, static_cast<int>(microbatches)));
    inference<Ids, Last> work{*this, ids, last};
    forward_->run(ctx, work, false);
  }
  Model& at(int chunk) { return *stages_[static_cast<std::size_t>(chunk)]; }

  pipeline_executor<Device> executor_;
  pipeline_shape shape_;
  std::vector<std::unique_ptr<Model>> stages_;  ///< of this rank, by chunk
  any_communicator ends_;                       ///< of the ranks with the first and the last stage, where they differ
  std::optional<pipeline_executor<Device>> forward_;
};

}  // namespace plait
