#pragma once

#include "llama_run.hpp"
#include "plait/device/cuda.hpp"
#include "plait/train/graph_step.hpp"

/// On a GPU a step can be replayed as a graph.
template <class Step>
class repeated_step<Step, plait::cuda> {
 public:
  repeated_step(plait::context<plait::cuda>& ctx, Step& step, bool as_graph) : step_(step) {
    if (as_graph) graph_.emplace(ctx, step);
  }
  void run(plait::context<plait::cuda>& ctx) {
    if (graph_)
      graph_->run(ctx);
    else
      step_.run(ctx);
  }
  bool replays() const { return graph_ && graph_->replaying(); }

 private:
  Step& step_;
  std::optional<plait::graph_step<Step>> graph_;
};
