// Records a training step as a CUDA graph and replays it, with equal results.
#pragma once

#include "plait/comm/threads.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/parallel/train_step.hpp"

namespace plait {

/// Runs a `training_step` as a graph. It runs the step twice without recording, so that all memory is allocated; then
/// it records the step, and replays it from then on. Loading data, reading results and the optimizer's `begin_step`,
/// which writes its numbers to the device's memory, stay outside the graph. comm/metrics.hpp does not count replays,
/// and a deadline covers a replay as one operation.
///
/// In two cases a step runs unrecorded, in the graph's memory, and the next step is recorded again. Either the step
/// compares values (`value_check`), or a parameter's values have changed outside a step, such as by a loaded
/// checkpoint. A program must change values on every rank, since NCCL records on all ranks or on none. Each rank of a
/// pipeline records its own stages, and all launch together. Destroy this object before the world: NCCL cannot destroy
/// a communicator while a graph holds its calls.
///
/// Throws `plait::error` if a replay would differ from the step. This holds for dropout, whose masks the host numbers,
/// and for in-process ranks, whose threads synchronise in every collective.
template <class Step>
class graph_step {
 public:
  graph_step(const context<cuda>& ctx, Step& step) : step_(step), graph_(ctx.device) {
    if (step.model().dropout() > 0)
      fail({"graph_step: dropout = ", step.model().dropout(),
            ", must be 0: a replay would drop the same elements in every step"});
    const any_communicator* const all[] = {&ctx.ranks.root(), &step.model().along()};
    for (const any_communicator* const ranks : all) {
      if (ranks->size() > 1 && ranks->template get_if<threads::communicator>() != nullptr)
        fail({"graph_step: ", ranks->size(),
              " in-process ranks meet on the host for every collective, which a graph cannot replay; use one rank or "
              "NCCL"});
    }
    step.model().prepare_recording();
  }

  void run(const context<cuda>& ctx) {
    if (runs_ < 2 || values_changed() || ctx.ranks.checks().on()) {
      graph_.reset();  // an unrecorded step needs as much memory and takes the graph's
      ++runs_;
      return step_.run(ctx);
    }
    if (graph_)
      step_.take_loaded();
    else
      graph_.record([&] {
        step_.run(ctx);
        step_.model().wait_for_transfers();
      });
    graph_.launch();
    ctx.ranks.root().watch("replayed step");
  }
  /// Whether steps are now replayed.
  bool replaying() const { return static_cast<bool>(graph_); }

 private:
  /// Whether values changed outside the step; a recorded step does not round values that the optimizer has rounded.
  bool values_changed() const {
    bool changed = false;
    step_.model().visit([&](auto& p) { changed = changed || p.values_changed(); });
    return changed;
  }

  Step& step_;
  cuda_graph graph_;
  int runs_ = 0;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
