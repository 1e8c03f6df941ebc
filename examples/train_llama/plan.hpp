// What is known of a run before it starts: layouts, traffic, memory, recomputation, and the predicted time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fit_recompute.hpp"
#include "options.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/io/json.hpp"
#include "plait/nn/strategy.hpp"
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
  double on_host = 0;  ///< what is offloaded
  double saved = 0;    ///< what it writes of a step, where steps are saved
  /// What a saved step must have that the run goes on from, or begins with; nothing where there is none.
  std::vector<plait::safetensors_declaration> state{};
};

/// Of a rank with these types; llama_plan.hpp has the two, and the build a file for each precision and strategy.
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

/// The bytes that ranks hold at least, on their GPUs, where they have some, and in the memory of their host.
struct least_bytes {
  double gpu = 0, host = 0;
};

/// Returns what one rank holds at least, by the plan of the run.
least_bytes least_bytes_of(const setup& s, std::int64_t rank);
/// Returns what all ranks of the mesh hold together.
least_bytes least_bytes_of_all(const setup& s);

/// Returns why the run cannot start, or nothing: it needs `bytes` of `memory`, such as "this host's memory", more than
/// --memory-share of what is available.
std::string memory_fault(const setup& s, double bytes, double available, const std::string& memory);
/// The same of this host's memory.
std::string host_memory_fault(const setup& s, double bytes);

struct prediction;

/// The options with what --plan auto chooses put in, for as many ranks as --cluster or --mesh names (or as there are,
/// where `ranks` is positive), by predicted time, fastest first: whoever trains takes the first that is legal. What the
/// command line gives stays. Throws where nothing fits, or where what is given cannot be priced.
std::vector<options> planned_options(const options& opt, std::int64_t ranks);

/// The names of the hardware that --cluster takes, separated by commas.
std::string hardware_names();

/// The prediction for a run that is set up; null without --cluster.
std::shared_ptr<const prediction> predict(const setup& s);

/// Step time, bubble, communication that is waited for, and memory by part, as lines and with them as JSON.
std::string prediction_text(const prediction& p);

/// The prediction as an object, or with why there is none; where steps ran, with their median's seconds and the peak of
/// a rank's memory beside it.
plait::json_object prediction_json(const prediction& p, double step_seconds = 0, double peak_bytes = 0);

/// Predicted beside measured step time and memory, as a line.
std::string beside_measured(const prediction& p, double step_seconds, double peak_bytes);

/// Prints what --dry-run says: layouts, collectives, memory, and what of saved states fits.
void print_plan(const setup& s, const run_plan& plan);
