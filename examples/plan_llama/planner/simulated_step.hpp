// Simulates a step's pipeline by its verified schedule and the times of each stage. The planner's formulas
// (pipeline_time.hpp) take an average. It takes milliseconds. One rank of a stage represents all of its ranks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "plait/kernels/philox.hpp"
#include "plait/schedule/parse.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/step_time.hpp"
#include "train_llama/observe/timeline.hpp"

namespace plait::planner {

/// A layout's schedule and the costs of its stages, in seconds.
struct step_costing {
  plait::schedule schedule;
  schedule_costs costs;
};

/// Returns the verified schedule of a layout with more than one stage, and the costs of each stage's passes, including
/// recomputation and the addition of gradients. Throws `error` if there is no schedule of these sizes.
inline step_costing cost_schedule(const hardware& h, const training_job& job, const training_layout& l) {
  step_costing out;
  const std::int64_t microbatches = l.microbatches(job);
  if (microbatches > max_microbatches || l.pp > max_pipeline_ranks)
    fail({"simulation: ", l.pp, " ranks and ", microbatches, " microbatches; legal are at most ", max_pipeline_ranks,
          " and ", max_microbatches});
  const stage_times times(h, job, l);
  const double layer_parameters = rank_layer_parameters(job, l),
               first_parameters = rank_layer_parameters(job.of_first_blocks(), l);
  const double ends = static_cast<double>(job.model.vocab * job.model.hidden) / static_cast<double>(l.tp);
  for (std::int64_t stage = 0; stage < l.stages(); ++stage) {
    const bool first = stage == 0, last = stage + 1 == l.stages();
    const block_counts blocks = blocks_of_stage(job.model, l.stages(), stage);
    const part_time part = times.of(blocks, first, last);
    const double parameters = static_cast<double>(blocks.alike) * layer_parameters +
                              static_cast<double>(blocks.first) * first_parameters + (first ? ends : 0) +
                              (last && !is_tied_here(job, l) ? ends : 0);
    const double weight = part.weight.sum() + detail::accumulation_seconds(h, job, l, parameters);
    const double input = part.input.sum() + part.again.sum();
    out.costs.stages.push_back({part.forward.sum(), input + weight, input, weight});
  }
  double forward = 0;
  for (const action_times& stage : out.costs.stages) forward += stage.forward / static_cast<double>(l.stages());
  out.costs.link = link_seconds(h, job, l, forward);
  automatic_options search;  // limits activations; ranks may end one after the other
  search.max_activations = static_cast<double>(2 * l.pp), search.by_span = job.program.delayed_norm;
  out.schedule =
      parse_schedule(schedule_text(l), static_cast<int>(l.pp), static_cast<int>(microbatches), out.costs, search);
  return out;
}

/// Returns the seconds of a step with its pipeline simulated; the other parts of the price stay.
inline double simulated_seconds(const hardware& h, const training_job& job, const layout_price& priced) {
  if (priced.layout.pp == 1) return priced.step();
  const step_costing step = cost_schedule(h, job, priced.layout);
  const step_split& s = priced.seconds;
  const double pipeline = std::max(simulate(step.schedule, step.costs).makespan, wire_seconds(h, job, priced.layout));
  const double beside = pipeline + s.data + s.optimizer + s.offload;
  const double apart = s.total() - s.turns, formula = apart - s.straggling;
  const double alone = beside * (formula > 0 ? apart / formula : 1);  // stragglers in proportion
  return s.turns > 0 ? std::max(alone, s.total()) : alone;
}

/// How the ranks of a simulated pipeline share its time.
struct pipeline_balance {
  double idle = 0;           ///< share of all ranks' time
  double uneven = 0;         ///< share by which the busiest rank computes longer than the mean
  std::int64_t busiest = 0;  ///< the busiest rank
};

inline pipeline_balance balance_of(const hardware& h, const training_job& job, const training_layout& l) {
  const step_costing step = cost_schedule(h, job, l);
  const simulation run = simulate(step.schedule, step.costs);
  pipeline_balance out{run.makespan_idle(), 0, 0};
  double sum = 0;
  for (std::int64_t r = 0; r < l.pp; ++r) {
    const double busy = run.busy(static_cast<int>(r));
    sum += busy;
    if (busy > run.busy(static_cast<int>(out.busiest))) out.busiest = r;
  }
  if (sum > 0) out.uneven = run.busy(static_cast<int>(out.busiest)) * static_cast<double>(l.pp) / sum - 1;
  return out;
}

/// Returns the simulated timeline in milliseconds, which train_llama/observe/pictures.hpp draws.
inline pipeline_timeline simulated_timeline(const hardware& h, const training_job& job, const training_layout& l) {
  step_costing step = cost_schedule(h, job, l);
  for (action_times& t : step.costs.stages)
    t = {1e3 * t.forward, 1e3 * t.backward, 1e3 * t.input_backward, 1e3 * t.weight_backward};
  step.costs.link *= 1e3;
  return timeline_of(step.schedule, step.costs, "ms");
}

/// Disturbances of a step of many ranks, which formulas do not include.
struct disturbance {
  double jitter = 0;     ///< the largest share by which a rank's pass differs from the mean
  double slow_rank = 1;  ///< factor by which one rank of the pipeline is slower than the others
  std::int64_t slow_at = 0;
  std::uint64_t seed = 1;
};

/// Draws the times of replicas' passes, one after the other. A stage on `tp * cp` ranks is as slow as its slowest rank,
/// so each of its passes takes the largest of `tp * cp` draws.
class disturbed_costs {
 public:
  disturbed_costs(const step_costing& even, const training_layout& l, const disturbance& d)
      : even_(even), group_(static_cast<double>(l.tp * l.cp)), d_(d) {}

  /// The first replica has the slow rank.
  schedule_costs of_replica(std::int64_t replica) {
    schedule_costs costs = even_.costs;
    for (int stage = 0; stage < even_.schedule.shape.stages(); ++stage) {
      // The largest of `group_` uniform draws has the distribution function u^group.
      double slower = 1 + d_.jitter * (2 * std::pow(kernels::uniform(d_.seed, 0, drawn_++), 1 / group_) - 1);
      if (replica == 0 && even_.schedule.shape.rank_of(stage) == d_.slow_at) slower *= d_.slow_rank;
      action_times& t = costs.stages[static_cast<std::size_t>(stage)];
      t = {slower * t.forward, slower * t.backward, slower * t.input_backward, slower * t.weight_backward};
    }
    return costs;
  }

 private:
  const step_costing& even_;
  double group_;
  disturbance d_;
  std::uint64_t drawn_ = 0;
};

}  // namespace plait::planner
