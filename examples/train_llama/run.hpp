// A rank's training behind one interface, who starts it on each device, and what saved states tell.
#pragma once

#include <fmt/format.h>

#include <array>
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
#include <string_view>
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
struct run_plan;

/// Returns the system's number of the first failure of standard output; 0: there was none.
inline int& output_failure() {
  static int failure = 0;
  return failure;
}

/// Prints to standard output. Where that is closed or full, training is worth more than what it says: the run goes on,
/// and complains when it has ended.
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = fmt::format(format, std::forward<Args>(args)...);
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() && output_failure() == 0)
    output_failure() = errno;
}

/// Flushes standard output; a failure is remembered, too.
inline void say_now() {
  errno = 0;
  if (std::fflush(stdout) != 0 && output_failure() == 0) output_failure() = errno;
}

/// The signal that asks the run to end after the step it is in, such as Ctrl-C's; else 0. A handler sets it, and the
/// threads of all ranks read it.
extern std::atomic<int> interrupted;
/// Whether SIGUSR1 has asked for a save since the last one.
extern std::atomic<int> save_asked;
static_assert(std::atomic<int>::is_always_lock_free);  // else no signal handler may touch it

/// Requests and news of the ranks of a run, as all of them know them: of each the largest that some rank has said.
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

/// One rank's training, whatever its precision, strategy and device: what the loop in train.cpp asks for. Everything
/// but the plain questions is collective.
class model_run {
 public:
  virtual ~model_run() = default;

  /// Optimizer step `index`, counted from 0, on that step's samples. Within it ranks bring together what they ask for,
  /// and where `with_communication` also what the communication since the step before has cost.
  virtual plait::step_result step(std::int64_t index, bool with_communication) = 0;
  /// What the ranks have asked for in the last step, the same on all. Not collective.
  virtual const requests& asked() const = 0;
  /// What all ranks have communicated from the norm of the step before to that of the last step; empty where that was
  /// not brought together. Not collective.
  virtual const std::vector<plait::axis_communication>& communication() const = 0;
  /// What routers did in the last step, by their layer; nothing for a model without experts. The ledger does not count
  /// what it takes.
  virtual std::map<std::int64_t, plait::router_statistics> routers() = 0;
  /// Mean loss over the held-out samples, as many whole microbatches as there are, with the weights that the last step
  /// left; nothing if interrupted. The ledger does not count what it takes.
  virtual std::optional<double> evaluate() = 0;
  /// The tokens of the prompt and what the model makes of it; shorter if interrupted.
  virtual std::vector<std::int64_t> sample() = 0;
  virtual std::uint64_t weights_hash() = 0;
  /// The hashes of each parameter, and of its gradient in the last step, if those are asked for. The ledger does not
  /// count what they take.
  virtual std::vector<plait::parameter_hash> hashes(bool gradients) = 0;
  /// Writes the model as --export-hf says.
  virtual void write_model() = 0;

  /// Loads what --resume names, and returns how many steps there were before: 0 where it names nothing.
  virtual std::int64_t resume() = 0;
  /// The newest step that was in --checkpoint-dir at the beginning, or -1.
  virtual std::int64_t newest_saved() = 0;
  /// The best step in --checkpoint-dir at the beginning, as what was resumed says.
  virtual best_step best_saved() = 0;
  /// Saves the state after `steps` steps in the background. Returns the saves that it had to wait for. `best`,
  /// which may be this one, is saved with it, and with --keep-best stays whatever its age.
  virtual std::vector<plait::finished_save> save(std::int64_t steps, const best_step& best) = 0;
  /// The saves that have ended since it was last asked; all others too, if it shall wait.
  virtual std::vector<plait::finished_save> ended_saves(bool wait) = 0;
  /// Waits until `save` would wait for none, and returns the saves that have ended by then.
  virtual std::vector<plait::finished_save> room_for_save() = 0;

  /// One number from those of all ranks of the run.
  virtual double all_reduce(double value, plait::reduce_op op) = 0;

  /// What all ranks of the run have communicated, from what each has.
  virtual std::vector<plait::axis_communication> of_ranks(const std::vector<plait::axis_times>& mine) = 0;
  /// What waited longest for communication over `axes` in the steps so far, of all ranks, in words; on rank 0 alone.
  virtual std::string longest_wait(const std::string& axes) = 0;

