// Checks that a model trains on every mesh, and as every pipeline, as it does on one rank. Compares losses, gradient
// norms, gradients, weights and bytes sent.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/layout/check.hpp"
#include "plait/parallel/executor.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/world.hpp"
#include "plait/plan/dry_run.hpp"
#include "plait/schedule/verify.hpp"
#include "plait/testing/findings.hpp"
#include "plait/testing/layer_parity.hpp"
#include "support/differences.hpp"

namespace plait::testing {

/// A text that a model can learn: the next token follows from the previous one, except one in nine.
inline std::int64_t learnable_token(std::int64_t sample, std::int64_t position, std::int64_t vocab) {
  const std::int64_t noise = (sample * 7919 + position * 104729) % 9 == 0 ? sample + position : 0;
  return (sample * 11 + position * 5 + noise + (sample * sample) % 13) % vocab;
}

/// A parameter or a gradient as a whole array.
struct named_values {
  std::string name;
  std::vector<double> values;  ///< without padding
  bool clean_padding = true;   ///< whether the rows beyond the logical shape are zero
};

/// All of a parameter or its gradient, without its padding; `local` is this rank's part. Collective.
template <class Parameter, class E, class Device>
named_values gather_full(const context<Device>& ctx, const Parameter& p, const E* local) {
  const std::vector<E> all = gather_whole(ctx, p, local);
  std::size_t logical = 1;
  for (std::int64_t n : p.info().shape) logical *= static_cast<std::size_t>(n);
  named_values out{p.name(), {}, true};
  for (std::size_t i = logical; i < all.size(); ++i) out.clean_padding &= widened(all[i]) == 0;
  for (std::size_t i = 0; i < logical; ++i) out.values.push_back(converted<double>(all[i]));
  return out;
}

/// Master values of all parameters that the model visits. Collective.
template <class Device, class Model>
std::vector<named_values> gather_values(const context<Device>& ctx, Model& model) {
  std::vector<named_values> all;
  model.visit([&](auto& p) { all.push_back(gather_full(ctx, p, std::as_const(p).value())); });
  return all;
}
/// Reduced gradients of the trainable parameters after the last step. Collective.
template <class Device, class Model>
std::vector<named_values> gather_gradients(const context<Device>& ctx, Model& model) {
  std::vector<named_values> all;
  model.visit([&](auto& p) {
    if (p.trainable()) all.push_back(gather_full(ctx, p, std::as_const(p).gradient()));
  });
  return all;
}

/// The largest number of microbatches that a rank kept at a time, from its events.
inline int most_kept(const std::vector<pipeline_event>& events) {
  int now = 0, most = 0;
  for (const pipeline_event& e : events) {
    if (e.step.op != step_op::pass) continue;
    if (e.step.pass.kind == action_kind::forward) most = std::max(most, ++now);
    if (frees_activations(e.step.pass.kind)) --now;
  }
  return most;
}

inline double norm_of(const std::vector<double>& v) {
  double squares = 0;
  for (double x : v) squares += x * x;
  return std::sqrt(squares);
}

inline std::string scientific(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

/// Compares each array of `got` with the array of that name in `expected`, which may have more. Differences are
/// relative in the Euclidean norm; for arrays that vanish, relative to `scale`.
inline findings compare_named(const std::vector<named_values>& got, const std::vector<named_values>& expected,
                              double tolerance, const std::function<bool(const std::string&)>& vanishes = {},
                              double scale = 1.0) {
  findings found;
  found.require(!got.empty(), "there is nothing to compare");
  for (const named_values& a : got) {
    const named_values* b = nullptr;
    for (const named_values& e : expected)
      if (e.name == a.name) b = &e;
    if (!b) {
      found.add(a.name + " is not on one rank");
      continue;
    }
    found.require(a.clean_padding, a.name + " has padding that is not zero");
    if (a.values.size() != b->values.size()) {
      found.add(a.name + " has another size than on one rank");
      continue;
    }
    double difference = relative_difference(a.values, b->values);
    if (vanishes && vanishes(a.name)) {
      std::vector<double> d = a.values;
      for (std::size_t i = 0; i < d.size(); ++i) d[i] -= b->values[i];
      difference = norm_of(d) / scale;
    }
    if (!(difference <= tolerance)) found.add(cat({a.name, " differs by ", scientific(difference)}));
  }
  return found;
}

/// The training run of a check. Every token is a function of its global sample and position, so that all meshes see
/// equal data.
struct model_setup {
  /// Global sizes of all dims, for a microbatch of this number of samples over the whole mesh (of a stage).
  std::function<dim_sizes(const mesh_shape& mesh, std::int64_t samples)> sizes;
  std::int64_t layers = 1;
  std::int64_t vocab = 2;
  std::int64_t batch = 8;  ///< samples in a step
  std::int64_t microbatches = 2;
  std::int64_t steps = 3;
  double learning_rate = 3e-3;
  double clip = 1.0;
  optimizer_options optimizer{};
  /// The ZeRO level and the other choices of data parallelism on a mesh. One rank alone runs with none of them.
  pipeline_options parallel{};
  std::uint64_t seed = 2026;
  double tolerance = 1e-10;  ///< relative, in the Euclidean norm of each parameter
  /// Whether the sizes of exchanges depend on values, as those of experts do. Then only the number of exchanges is
  /// compared.
  bool ragged = false;
  bool late_results = false;  ///< whether only the last step's results are read
  /// The token of a sample at a position; empty: `learnable_token`.
  std::function<std::int64_t(std::int64_t sample, std::int64_t position)> token{};
  /// Whether the label of a sample at a position is ignored, in addition to those that always are.
  std::function<bool(std::int64_t sample, std::int64_t position)> ignored{};
  /// Whether the gradient of a parameter is mathematically zero, so that computed values are rounding errors. An
  /// example is the bias of attention's keys.
  std::function<bool(const std::string& name)> vanishes{};
};

/// The results of one rank. The tensors of its stages are gathered to their full logical shape.
struct model_outcome {
  std::vector<step_result> steps;
  std::vector<named_values> initial, first_gradients, last_gradients, weights;
  std::uint64_t initial_hash = 0;
  bool compares = false;                            ///< whether there is a dry run
  ledger sent, predicted;                           ///< by the last step
  posted_program posted;                            ///< collectives and messages that the dry run starts
  std::int64_t kept_bytes = 0, predicted_kept = 0;  ///< between passes, at most
  double kept = 0, kept_by_schedule = 0;            ///< most microbatches in the chunks of this rank at a time
  std::int64_t parameters = 0;                      ///< logical elements that count on this rank
  axis_list sharding;                               ///< axes that shard tokens, activations or stored parameters
};

namespace detail {

template <class Make, class Device>
using made_stage = std::remove_pointer_t<
    decltype(std::declval<Make&>()(std::declval<const context<Device>&>(), stage_layers{}, nullptr).get())>;

}  // namespace detail

/// This rank's stages of a model with this number of layers. The first and the last stage have fewer layers than the
/// others. `make(part, first)` makes a stage.
template <class Stage, class Device, class Make>
pipeline<Stage> make_stages(const context<Device>& ctx, any_communicator along, std::int64_t layers,
                            const schedule& plan, const pipeline_options& how, const Make& make) {
  const stage_costs balance{std::vector<double>(static_cast<std::size_t>(layers), 1.0), 0.2, 0.7};
  return pipeline<Stage>(ctx, std::move(along), plan, split_layers(balance, plan.shape.stages()), make, how);
}

namespace detail {

/// This rank's stages by the schedule, or the whole model.
template <class Device, class Make>
class made_model {
 public:
  using stage = made_stage<Make, Device>;
  made_model(const context<Device>& ctx, any_communicator along, const model_setup& how, const schedule* plan,
             Make& make) {
    if (!plan) {
      whole_ = make(ctx, stage_layers{0, how.layers, true, true}, nullptr);
      pipe_ = std::make_unique<pipeline<stage>>(ctx, *whole_, static_cast<int>(how.microbatches), how.parallel);
      return;
    }
    const auto stage_of = [&](stage_layers part, stage* first) { return make(ctx, part, first); };
    pipe_.reset(new pipeline<stage>(make_stages<stage>(ctx, along, how.layers, *plan, how.parallel, stage_of)));
  }
  pipeline<stage>& operator*() { return *pipe_; }

 private:
  std::unique_ptr<stage> whole_;
  std::unique_ptr<pipeline<stage>> pipe_;
};

inline void note_axes(const layout& lies, axis_list& axes) {
  for (const dim_placement& p : lies.dims)
    for (axis_id axis : p.axes)
      if (!axes.contains(axis)) axes.push_back(axis);
}

inline mesh_shape of_one_rank(const mesh_shape& mesh) {
  mesh_shape one;
  for (axis_id axis : mesh.axes) one.add(axis, 1);
  return one;
}

/// Whether a ledger has anything on a group that contains the axis (`cp+tp`).
inline bool sends_over(const ledger& book, axis_id axis) {
  for (const ledger::row& row : book.rows) {
    const std::string label = cat({"+", row.label, "+"}), name = std::string("+") + axis.text();
    const bool named = label.find(name + "+") != label.npos || label.find(name + " ") != label.npos;
    if (named && book.total(row.label).calls > 0) return true;
  }
  return false;
}

}  // namespace detail

/// Returns the traffic of `rank` of a mesh in a step, by a dry run.
template <class Make>
step_plan predict_model(const mesh_shape& mesh, std::int64_t rank, const model_setup& how, Make& make,
                        const schedule* plan = nullptr) {
  pipeline_world ranks = pipeline_world::counting(mesh, rank);
  counting_device device;
  const mesh_shape& stage = ranks.stage().shape();
  const context<counting_device> ctx{device, ranks.stage(), how.sizes(stage, how.batch / how.microbatches), how.seed};
  detail::made_model<counting_device, Make> model(ctx, ranks.along(), how, plan, make);
  using stage_type = typename detail::made_model<counting_device, Make>::stage;
  chosen_optimizer<typename stage_type::precision_type, counting_device> optimizer(how.optimizer);
  return dry_run_step(ctx, *model, optimizer);
}

/// Whether a model is compared with its dry run. In float and bf16 on the cpu it is not: only sizes differ from double
/// there, and the layers would be compiled once more for it.
template <class T, class Device>
inline constexpr bool predicted_here = sizeof(T) == 8 || !std::is_same_v<Device, cpu>;

/// Fills the tokens and labels of a microbatch whose first sample is `first`. Some labels are `ignored`.
inline void fill_tokens(const model_setup& how, std::int64_t first, host_tokens& ids, host_tokens& labels,
                        std::int64_t ignored = -100) {
  const auto token = [&](std::int64_t sample, std::int64_t position) {
    return how.token ? how.token(sample, position) : learnable_token(sample, position, how.vocab);
  };
  ids.fill([&](std::int64_t row, std::int64_t position) { return token(first + row, position); });
  labels.fill([&](std::int64_t row, std::int64_t position) {
    const std::int64_t sample = first + row;
    const bool masked = (sample % 3 == 0 && position < 4) || (how.ignored && how.ignored(sample, position));
    return masked ? ignored : token(sample, position + 1);
  });
}

/// Loads the tokens, labels and starts of documents of step `i`; a sample has three documents.
template <class Step, class Device>
void load_step(const context<Device>& ctx, Step& step, const model_setup& how, std::int64_t i) {
  step.load(ctx, i * how.batch, [&](std::int64_t k, host_tokens& ids, host_tokens& labels, host_starts& starts) {
    const std::int64_t before = i * how.batch + k * (how.batch / how.microbatches);
    const std::int64_t second = ids.stored_part().global[1] * 2 / 3;
    fill_tokens(how, before, ids, labels, step.model().ignore_index());
    starts.fill([&](std::int64_t sample, std::int64_t position) {
      const std::int64_t first = 1 + (before + sample) % 3;
      return position < first ? 0 : position < second ? first : second;
    });
  });
}

/// Trains on one rank's share of `ranks`.
template <class Device, class Make>
model_outcome train_rank(pipeline_world& ranks, Device& device, const model_setup& how, Make& make,
                         const schedule* plan = nullptr) {
  world& stage = ranks.stage();
  const context<Device> ctx{device, stage, how.sizes(stage.shape(), how.batch / how.microbatches), how.seed};
  detail::made_model<Device, Make> made(ctx, ranks.along(), how, plan, make);
  auto& model = *made;
  using stage_type = typename std::remove_reference_t<decltype(model)>::stage_type;
  using precision = typename stage_type::precision_type;
  chosen_optimizer<precision, Device> optimizer(how.optimizer);
  initialize(ctx, model);
  model_outcome out;
  out.initial = gather_values(ctx, model);
  out.initial_hash = weights_hash(ctx, model);
  training_step step(ctx, model, optimizer, how.clip);
  std::vector<pipeline_event> events;
  for (std::int64_t i = 0; i < how.steps; ++i) {
    load_step(ctx, step, how, i);
    stage.ledger().clear();
    events.clear();
    optimizer.begin_step(ctx, how.learning_rate);
    const std::size_t before = device.bytes_in_use();
    model.executor().events = &events;
    step.run(ctx);
    model.executor().events = nullptr;
    if (!how.late_results || i + 1 == how.steps) out.steps.push_back(step.result(ctx));
    out.kept_bytes = 0;
    for (const pipeline_event& e : events)
      if (e.memory > before) out.kept_bytes = std::max(out.kept_bytes, static_cast<std::int64_t>(e.memory - before));
    out.sent = stage.ledger();
    if (i == 0) out.first_gradients = gather_gradients(ctx, model);
  }
  out.last_gradients = gather_gradients(ctx, model);
  out.weights = gather_values(ctx, model);
  if constexpr (predicted_here<precision, Device>) {
    const step_plan predicted = predict_model(ranks.shape(), ranks.root().rank(), how, make, plan);
    out.compares = true;
    out.predicted = predicted.traffic;
    out.posted = predicted.posted;
    out.predicted_kept = predicted.kept_bytes;
  }
  out.kept = most_kept(events);
  out.kept_by_schedule =
      plan ? peak_activations(*plan, ranks.along().rank()) * plan->shape.chunks : (how.microbatches > 0 ? 1 : 0);
  detail::note_axes(layout_v<typename stage_type::tokens::spec>, out.sharding);
  detail::note_axes(layout_v<typename stage_type::activation::spec>, out.sharding);
  model.visit([&](auto& p) { detail::note_axes(p.stored(), out.sharding); });
  model.visit([&](auto& p) {
    if (!p.counts()) return;  // another rank counts this copy
    std::int64_t n = 1;
    for (std::int64_t extent : p.info().shape) n *= extent;
    out.parameters += n;
  });
  return out;
}

/// Runs all ranks of a mesh, started by `launch`. `plan` is the schedule of a pipeline over the mesh's axis pp. Without
/// a plan the mesh has no axis pp, and every rank has the whole model.
template <class Make, class Launch = on_cpu>
std::vector<model_outcome> train_on(const mesh_shape& mesh, const model_setup& how, Make& make,
                                    const schedule* plan = nullptr, const Launch& launch = {}) {
  std::vector<model_outcome> all(static_cast<std::size_t>(mesh.size()));
  launch(static_cast<int>(mesh.size()), [&](auto& c, auto& device) {
    pipeline_world ranks(mesh, any_communicator(c));
    ranks.stage().checks().set(value_check::always);
    all[static_cast<std::size_t>(c.rank())] = train_rank(ranks, device, how, make, plan);
  });
  return all;
}

/// Returns the results of one rank alone, on a mesh with the axes of `mesh`, at ZeRO level `replicated`. Reports a case
/// that tests nothing: a parameter without a gradient, or a constant loss or constant weights.
template <class Make, class Launch = on_cpu>
model_outcome train_alone(const mesh_shape& mesh, const model_setup& how, Make& make, findings& found,
                          const Launch& launch = {}) {
  model_setup alone = how;
  alone.parallel = {};  // one rank shares with no other
  model_outcome one = std::move(train_on(detail::of_one_rank(mesh), alone, make, nullptr, launch)[0]);
  for (const std::vector<named_values>* step : {&one.first_gradients, &one.last_gradients})
    for (const named_values& g : *step) {
      const double size = norm_of(g.values), whole = one.steps.back().gradient_norm;
      if (how.vanishes && how.vanishes(g.name))
        found.require(size <= how.tolerance * whole,
                      cat({"one rank: the gradient of ", g.name, " should vanish, and its norm is ", size}));
      else
        found.require(size > 1e-12 * whole,
                      cat({"one rank: the gradient of ", g.name, " is zero, so that the case shows nothing of it"}));
    }
  for (std::size_t i = 0; i < one.weights.size(); ++i) {
    const std::string& name = one.weights[i].name;
    const bool trained = std::any_of(one.last_gradients.begin(), one.last_gradients.end(),
                                     [&](const named_values& g) { return g.name == name; });
    if (trained && !(how.vanishes && how.vanishes(name)))
      found.require(one.weights[i].values != one.initial[i].values, "one rank: the steps do not change " + name);
  }
  found.require(one.steps.front().loss != one.steps.back().loss,
                "one rank: the loss is the same in the first and the last step");
  return one;
}

/// Compares one rank of a mesh with one rank alone. Random numbers do not depend on the mesh, so initial weights are
/// bitwise equal.
inline findings compare_models(const model_outcome& got, const model_outcome& one, const model_setup& how) {
  findings found;
  found.require(got.steps.size() == one.steps.size(), "another number of results than of one rank");
  for (std::size_t i = 0; i < std::min(got.steps.size(), one.steps.size()); ++i) {
    const step_result &a = got.steps[i], &b = one.steps[i];
    const std::string step = cat({"step ", i});
    found.require(a.tokens == b.tokens, cat({step, " counts ", a.tokens, " tokens, and one rank ", b.tokens}));
    const double loss = std::abs(a.loss - b.loss) / std::abs(b.loss);
    const double norm = std::abs(a.gradient_norm - b.gradient_norm) / b.gradient_norm;
    if (!(std::abs(a.auxiliary - b.auxiliary) <= how.tolerance * std::abs(b.auxiliary)))
      found.add(cat({step, ": the auxiliary loss is ", a.auxiliary, ", and one rank's ", b.auxiliary}));
    if (!(loss <= how.tolerance)) found.add(cat({step, ": the loss differs by ", scientific(loss)}));
    if (!(norm <= how.tolerance)) found.add(cat({step, ": the gradient norm differs by ", scientific(norm)}));
  }
  found.require(got.initial_hash == one.initial_hash, "another hash of the initial weights");
  const double whole = one.steps.back().gradient_norm;
  found.add(compare_named(got.initial, one.initial, 0.0), "initial value");
  found.add(compare_named(got.first_gradients, one.first_gradients, how.tolerance, how.vanishes, whole),
            "gradient of the first step");
  found.add(compare_named(got.last_gradients, one.last_gradients, how.tolerance, how.vanishes, whole),
            "gradient of the last step");
  found.add(compare_named(got.weights, one.weights, how.tolerance, how.vanishes), "weight after the last step");
  if (got.compares)
    found.add(compare_ledgers(got.sent, got.predicted, true, how.ragged), "what is sent, and the dry run's prediction");
  return found;
}

/// Compares every rank of `mesh` with `one`. Also reports a parameter that is on no stage or on two, and an axis of
/// several ranks that shards nothing and sends nothing, so that the case does not test it. The collectives and messages
/// of all ranks must have one order.
template <class Make, class Launch = on_cpu>
findings check_model_on(const mesh_shape& mesh, const model_setup& how, const model_outcome& one, Make& make,
                        const schedule* plan = nullptr, const Launch& launch = {}) {
  findings found;
  const std::string where = describe(mesh) + (plan ? ", " + plan->name.str() : std::string());
  const std::vector<model_outcome> all = train_on(mesh, how, make, plan, launch);
  std::int64_t parameters = 0;
  axis_list works;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::string rank = cat({where, ", rank ", r});
    found.add(compare_models(all[r], one, how), rank);
    if (!(all[r].kept == all[r].kept_by_schedule))
      found.add(cat({rank, " keeps ", all[r].kept, " microbatches, and its schedule says ", all[r].kept_by_schedule}));
    if (all[r].compares && !plan && !how.ragged &&
        all[r].kept_bytes != all[r].predicted_kept)  // in a pipeline, the time when messages arrive varies
      found.add(cat({rank, " keeps ", all[r].kept_bytes, " bytes, and the dry run said ", all[r].predicted_kept}));
    if (mesh.group_of(static_cast<std::int64_t>(r), axis_list(axis_of<pp>)) == 0) parameters += all[r].parameters;
    for (axis_id axis : mesh.axes)
      if (!works.contains(axis) && (all[r].sharding.contains(axis) || detail::sends_over(all[r].sent, axis)))
        works.push_back(axis);
  }
  if (parameters != one.parameters)
    found.add(cat({where, ": the stages have ", parameters, " parameters, and one rank ", one.parameters}));
  if (all[0].compares) {
    std::vector<posted_program> posted;
    for (const model_outcome& rank : all) posted.push_back(rank.posted);
    const std::string order = describe(verify_order(posted));
    found.require(order == "ok", cat({where, ": ", order}));
  }
  for (axis_id axis : mesh.axes)
    found.require(mesh.extent(axis) == 1 || works.contains(axis),
                  cat({where, ": nothing is sharded or sent over ", axis.text()}));
  return found;
}

/// Compares each rank of each mesh with one rank alone, for meshes with the axes of `axes`, which have no pipeline.
/// Losses and gradient norms of every step, gradients of the first and the last, and the weights must be equal within
/// `how.tolerance`. The bytes sent and kept must equal a dry run's prediction.
///
///     for (const zero_level level : {zero_level::replicated, zero_level::optimizer, zero_level::gradients,
///                                    zero_level::parameters}) {
///       how.parallel.parallel.level = level;
///       found.add(check_model(one, meshes, how, make), cat({"ZeRO ", static_cast<int>(level)}));
///     }
///
/// Throws where a mesh has one rank along the data axes and the level is above `replicated`, as a program would.
template <class Make, class Launch = on_cpu>
findings check_model(const mesh_shape& axes, const std::vector<mesh_shape>& meshes, const model_setup& how, Make&& make,
                     const Launch& launch = {}) {
  findings found;
  const model_outcome one = train_alone(axes, how, make, found, launch);
  for (const mesh_shape& mesh : meshes) found.add(check_model_on(mesh, how, one, make, nullptr, launch), "mesh");
  return found;
}

}  // namespace plait::testing
