// A training step recorded as a CUDA graph and replayed, with equal numbers.
#pragma once

#include "plait/comm/threads.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/parallel/train_step.hpp"

namespace plait {

/// Runs a `training_step` as a graph. It runs the step twice as it is, so that all memory is there, then records it,
/// and replays it from then on. Loading data and reading the result stay outside of it, and so does the optimizer's
/// `begin_step`, whose numbers lie in the device's memory. A replay is not counted in the ledger, and a deadline covers
/// it as one operation. In two cases the step runs unrecorded, in the memory of the graph: values of the step are
/// compared (`value_check`), or a parameter's values have changed outside a step, as by a loaded checkpoint. The next
/// step is recorded anew. A program must change values on every rank, since NCCL records on all or on none. The ranks
/// of a pipeline each record their own stages, and launch together. Destroy it before the world: NCCL ends no
/// communicator while there is a graph that holds its calls.
///
/// Throws `plait::error` where a replay could not be the step: with dropout, whose masks are numbered on the host, and
/// on in-process ranks, whose threads meet for every collective.
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
      graph_.reset();  // a step that is launched needs as much memory, and is handed the graph's
      ++runs_;
      return step_.run(ctx);
    }
    if (graph_)
      step_.take_loaded();
    else
      graph_.record([&] {
        step_.run(ctx);
        step_.model().settle();
      });
    graph_.launch();
    ctx.ranks.root().watch("replayed step");
  }
  /// Whether steps are replayed by now.
  bool replaying() const { return static_cast<bool>(graph_); }

 private:
  /// A recorded step does not round values that the optimizer has rounded.
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