  /// This rank, of all.
  virtual std::int64_t rank() = 0;
  /// What all ranks did in the traced step; on rank 0 alone, and nothing if no step was to be traced.
  virtual std::vector<std::vector<plait::step_event>> traced() = 0;
  /// The layers of the stages as they are.
  virtual const std::vector<plait::stage_layers>& stages() const = 0;

  /// The mesh of the model's tensors, of one stage; its ledger has counted `counted_steps` of the steps that ran.
  virtual plait::world& world() = 0;
  virtual std::int64_t counted_steps() const = 0;
  /// The most memory that this rank has used on its device.
  virtual std::size_t peak_bytes() const = 0;
  /// What the device is called; empty for the CPU.
  virtual std::string device_name() const = 0;

 protected:
  model_run() = default;
  model_run(const model_run&) = delete;
  model_run& operator=(const model_run&) = delete;
};

/// Makes a rank's training.
template <class Device>
using make_run = std::unique_ptr<model_run> (*)(const setup&, Device&, plait::any_communicator);

/// A rank's training, with the sequence placed as --attention says. Defined in llama_run.hpp; on the CPU each
/// instantiation is compiled in a file of its own, which CMake writes.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
std::unique_ptr<model_run> make_llama_run(const setup& s, Device& device, plait::any_communicator ranks);

/// Returns what makes a rank's training on a GPU with the types that the options name.
make_run<plait::cuda> cuda_program(const options& opt);

/// Saves what training leaves behind, and tells what has become of it.
class keeper {
 public:
  /// What is told of a save that has ended.
  struct news {
    plait::finished_save save;
    double bytes = 0;              ///< of all ranks
    std::optional<double> loss{};  ///< held-out, of --keep-best
    bool is_best = false;          ///< of all that are saved until this one
  };

  keeper(const setup& s, model_run& run, std::function<void(const news&)> tell)
      : s_(s), run_(run), tell_(std::move(tell)), last_(run.newest_saved()), kept_(run.best_saved()) {}

  /// After a step: whether it is one to save. Ranks meet here where all know that there is a reason.
  void after(std::int64_t steps, const requests& asked) {
    if (s_.opt.checkpoint_dir.empty()) return;
    if (asked.ended_saves != 0) tell(run_.ended_saves(false));
    if (asked.save != 0) save_asked = 0;
    if (asked.save != 0 || (s_.opt.save_every > 0 && steps % s_.opt.save_every == 0)) save(steps);
  }
  /// At the end, however it came. A save of this very step that has failed is tried once more, when those before it no
  /// longer take room or time.
  void finish(std::int64_t steps, bool worth_saving) {
    if (s_.opt.checkpoint_dir.empty()) return;
    tell(run_.ended_saves(true));
    const bool has_failed = steps == newest_ended_ && !failure_.empty();
    if (worth_saving && (steps > last_ || has_failed)) save(steps);
    tell(run_.ended_saves(true));
  }
  /// What the save of the newest step failed with.
  const std::string& failure() const { return failure_; }
  /// What is wrong with the save of the newest step, which was committed; rank 0 knows.
  const std::string& damage() const { return damage_; }

 private:
  void save(std::int64_t steps) {
    last_ = steps;
    tell(run_.room_for_save());  // the best that stays is known by what has failed
    std::optional<double>& loss = judged_[static_cast<std::uint64_t>(steps)];
    if (s_.opt.keep_best == "held-out") loss = run_.evaluate();
    best_step best = kept_;
    for (const auto& [step, its] : judged_)
      if (its && *its < best.loss) best = {static_cast<std::int64_t>(step), *its};
    try {
      tell(run_.save(steps, best));
    } catch (const plait::error_of_all& e) {
      ended({.step = static_cast<std::uint64_t>(steps), .failure = e.what()}, 0);
    }
  }
  void tell(const std::vector<plait::finished_save>& saves) {
    for (const plait::finished_save& s : saves)
      ended(s, run_.all_reduce(static_cast<double>(s.bytes), plait::reduce_op::sum));
  }
  void ended(const plait::finished_save& save, double bytes) {
    const auto step = static_cast<std::int64_t>(save.step);
    if (step >= newest_ended_) {  // a save that fails at once ends before older ones that are under way
      newest_ended_ = step;
      failure_ = save.failure;
      damage_ = save.damage;
    }
    const std::optional<double> loss = judged_.extract(save.step).mapped();
    const bool is_best = save.failure.empty() && loss && *loss < kept_.loss;
    if (is_best) kept_ = {step, *loss};
    tell_({save, bytes, loss, is_best});
  }

