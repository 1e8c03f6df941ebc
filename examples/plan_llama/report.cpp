#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "../number_text.hpp"
#include "plait/io/json.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/price_report.hpp"

namespace {

namespace pp = plait::planner;

/// Returns a number with a unit, such as "16.8 M".
std::string with_unit(double value) {
  constexpr const char* units[] = {"", " k", " M", " B", " T"};
  std::size_t unit = 0;
  while (std::abs(value) >= 999.5 && unit + 1 < std::size(units)) value /= 1000, ++unit;
  return fmt::format("{:.{}f}{}", value, value < 10 ? 2 : value < 100 ? 1 : 0, units[unit]);
}

std::string share(double part, double whole) { return fmt::format("{:.1f} %", whole > 0 ? 100 * part / whole : 0); }

double tokens_per_second(const findings& f, const pp::ranked_layout& r) { return f.asked.job.tokens() / r.seconds; }

double days(const findings& f, const pp::ranked_layout& r) { return f.why.tokens / tokens_per_second(f, r) / 86400; }

double cost(const findings& f, const pp::ranked_layout& r) {
  return days(f, r) * 24 * static_cast<double>(r.price.layout.ranks()) * f.why.hour_price;
}

/// Returns the mesh as a type. `train_llama --mesh` takes the same extents, with tp and tp_rep as one axis. If tp has
/// more ranks than there are kv heads, copies of a head are the axis tp_rep. Copies along a part of dp are also an
/// axis, and a hybrid's axes follow. Ranks of dp over which experts are sharded are the axis ep.
std::string mesh_type(const findings& f, const pp::training_layout& l) {
  const auto axis = [](const char* name, std::int64_t extent) {
    return fmt::format("pl::axis<pl::{}, {}>", name, extent);
  };
  const std::int64_t copies = std::max<std::int64_t>(1, l.tp / f.asked.job.model.kv_heads);
  const bool part = l.replicate == pp::replication::over_part_of_dp;
  const std::string pipeline = axis("pp", l.pp);
  const std::int64_t own = l.near_dp();
  const std::string data = part
                               ? fmt::format("pl::axis<dp_copies, {}>, {}", l.dp_copies, axis("dp", l.dp / l.dp_copies))
                               : axis("dp", l.dp / own);
  std::string out = part ? "struct dp_copies : pl::axis_tag<\"dp_copies\"> {};\n" : "";
  out += fmt::format("using mesh = pl::mesh<{}, {}{}, {}, {}{}>;", l.pipeline_inside ? data : pipeline,
                     l.pipeline_inside ? pipeline : data, own > 1 ? ", " + axis("ep", own) : "", axis("cp", l.cp),
                     axis("tp", l.tp / copies), copies > 1 ? ", " + axis("tp_rep", copies) : "");
  constexpr const char* line =
      "\nconst pl::data_axes axes{{.shard = pl::axis_list({}), .replicate = pl::axis_list(pl::axis_of<{}>)}};";
  if (part) out += fmt::format(line, "pl::axis_of<pl::dp>, pl::axis_of<pl::cp>", "dp_copies");
  if (l.replicate == pp::replication::over_dp) out += fmt::format(line, "pl::axis_of<pl::cp>", "pl::dp");
  if (l.replicate == pp::replication::over_cp) out += fmt::format(line, "pl::axis_of<pl::dp>", "pl::cp");
  return out;
}

/// Returns the part of a layout for which `train_llama` has no option; empty: none.
std::string not_trainable(const pp::training_layout& l) {
  if (l.replicate == pp::replication::over_part_of_dp) return "copies along a part of dp";
  return l.folds_experts && l.ep > 1 ? "whole experts over ranks of tp, cp and dp" : "";
}

/// Returns the first layout for which `train_llama` has all options.
const pp::ranked_layout* trainable(const findings& f) {
  for (const pp::ranked_layout& r : f.ranked)
    if (not_trainable(r.price.layout).empty()) return &r;
  return nullptr;
}

std::string trainer_options(const findings& f, const pp::training_layout& l) {
  constexpr const char* levels[] = {"replicated", "zero1", "zero2", "zero3"};
  std::string out = fmt::format("--mesh pp={},dp={}{},cp={},tp={} --seq {} --global-batch {} --micro-batch {}", l.pp,
                                l.dp / l.near_dp(), l.near_dp() > 1 ? fmt::format(",ep={}", l.ep) : "", l.cp, l.tp,
                                f.asked.job.seq, f.asked.job.global_batch, l.microbatch);
  if (l.pp > 1) out += " --schedule " + pp::schedule_text(l);
  if (l.cp > 1 && l.context != pp::context_kind::ring) {
    // With gathered keys all ranks have even work in zigzag order, if the sequence has enough tokens for it.
    const bool even = l.context == pp::context_kind::all_gather_kv &&
                      f.asked.job.seq % (2 * l.cp * (l.cuts_sequence() ? l.tp : 1)) == 0;
    out += fmt::format(" --attention {}:{}", pp::name_of(l.context), even ? "zigzag" : "contiguous");
  }
  if (l.tp > 1 && !l.sequence_parallel) out += " --strategy tp";
  out += " --recompute " + pp::recompute_text(l);
  if (l.zero != plait::zero_level::replicated)
    out += fmt::format(" --data-parallel {}", levels[static_cast<int>(l.zero)]);
  if (l.replicate != pp::replication::none) out += " --replicate-over " + pp::replicate_text(l);
  if (l.loss_chunks > 1) out += fmt::format(" --loss-chunks {}", l.loss_chunks);
  if (l.offload_activations || l.offload_optimizer)
    out += fmt::format(" --device cuda --offload {}", pp::offload_text(l));
  return out;
}

std::string heading(const findings& f) {
  const pp::training_job& job = f.asked.job;
  return fmt::format("{} parameters, {} sequences of {} tokens in a step ({} tokens), in {}, {}",
                     with_unit(job.model.parameters()), job.global_batch, job.seq, with_unit(job.tokens()),
                     pp::name_of(job.program.products),
                     f.searched ? fmt::format("{} {}", f.asked.accelerators, f.asked.machine.name)
                                : fmt::format("{} {}", f.ranked.front().price.layout.ranks(), f.asked.machine.name));
}

std::string utilisation_text(const findings& f, const pp::ranked_layout& r) {
  return fmt::format("{:.1f} %", 100 * pp::utilisation(f.asked.machine, f.asked.job, r.price.layout, r.seconds));
}

plait::json_object layout_json(const findings& f, const pp::ranked_layout& r) {
  plait::json_object out = pp::price_json(f.asked.machine, f.asked.job, r.price);
  out.add("ranked_seconds", r.seconds).add("simulated", r.simulated);
  out.add("variants", r.variants).add("variants_slower", r.apart);
  if (f.why.tokens > 0) out.add("days", days(f, r));
  if (f.why.tokens > 0 && f.why.hour_price > 0) out.add("cost", cost(f, r));
  return out;
}

std::string table_line(const findings& f, const char* mark, const pp::ranked_layout& r) {
  const pp::layout_price& p = r.price;
  const pp::step_split& s = p.seconds;
  const double step = p.step();
  std::string line = fmt::format("{:>4} {:>10} {:>10} {:>7} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}", mark,
                                 duration_text(r.seconds), duration_text(step), utilisation_text(f, r),
                                 with_unit(tokens_per_second(f, r)), fmt::format("{:.1f} GB", p.memory.total() / 1e9),
                                 share(s.bubble, step), share(s.tensor, step), share(s.context, step),
                                 share(s.experts, step), share(s.data, step), share(s.recompute, step));
  if (f.why.tokens > 0) line += fmt::format(" {:>7.1f}", days(f, r));
  if (f.why.tokens > 0 && f.why.hour_price > 0) line += fmt::format(" {:>9}", with_unit(cost(f, r)));
  line += "  " + pp::layout_text(p.layout);
  if (r.variants > 0)
    line += fmt::format("  (and {} variant{} of zero and replicate within {:.1f} %)", r.variants,
                        r.variants == 1 ? "" : "s", std::ceil(1000 * r.apart) / 10);
  if (!r.simulated && pp::shares_links(p.layout)) line += "  (not simulated)";
  return line + (p.fits ? "" : "  (does not fit)") + "\n";
}

/// Returns a text on the memory that the search leaves free, and the time that this costs.
std::string margin_text(const findings& f) {
  const double limit = f.memory_share * f.asked.machine.memory;
  if (!f.found.within_share)
    return fmt::format("no layout leaves the margin of memory free, {:.0f} % of it, and keeps below {:.1f} GB\n",
                       100 * (1 - f.memory_share), limit / 1e9);
  if (f.memory_share == 1) return {};
  std::string out = fmt::format("{:.0f} % of the memory is left free as a margin: layouts keep below {:.1f} GB",
                                100 * (1 - f.memory_share), limit / 1e9);
  if (f.fuller)
    out += fmt::format("; without it, {} would come first, {:.1f} % faster with {:.1f} GB",
                       pp::layout_text(f.fuller->price.layout),
                       100 * (1 - f.fuller->seconds / f.ranked.front().seconds), f.fuller->price.memory.total() / 1e9);
  return out + "\n";
}

}  // namespace

