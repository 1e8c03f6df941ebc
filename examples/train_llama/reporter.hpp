// What a run prints, logs and draws.
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

// Words about a run, for its beginning and its plan.

/// "dp=2, tp=4": the extents as given, and how many ranks hold each key-value head where tp outnumbers them.
std::string mesh_text(const plait::mesh_shape& shape);

/// "pipeline: zb_v, stages of 3, 3, 3, 2 layers".
std::string pipeline_text(const setup& s, const std::vector<plait::stage_layers>& stages);

/// What layers recompute, as a line; empty where it is nothing and none was asked for.
std::string recompute_text(const setup& s);

/// What --lora trains, as a line; empty where there are no adapters.
std::string adapters_text(const setup& s);

/// The options as --plan auto has made them, as a line.
std::string plan_text(const setup& s);

/// Returns the bytes that one rank of a group sends, of those of all of them. A message is counted by its sender alone.
std::uint64_t per_rank(const plait::mesh_shape& shape, const std::string& label, plait::collective kind,
                       std::uint64_t wire);
/// Returns those of one step, of all collectives of a row that has so many.
std::uint64_t per_rank(const plait::mesh_shape& shape, const plait::ledger::row& row, std::uint64_t steps = 1);

/// All that the ranks have sent, and whether that is what the types say.
struct traffic {
  plait::json_object bytes;  ///< of a rank, by axis
  std::string text;
  bool as_predicted = true;
};

/// Returns that of so many steps. Collective.
traffic traffic_of(const setup& s, model_run& run, std::int64_t steps);

/// Returns the axes for which ranks have waited longest; null where that is not known.
const plait::axis_communication* most_waited(const std::vector<plait::axis_communication>& communication);

/// What a run makes of its devices' peak. A token's operations are those of `plait::flops_per_token`: 6 for each weight
/// that multiplies, and the full square of attention; recomputation does not count. Says nothing, and adds nothing to
/// the log, on the CPU without --peak-tflops.
class utilisation {
 public:
  /// `device` is what the GPU is called.
  utilisation(const setup& s, std::string device);

  /// Lines for the beginning: the device, how it computes, a token's operations and the peak that they are measured by.
  std::string heading() const;
  /// A token's operations, a line.
  std::string operations() const;
  /// A line for the end.
  std::string ending() const;

  /// Of a step at this rate, 0 to 1; 0 where no peak is known.
  double of_step(double tokens_per_second);
  void add_to(plait::json_object& summary) const;

 private:
  double median() const;
  double causal() const { return flops_.causal() / flops_.total(); }

  const setup& s_;
  std::string device_;
  plait::llama_flops flops_;
  double peak_ = 0;  ///< TFLOP/s of one device; 0: not known
  std::vector<double> steps_;
};

/// How many steps are from one line of progress to the next, where there is no terminal.
std::int64_t steps_between_lines(const setup& s);

/// Rank 0's outputs: what is printed of a run, its log and its pictures.
class reporter {
 public:
  /// The run goes on after `resumed` steps of others. Prints how it begins.
  reporter(const setup& s, model_run& run, std::int64_t resumed);

  /// After a step, which took so many seconds.
  void step(plait::step_record record, double took);

  void hashes(std::int64_t step, const std::vector<plait::parameter_hash>& all);

  /// After an evaluation.
  void evaluated(std::int64_t step, double loss);

  /// Tells what became of a save, with its time on rank 0 and all ranks' bytes.
  void saved(const keeper::news& news);

  /// The end of a run.
  struct ending {
    std::int64_t steps = 0;    ///< in all
    std::int64_t resumed = 0;  ///< of them, in runs before
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

  /// What could not be written; empty: nothing.
  const std::string& failure() const { return failure_; }

 private:
  /// Has a file of the run written. Training is worth more than what it writes beside the model: the run goes on where
  /// that fails, and complains when it has ended. Returns whether it is written.
  template <class F>
  bool written(F&& write);
  /// Adds to the log, if there is one still.
  template <class F>
  void logged(F&& add);
  void begin_curves(std::int64_t resumed);
  void add_held_out(std::int64_t step, double loss);
  void draw();
  /// Writes and tells what the traced step looked like.
  void show(std::int64_t step, const std::vector<plait::pipeline_timeline>& timelines,
            const std::vector<std::vector<plait::step_event>>& traced);

  /// Seconds of the median step; 0 where there was none.
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
