#pragma once

#include "llama_run.hpp"
#include "plait/device/cuda.hpp"
#include "plait/parallel/graph_step.hpp"

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

/// All strategies in one translation unit, as they share the kernels, on which nvcc spends most of its time.
template <class Precision>
make_run<plait::cuda> cuda_run(const options& opt) {
  using plait::megatron_sp, plait::megatron_tp, plait::stored_over_dp;
  const bool sp = opt.strategy == "sp", sharded = opt.store == "sharded";
  if (sharded)
    return sp ? make_llama_run<Precision, stored_over_dp<megatron_sp>, plait::cuda>
              : make_llama_run<Precision, stored_over_dp<megatron_tp>, plait::cuda>;
  return sp ? make_llama_run<Precision, megatron_sp, plait::cuda> : make_llama_run<Precision, megatron_tp, plait::cuda>;
}
