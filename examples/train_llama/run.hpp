// An interface for a rank's training, functions that start it on each device, and the texts of saved states.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "options.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/comm/agreement.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/error.hpp"
#include "plait/device/device.hpp"
#include "plait/nn/moe/router_statistics.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/step_result.hpp"
#include "train_llama/observe/communication.hpp"
#include "train_llama/observe/step_events.hpp"

namespace plait {
class file_system;
struct loaded_state;
namespace mpi {
class communicator;
}
}  // namespace plait

/// Returns the `errno` of the first failure of standard output; 0: none.
inline int& output_failure() {
  static int failure = 0;
  return failure;
}

/// Prints to standard output. If that is closed or full, the run continues, because training is worth more than its
/// output. The error is reported at the end.
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = fmt::format(format, std::forward<Args>(args)...);
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() && output_failure() == 0)
    output_failure() = errno;
}

/// Flushes standard output, and records a failure.
inline void say_now() {
  errno = 0;
  if (std::fflush(stdout) != 0 && output_failure() == 0) output_failure() = errno;
}

/// The signal that asks the run to end after its present step, such as that of Ctrl-C; 0: none. A handler sets it, and
/// the threads of all ranks read it.
extern std::atomic<int> interrupted;
/// Whether SIGUSR1 has asked for a save since the last one.
extern std::atomic<int> save_asked;
static_assert(std::atomic<int>::is_always_lock_free);  // required in a signal handler

/// The requests of a run's ranks, after an exchange. Each number is the largest of all ranks.
struct requests {
  double stop = 0;           ///< a signal asks the run to end after this step
  double save = 0;           ///< SIGUSR1 asks for a save
  double ended_saves = 0;    ///< a save has ended
  double communication = 0;  ///< how many rows the communication of a rank has
};

/// The saved step with the least held-out loss.
struct best_step {
  std::int64_t step = -1;  ///< -1: none
  double loss = std::numeric_limits<double>::infinity();
};

/// The interface of one rank's training for the loop in train.cpp, the same for every precision, strategy and device.
/// All functions are collective, except those that only return a value.
class model_run {
 public:
  virtual ~model_run() = default;

  /// Runs optimizer step `index`, counted from 0, on that step's samples. During the step ranks exchange their
  /// requests. With `with_communication` they also exchange the times of communication since the step before.
  virtual plait::step_result step(std::int64_t index, bool with_communication) = 0;
  /// Returns the statistics of routers in the last step, by layer; empty for a model without experts. The ledger does
  /// not count the call's communication.
  virtual std::map<std::int64_t, plait::router_statistics> routers() = 0;
  /// Returns the mean loss over the held-out samples with the present weights; nothing if interrupted. The ledger does
  /// not count the call's communication.
  virtual std::optional<double> evaluate() = 0;
  /// Returns the tokens of the prompt and the sampled ones; fewer if interrupted.
  virtual std::vector<std::int64_t> sample() = 0;
  virtual std::uint64_t weights_hash() = 0;
  /// Returns the hash of each parameter, and with `gradients` also of its gradient in the last step. The ledger does
  /// not count the call's communication.
  virtual std::vector<plait::parameter_hash> hashes(bool gradients) = 0;
  /// Writes the model to the directory of --export-hf.
  virtual void write_model() = 0;

  /// Loads the step that --resume names, and returns the number of earlier steps: 0 if it names no step.
  virtual std::int64_t resume() = 0;
  /// Saves the state after `steps` steps in the background. Returns the saves that it had to wait for. `best` may be
  /// this step. It is recorded in the save, and with --keep-best that step is kept.
  virtual std::vector<plait::finished_save> save(std::int64_t steps, const best_step& best) = 0;
  /// Returns the saves that have ended since the last call. With `wait` it waits for all saves.
  virtual std::vector<plait::finished_save> ended_saves(bool wait) = 0;
  /// Waits until `save` would not have to wait, and returns the saves that have ended.
  virtual std::vector<plait::finished_save> room_for_save() = 0;

  /// Reduces one number over all ranks of the run.
  virtual double all_reduce(double value, plait::reduce_op op) = 0;

  /// Returns the communication of all ranks of the run, from the times of each.
  virtual std::vector<plait::axis_communication> of_ranks(const std::vector<plait::axis_times>& mine) = 0;
  /// Returns a text on rank 0: the part of a step that waited longest for communication over `axes`, on any rank so
  /// far.
  virtual std::string longest_wait(const std::string& axes) = 0;

  /// Returns on rank 0 the events of all ranks in the traced step; empty if no step is traced.
  virtual std::vector<std::vector<plait::step_event>> traced() = 0;

