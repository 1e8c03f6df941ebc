// The stages of a model on one rank, which a schedule runs up to their reduced gradients.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/executor.hpp"
#include "plait/parallel/model.hpp"
#include "plait/parallel/placement.hpp"
#include "plait/parallel/units.hpp"
#include "plait/schedule/schedule.hpp"
#ifndef PLAIT_COMPILED
#include "plait/schedule/expand.hpp"
#include "plait/schedule/generators.hpp"
#endif

namespace plait::detail {

// Checks of parameters over the stages of a pipeline: their names, and the parameters that the first and the last stage
// share.

/// The name of the communicator of the first and the last stage, which sums the gradients of shared parameters.
inline constexpr const char* ends_axis = "pp ends";

/// Returns (another rank, name) for each of `names` that another rank also has. Collective.
template <compute_device Device>
std::vector<std::pair<int, std::uint64_t>> find_twice(const context<Device>& ctx, any_communicator& along,
                                                      const std::vector<std::uint64_t>& names) {
  std::vector<std::pair<int, std::uint64_t>> twice;
  if (along.size() == 1 || only_counts<Device>) return twice;
  const auto most =
      static_cast<std::size_t>(all_reduce_scalar(ctx.device, along, static_cast<double>(names.size()), reduce_op::max));
  const std::vector<std::uint64_t> all = gather_all(ctx.device, along, names, most);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int rank = static_cast<int>(i / most);
    if (rank != along.rank() && all[i] != 0 && std::find(names.begin(), names.end(), all[i]) != names.end())
      twice.emplace_back(rank, all[i]);
  }
  return twice;
}

/// Throws if two parameters of any stages have one name and are not tied across stages. `all` are this rank's
/// parameters. Collective.
template <class Precision, compute_device Device>
void check_names(const context<Device>& ctx, any_communicator& along,
                 const std::vector<parameter<Precision, Device>*>& all) {
  std::vector<std::uint64_t> names;
  std::set<std::string> seen;
  for (const auto* p : all) {
    if (!seen.insert(p->name()).second)
      fail({"pipeline: two parameters are called ", p->name(),
            ": they would have the same initial values and one entry in a checkpoint; give each its own name, or let "
            "several layers use one parameter"});
    if (!p->info().tied_across_stages) names.push_back(p->stream_of(p->name()));
  }
  for (const auto& [rank, name] : find_twice(ctx, along, names))
    for (const auto* p : all)
      if (!p->info().tied_across_stages && p->stream_of(p->name()) == name)
        fail({"pipeline: the parameter ", p->name(), " is on pipeline ranks ", along.rank(), " and ", rank,
              "; if it is one parameter, both stages must make it with tied_across_stages, and if not, each needs its "
              "own name"});
}
/// Returns a text that is equal for two descriptions that may describe one shared parameter.
std::string made_as(const parameter_info& info);
/// Makes the first and the last stage sum the gradients of the parameters that they share.
template <class Precision, compute_device Device>
void tie_stages(const context<Device>& ctx, any_communicator& along, const pipeline_shape& shape,
                const std::vector<parameter<Precision, Device>*>& all) {
  const auto join = [&](const any_communicator& ends, bool counts) {
    for (auto* p : all)
      if (p->info().tied_across_stages) p->join_stages(ends, counts);
  };
  const int first = shape.rank_of(0), last = shape.rank_of(shape.stages() - 1);
  const bool here = along.rank() == first || along.rank() == last;
  std::uint64_t names = 0;
  for (const auto* p : all) {
    if (!p->info().tied_across_stages) continue;
    names += p->stream_of(made_as(p->info()) + (p->trainable() ? "" : " frozen"));
    if (!here)
      fail({"pipeline: the parameter ", p->name(),
            " is tied across stages, but only the first and the last stage can share parameters"});
  }
  if (first == last || shape.ranks == 1) return;
  if constexpr (only_counts<Device>) {  // its split cannot know the number of ranks
    const auto* const counting = along.get_if<counting_communicator>();
    if (here && counting != nullptr)
      join(ctx.ranks.count(counting->pair(along.rank() == first ? 0 : 1, first, last, ends_axis)),
           along.rank() == first);
  } else {
    any_communicator ends = along.split(here ? 0 : -1, along.rank(), ends_axis);
    if (!here) return;
    for (const std::uint64_t theirs : gather_all(ctx.device, ends, {names}, 1))
      if (theirs != names)
        fail(
            "pipeline: the first and the last stage do not have the same parameters that are tied across stages; "
            "both must make them, with one name, shape and initializer, and both freeze them or neither");
    join(ends, along.rank() == first);
  }
}

