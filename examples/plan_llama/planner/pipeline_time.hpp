// The time of a pipeline's step by formulas, which take nanoseconds to compute. They are exact for even stages and
// approximate for uneven ones. Tests compare them with the exact simulation (simulated_step.hpp).
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
  bool delayed_norm = false;                  ///< each rank begins its next step when its own part of this step ends
};

/// Returns the seconds of a step of p ranks with m microbatches and v chunks.
///
/// gpipe and 1F1B: the busiest rank works all the time, and its first and last microbatch pass all other ranks. In the
/// steady state of 1F1B each microbatch waits for one message (an event simulation; Qi et al. 2023, table 5).
/// Interleaved: passing the other ranks takes a v-th of that (Narayanan et al. 2021, section 2.2), with ((2v-1)p - 2)
/// links. ZB-H1: (p-1)(F+I-W+4c), or (m+p-1)(F+I)+W for m <= p; ZB-H2 and ZB-V: the makespan (arXiv 2401.10241). A
/// schedule that is searched with the memory of 2 p microbatches (there ZB-2p) keeps each rank busy from its first pass
/// on, so ranks end one after the other as they began.
constexpr double pipeline_seconds(const training_layout& l, std::int64_t microbatches, const pipeline_costs& c) {
  const auto m = static_cast<double>(microbatches), p = static_cast<double>(l.pp), v = static_cast<double>(l.chunks);
  if (l.pp == 1) return m * c.busiest;
  const double others = c.sum - c.busiest;
  const auto few = [&] {  // weight gradients fill idle time, except those of the last microbatch
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
      const double uneven = c.sum > 0 ? others / (c.sum / p) : p - 1;  // work of other ranks over the mean
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

/// Returns the number of messages, one after the other, that the passes of a step wait for.
constexpr double messages_in_turn(const training_layout& l, std::int64_t microbatches) {
  return pipeline_seconds(l, microbatches, {.link = 1});
}

/// Returns the seconds that ranks of pipelines on fewer cores take in addition to their work. At both ends of a step
/// only k of p stages have work, with `together` ranks each, which may be too few for all cores. This lasts a forward
/// and a backward pass, `passes`. And after a message has come, a rank waits `turn` seconds for a core.
constexpr double shared_cores_seconds(const training_layout& l, std::int64_t microbatches, std::int64_t cores,
                                      std::int64_t together, double passes, double turn) {
  if (l.pp == 1) return 0;
  double idle = 0;
  for (std::int64_t k = 1; k < l.pp && k * together < cores; ++k)
    idle += static_cast<double>(cores - k * together) / static_cast<double>(cores);
  return idle * passes / static_cast<double>(l.chunks) + messages_in_turn(l, microbatches) * turn;
}

/// Returns the most microbatches whose activations rank r keeps at one time; one of v chunks counts as a v-th. In the
/// last microbatch-stage the forward pass is over.
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
