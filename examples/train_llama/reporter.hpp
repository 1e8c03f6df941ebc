// The output of a run: printed lines, the log and pictures.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "options.hpp"
#include "plait/io/json.hpp"
#include "run.hpp"
#include "train_llama/observe/communication.hpp"
#include "train_llama/observe/report.hpp"
#include "train_llama/observe/run_log.hpp"

// Descriptions of a run for its first lines and its plan.

/// Returns "dp=2, tp=4": the given extents. If tp has more ranks than there are kv heads, it adds how many share each.
std::string mesh_text(const plait::mesh_shape& shape);

/// Returns "pipeline: zb_v, stages of 3, 3, 3, 2 layers".
std::string pipeline_text(const setup& s, const std::vector<plait::stage_layers>& stages);

/// Returns a line on what layers recompute; empty with --recompute none.
std::string recompute_text(const setup& s);

/// Returns a line on the adapters of --lora; empty if there are none.
std::string adapters_text(const setup& s);

/// Returns a line with the options that --plan auto has chosen.
std::string plan_text(const setup& s);

/// Returns the bytes that one rank of a group sends, from the bytes of all. Only the sender counts a message.
std::uint64_t per_rank(const plait::mesh_shape& shape, const std::string& label, plait::collective kind,
                       std::uint64_t wire);
/// Returns the bytes that one rank sends in one step for the collectives of a row, which counts `steps` steps.
std::uint64_t per_rank(const plait::mesh_shape& shape, const plait::ledger::row& row, std::uint64_t steps = 1);

/// The bytes that ranks have sent, and whether they equal the prediction from the types.
struct traffic {
  plait::json_object bytes;  ///< of a rank, by axis
  std::string text;
  bool as_predicted = true;
};

/// Returns the traffic of a number of steps. Collective.
traffic traffic_of(const setup& s, model_run& run, std::int64_t steps);

/// Returns the axes for which ranks have waited longest; null if unknown.
const plait::axis_communication* most_waited(const std::vector<plait::axis_communication>& communication);

/// The share of its devices' peak that a run reaches. The operations of a token are `plait::flops_per_token`: 6 for
/// each weight of a product, and the full square of attention. Recomputation does not count. On the CPU without
/// --peak-tflops its texts are empty and it adds nothing to the log.
class utilisation {
 public:
  /// `device` is the name of the GPU.
  utilisation(const setup& s, std::string device);

  /// Returns the first lines: the device, its kernels, a token's operations, and the peak.
  std::string heading() const;
  /// Returns a line on a token's operations.
  std::string operations() const;
  /// Returns the line for the end of the run.
  std::string ending() const;

  /// Returns the share of the peak, 0 to 1, of a step at this rate; 0 if the peak is unknown.
  double of_step(double tokens_per_second);
  void add_to(plait::json_object& summary) const;

 private:
  double median() const;
  double causal() const { return flops_.causal() / flops_.total(); }

  const setup& s_;
  std::string device_;
  plait::llama_flops flops_;
  double peak_ = 0;  ///< TFLOP/s of one device; 0: unknown
  std::vector<double> steps_;
};

/// Returns the number of steps between two lines of progress if the output is not a terminal.
std::int64_t steps_between_lines(const setup& s);

/// Writes the output of rank 0: printed lines, the log and pictures.
class reporter {
 public:
  /// Prints the first lines. The run continues after `resumed` steps of earlier runs.
  reporter(const setup& s, model_run& run, std::int64_t resumed);

  /// Reports a step, which took `took` seconds.
  void step(plait::step_record record, double took);

  void hashes(std::int64_t step, const std::vector<plait::parameter_hash>& all);

  /// Reports an evaluation.
  void evaluated(std::int64_t step, double loss);

  /// Reports the result of a save, with its time on rank 0 and the bytes of all ranks.
  void saved(const checkpointer::saved_step& result);

  /// The results at the end of a run.
  struct ending {
    std::int64_t steps = 0;    ///< in all
    std::int64_t resumed = 0;  ///< made by earlier runs
    std::int64_t skipped = 0;
    double last_loss = 0;
    double seconds = 0;
    bool diverged = false;
    traffic sent{};
    double peak_bytes = 0;
    std::vector<plait::axis_communication> communication{};  ///< of all steps
    std::string longest_wait{};
    std::optional<double> held_out{};
    std::uint64_t hash = 0;
    std::vector<std::vector<plait::step_event>> traced{};  ///< of each rank
  };

  void finish(const ending& e);

  /// The error of the first output that could not be written; empty: none.
  const std::string& failure() const { return failure_; }

 private:
  /// Calls a function that writes a file of the run, and returns whether that succeeded. After a failure the run
  /// continues, because training is worth more than its output. The error is reported at the end.
  template <class F>
  bool written(F&& write);
  /// Adds to the log, unless writing to it has failed.
  template <class F>
  void logged(F&& add);
  void begin_curves(std::int64_t resumed);
  void add_held_out(std::int64_t step, double loss);
  void draw();

  /// Returns the seconds of the median step; 0 if there was no step.
  double median_step() const;

  const setup& s_;
  plait::mesh_shape shape_;
  utilisation use_;
  std::optional<plait::json_log> log_;
  std::optional<plait::progress> display_;
  std::vector<plait::axis_communication> shown_;
  std::vector<double> took_;  ///< seconds of each step
  std::vector<plait::curve_series> curves_ = plait::loss_curves({});
  std::string failure_;
};
