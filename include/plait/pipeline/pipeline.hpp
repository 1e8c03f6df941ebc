// The stages of a model on one rank, run by a schedule up to their reduced gradients. It updates no weights:
// train/train_step.hpp does. Next: pipeline/model.hpp for the concept of a stage, schedule/schedule.hpp.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/counting.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/pipeline/executor.hpp"
#include "plait/pipeline/layer_split.hpp"
#include "plait/pipeline/model.hpp"
#include "plait/schedule/generators/one_f_one_b.hpp"
#include "plait/tensor/all_reduce_scalar.hpp"

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

/// A model as one or more stages, shared out over the ranks of a pipeline and run by a schedule: what `training_step`
/// runs, and whoever visits parameters sees as a model with this rank's parameters. Every model is one, of one stage
/// where nothing else is said.
template <model Stage>
class pipeline {
 public:
  using stage_type = Stage;
  using precision_type = typename Stage::precision_type;
  using device = typename Stage::device;
  using tokens = typename Stage::tokens;
  using logits = typename Stage::logits;
  using mean = typename Stage::mean;
  using batch = std::vector<std::pair<tokens, tokens>>;  ///< ids and labels of each microbatch
  using parameter = plait::parameter<precision_type, device>;
  using gradients = std::vector<reduced_gradient<precision_type, device>>;

  /// Collective along the pipeline. `make(part, first_stage)` makes this rank's stages, in the order of their chunks,
  /// as `std::unique_ptr<Stage>`; `first_stage` is the model's first stage if this rank has it, and null otherwise.
  /// Throws where two parameters have one name, or those that are tied across stages are not the same on the first and
  /// the last.
  template <class Make>
  pipeline(const context<device>& ctx, any_communicator along, const schedule& plan,
           std::span<const stage_layers> parts, Make&& make, const schedule_costs& costs = {})
      : executor_(along, plan, costs), shape_(plan.shape) {
    if (static_cast<int>(parts.size()) != shape_.stages())
      fail({"pipeline: the layers are split into ", parts.size(), " stages, and the schedule ", plan.name.str(),
            " has ", shape_.stages()});
    for (int chunk = 0; chunk < shape_.chunks; ++chunk) {
      const stage_layers& part = parts[static_cast<std::size_t>(shape_.stage_of(along.rank(), chunk))];
      Stage* const first = !stages_.empty() && stages_[0]->part().first ? stages_[0] : nullptr;
      own_.push_back(make(part, first));
      stages_.push_back(own_.back().get());
    }
    check_names(ctx, along);
    tie(ctx, along);
  }
  /// A whole model as a pipeline of one stage, for so many microbatches in a step. The model must outlive it.
  pipeline(const context<device>& ctx, Stage& whole, int microbatches)
      : executor_(counting_communicator(0, 1, "pp"), make_schedule<one_f_one_b>(1, microbatches)),
        shape_{1, 1, microbatches},
        stages_{&whole} {
    if (!whole.part().first || !whole.part().last)
      fail("pipeline: one stage of several was given as the whole model; its ranks need a schedule");
    check_names(ctx, executor_.along());
    tie(ctx, executor_.along());
  }

  const pipeline_shape& shape() const { return shape_; }
  pipeline_executor<device>& executor() { return executor_; }
  std::span<Stage* const> stages() const { return stages_; }
  bool has_last_stage() const { return stages_.back()->part().last; }
  std::int64_t ignore_index() const { return stages_[0]->ignore_index(); }
  bool documents() const { return stages_[0]->documents(); }
  double dropout() const { return stages_[0]->dropout(); }

  /// Forward and backward passes of all microbatches, the first sample of the first one being `first_sample`. Adds
  /// their losses to `loss`, on the rank that has the last stage, and takes the seed from it. Returns the reduced
  /// gradients of this rank's trainable parameters: those of a chunk are reduced as soon as its last microbatch is
  /// through, those that are tied across stages at the end. `starts` are the `microbatch::document_starts` of each
  /// microbatch, where sequences are packed from documents.
  gradients run(const context<device>& ctx, batch& data, mean& loss, std::int64_t first_sample,
                std::span<const std::int32_t* const> starts = {}) {
    if (static_cast<int>(data.size()) != shape_.microbatches)
      fail({"pipeline: ", data.size(), " microbatches, and the schedule is for ", shape_.microbatches});
    training work{*this, data, loss, first_sample, starts, {}};
    executor_.run(ctx, work);
    visit([&](parameter& p) {
      if (p.info().tied_across_stages && p.trainable()) work.reduced.push_back(p.reduce(ctx));
    });
    return std::move(work.reduced);
  }
  /// Adds the losses of all microbatches to `loss` as `run` does, without gradients.
  void evaluate(const context<device>& ctx, batch& data, mean& loss) {
    const auto add = [&](activation x, std::size_t i) {
      loss.add(ctx, stages_.back()->forward_loss(ctx, std::move(x), data[i].second, nullptr));
    };
    run_forward(
        ctx, data.size(), [&](std::size_t i) -> const tokens& { return data[i].first; }, add);
  }
  /// The scores of one microbatch, on the ranks that have the last stage; empty on the others.
  logits score(const context<device>& ctx, const tokens& ids) {
    logits scores;
    const auto take = [&](activation x, std::size_t) { scores = stages_.back()->forward_scores(ctx, std::move(x)); };
    run_forward(
        ctx, 1, [&](std::size_t) -> const tokens& { return ids; }, take);
    return scores;
  }