  /// The world of one stage, on which the model's tensors are. Its ledger has counted `counted_steps` of the run's
  /// steps.
  virtual plait::world& world() = 0;
  /// The most memory that this rank has used on its device.
  virtual std::size_t peak_bytes() const = 0;

  // Facts that the training sets.
  std::int64_t rank = 0;                      ///< the number of this rank in the run
  std::string device_name{};                  ///< empty for the CPU
  std::vector<plait::stage_layers> stages{};  ///< the layers of the pipeline's stages
  std::int64_t counted_steps = 0;             ///< steps that the world's ledger has counted
  requests asked{};                           ///< the requests of all ranks in the last step
  /// The communication of all ranks from the norm of the step before to that of the last step; empty if ranks did not
  /// exchange it.
  std::vector<plait::axis_communication> communication{};
  std::int64_t newest_saved = -1;  ///< the newest step in --checkpoint-dir at the beginning; -1: none
  best_step best_saved{};          ///< the best step in --checkpoint-dir, as recorded in the resumed step

 protected:
  model_run() = default;
  model_run(const model_run&) = delete;
  model_run& operator=(const model_run&) = delete;
};

/// Makes a rank's training.
template <class Device>
using make_run = std::unique_ptr<model_run> (*)(const setup&, Device&, plait::any_communicator);

/// Makes a rank's training, with the order of the sequence of --attention. Defined in llama_run.hpp. On the CPU CMake
/// writes a file for each instantiation.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
std::unique_ptr<model_run> make_llama_run(const setup& s, Device& device, plait::any_communicator ranks);

/// Returns the function that makes a rank's training on a GPU with the types of the options.
make_run<plait::cuda> cuda_program(const options& opt);

/// Saves training states, and reports the results of saves.
class checkpointer {
 public:
  /// The result of a save that has ended.
  struct saved_step {
    plait::finished_save save;
    double bytes = 0;              ///< of all ranks
    std::optional<double> loss{};  ///< held-out loss, for --keep-best
    bool is_best = false;          ///< whether the loss is the least of all saves so far
  };

  checkpointer(const setup& s, model_run& run, std::function<void(const saved_step&)> tell)
      : s_(s), run_(run), tell_(std::move(tell)), last_(run.newest_saved), kept_(run.best_saved) {}

  /// Saves after a step, if it is due. Collective calls are made only if all ranks have the same reason for them.
  void after(std::int64_t steps, const requests& asked) {
    if (s_.opt.checkpoint_dir.empty()) return;
    if (asked.ended_saves != 0) report(run_.ended_saves(false));
    if (asked.save != 0) save_asked = 0;
    if (asked.save != 0 || (s_.opt.save_every > 0 && steps % s_.opt.save_every == 0)) save(steps);
  }
  /// Saves at the end of the run. If a save of this step has failed, it tries once more after the other saves have
  /// ended.
  void finish(std::int64_t steps, bool worth_saving) {
    if (s_.opt.checkpoint_dir.empty()) return;
    report(run_.ended_saves(true));
    if (worth_saving && (steps > last_ || (steps == newest_ended_ && !newest_.failure.empty()))) save(steps);
    report(run_.ended_saves(true));
  }
  /// The error of the save of the newest step; empty: none.
  const std::string& failure() const { return newest_.failure; }
  /// A problem of the save of the newest step, although it was committed. Only rank 0 has it.
  const std::string& damage() const { return newest_.damage; }

 private:
  void save(std::int64_t steps) {
    last_ = steps;
    report(run_.room_for_save());  // which step is best depends on failed saves
    std::optional<double>& loss = judged_[static_cast<std::uint64_t>(steps)];
    if (s_.opt.keep_best == "held-out") loss = run_.evaluate();
    best_step best = kept_;
    for (const auto& [step, its] : judged_)
      if (its && *its < best.loss) best = {static_cast<std::int64_t>(step), *its};
    try {
      report(run_.save(steps, best));
    } catch (const plait::error_of_all& e) {
      ended({.step = static_cast<std::uint64_t>(steps), .failure = e.what()}, 0);
    }
  }
  void report(const std::vector<plait::finished_save>& saves) {
    for (const plait::finished_save& s : saves)
      ended(s, run_.all_reduce(static_cast<double>(s.bytes), plait::reduce_op::sum));
  }
  void ended(const plait::finished_save& save, double bytes) {
    const auto step = static_cast<std::int64_t>(save.step);
    // A save that fails at once ends before older saves.
    if (step >= newest_ended_) newest_ended_ = step, newest_ = save;
    const std::optional<double> loss = judged_.extract(save.step).mapped();
    const bool is_best = save.failure.empty() && loss && *loss < kept_.loss;
    if (is_best) kept_ = {step, *loss};
    tell_({save, bytes, loss, is_best});
  }