std::string text_report(const findings& f) {
  const pp::ranked_layout& first = f.ranked.front();
  const pp::layout_price& best = first.price;
  std::string out = heading(f) + "\n";
  if (f.searched)
    out += fmt::format("{} candidates, {} legal, {} fit in {:.1f} GB\n", f.found.candidates, f.found.legal,
                       f.found.fitting, f.asked.machine.memory / 1e9) +
           margin_text(f);
  out += fmt::format("\n{:>4} {:>10} {:>10} {:>7} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}", "", "step",
                     "formulas", "MFU", "tokens/s", "memory", "bubble", "tp", "cp", "ep", "dp", "again");
  if (f.why.tokens > 0) out += fmt::format(" {:>7}", "days");
  if (f.why.tokens > 0 && f.why.hour_price > 0) out += fmt::format(" {:>9}", "cost");
  out += "  layout\n";
  for (std::size_t i = 0; i < f.ranked.size(); ++i) out += table_line(f, fmt::format("{}", i + 1).c_str(), f.ranked[i]);
  if (f.thumb) out += table_line(f, "rule", *f.thumb);
  out += "step: simulated where ranks share links, and by formulas elsewhere; the shares are of the formulas' time\n";

  out += fmt::format("\n{}{}.\n", f.searched ? "1: " : "", pp::what_binds(best));
  const auto gigabytes = [](double bytes) { return fmt::format("{:.1f} GB", bytes / 1e9); };
  out += fmt::format("time:  {}\n", pp::parts_text(pp::time_parts(best.seconds), duration_text));
  out += fmt::format("memory (rank {} of the pipeline): {}\n", best.fullest,
                     pp::parts_text(pp::memory_parts(best.memory), gigabytes));
  if (best.memory.host > 0)
    out += fmt::format("memory of the host: {:.1f} GB a rank are offloaded, and {:.1f} GB there are\n",
                       best.memory.host / 1e9, f.asked.machine.host_memory / 1e9);
  if (!f.too_large.empty()) out += f.too_large + "\n";
  if (f.simulated)
    out += fmt::format("with the schedule simulated: {} ({:+.1f} %)\n", duration_text(*f.simulated),
                       100 * (*f.simulated / best.step() - 1));
  if (f.balance) out += pp::text_of(*f.balance) + "\n";
  if (f.on_links)
    out += fmt::format("with shared links simulated, stragglers apart: {} ({:+.1f} %)\n", duration_text(*f.on_links),
                       100 * (*f.on_links / (best.step() - best.seconds.straggling) - 1));
  if (f.disturbed)
    out +=
        fmt::format("with jitter and slow ranks in all {} pipelines: {:+.1f} %\n", best.layout.dp, 100 * *f.disturbed);
  if (f.thumb)
    out += fmt::format("the rule of thumb takes {:+.1f} % of the time\n", 100 * (f.thumb->seconds / first.seconds - 1));
  if (!f.neighbours.empty()) {
    out += "one step away:\n";
    for (const pp::alternative& a : f.neighbours) out += fmt::format("  {} {}\n", a.change, a.effect);
  }
  if (!f.precisions.empty()) out += "in another precision:\n";
  for (const in_precision& p : f.precisions) {
    const double longer = p.best.seconds / first.seconds - 1;
    out += fmt::format("  {} {:.1f} % {}: {} and {:.1f} GB, {}\n", pp::name_of(p.kind), 100 * std::abs(longer),
                       longer < 0 ? "faster" : "slower", duration_text(p.best.seconds),
                       p.best.price.memory.total() / 1e9, pp::layout_text(p.best.price.layout));
  }
  if (f.searched && !f.found.front.empty()) {
    out += "less memory, more time, by formulas:\n";
    for (const pp::layout_price& p : f.found.front)  // about eight of them, evenly spaced
      if ((&p - f.found.front.data()) % std::max<std::ptrdiff_t>(1, std::ssize(f.found.front) / 8) == 0)
        out += fmt::format("  {:6.1f} GB {:>10}  {}\n", p.memory.total() / 1e9, duration_text(p.step()),
                           pp::layout_text(p.layout));
  }
  out += fmt::format("\n{}\n", mesh_type(f, best.layout));
  const pp::ranked_layout* run = trainable(f);
  if (run != &first) out += fmt::format("train_llama has no option for {}", not_trainable(best.layout));
  if (run != nullptr && run != &first) out += fmt::format("; layout {} as its options:\n", run - &first + 1);
  return out + (run == nullptr ? "\n" : fmt::format("train_llama {}\n", trainer_options(f, run->price.layout)));
}