  void sum_over_stages(const context<device>&, double* value) {
    if (shape_.ranks > 1) executor_.along().all_reduce(value, value, 1, dtype::f64, reduce_op::sum);
  }

  /// Calls f(parameter) for each that this rank has.
  template <class F>
  void visit(F&& f) {
    const visitor erased(f);
    for (Stage* stage : stages_) stage->visit(erased);
  }
  /// Visits all but the copy of a tied parameter that another rank counts: over all stages, each parameter once.
  template <class F>
  void visit_once(F&& f) {
    visit([&](parameter& p) {
      if (p.counts()) f(p);
    });
  }

 private:
  using activation = typename Stage::activation;
  using gradient = typename Stage::gradient;

  /// Refers to whatever visits parameters, for the length of a visit: a stage compiles its visit once, and not for
  /// each of its visitors.
  class visitor {
   public:
    template <class F>
      requires(!std::same_as<std::remove_cvref_t<F>, visitor>)
    explicit visitor(F& f)
        : f_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
          call_([](void* g, parameter& p) { (*static_cast<F*>(g))(p); }) {}
    void operator()(parameter& p) const { call_(f_, p); }

   private:
    void* f_;
    void (*call_)(void*, parameter&);
  };

  /// A training step as the executor sees it.
  struct training {
    using activation = typename Stage::activation;
    using gradient = typename Stage::gradient;
    using saved = typename Stage::saved;

    activation input(const context<device>& ctx, int) { return activation(ctx); }
    gradient output_gradient(const context<device>& ctx, int) { return gradient(ctx); }
    activation forward(const context<device>& ctx, int chunk, int i, activation x, saved* kept) {
      const microbatch<device> mb = at(ctx, i);
      auto& [ids, labels] = data[static_cast<std::size_t>(i)];
      Stage& stage = owner.at(chunk);
      x = stage.forward_layers(mb, ids, std::move(x), kept);
      if (!stage.part().last) return x;
      loss.add(ctx, stage.forward_loss(mb, std::move(x), labels, kept));
      return {};
    }
    gradient backward(const context<device>& ctx, int chunk, int i, saved& kept, gradient dy, weight_work* deferred) {
      microbatch<device> mb = at(ctx, i);
      mb.deferred = deferred;
      auto& [ids, labels] = data[static_cast<std::size_t>(i)];
      Stage& stage = owner.at(chunk);
      if (stage.part().last) dy = stage.backward_loss(mb, labels, kept, loss.seed());
      return stage.backward_layers(mb, ids, kept, std::move(dy));
    }
    void finished(const context<device>& ctx, int chunk) {
      const auto reduce = [&](parameter& p) {
        if (!p.info().tied_across_stages && p.trainable()) reduced.push_back(p.reduce(ctx));
      };
      const visitor erased(reduce);
      owner.at(chunk).visit(erased);
    }
    microbatch<device> at(const context<device>& ctx, int i) const {
      microbatch<device> mb(ctx);
      mb.first_sample = first_sample + i * ctx.sizes.of(layout_v<typename tokens::spec>.dims[0].dim);
      if (!starts.empty()) mb.document_starts = starts[static_cast<std::size_t>(i)];
      return mb;
    }

    pipeline& owner;
    batch& data;
    mean& loss;
    std::int64_t first_sample;
    std::span<const std::int32_t* const> starts;
    gradients reduced;
  };

  /// Forward passes alone: `ids(i)` are the tokens of microbatch i, `last(x, i)` takes what leaves the layers.
  template <class Ids, class Last>
  struct inference {
    using activation = typename Stage::activation;
    using gradient = typename Stage::gradient;
    using saved = typename Stage::saved;

    activation input(const context<device>& ctx, int) { return activation(ctx); }
    gradient output_gradient(const context<device>&, int) { return {}; }
    activation forward(const context<device>& ctx, int chunk, int microbatch, activation x, saved*) {
      Stage& stage = owner.at(chunk);
      const auto i = static_cast<std::size_t>(microbatch);
      x = stage.forward_layers(ctx, ids(i), std::move(x), nullptr);
      if (!stage.part().last) return x;
      last(std::move(x), i);
      return {};
    }
    gradient backward(const context<device>&, int, int, saved&, gradient, weight_work*) { return {}; }
    void finished(const context<device>&, int) {}