#ifndef PLAIT_COMPILED
PLAIT_INLINE std::string made_as(const parameter_info& info) {
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
#endif

/// The schedule of a model with one stage.
schedule one_stage(int microbatches);
/// Returns a schedule of forward passes only.
schedule forward_passes(const pipeline_shape& shape, std::size_t microbatches);
/// Returns the step of a schedule with these units. Its activations are offloaded if the options say so.
step_schedule expanded_step(const schedule& plan, std::vector<step_unit> units, const data_parallel& policy,
                            const pipeline_options& options);
#ifndef PLAIT_COMPILED
PLAIT_INLINE schedule one_stage(int microbatches) { return make_schedule<one_f_one_b>(1, microbatches); }
PLAIT_INLINE schedule forward_passes(const pipeline_shape& shape, std::size_t microbatches) {
  return forward_schedule(shape, static_cast<int>(microbatches));
}
PLAIT_INLINE step_schedule expanded_step(const schedule& plan, std::vector<step_unit> units,
                                         const data_parallel& policy, const pipeline_options& options) {
  step_schedule step = expand(plan, std::move(units), policy, options.costs);
  if (!options.offload_activations || !trains(plan)) return step;
  step_schedule moving = with_offload(step);
  if (plan.shape.ranks == 1 && moving.programs == step.programs)
    fail(
        "pipeline: offload_activations = 1 would change nothing, because the backward pass of each unit follows its "
        "forward pass too soon; legal is 0");
  return moving;
}
#endif

// Makes a rank's step from a schedule and the rank's units. A rank does not know the parameters of other stages, so
// each of those stages is one unit.

/// `local` receives, for each unit of the step, its index in `units`; -1 for units of other ranks.
template <class Precision, compute_device Device>
step_schedule step_of_units(const schedule& plan, int rank, const parameter_units<Precision, Device>& units,
                            const pipeline_options& options, std::vector<int>& local) {
  const pipeline_shape& shape = plan.shape;
  const int last = shape.stages() - 1;
  std::vector<step_unit> all;
  std::vector<int> place(static_cast<std::size_t>(units.size()));  // for each of this rank's units, its index in the
                                                                   // step
  local.clear();
  for (int stage = 0; stage <= last; ++stage) {
    if (shape.rank_of(stage) != rank) {
      all.emplace_back().stage = stage;
      local.push_back(-1);
      continue;
    }
    for (int i = 0; i < units.size(); ++i) {
      if (units.described(i).stage != stage) continue;
      place[static_cast<std::size_t>(i)] = static_cast<int>(all.size());
      all.push_back(units.described(i));
      local.push_back(i);
    }
  }
  for (int i = 0; i < units.size(); ++i) {
    step_unit& u = all[static_cast<std::size_t>(place[static_cast<std::size_t>(i)])];
    if (u.uses >= 0) u.uses = place[static_cast<std::size_t>(u.uses)];
    if (!units.tied(i) || shape.rank_of(0) == shape.rank_of(last)) continue;
    u.tied_to = u.stage == 0 ? static_cast<int>(all.size()) - 1 : 0;
    step_unit& twin = all[static_cast<std::size_t>(u.tied_to)];
    twin.tied_to = place[static_cast<std::size_t>(i)];
    twin.parameters = u.parameters;
    twin.trainable = u.trainable;
  }
  data_parallel policy = options.parallel;
  if (policy.hybrid && !units.hybrid())
    fail(
        "data parallelism: hybrid = 1, but no ranks hold the same pieces; legal is 0, and data_axes::replicate makes a "
        "hybrid");
  policy.hybrid = units.hybrid();
  return expanded_step(plan, std::move(all), policy, options);
}

#define PLAIT_INSTANTIATE(T)                                                                                \
  PLAIT_COMPILED_TEMPLATE(                                                                                  \
      void check_names(const context<cpu>&, any_communicator&, const std::vector<parameter<T, cpu>*>&))     \
  PLAIT_COMPILED_TEMPLATE(void tie_stages(const context<cpu>&, any_communicator&, const pipeline_shape&,    \
                                          const std::vector<parameter<T, cpu>*>&))                          \
  PLAIT_COMPILED_TEMPLATE(step_schedule step_of_units(const schedule&, int, const parameter_units<T, cpu>&, \
                                                      const pipeline_options&, std::vector<int>&))
PLAIT_INSTANTIATE(float)
PLAIT_INSTANTIATE(bf16)
PLAIT_INSTANTIATE(double)
#undef PLAIT_INSTANTIATE
PLAIT_COMPILED_TEMPLATE(std::vector<std::pair<int, std::uint64_t>> find_twice(const context<cpu>&, any_communicator&,
                                                                              const std::vector<std::uint64_t>&))

}  // namespace plait::detail