  const setup& s_;
  model_run& run_;
  std::function<void(const saved_step&)> tell_;
  std::int64_t last_;                                      ///< newest step whose save has begun
  std::int64_t newest_ended_ = -1;                         ///< newest step whose save has ended
  best_step kept_;                                         ///< the best step on disk
  std::map<std::uint64_t, std::optional<double>> judged_;  ///< held-out losses of unfinished saves
  plait::finished_save newest_{};                          ///< of `newest_ended_`
};

// Texts that describe a run in a saved step, and to other processes.

/// Returns a text with all that a place in the data depends on, except --seed and --seq.
std::string data_text(const options& opt);

/// Returns the settings that must be equal in all processes of a run: options, the model, the data, and the derived
/// layouts. record.cpp lists the options that may differ.
std::vector<plait::setting> agreed_settings(const setup& s);

/// Returns the file system that writes steps, as --checkpoint-io says. Throws `plait::error`, which names the option,
/// if this program or machine does not support it.
plait::file_system& checkpoint_files(const options& opt);

/// Returns a line on how steps are written, and why not by io_uring; nothing if no step is saved.
std::string checkpoint_io_text(const options& opt);

/// Throws `plait::error_of_all`, which names the option, if the run cannot continue from a saved state, because its
/// place in the data would differ. It uses no fmt, because nvcc compiles it.
void check_resumed(const setup& s, const plait::loaded_state& loaded);

/// Returns the options that affect a step's numbers, such as "--global-batch 8, --optimizer adamw". Options of data and
/// learning rate have other texts. The text is saved with a step.
std::string training_text(const setup& s);

/// Returns the first difference between a model's shape and that of a saved step, such as "hidden_size is 64, and the
/// step has 32"; nothing if they are equal, or if the step has no shape.
std::string other_model_than(const plait::llama_config& config, const plait::loaded_state& loaded);

/// Returns the options that differ from those saved with a step, such as "--clip 0.5, which was 1". Empty if none
/// differs, or if an older step lacks the text. A run may continue with other options; it prints them.
std::string changed_options(const setup& s, const plait::loaded_state& loaded);

/// Returns the model that is recorded in a saved state; nothing if an older program or no run saved it.
std::optional<plait::llama_config> saved_model(const plait::loaded_state& loaded);

/// Whether the run evaluates other tokens than the run of the step that it continues.
bool judges_otherwise(const setup& s, const plait::loaded_state& loaded);

/// Returns why a run cannot continue from a state that failed to load with the error `why`. The reason is that it has
/// other adapters, or `why` itself, after a list of options that differ from those of the state.
std::string why_not_resumed(const setup& s, const std::string& path, const std::string& why);

/// Returns the options of the adapters that a step was saved with.
saved_adapters adapters_saved(const plait::loaded_state& loaded);

/// Returns a text that was saved with a step, such as "train.rate". It is empty if no step had been made. For a step of
/// an older format it returns a text that equals that of no run. The caller then asks for the option that allows
/// changes.
std::string saved_text(const plait::loaded_state& loaded, const char* scalar);

/// Returns lines for a dry run on the steps that --init-from, --resume and --checkpoint-dir name; empty if they name
/// none. Throws `plait::error`, which names the option, for a step that the run would refuse: one that is missing, is
/// not whole by its manifest, or does not fit the run. It reads no tensor, and writes nothing.
std::string planned_state_text(const setup& s);

/// Runs the training of one rank, from the first step to the sampled text. Rank 0 reports and writes the outputs.
/// Returns the error that ended the training, equal on all ranks; empty if there was none.
std::string train(const setup& s, model_run& run);

// Functions that start the ranks of a run on GPUs. Each calls `body` with every rank's training, in the rank's own
// thread. A program without CUDA, NCCL or cuDNN has them, too: there `check_built` throws an error that says how to
// build with them.
using rank_body = std::function<void(model_run&)>;

/// Throws `plait::error` if the options need a library that this program was built without.
void check_built(const options& opt);
bool has_cudnn();

/// Starts ranks as threads of this process, which share a GPU.
void start_on_one_gpu(const setup& s, const rank_body& body);
/// Starts ranks as threads of this process, each with its own GPU, from the first GPU on.
void start_on_all_gpus(const setup& s, const rank_body& body);
/// Starts this process as the rank that torchrun's or Slurm's variables name.
void start_launched(const setup& s, const rank_body& body);
/// Starts this process as the rank that it has in MPI.
void start_by_mpi(const setup& s, plait::mpi::communicator& ranks, const rank_body& body);