    pipeline& owner;
    Ids& ids;
    Last& last;
  };

  template <class Ids, class Last>
  void run_forward(const context<device>& ctx, std::size_t microbatches, Ids ids, Last last) {
    if (!forward_ || forward_->shape().microbatches != static_cast<int>(microbatches))
      forward_.emplace(executor_.along(), forward_schedule(shape_, static_cast<int>(microbatches)));
    inference<Ids, Last> work{*this, ids, last};
    forward_->run(ctx, work, false);
  }
  Stage& at(int chunk) { return *stages_[static_cast<std::size_t>(chunk)]; }

  /// Parameters have one name each, over all stages, but for those that are tied across stages.
  void check_names(const context<device>& ctx, any_communicator& along) {
    std::vector<std::uint64_t> names;
    std::set<std::string> seen;
    visit([&](parameter& p) {
      if (!seen.insert(p.name()).second)
        fail({"pipeline: two parameters are called ", p.name(),
              ": they would have the same initial values and one entry in a checkpoint; give each its own name, or let "
              "several layers use one parameter"});
      if (!p.info().tied_across_stages) names.push_back(parameter::stream_of(p.name()));
    });
    for (const auto& [rank, name] : find_twice(ctx, along, names))
      visit([&, rank = rank, name = name](parameter& p) {
        if (!p.info().tied_across_stages && parameter::stream_of(p.name()) == name)
          fail(
              {"pipeline: the parameter ", p.name(), " is on pipeline ranks ", along.rank(), " and ", rank,
               "; if it is one parameter, both stages must make it with tied_across_stages, and if not, each needs its "
               "own name"});
      });
  }
  /// (another rank, name) for each of `names` that another rank has too. Collective.
  static std::vector<std::pair<int, std::uint64_t>> find_twice(const context<device>& ctx, any_communicator& along,
                                                               const std::vector<std::uint64_t>& names) {
    std::vector<std::pair<int, std::uint64_t>> twice;
    if (along.size() == 1 || only_counts<device>) return twice;
    const auto most = static_cast<std::size_t>(
        all_reduce_scalar(ctx.device, along, static_cast<double>(names.size()), reduce_op::max));
    const std::vector<std::uint64_t> all = gather_all(ctx.device, along, names, most);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const int rank = static_cast<int>(i / most);
      if (rank != along.rank() && all[i] != 0 && std::find(names.begin(), names.end(), all[i]) != names.end())
        twice.emplace_back(rank, all[i]);
    }
    return twice;
  }

  /// Returns a text that is equal where a parameter that is made twice is one parameter.
  static std::string made_as(const parameter_info& info) {
    std::string text = info.name;
    if (info.decays) text += " decays";
    if (info.hidden_layer) text += " hidden";
    const auto add = [&text](auto number) {
      text += ' ';
      text += std::to_string(number);
    };
    for (std::int64_t n : info.shape) add(n);
    add(std::bit_cast<std::uint64_t>(info.init.mean));
    add(std::bit_cast<std::uint64_t>(info.init.std));
    return text;
  }
  /// The ranks of the first and the last stage sum the gradients of what both have.
  void tie(const context<device>& ctx, any_communicator& along) {
    const int first = shape_.rank_of(0), last = shape_.rank_of(shape_.stages() - 1);
    const bool here = along.rank() == first || along.rank() == last;
    std::uint64_t names = 0;
    visit([&](parameter& p) {
      if (!p.info().tied_across_stages) return;
      names += parameter::stream_of(made_as(p.info()));
      if (!here)
        fail({"pipeline: the parameter ", p.name(),
              " is tied across stages, but only the first and the last stage can share parameters"});
    });
    if (first == last || shape_.ranks == 1) return;
    if constexpr (only_counts<device>) {  // its split cannot know how many ranks there are
      if (here)
        join(ctx.ranks.count(counting_communicator(along.rank() == first ? 0 : 1, 2, "pp ends")),
             along.rank() == first);
    } else {
      any_communicator ends = along.split(here ? 0 : -1, along.rank(), "pp ends");
      if (!here) return;
      for (const std::uint64_t theirs : gather_all(ctx.device, ends, {names}, 1))
        if (theirs != names)
          fail(
              "pipeline: the first and the last stage do not have the same parameters that are tied across stages; "
              "both must make them, with one name, shape and initializer, and alike in decays and hidden_layer");
      join(ends, along.rank() == first);
    }
  }
  void join(const any_communicator& ends, bool counts) {
    visit([&](parameter& p) {
      if (p.info().tied_across_stages) p.join_stages(ends, counts);
    });
  }

  pipeline_executor<device> executor_;
  pipeline_shape shape_;
  std::vector<std::unique_ptr<Stage>> own_;
  std::vector<Stage*> stages_;  ///< of this rank, by chunk
  std::optional<pipeline_executor<device>> forward_;
};

}  // namespace plait
