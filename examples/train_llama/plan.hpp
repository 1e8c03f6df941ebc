// The plan of a run before it starts: layouts, traffic, memory, recomputation, and the predicted time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fit_recompute.hpp"
#include "options.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/io/json.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/schedule/order.hpp"

/// The plan of a run, derived from the types before it starts: the layout of each tensor, the traffic of a step, and
/// the memory of a rank. Making it needs neither ranks nor a GPU.
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
  std::int64_t trained = 0;      ///< elements of the parameters that are trained, on all ranks of the stage together
  plait::ledger traffic;         ///< of a step
  plait::posted_program posted;  ///< the calls of a step, in order
  // Bytes of a rank between a forward and a backward pass.
  double weights = 0;    ///< as stored, and as used if that differs
  double gradients = 0;  ///< as stored, and as passes add to them if that differs
  double optimizer = 0;  ///< moments or momenta, and master weights if layers use rounded ones
  double kept = 0;       ///< activations
  double attention = 0;  ///< scratch of cuDNN's gradients in a fixed order
  double bytes() const { return weights + gradients + optimizer + kept + attention; }
  double peak = 0;     ///< the most bytes at a time in a step, within a pass
  double on_host = 0;  ///< offloaded bytes
  double saved = 0;    ///< bytes that the rank writes in a save, if steps are saved
  /// The tensors that the step of --resume or --init-from must have; empty if there is no such step.
  std::vector<plait::safetensors_declaration> state{};
};

/// The plan of a rank with these types. llama_plan.hpp defines its functions, and the build makes a file for each
/// precision and strategy.
template <class Precision, plait::strategy S>
run_plan plan_as(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages);
template <class Precision, plait::strategy S>
plait::recompute_fit fit_as(const setup& s, int at, std::int64_t rank, std::int64_t budget);

/// Returns the plan of one rank. `stages` are the layers of the pipeline's stages.
run_plan plan_of_rank(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages);
/// Returns the plans of a rank of each rank of the pipeline. Throws if the model does not fit the mesh.
std::shared_ptr<const std::vector<run_plan>> plans_of(const setup& s);
/// Returns the plan of the rank that needs most memory.
const run_plan& fullest_plan(const setup& s);
/// Returns a line which says that all ranks issue the collectives and messages of a step in one order. Throws if they
/// do not. It makes a dry run of each rank's step, so it does this only for small meshes. Empty for one rank.
std::string order_text(const setup& s);

/// The bytes that ranks need at least, on their GPUs, if any, and in host memory.
struct least_bytes {
  double gpu = 0, host = 0;
};

/// Returns the least bytes of one rank by the plan of the run.
least_bytes least_bytes_of(const setup& s, std::int64_t rank);
/// Returns the least bytes of all ranks of the mesh together.
least_bytes least_bytes_of_all(const setup& s);

/// Returns why the run cannot start: it needs `bytes` of `memory`, such as "this host's memory", which is more than
/// --memory-share of the available bytes. Empty if it can start.
std::string memory_fault(const setup& s, double bytes, double available, const std::string& memory);
/// Returns the same for this host's memory.
std::string host_memory_fault(const setup& s, double bytes);

struct prediction;

/// Returns the options completed by --plan auto, by predicted time, fastest first. The caller takes the first legal
/// one. Given options stay. The number of ranks is `ranks` if positive, otherwise that of --cluster or --mesh. Throws
/// if nothing fits, or if a given option cannot be predicted.
std::vector<options> planned_options(const options& opt, std::int64_t ranks);

/// Returns the prediction for a run; null without --cluster.
std::shared_ptr<const prediction> predict(const setup& s);

/// Returns lines on step time, bubble, exposed communication, and memory by part.
std::string prediction_text(const prediction& p);

/// Returns the prediction as an object, or the reason why there is none. If steps ran, it also has the seconds of their
/// median and the peak memory of a rank.
plait::json_object prediction_json(const prediction& p, double step_seconds = 0, double peak_bytes = 0);

/// Returns a line with predicted and measured step time and memory.
std::string beside_measured(const prediction& p, double step_seconds, double peak_bytes);

/// Prints the output of --dry-run: layouts, collectives, memory, and which saved states fit.
void print_plan(const setup& s);
