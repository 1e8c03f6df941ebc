// The time of a pipeline's step by formulas, in nanoseconds of the processor. They hold for even stages and are near
// for uneven ones: the simulator has the exact time (simulated_step.hpp), and tests compare the two.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan_llama/planner/training_layout.hpp"

namespace plait::planner {

/// Seconds of one microbatch on the ranks of a pipeline, over all chunks of a rank.
struct pipeline_costs {
  double busiest = 0;                         ///< of the rank with the most work, forward and backward
  double sum = 0;                             ///< of all ranks
  double forward = 0, input = 0, weight = 0;  ///< of a rank on average, in three parts
  double link = 0;                            ///< of a message to the next stage
  bool delayed_norm = false;                  ///< each rank begins its next step when its own part of this one ends
};

/// Seconds of a step of p ranks with m microbatches and v chunks.
///
/// gpipe and 1F1B: the busiest rank works all the time, and its first and last microbatch pass all other ranks; a
/// message costs each microbatch of 1F1B one link in the steady state (an event simulation; Qi et al. 2023, table 5).
/// Interleaved: the others' passing takes a v-th (Narayanan et al. 2021, section 2.2), with ((2v-1)p - 2) links.
/// ZB-H1: (p-1)(F+I-W+4c), or (m+p-1)(F+I)+W for m <= p; ZB-H2 and ZB-V: the makespan (arXiv 2401.10241). A schedule
/// that is searched with the memory of 2 p microbatches (there ZB-2p) has work for each rank from its first pass on, so
/// that the ranks end one after the other as they began.
constexpr double pipeline_seconds(const training_layout& l, std::int64_t microbatches, const pipeline_costs& c) {
  const auto m = static_cast<double>(microbatches), p = static_cast<double>(l.pp), v = static_cast<double>(l.chunks);
  if (l.pp == 1) return m * c.busiest;
  const double others = c.sum - c.busiest;
  const auto few = [&] {  // weight gradients fill what would be idle, but those of the last microbatch
    const double passes = c.forward + c.input;
    return m * (c.busiest - c.weight) + others / std::max(c.sum / p, 1e-30) * passes + c.weight + 2 * (p - 1) * c.link;
  };
  switch (l.schedule) {
    case schedule_kind::gpipe:
      return m * c.busiest + others + 2 * (p - 1) * c.link;
    case schedule_kind::one_f_one_b:
      return m * c.busiest + others + (2 * (p - 1) + std::max(0.0, m - p)) * c.link;
    case schedule_kind::interleaved:
      return m * c.busiest + others / v + ((2 * v - 1) * p - 2) * c.link;
    case schedule_kind::zb_h1:
    case schedule_kind::zb_h2: {
      const bool h2 = l.schedule == schedule_kind::zb_h2;
      const double uneven = c.sum > 0 ? others / (c.sum / p) : p - 1;  // ranks' worth of work that the others have
      if (m <= p) return few();
      if (h2 && c.delayed_norm)
        return m * c.busiest + uneven * std::max(0.0, c.forward + c.input - 2 * c.weight) + 2 * (p - 1) * c.link;
      if (h2)
        return m * c.busiest + uneven * std::max(c.forward, c.forward + c.input - c.weight) + 2 * (p - 1) * c.link;
      return m * c.busiest + uneven * std::max(c.forward, c.forward + c.input - c.weight) + 4 * (p - 1) * c.link;
    }
    case schedule_kind::automatic:
      if (m <= p) return few();
      return m * c.busiest + (c.delayed_norm || c.sum == 0 ? 0 : others / (c.sum / p) * c.forward) +
             2 * (p - 1) * c.link;
    case schedule_kind::zb_v:
      if (m <= p) return few();
      return m * c.busiest + others / p * (p / 2) * (c.forward / std::max(c.forward + c.input + c.weight, 1e-30)) +
             2 * p * c.link;
  }
  return 0;
}

/// How many messages, one after the other, the passes of a step wait for.
constexpr double messages_in_turn(const training_layout& l, std::int64_t microbatches) {
  return pipeline_seconds(l, microbatches, {.link = 1});
}

/// Seconds that ranks of pipelines on fewer cores take beyond their work: at both ends of a step the first k of p
/// stages have work, which is of `together` ranks each and may be too little for all cores, for as long as a pass
/// forward and one backward last, `passes`; and what a pass waits for has come `turn` seconds before its rank gets a
/// core.
constexpr double shared_cores_seconds(const training_layout& l, std::int64_t microbatches, std::int64_t cores,
                                      std::int64_t together, double passes, double turn) {
  if (l.pp == 1) return 0;
  double idle = 0;
  for (std::int64_t k = 1; k < l.pp && k * together < cores; ++k)
    idle += static_cast<double>(cores - k * together) / static_cast<double>(cores);
  return idle * passes / static_cast<double>(l.chunks) + messages_in_turn(l, microbatches) * turn;
}

/// The most microbatches that rank r keeps activations of at a time, counting one of v chunks as a v-th: in the last
/// microbatch-stage the forward pass is over.
constexpr double microbatches_in_flight(const training_layout& l, std::int64_t microbatches, std::int64_t rank) {
  const auto m = static_cast<double>(microbatches), p = static_cast<double>(l.pp), v = static_cast<double>(l.chunks);
  const auto r = static_cast<double>(rank);
  switch (l.schedule) {
    case schedule_kind::gpipe:
      return m;
    case schedule_kind::one_f_one_b:
      return std::min(m, p - r);
    case schedule_kind::interleaved:
      return std::min(m, (2 * (p - r - 1) + (v - 1) * p + 1) / v);
    case schedule_kind::zb_h1:
    case schedule_kind::zb_v:
      return std::min(m, p);
    case schedule_kind::zb_h2:
      return std::min(m, 2 * p - 1);
    case schedule_kind::automatic:
      return std::min(m, 2 * p);
  }
  return m;
}

}  // namespace plait::planner
