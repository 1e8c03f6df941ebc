// A layout's price as named parts and as JSON, for printing.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/io/json.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/step_time.hpp"

namespace plait::planner {

/// Names and amounts.
using named_parts = std::vector<std::pair<const char*, double>>;

/// Returns the seconds of a step by purpose; they add up to the step.
inline named_parts time_parts(const step_split& s) {
  return {{"products", s.products},
          {"attention", s.attention},
          {"memory-bound kernels", s.memory},
          {"tensor parallelism", s.tensor},
          {"context parallelism", s.context},
          {"expert parallelism", s.experts},
          {"bubble", s.bubble},
          {"data parallelism", s.data},
          {"optimizer", s.optimizer},
          {"offload", s.offload},
          {"stragglers", s.straggling},
          {"shared cores", s.turns}};
}

/// Returns the bytes of a rank by purpose; they add up to its memory.
inline named_parts memory_parts(const memory_split& m) {
  return {{"weights", m.weights},     {"gradients", m.gradients},
          {"optimizer", m.optimizer}, {"activations", m.activations},
          {"logits", m.logits},       {"working", m.working},
          {"buffers", m.buffers},     {"fragmentation", m.fragmentation},
          {"reserved", m.reserved}};
}

/// Returns the amounts above 0, each formatted by `text`: " products 1 ms, attention 2 ms".
template <class F>
std::string parts_text(const named_parts& parts, F&& text) {
  std::string out;
  for (const auto& [name, value] : parts)
    if (value > 0) append(out, {out.empty() ? " " : ", ", name, " ", text(value)});
  return out;
}

/// Returns the seconds of a step in which a rank waits for communication over tp, cp, ep and the data ranks.
constexpr double exposed_seconds(const step_split& s) { return s.tensor + s.context + s.experts + s.data; }

/// Returns a price as one JSON object, in seconds and bytes.
inline json_object price_json(const hardware& h, const training_job& job, const layout_price& p) {
  const auto object = [](const named_parts& parts) {
    json_object out;
    for (const auto& [name, value] : parts) out.add(name, value);
    return out;
  };
  const training_layout& l = p.layout;
  json_object out;
  out.add("layout", layout_text(l)).add("tp", l.tp).add("cp", l.cp).add("pp", l.pp).add("dp", l.dp);
  if (l.ep > 1) out.add("ep", l.ep);
  out.add("microbatch", l.microbatch).add("schedule", schedule_text(l)).add("recompute", recompute_text(l));
  out.add("zero", static_cast<int>(l.zero)).add("replicate", replicate_text(l)).add("offload", offload_text(l));
  out.add("step_seconds", p.step());
  out.add("mfu", utilisation(h, job, l, p.step()));
  out.add("mfu_causal", utilisation(h, job, l, p.step(), job.model.visible(job.seq)));
  out.add("tokens_per_second", job.tokens() / p.step()).add("recomputed_seconds", p.seconds.recompute);
  out.add("exposed_seconds", exposed_seconds(p.seconds));
  out.add("seconds", object(time_parts(p.seconds))).add("memory_bytes", p.memory.total());
  out.add("host_bytes", p.memory.host);
  return out.add("memory", object(memory_parts(p.memory))).add("fits", p.fits);
}

}  // namespace plait::planner