std::string json_report(const findings& f) {
  std::vector<plait::json_object> best, front, neighbours;
  for (const pp::ranked_layout& r : f.ranked) best.push_back(layout_json(f, r));
  for (const pp::layout_price& p : f.found.front) front.push_back(pp::price_json(f.asked.machine, f.asked.job, p));
  for (const pp::alternative& a : f.neighbours)
    neighbours.push_back(plait::json_object().add("change", a.change).add("effect", a.effect));
  const pp::layout_price& first = f.ranked.front().price;
  plait::json_object out;
  out.add("hardware", f.asked.machine.name).add("accelerators", first.layout.ranks());
  out.add("parameters", f.asked.job.model.parameters()).add("seq", f.asked.job.seq);
  out.add("global_batch", f.asked.job.global_batch).add("searched", f.searched);
  if (f.searched) {
    out.add("candidates", f.found.candidates).add("legal", f.found.legal).add("fitting", f.found.fitting);
    out.add("memory_share", f.memory_share).add("within_share", f.found.within_share).add("front", front);
    if (f.fuller) out.add("without_margin", layout_json(f, *f.fuller));
  }
  out.add("layouts", best).add("binds", pp::what_binds(first)).add("alternatives", neighbours);
  if (f.searched) {
    std::vector<plait::json_object> others;
    for (const in_precision& p : f.precisions)
      others.push_back(plait::json_object()
                           .add("precision", pp::name_of(p.kind))
                           .add("layout", pp::layout_text(p.best.price.layout))
                           .add("step_seconds", p.best.price.step())
                           .add("ranked_seconds", p.best.seconds)
                           .add("memory_bytes", p.best.price.memory.total()));
    out.add("precisions", others);
  }
  if (f.thumb) out.add("rule_of_thumb", layout_json(f, *f.thumb));
  if (!f.too_large.empty()) out.add("too_large", f.too_large);
  if (f.simulated) out.add("simulated_seconds", *f.simulated);
  if (f.balance) out.add("idle_share", f.balance->idle).add("uneven_share", f.balance->uneven);
  if (f.on_links) out.add("on_links_seconds", *f.on_links);
  if (f.disturbed) out.add("disturbed_share", *f.disturbed);
  out.add("mesh", mesh_type(f, first.layout));
  if (const pp::ranked_layout* run = trainable(f)) out.add("train_llama", trainer_options(f, run->price.layout));
  return out.text() + "\n";
}
