#pragma once

#include "llama_run.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/device/cuda.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/parallel/graph_step.hpp"
#include "run.hpp"

/// Runs the steps of a GPU. It can replay a step as a graph, and measure the step's products in its first run.
template <class Step>
class repeated_step<Step, plait::cuda> {
 public:
  repeated_step(plait::context<plait::cuda>& ctx, Step& step, const setup& s, plait::any_communicator& ranks)
      : s_(s), step_(step), ranks_(ranks), measures_(!s.opt.products.empty() && s.products.empty()) {
    if (s.as_graph) graph_.emplace(ctx, step);
    if (measures_) ctx.device.measure_products(candidates);
    if (!s.products.empty()) ctx.device.use_products(plait::product_choices::parse(s.products, "--products"));
  }
  void run(plait::context<plait::cuda>& ctx) {
    if (graph_)
      graph_->run(ctx);
    else
      step_.run(ctx);
    if (!std::exchange(measures_, false)) return;
    const plait::product_choices chosen = plait::agree_on_products(ctx.device, ranks_);
    if (ranks_.rank() != 0) return;
    plait::write_file_atomically(s_.opt.products, chosen.text(), "--products");
    if (!chosen.unmeasured().empty()) say("{}\n", chosen.unmeasured_text());
  }
  bool replays() const { return graph_ && graph_->replaying(); }

 private:
  static constexpr int candidates = 16;

  const setup& s_;
  Step& step_;
  plait::any_communicator& ranks_;
  bool measures_;
  std::optional<plait::graph_step<Step>> graph_;
};
