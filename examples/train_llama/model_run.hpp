#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "options.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/world.hpp"
#include "plait/device/device.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/step_result.hpp"
#include "requests.hpp"
#include "train_llama/observe/step_events.hpp"

/// The saved step with the least held-out loss.
struct best_step {
  std::int64_t step = -1;  ///< -1: none
  double loss = std::numeric_limits<double>::infinity();
};

/// One rank's training, whatever its precision, strategy and device: what the loop in train.cpp asks for. Everything
/// but the plain questions is collective. No fmt here: nvcc compiles it.
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
  /// Mean loss over the held-out samples, as many whole microbatches as there are, with the weights that the last step
  /// left; nothing if interrupted. The ledger does not count what it takes.
  virtual std::optional<double> evaluate() = 0;
  /// The prompt and what the model makes of it, a byte per token; shorter if interrupted.
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
  /// Saves the state after so many steps, in the background, and returns the saves that it had to wait for. `best`,
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

// The instantiations of GPUs, all strategies of a precision in one file.
make_run<plait::cuda> cuda_float(const options& opt);
make_run<plait::cuda> cuda_bf16(const options& opt);
make_run<plait::cuda> cuda_bf16_gradients(const options& opt);