namespace plait {

// The reduced gradients of a step so far, by unit, for the norm and the optimizer.

template <class Precision, compute_device Device>
struct reduced_units {
  using units_type = parameter_units<Precision, Device>;

  typename units_type::gradients all;
  std::map<int, std::pair<std::size_t, std::size_t>> ranges;  ///< for each unit: its begin and its number of gradients
                                                              ///< in `all`

  /// Waits for the reduction of a unit, unless it is already finished.
  void finish(const context<Device>& ctx, units_type& units, int unit);
  std::span<reduced_gradient<Precision, Device>> of(int unit) {
    const auto [begin, count] = ranges.at(unit);
    return std::span(all).subspan(begin, count);
  }
};

template <class Precision, compute_device Device>
void reduced_units<Precision, Device>::finish(const context<Device>& ctx, units_type& units, int unit) {
  if (ranges.contains(unit)) return;
  const std::size_t begin = all.size();
  units.finish_reduction(ctx, unit, all);
  ranges[unit] = {begin, all.size() - begin};
}

PLAIT_COMPILED_TEMPLATE(struct reduced_units<float, cpu>)
PLAIT_COMPILED_TEMPLATE(struct reduced_units<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(struct reduced_units<double, cpu>)

/// A model as one or more stages, distributed over the ranks of a pipeline and run by a schedule. `training_step` runs
/// it; visitors of parameters see a model with this rank's parameters. A whole model is a pipeline of one stage.
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

  /// Collective along the pipeline. `make(part, first_stage)` constructs this rank's stages, in the order of their
  /// chunks, as `std::unique_ptr<Stage>`. `first_stage` is the model's first stage if this rank has it, otherwise null.
  /// Throws if two parameters have one name, or if tied parameters differ between the first and the last stage.
  template <class Make>
  pipeline(const context<device>& ctx, any_communicator along, const schedule& plan,
           std::span<const stage_layers> parts, Make&& make, const pipeline_options& options = {})
      : shape_(plan.shape),
        options_(options),
        units_(ctx, options.parallel.level, options.axes, options.cut, options.wire) {
    if (static_cast<int>(parts.size()) != shape_.stages())
      fail({"pipeline: the layers are split into ", parts.size(), " stages, and the schedule ", plan.name.str(),
            " has ", shape_.stages()});
    for (int chunk = 0; chunk < shape_.chunks; ++chunk) {
      const stage_layers& part = parts[static_cast<std::size_t>(shape_.stage_of(along.rank(), chunk))];
      Stage* const first = !stages_.empty() && stages_[0]->part().first ? stages_[0] : nullptr;
      own_.push_back(make(part, first));
      stages_.push_back(own_.back().get());
    }
    // Units come after all stages: a bucket needs every layer that uses its parameters, and a table may be tied.
    for (int chunk = 0; chunk < shape_.chunks; ++chunk) add_units(ctx, shape_.stage_of(along.rank(), chunk), at(chunk));
    check(ctx, *this, along);
    const int rank = along.rank();
    executor_.emplace(std::move(along), step_of(plan, rank));
  }
  /// Runs a whole model as a pipeline of one stage, with `microbatches` microbatches per step. The model must outlive
  /// it.
  pipeline(const context<device>& ctx, Stage& whole, int microbatches, const pipeline_options& options = {})
      : shape_{1, 1, microbatches},
        options_(options),
        stages_{&whole},
        units_(ctx, options.parallel.level, options.axes, options.cut, options.wire) {
    if (!whole.part().first || !whole.part().last)
      fail("pipeline: one stage of several was given as the whole model; its ranks need a schedule");
    any_communicator along = counting_communicator(0, 1, "pp");
    add_units(ctx, 0, whole);
    check(ctx, *this, along);
    executor_.emplace(along, step_of(detail::one_stage(microbatches), 0));
  }

  const pipeline_shape& shape() const { return shape_; }
  step_executor<device>& executor() { return *executor_; }
  /// The names of the step's units, by index; empty for units of other ranks.
  std::vector<std::string> unit_names() const {
    std::vector<std::string> names;
    for (const int unit : local_) names.push_back(unit < 0 ? std::string() : units_.name(unit));
    return names;
  }
  std::span<Stage* const> stages() const { return stages_; }
  bool has_last_stage() const { return stages_.back()->part().last; }
  std::int64_t ignore_index() const { return stages_[0]->ignore_index(); }
  bool documents() const { return stages_[0]->documents(); }
  /// The order of tokens along their sequence's dim; without a length, the text's order.
  sequence_order order() const {
    if constexpr (requires { stages_[0]->order(); }) {
      return stages_[0]->order();
    } else {
      static_assert(!layout_v<typename tokens::spec>.has(dim_of<zseq>),
                    "a model whose tokens lie in zigzag order (zseq) needs a member order(), their sequence_order");
      return {};
    }
  }
  double dropout() const { return stages_[0]->dropout(); }

  /// Runs a whole step: forward and backward passes of all microbatches, with the communication and updates of data
  /// parallelism among and after them. `first_sample` is the first sample of the first microbatch. Adds the losses to
  /// `loss` on the rank of the last stage, and takes the seed from it.
  ///
  /// Calls `optimizer.norm(gradients)` once, when the gradients of this rank's trainable parameters are reduced. Calls
  /// `optimizer.update(gradients)` for each unit's gradients, at their place in the step's program. `starts` are the
  /// `microbatch::document_starts` of each microbatch, if sequences are packed from documents.
  template <class Optimizer>
  void run(const context<device>& ctx, batch& data, mean& loss, std::int64_t first_sample,
           std::span<const std::int32_t* const> starts, Optimizer&& optimizer) {
    if (static_cast<int>(data.size()) != shape_.microbatches)
      fail({"pipeline: ", data.size(), " microbatches, and the schedule is for ", shape_.microbatches});
    units_.begin_step(ctx);
    training<std::remove_reference_t<Optimizer>> work{*this, data, loss, first_sample, starts, optimizer};
    try {
      executor_->run(ctx, work);
    } catch (...) {
      units_.abandon_step();
      throw;
    }
  }
  /// The ranks that hold the other stages; one rank without a pipeline.
  const any_communicator& along() const { return executor_->along(); }
  /// Prepares recording: later steps never query whether an operation is complete (`release_by_schedule`).
  void prepare_recording() {
    executor_->release_by_schedule();
    units_.stop_polling();
  }
  /// Gathers values that have changed, such as by a loaded checkpoint, except parameters that are gathered at each use.
  /// Without this call, the next pass does it.
  void gather_changed(const context<device>& ctx) {
    units_.gather_changed(ctx);
    wait_for_transfers();
  }
  /// Waits until the parameter gathers that the last step has started are complete.
  void wait_for_transfers() { units_.wait_for_transfers(); }
  /// Adds the losses of all microbatches to `loss` like `run`, but without gradients and dropout. Options of the loss,
  /// such as label smoothing, apply here too.
  void evaluate(const context<device>& ctx, batch& data, mean& loss, std::span<const std::int32_t* const> starts = {}) {
    const auto add = [&](const microbatch<device>& mb, activation x, std::size_t i) {
      loss.add(ctx, stages_.back()->forward_loss(mb, std::move(x), data[i].second, nullptr));
    };
    run_forward(
        ctx, data.size(), [&](std::size_t i) -> const tokens& { return data[i].first; }, add, starts);
  }
  /// Returns the scores of one microbatch without dropout, on the ranks of the last stage; empty on others. `starts`
  /// are its `microbatch::document_starts`, if sequences are packed from documents.
  logits score(const context<device>& ctx, const tokens& ids, const std::int32_t* starts = nullptr) {
    logits scores;
    const auto take = [&](const microbatch<device>& mb, activation x, std::size_t) {
      scores = stages_.back()->forward_scores(mb, std::move(x));
    };
    run_forward(
        ctx, 1, [&](std::size_t) -> const tokens& { return ids; }, take,
        std::span<const std::int32_t* const>(&starts, starts == nullptr ? 0 : 1));
    return scores;
  }

  void sum_over_stages(const context<device>&, double* value) {
    if (shape_.ranks > 1) executor_->along().all_reduce(value, value, 1, dtype::f64, reduce_op::sum);
  }

  /// Calls f(parameter) for each parameter of this rank.
  template <class F>
  void visit(F&& f) {
    for (int chunk = 0; chunk < shape_.chunks; ++chunk) visit_chunk(chunk, f);
  }
  /// Calls f(parameter) for each parameter of one of this rank's stages.
  template <class F>
  void visit_chunk(int chunk, F&& f) {
    wait_for_transfers();
    const visitor erased(f);
    at(chunk).visit(erased);
  }

 private:
  using activation = typename Stage::activation;
  using gradient = typename Stage::gradient;
  using saved = typename Stage::saved;

  /// A reference to any visitor of parameters during a visit, so a stage compiles its visit once for all visitors.
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

  using reduced_gradient_type = reduced_gradient<precision_type, device>;
  /// The base of the passes that the executor runs.
  struct passes {
    using activation = typename Stage::activation;
    using gradient = typename Stage::gradient;
    using saved = typename Stage::saved;

    pipeline& owner;
    unit_watcher* watcher = nullptr;

    activation input(const context<device>& ctx, int) { return activation(ctx); }
    gradient output_gradient(const context<device>& ctx, int) { return gradient(ctx); }
    int local(int unit) const { return owner.local_[static_cast<std::size_t>(unit)]; }
    void watch(unit_watcher* who) { watcher = who; }
    void enter(const context<device>& ctx, int unit, action_kind kind) {
      owner.units_.enter(ctx, local(unit), adds_gradient(kind));
    }
    /// Gathers or releases a unit.
    void move(const context<device>& ctx, const step_entry& e) {
      if (e.op == step_op::gather) owner.units_.gather(ctx, local(e.unit));
      if (e.op == step_op::release) owner.units_.release(local(e.unit));
    }
  };

  /// A training step as the executor runs it.
  template <class Optimizer>
  struct training : passes {
    training(pipeline& all, batch& b, mean& m, std::int64_t first, std::span<const std::int32_t* const> documents,
             Optimizer& updates)
        : passes{all}, data(b), loss(m), first_sample(first), starts(documents), optimizer(updates) {}

    activation forward(const context<device>& ctx, int chunk, int i, activation x, saved* kept) {
      const microbatch<device> mb = at(ctx, i);
      auto& [ids, labels] = data[static_cast<std::size_t>(i)];
      Stage& stage = this->owner.at(chunk);
      x = stage.forward_layers(mb, ids, std::move(x), kept);
      if (!stage.part().last) return x;
      detail::forward_loss_of_step(stage, mb, std::move(x), labels, *kept, [&](auto&& sum) { loss.add(ctx, sum); });
      return {};
    }
    gradient backward(const context<device>& ctx, int chunk, int i, saved& kept, gradient dy, weight_work* deferred) {
      microbatch<device> mb = at(ctx, i);
      mb.deferred = deferred;
      auto& [ids, labels] = data[static_cast<std::size_t>(i)];
      Stage& stage = this->owner.at(chunk);
      if (stage.part().last)
        dy = detail::backward_loss_of_step(stage, mb, labels, kept, loss.seed(ctx),
                                           [&](auto&& sum) { loss.add(ctx, sum); });
      return stage.backward_layers(mb, ids, kept, std::move(dy));
    }
    template <class F>
      requires gives_kept<Stage>
    void visit_kept(int chunk, int unit, saved& kept, F&& f) {
      this->owner.at(chunk).visit_kept(unit, kept, f);
    }
    void enter(const context<device>& ctx, int unit, action_kind kind) {
      if (adds_gradient(kind) && this->owner.executor_->step().limits_reducing())
        for (; reducing.size() > step_schedule::most_reducing; reducing.pop_front())
          this->owner.units_.finish_sum(reducing.front());
      passes::enter(ctx, unit, kind);
    }
    void perform(const context<device>& ctx, const step_entry& e) {
      auto& units = this->owner.units_;
      switch (e.op) {
        case step_op::reduce:
          reducing.push_back(this->local(e.unit));
          return units.reduce(ctx, reducing.back());
        case step_op::reduce_copies:
          return units.reduce_copies(this->local(e.unit));
        case step_op::reduce_ties:
          return units.reduce_ties(ctx, this->local(e.unit));
        case step_op::norm:
          for (const step_entry& other : this->owner.program())  // in the order of their reductions
            if (other.unit >= 0 && other.op == this->owner.executor_->step().last_reduction(other.unit))
              reduced.finish(ctx, units, this->local(other.unit));
          optimizer.norm(std::span<const reduced_gradient_type>(reduced.all));
          return;
        case step_op::update:
          reduced.finish(ctx, units, this->local(e.unit));
          return optimizer.update(reduced.of(this->local(e.unit)));
        default:
          return this->move(ctx, e);
      }
    }
    microbatch<device> at(const context<device>& ctx, int i) const {
      microbatch<device> mb(ctx);
      mb.units = this->watcher;
      mb.place_in_step(i, static_cast<std::int64_t>(data.size()), first_sample,
                       local_box(layout_v<typename tokens::spec>, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank()));
      mb.auxiliary = loss.auxiliary();
      if (!starts.empty()) mb.document_starts = starts[static_cast<std::size_t>(i)];
      return mb;
    }

    batch& data;
    mean& loss;
    std::int64_t first_sample;
    std::span<const std::int32_t* const> starts;
    Optimizer& optimizer;
    std::deque<int> reducing{};  ///< units whose reductions have begun, if no pass has waited for them
    reduced_units<precision_type, device> reduced{};
  };

  /// Forward passes only. `ids(i)` are the tokens of microbatch i; `last(x, i)` takes the output of the layers.
  template <class Ids, class Last>
  struct inference : passes {
    inference(pipeline& all, Ids& tokens_of, Last& to, std::span<const std::int32_t* const> documents)
        : passes{all}, ids(tokens_of), last(to), starts(documents) {}

    activation forward(const context<device>& ctx, int chunk, int number, activation x, saved*) {
      Stage& stage = this->owner.at(chunk);
      const auto i = static_cast<std::size_t>(number);
      microbatch<device> mb(ctx);
      mb.units = this->watcher;
      mb.drops = false;
      if (!starts.empty()) mb.document_starts = starts[i];
      x = stage.forward_layers(mb, ids(i), std::move(x), nullptr);
      if (!stage.part().last) return x;
      last(mb, std::move(x), i);
      return {};
    }
    gradient backward(const context<device>&, int, int, saved&, gradient, weight_work*) { return {}; }
    void perform(const context<device>& ctx, const step_entry& e) { this->move(ctx, e); }

    Ids& ids;
    Last& last;
    std::span<const std::int32_t* const> starts;
  };

  template <class Ids, class Last>
  void run_forward(const context<device>& ctx, std::size_t microbatches, Ids ids, Last last,
                   std::span<const std::int32_t* const> starts) {
    if (!starts.empty() && starts.size() != microbatches)
      fail({"pipeline: ", microbatches, " microbatches, and the documents of ", starts.size()});
    if (!forward_ || forward_->shape().microbatches != static_cast<int>(microbatches))
      forward_.emplace(executor_->along(),
                       step_of(detail::forward_passes(shape_, microbatches), executor_->along().rank()));
    units_.begin_forward(ctx);
    inference<Ids, Last> work(*this, ids, last, starts);
    forward_->run(ctx, work, false);
  }
  const std::vector<step_entry>& program() const {
    return executor_->step().programs[static_cast<std::size_t>(executor_->along().rank())];
  }
  Stage& at(int chunk) { return *stages_[static_cast<std::size_t>(chunk)]; }

  static void check(const context<device>& ctx, pipeline& all, any_communicator& along) {
    std::vector<parameter*> own;
    all.visit([&](parameter& p) { own.push_back(&p); });
    detail::check_names(ctx, along, own);
    detail::tie_stages(ctx, along, all.shape_, own);
  }

  void add_units(const context<device>& ctx, int stage, Stage& of) {
    if constexpr (announces_units<Stage>) {
      if (of.units() < 1)
        fail({"pipeline: units() of stage ", stage, " is ", of.units(), "; legal is 1 or more, or no units() at all"});
      for (int i = 0; i < of.units(); ++i)
        units_.add(ctx, stage, [&](auto&& f) {
          const visitor erased(f);
          of.visit_unit(i, erased);
        });
    } else {
      units_.add(ctx, stage, [&](auto&& f) {
        const visitor erased(f);
        of.visit(erased);
      });
    }
  }
  step_schedule step_of(const schedule& plan, int rank) {
    if (options_.offload_activations && !gives_kept<Stage>)
      fail("pipeline: offload_activations is for models that have visit_kept(unit, saved, f); legal is 0");
    return detail::step_of_units(plan, rank, units_, options_, local_);
  }

  pipeline_shape shape_;
  pipeline_options options_;
  std::vector<std::unique_ptr<Stage>> own_;
  std::vector<Stage*> stages_;  ///< of this rank, by chunk
  parameter_units<precision_type, device> units_;
  std::vector<int> local_;  ///< for each unit of the step: its index on this rank, or -1
  std::optional<step_executor<device>> executor_, forward_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
