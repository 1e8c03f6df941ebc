#include "run_texts.hpp"

#include <fmt/format.h>

#include "plait/nn/strategy.hpp"

std::string counted(std::int64_t n, const char* what, const char* plural) {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : plural);
}

std::string mesh_text(const plait::mesh_shape& shape) {
  const std::int64_t tp = shape.extent(plait::axis_of<plait::tp>), copies = shape.extent(plait::axis_of<plait::tp_rep>);
  std::string text = fmt::format("dp={}", shape.extent(plait::axis_of<plait::dp>));
  for (plait::axis_id axis : {plait::axis_of<plait::pp>, plait::axis_of<plait::cp>})
    if (shape.extent(axis) > 1) text += fmt::format(", {}={}", axis.text(), shape.extent(axis));
  text += fmt::format(", tp={}", tp * copies);
  if (copies > 1) text += fmt::format(", each key-value head on {} ranks", copies);
  return text;
}

std::string pipeline_text(const setup& s, const std::vector<plait::stage_layers>& stages) {
  std::string sizes;
  for (const plait::stage_layers& part : stages) sizes += (sizes.empty() ? "" : ", ") + std::to_string(part.size());
  return fmt::format("pipeline: {}, stages of {} layers", s.schedule.name.view(), sizes);
}

std::string recompute_text(const setup& s) {
  std::int64_t full = 0, selective = 0;
  for (std::int64_t i = 0; i < s.config.layers; ++i) {
    full += s.recompute.of_layer(i) == plait::recompute::full;
    selective += s.recompute.of_layer(i) == plait::recompute::selective;
  }
  const bool head = s.recompute.of_head() != plait::recompute::none;
  if (full + selective == 0 && !head)
    return s.opt.recompute.starts_with("budget:")
               ? fmt::format("recompute: nothing, because --recompute {} has room for all\n", s.opt.recompute)
               : "";
  return fmt::format("recompute: of {}, {} in full and {} selectively{}\n", counted(s.config.layers, "layer"), full,
                     selective, head ? ", and the head selectively" : "");
}

std::string plan_text(const setup& s) {
  return fmt::format("plan: --mesh {}{} --data-parallel {}{} --micro-batch {} --recompute {}\n", s.opt.mesh,
                     s.schedule.shape.ranks > 1 ? " --schedule " + s.opt.schedule : "", s.opt.data_parallel,
                     s.opt.replicate_over != "none" ? " --replicate-over " + s.opt.replicate_over : "",
                     s.opt.micro_batch, s.opt.recompute);
}
