#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "keeper.hpp"
#include "model_run.hpp"
#include "traffic.hpp"
#include "train_llama/observe/progress.hpp"
#include "train_llama/observe/report.hpp"
#include "utilisation.hpp"

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