  const setup& s_;
  model_run& run_;
  std::function<void(const news&)> tell_;
  std::int64_t last_;                                      ///< step that was saved, or that a save was begun of
  std::int64_t newest_ended_ = -1;                         ///< step of a save
  best_step kept_;                                         ///< the best that is on the disk
  std::map<std::uint64_t, std::optional<double>> judged_;  ///< held-out losses of saves that are under way
  std::string failure_, damage_;                           ///< of the save of `newest_ended_`
};

// What a saved step, or another process, tells of its run.

/// Returns in words what a place in the data depends on, beside --seed and --seq.
std::string data_text(const options& opt);

/// What the ranks of several processes must have been given alike: options, the model, the data, what follows from
/// them. record.cpp lists what may differ.
std::vector<plait::setting> agreed_settings(const setup& s);

/// Returns the files that steps are written to, as --checkpoint-io says. Throws `plait::error`, naming it, where it
/// asks for what this program or machine has not.
plait::file_system& checkpoint_files(const options& opt);

/// Returns a line on how steps are written, and why not through io_uring; nothing where none is saved.
std::string checkpoint_io_text(const options& opt);

/// Throws `plait::error_of_all`, naming the option, where the run cannot go on from a saved state: its place in the
/// data would be another. No fmt here: nvcc compiles it.
void check_resumed(const setup& s, const plait::loaded_state& loaded);

/// The options by which a step's numbers are made, but for those of data and learning rate, which have texts of their
/// own: "--global-batch 8, --optimizer adamw". It is saved with a step.
std::string training_text(const setup& s);

/// Returns what of the shape of a model is otherwise in the one that a saved step is of, such as "hidden_size is 64,
/// and the step has 32"; nothing where they are alike, or the step does not say.
std::string other_model_than(const plait::llama_config& config, const plait::loaded_state& loaded);

/// Which of them the saved text has otherwise, such as "--clip 0.5, which was 1": nothing where none is, or where the
/// step was saved before steps had the text. A run may go on with others: it says which.
std::string changed_options(const setup& s, const plait::loaded_state& loaded);

/// The model that a saved state is of, as it says; nothing where it was saved before states did, or by no run.
std::optional<plait::llama_config> saved_model(const plait::loaded_state& loaded);

/// Whether the run takes held-out losses of other tokens than the step that it goes on from.
bool judges_otherwise(const setup& s, const plait::loaded_state& loaded);

/// Returns why a run cannot go on from a state that failed to load by `why`: it has other adapters, or `why`, after the
/// options of the run that are not those of the state, as far as they can be read.
std::string why_not_resumed(const setup& s, const std::string& path, const std::string& why);

/// Returns the options of the adapters that a step was saved with.
saved_adapters adapters_saved(const plait::loaded_state& loaded);

/// Returns a text that was saved with a step, such as "train.rate". It is empty where no step had been made. A step of
/// an older format has none: the text then equals no other run's, and the caller asks for the option that allows a
/// change.
std::string saved_text(const plait::loaded_state& loaded, const char* scalar);

/// Returns lines on what --init-from, --resume and --checkpoint-dir name, for a dry run: nothing if they name nothing
/// that is saved. Throws `plait::error`, naming the option, where the run would refuse it: what is not there, is not
/// whole by its manifest, or does not fit the run. No tensor is read, and nothing is written.
std::string planned_state_text(const setup& s, const run_plan& plan);

/// The training of one rank, from the first step to the sampled text; rank 0 reports and writes the outputs. Returns
/// why the training could not go on, the same on all ranks; empty if it could.
std::string train(const setup& s, model_run& run);

// How the ranks of a run on GPUs are started. Each function hands every rank's training to `body`, in the rank's own
// thread. A program without CUDA, NCCL or cuDNN has them, too: `check_built` says how to build with it.
using rank_body = std::function<void(model_run&)>;

/// Throws `plait::error` unless this program has what the options ask for.
void check_built(const options& opt);
bool has_cudnn();

/// The ranks are threads of this process and share a GPU.
void start_on_one_gpu(const setup& s, const rank_body& body);
/// The ranks are threads of this process, each with a GPU of its own, from the first on.
void start_on_all_gpus(const setup& s, const rank_body& body);
/// This process is the rank that torchrun's or Slurm's variables name.
void start_launched(const setup& s, const rank_body& body);
/// This process is the same rank as in MPI.
void start_by_mpi(const setup& s, plait::mpi::communicator& ranks, const rank_body& body);
