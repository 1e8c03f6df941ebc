#include "print_plan.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "../size_text.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/schedule/verify.hpp"
#include "planned.hpp"
#include "resumed.hpp"
#include "run_texts.hpp"
#include "say.hpp"
#include "traffic.hpp"
#include "utilisation.hpp"

namespace {

/// What is cut over which axes, as a line; empty where there is one data rank.
std::string data_parallel_text(const setup& s) {
  const auto over = [&](const plait::axis_list& axes) {
    std::string names;
    for (const plait::axis_id axis : axes)
      if (s.mesh.extent(axis) > 1)
        names += fmt::format("{}{}={}", names.empty() ? "" : ",", axis.text(), s.mesh.extent(axis));
    return names;
  };
  const plait::pipeline_options& how = s.parallel;
  const std::string cut = over(how.axes.shard), copied = over(how.axes.replicate);
  if (cut.empty() && copied.empty()) return {};
  const bool replicated = how.parallel.level == plait::zero_level::replicated;
  std::string text = fmt::format("data parallel: {} over {}", s.opt.data_parallel,
                                 replicated || copied.empty() ? cut : cut + ", equal over " + copied);
  if (how.parallel.level == plait::zero_level::parameters)
    text += fmt::format(", gathered {} ahead{}", counted(how.parallel.prefetch, "use"),
                        how.parallel.reshard_after_forward ? "" : ", kept from forward to backward pass");
  return text + (how.parallel.overlap ? "" : ", reduced after the last pass") + "\n";
}

/// Into how many pieces linears cut what they send, as a line; empty where they cut nothing.
std::string tensor_overlap_text(const options& opt) {
  if (opt.tensor_overlap == 1) return {};
  return fmt::format("tensor parallel: linears gather and reduce in {} chunks, beside their products\n",
                     opt.tensor_overlap);
}

}  // namespace

void print_plan(const setup& s, const run_plan& plan) {
  const std::string saved = planned_state_text(s, plan);  // what does not fit is said before all else
  if (s.opt.plan == "auto") say("{}", plan_text(s));
  say("model: {} parameters\nmesh: {}, {}\n{}{}step: {} of {} of {} tokens, {}\n{}\n", plait::parameter_count(s.config),
      counted(s.mesh.size(), "rank"), mesh_text(s.mesh), data_parallel_text(s),
      tensor_overlap_text(s.opt) + recompute_text(s), counted(s.microbatches, "microbatch", "es"),
      counted(s.sequences, "sequence"), s.opt.seq, precision_text(s.opt), utilisation(s, "").operations());
  if (s.schedule.shape.ranks > 1) {
    const plait::simulation times =
        plait::simulate(s.schedule, plait::schedule_costs_of(plait::llama_part_flops(s.config, s.opt.seq), s.stages));
    say("{}; idle {:.1f} % by counted operations; at most {:g} microbatches kept in a rank's layers\n\n",
        pipeline_text(s, s.stages), 100 * times.makespan_idle(), plait::peak_activations(s.schedule));
  }
  say("activations\n");
  for (const run_plan::activation& a : plan.activations)
    say("  {:10} {}  ({} a rank)\n", a.name, a.layout, size_text(a.bytes));
  say("\nparameters (as layers of the same kind share a layout, those of layer 0 stand for all)\n");
  for (const run_plan::parameter& p : plan.parameters) {
    if (p.name.find("layers.") != std::string::npos && p.name.find("layers.0.") == std::string::npos) continue;
    say("  {:46} stored {}{}\n", p.name, p.stored, p.used.empty() ? "" : ", used " + p.used);
  }
  say("\ncollectives of a step, for one rank\n");
  if (plan.traffic.rows.empty()) say("  none\n");
  plait::json_object sent;
  for (const auto& row : plan.traffic.rows) {
    sent.add(row.label, per_rank(s.mesh, row));
    for (int k = 0; k < plait::collective_kinds; ++k) {
      const auto& e = row.kinds[static_cast<std::size_t>(k)];
      if (e.calls == 0) continue;
      say("  {:12} {:14} {:6} call{} {:>9} handed in, {:>9} sent\n", row.label,
          plait::name_of(static_cast<plait::collective>(k)), e.calls, e.calls == 1 ? ", " : "s,",
          size_text(static_cast<double>(e.payload)),
          size_text(static_cast<double>(per_rank(s.mesh, row.label, static_cast<plait::collective>(k), e.wire))));
    }
  }
  say("  bytes sent in a step, by axis: {}\n", sent.text());
  if (const std::string order = order_text(s); !order.empty()) say("  {}", order);
  say("\nmemory of a rank\n");
  const auto row = [](const char* what, double bytes) { say("  {:12} {:>12}\n", what, size_text(bytes)); };
  row("weights", plan.weights);
  row("gradients", plan.gradients);
  row("optimizer", plan.optimizer);
  row("activations", plan.kept);
  if (plan.attention > 0)
    say("  {:12} {:>12}, of cuDNN's gradients in a fixed order; none with --attention-sums any\n", "attention",
        size_text(plan.attention));
  row("in all", plan.bytes());
  if (plan.on_host > 0) row("on the host", plan.on_host);
  if (plan.saved > 0)
    say("  {:12} {:>12}, of the host: two copies of the {} that the rank writes of a step to --checkpoint-dir\n",
        "staging", size_text(2 * plan.saved), size_text(plan.saved));
  if (s.predicted) say("\n{}", prediction_text(*s.predicted));
  if (!saved.empty()) say("\n{}", saved);
}
