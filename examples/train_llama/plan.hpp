#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/plan/recompute_prices.hpp"
#include "plait/schedule/order.hpp"

/// What is known of a run before it starts, from the types: how each tensor lies, what a step sends, what a rank holds.
/// It needs neither ranks nor a GPU.
struct run_plan {
  struct activation {
    std::string name, layout;
    double bytes = 0;  ///< of a rank
  };
  struct parameter {
    std::string name, stored;
    std::string used;  ///< empty: as stored
  };

  std::vector<activation> activations;
  std::vector<parameter> parameters;
  plait::ledger traffic;         ///< of a step
  plait::posted_program posted;  ///< the same call by call
  // Bytes of a rank between a forward and a backward pass.
  double weights = 0;    ///< as they are stored, and as they are used where that is something else
  double gradients = 0;  ///< likewise
  double optimizer = 0;  ///< moments or momenta, and master weights where layers use rounded ones
  double kept = 0;       ///< activations
  double attention = 0;  ///< what cuDNN's gradients in a fixed order take for themselves
  double bytes() const { return weights + gradients + optimizer + kept + attention; }
  double on_host = 0;  ///< what is offloaded of the optimizer's
  double saved = 0;    ///< what it writes of a step, where steps are saved
  /// What a saved step must have that the run goes on from, or begins with; nothing where there is none.
  std::vector<plait::safetensors_declaration> state{};
};

/// Of a rank with these types; counted_plan.hpp has the two, and the build a file for each precision and strategy.
template <class Precision, plait::strategy S>
run_plan plan_as(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages);
template <class Precision, plait::strategy S>
plait::recompute_fit fit_as(const setup& s, int at, std::int64_t rank, std::int64_t budget);

/// Of one rank, with the layers of its pipeline in these stages.
run_plan plan_of_rank(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages);
/// The ranks that lie between two stages of the same part of the data: those of cp, tp and tp_rep.
std::int64_t ranks_of_stage(const setup& s);
/// Of the rank that holds most; the parameters and the state are those of all stages.
run_plan plan_of(const setup& s);
/// Says that the collectives and messages of a step stand in one order on all ranks, as a line; throws where they do
/// not. Each rank's step is run where everything is only counted, and so of small meshes alone; empty of one rank.
std::string order_text(const setup& s);
/// What the layers of the pipeline's rank `at` recompute so that they keep at most `budget` bytes.
plait::recompute_fit fit_of_rank(const setup& s, int at, std::int64_t budget);
