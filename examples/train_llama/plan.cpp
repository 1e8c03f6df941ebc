#include "plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "../number_text.hpp"
#include "machine.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/schedule/verify.hpp"
#include "plan_llama/planner/explain.hpp"
#include "plan_llama/planner/hardware_json.hpp"
#include "plan_llama/planner/llama_shape.hpp"
#include "plan_llama/planner/price_report.hpp"
#include "plan_llama/planner/software_table.hpp"
#include "plan_llama/planner/step_time.hpp"
#include "reporter.hpp"
#include "run.hpp"

namespace {

/// Returns the number of ranks between two stages with the same data: those of cp, tp and tp_rep.
std::int64_t ranks_of_stage(const setup& s) {
  return s.mesh.size() / s.mesh.extent(plait::axis_of<plait::pp>) / s.mesh.extent(plait::axis_of<plait::dp>);
}

}  // namespace

run_plan plan_of_rank(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages) {
  return with_types(s.opt, [&]<class Precision, class S>() { return plan_as<Precision, S>(s, rank, stages); });
}

std::shared_ptr<const std::vector<run_plan>> plans_of(const setup& s) {
  std::vector<run_plan> plans;
  for (std::int64_t at = 0; at < s.mesh.extent(plait::axis_of<plait::pp>); ++at)
    plans.push_back(plan_of_rank(s, at * ranks_of_stage(s), s.stages));
  return std::make_shared<const std::vector<run_plan>>(std::move(plans));
}

const run_plan& fullest_plan(const setup& s) {
  return *std::max_element(s.plans->begin(), s.plans->end(),
                           [](const auto& a, const auto& b) { return a.peak < b.peak; });
}

plait::layer_recompute recompute_of(const setup& s) {
  const recompute_request wanted = parse_recompute(s.opt.recompute);
  if (wanted.every && *wanted.every > s.config.layers)
    reject("--recompute {} recomputes no layer of a model of {}; legal is every:1 to every:{}", s.opt.recompute,
           s.config.layers, s.config.layers);
  if (!wanted.budget) return wanted.modes;
  if (s.opt.split == "measured" && s.stages.size() > 1)
    reject("--recompute {} chooses layers before stages are measured; with it, --split flops and even are legal",
           s.opt.recompute);
  std::vector<plait::recompute> layers(static_cast<std::size_t>(s.config.layers), plait::recompute::none);
  plait::recompute head = plait::recompute::none;
  std::int64_t least = 0;
  for (int at = 0; at < s.schedule.shape.ranks; ++at) {
    const plait::recompute_fit fit = with_types(s.opt, [&]<class Precision, class S>() {
      return fit_as<Precision, S>(s, at, at * ranks_of_stage(s), *wanted.budget);
    });
    least = std::max(least, fit.least);
    for (std::size_t chunk = 0; chunk < fit.stages.size(); ++chunk) {
      const plait::stage_layers& part =
          s.stages[static_cast<std::size_t>(s.schedule.shape.stage_of(at, static_cast<int>(chunk)))];
      for (std::int64_t i = part.begin; i < part.end; ++i)
        layers[static_cast<std::size_t>(i)] = fit.stages[chunk].of_layer(i);
      if (part.last) head = fit.stages[chunk].of_head();
    }
  }
  if (least > 0)
    reject(
        "--recompute {} is {} bytes, and with every layer recomputed a rank still keeps {}; the least that "
        "is legal here is budget:{}",
        s.opt.recompute, *wanted.budget, least, least);
  return plait::layer_recompute(std::move(layers), head);
}

std::string order_text(const setup& s) {
  constexpr std::int64_t most = 64;  // ranks; each takes as long as a step on the host
  if (s.mesh.size() == 1) return {};
  if (s.mesh.size() > most)
    return fmt::format("order of collectives: not followed over {} ranks, only up to {}\n", s.mesh.size(), most);
  std::vector<plait::posted_program> ranks;
  for (std::int64_t rank = 0; rank < s.mesh.size(); ++rank) ranks.push_back(plan_of_rank(s, rank, s.stages).posted);
  plait::require_one_order(ranks);
  return fmt::format("order of collectives: {} collectives and messages of a step stand in one order on all {} ranks\n",
                     plait::verify_order(ranks).completed, s.mesh.size());
}

namespace {

/// Returns the bytes that are surely needed. A resumed run may have made all of its steps.
least_bytes least_of(const setup& s, const run_plan& plan) {
  double bytes = plan.weights;
  if (s.opt.steps > 0) bytes += plan.optimizer;
  if (s.opt.steps > 0 && s.opt.resume == "none") bytes += plan.gradients + plan.kept + plan.attention;
  const double offloaded = s.opt.steps > 0 ? plan.on_host : 0;
  return s.opt.device == "cuda" ? least_bytes{bytes, offloaded} : least_bytes{0, bytes + offloaded};
}

}  // namespace

least_bytes least_bytes_of(const setup& s, std::int64_t rank) {
  const auto at = static_cast<std::size_t>(rank / ranks_of_stage(s));
  return least_of(s, (*s.plans)[at % s.plans->size()]);
}

least_bytes least_bytes_of_all(const setup& s) {
  const auto ranks = static_cast<double>(s.mesh.size()) / static_cast<double>(s.plans->size());
  least_bytes all;
  for (const run_plan& plan : *s.plans) {
    const least_bytes one = least_of(s, plan);
    all.gpu += ranks * one.gpu;
    all.host += ranks * one.host;
  }
  return all;
}

std::string memory_fault(const setup& s, double bytes, double available, const std::string& memory) {
  if (bytes <= s.opt.memory_share * available) return {};
  return fmt::format(
      "--memory-share {}: the run needs at least {} of {}, and {} are available; --dry-run shows what takes it, and a "
      "share of {:.3g} starts the run nevertheless",
      s.opt.memory_share, size_text(bytes), memory, size_text(available), 1.01 * bytes / std::max(available, 1.0));
}

std::string host_memory_fault(const setup& s, double bytes) {
  const std::optional<double> available = available_memory();
  return available ? memory_fault(s, bytes, *available, "this host's memory") : "";
}

/// The planner's prediction of a run's step on --cluster.
struct prediction {
  plait::planner::hardware machine;
  plait::planner::training_job job;
  std::optional<plait::planner::layout_price> price{};
  std::string unpriced{};  ///< why there is no prediction
};

namespace {

namespace pp = plait::planner;

constexpr std::size_t most_tried = 2000;

/// Returns a text with the first option that the planner cannot predict; empty: none.
std::string why_unpriced(const options& opt) {
  const auto no = [](const char* flag, const std::string& value, const char* legal) {
    return fmt::format("{} {} is not priced; priced are {}", flag, value, legal);
  };
  if (opt.precision == "double") return no("--precision", opt.precision, "float, bf16 and bf16-no-masters");
  if (opt.tf32) return "--tf32 is not priced; leave it out";
  if (opt.optimizer != "adamw") return no("--optimizer", opt.optimizer, "adamw");
  if (opt.leaves) return no("--deterministic", opt.deterministic, "off");
  if (opt.expert_limit > 0 && opt.expert_limit < 1)
    return no("--expert-limit", fmt::format("{}", opt.expert_limit), "0, and 1 or more");
  if (opt.expert_rows != "counted") return no("--expert-rows", opt.expert_rows, "counted");
  if (opt.lora > 0) return fmt::format("--lora {} is not priced; leave it out", opt.lora);
  if (parse_recompute(opt.recompute).budget)
    return no("--recompute", opt.recompute, "none, selective, full and every:K");
  try {
    pp::training_layout l;
    pp::set_layout_key(l, "schedule", opt.schedule, "");
    // The trainer searches this schedule with all available memory, and the planner cannot.
    if (l.schedule == pp::schedule_kind::automatic) plait::fail("automatic");
  } catch (const plait::error&) {
    return no("--schedule", opt.schedule, "gpipe, 1f1b, interleaved:V, zb_h1, zb_h2 and zb_v");
  }
  return {};
}

/// Returns the planner's description of this program under its options.
pp::software program_of(const options& opt) {
  pp::software program;
  pp::set_products(program, in_bf16(opt) ? pp::number_kind::bf16 : pp::number_kind::f32);
  const double moments = opt.moments == "full" ? 8 : opt.moments == "bf16" ? 4 : 2 + 8.0 / 256;
  program.optimizer_bytes = moments + (opt.precision == "bf16" ? 4 : 0);  // masters
  if (has_bf16_gradients(opt)) program.gradient_bytes = 2;
  if (opt.reduce_in == "bf16" || (has_bf16_gradients(opt) && opt.reduce_in == "full")) program.reduced_bytes = 2;
  program.fixed_order_attention = opt.device == "cuda" && has_cudnn() && in_bf16(opt) &&
                                  opt.attention_kernel != "own" && opt.attention_sums == "fixed";
  program.overlaps_tensor = opt.tensor_overlap > 1;
  program.overlaps_data = opt.overlap == "on";
  return program;
}

pp::training_job job_of(const options& opt, const plait::llama_config& config, std::int64_t batch) {
  pp::training_job job;
  job.model = plait::plan_shape(config);
  job.model.dropout = opt.dropout > 0, job.model.limited = opt.expert_limit > 0;
  job.seq = opt.seq;
  job.global_batch = batch;
  job.program = program_of(opt);
  return job;
}

void check_machine(const pp::hardware& machine, const pp::training_job& job, const options& opt) {
  if (machine.peak_of(job.program.products) == 0)
    reject("--precision {}: --cluster {} has no products in {}", opt.precision, opt.cluster,
           pp::name_of(job.program.products));
}

/// Returns a layout with the parts that the options give. Its extents are set elsewhere.
pp::training_layout given_layout(const options& opt) {
  pp::training_layout l;
  l.microbatch = opt.micro_batch;
  pp::set_layout_key(l, "schedule", opt.schedule, "--schedule");
  pp::set_layout_key(l, "recompute", opt.recompute, "--recompute");
  l.zero = level_of(opt);
  pp::set_layout_key(l, "replicate", opt.replicate_over, "--replicate-over");
  l.sequence_parallel = opt.strategy == "sp";
  pp::set_layout_key(l, "context", opt.attention.substr(0, opt.attention.find(':')), "--attention");
  pp::set_layout_key(l, "offload", opt.offload, "--offload");
  l.loss_chunks = opt.loss_chunks;
  return l;
}

pp::search_options search_of(const options& opt) {
  const pp::training_layout given = given_layout(opt);
  pp::search_options search;
  search.orders = pp::axis_orders::pipeline_inside;  // the order of the trainer's meshes
  search.sequence_parallel = given.sequence_parallel;
  search.loss_chunks = given.loss_chunks;
  search.context = {given.context};
  search.most = most_tried;
  if (opt.given("--micro-batch")) search.microbatch = {given.microbatch};
  if (opt.given("--recompute")) {
    if (given.recompute_every > 1)
      reject("--recompute {} is not searched by --plan auto; legal with it are none, selective and full",
             opt.recompute);
    search.recompute = {given.recompute};
  }
  if (opt.given("--schedule")) {
    search.schedules = {given.schedule};
    if (given.schedule == pp::schedule_kind::interleaved) search.chunks = {given.chunks};
  }
  search.replicate = {pp::replication::none, pp::replication::over_dp, pp::replication::over_cp};
  if (opt.given("--replicate-over")) search.replicate = {given.replicate};
  if (opt.given("--offload") || opt.device != "cuda")
    search.offload = {{given.offload_activations, given.offload_optimizer}};
  const bool whole = opt.moments == "int8" && opt.shard == "even";  // a block with one scale may not be cut
  if (opt.given("--data-parallel")) search.zero = {given.zero};
  if (!opt.given("--data-parallel") && whole) search.zero = {plait::zero_level::replicated};
  return search;
}

/// Returns the number of ranks for --plan auto.
std::int64_t ranks_to_plan(const options& opt, const pp::cluster& on, std::int64_t ranks) {
  const std::int64_t named = on.accelerators;
  if (ranks > 0 && named > 0 && ranks != named)
    reject("--cluster {} names {} ranks, but --backend {} was started with {}; they must be equal", opt.cluster, named,
           opt.backend, ranks);
  if (ranks > 0) return ranks;
  if (named > 0) return named;
  if (opt.given("--mesh")) return parse_mesh(opt).size();
  reject("--plan auto needs the number of ranks; name it by --cluster, as in {}:8", opt.cluster);
}

}  // namespace

std::vector<options> planned_options(const options& opt, std::int64_t ranks) {
  if (opt.cluster.empty()) plait::fail("--plan auto needs --cluster, which describes the machine, as in cpu:8");
  if (opt.global_batch == 0)
    plait::fail("--plan auto needs --global-batch, the sequences of a step: layouts differ in how they cut it");
  const plait::llama_config config = open_model(opt).config;
  if (const std::string why = why_unpriced(opt); !why.empty()) reject("--plan auto: {}", why);
  const pp::cluster on = pp::load_cluster(opt.cluster, "--cluster");
  const std::int64_t all = ranks_to_plan(opt, on, ranks);
  const pp::training_job job = job_of(opt, config, opt.global_batch);
  check_machine(on.machine, job, opt);
  if (const std::string why = pp::why_no_host_link(on.machine, given_layout(opt)); !why.empty())
    reject("--plan auto: {}", why);
  pp::search_options search = search_of(opt);
  if (opt.given("--mesh")) {
    const plait::mesh_shape mesh = parse_mesh(opt, all);
    search.tp = {mesh.extent(plait::axis_of<plait::tp>)};
    search.cp = {mesh.extent(plait::axis_of<plait::cp>)};
    search.pp = {mesh.extent(plait::axis_of<plait::pp>)};
    search.ep = {mesh.extent(plait::axis_of<plait::ep>)};
  }
  const pp::search_result found = pp::search_layouts(on.machine, job, all, search);
  if (found.best.empty()) reject("--plan auto: {}", pp::why_nothing(on.machine, job, all, found, search));
  std::vector<options> out;
  for (const pp::layout_price& p : found.best) {
    const pp::training_layout& l = p.layout;
    options& o = out.emplace_back(opt);
    o.mesh = fmt::format("dp={},pp={}{},cp={},tp={}", l.dp / l.ep, l.pp, l.ep > 1 ? fmt::format(",ep={}", l.ep) : "",
                         l.cp, l.tp);
    // Options for a pipeline apply only if the plan has one.
    o.schedule = pp::schedule_text(l);
    o.data_parallel = level_names[static_cast<int>(l.zero)];
    o.replicate_over = pp::replicate_text(l);
    o.micro_batch = l.microbatch;
    o.recompute = pp::recompute_text(l);
    o.offload = pp::offload_text(l);
    for (const auto& [name, value] : {std::pair<const char*, std::string>{"--mesh", o.mesh},
                                      {"--schedule", o.schedule},
                                      {"--data-parallel", o.data_parallel},
                                      {"--replicate-over", o.replicate_over},
                                      {"--micro-batch", fmt::format("{}", o.micro_batch)},
                                      {"--recompute", o.recompute},
                                      {"--offload", o.offload}})
      for (auto& [option, text] : o.by_name)
        if (option == name) text = value;
  }
  return out;
}

std::shared_ptr<const prediction> predict(const setup& s) {
  if (s.opt.cluster.empty()) return nullptr;
  pp::cluster on = pp::load_cluster(s.opt.cluster, "--cluster");
  if (on.accelerators > 0 && on.accelerators != s.mesh.size())
    reject("--cluster {} names {} ranks and --mesh {} has {}; they must be equal", s.opt.cluster, on.accelerators,
           s.opt.mesh, s.mesh.size());
  prediction p{std::move(on.machine), {}, {}, why_unpriced(s.opt)};
  if (p.unpriced.empty()) {
    p.job = job_of(s.opt, s.config, s.sequences * s.microbatches);
    check_machine(p.machine, p.job, s.opt);
    pp::training_layout l = given_layout(s.opt);
    l.tp = s.mesh.extent(plait::axis_of<plait::tp>) * s.mesh.extent(plait::axis_of<plait::tp_rep>);
    l.cp = s.mesh.extent(plait::axis_of<plait::cp>);
    l.pp = s.mesh.extent(plait::axis_of<plait::pp>);
    l.ep = s.mesh.extent(plait::axis_of<plait::ep>);
    l.dp = s.mesh.extent(plait::axis_of<plait::dp>) * l.ep;
    l.pipeline_inside = l.pp > 1 && l.dp > 1;
    if (l.pp == 1) l.schedule = pp::schedule_kind::one_f_one_b, l.chunks = 1;
    p.unpriced = pp::why_illegal(l, p.job);
    if (p.unpriced.empty()) p.unpriced = pp::why_no_host_link(p.machine, l);
    if (p.unpriced.empty()) p.price = pp::price(p.machine, p.job, l);
  }
  return std::make_shared<const prediction>(std::move(p));
}

std::string prediction_text(const prediction& p) {
  if (!p.price) return fmt::format("prediction: none, as {}\n", p.unpriced);
  const pp::step_split& s = p.price->seconds;
  const double step = p.price->step();
  std::string out = fmt::format("prediction on {}\n  {:12} {:>12}:{}\n", p.machine.name, "step", duration_text(step),
                                pp::parts_text(pp::time_parts(s), duration_text));
  out += fmt::format("  {:12} {:>11.1f}%\n  {:12} {:>11.1f}%: over tp {:.1f}%, cp {:.1f}%, ep {:.1f}%, dp {:.1f}%\n",
                     "bubble", 100 * s.bubble / step, "exposed", 100 * pp::exposed_seconds(s) / step,
                     100 * s.tensor / step, 100 * s.context / step, 100 * s.experts / step, 100 * s.data / step);
  out += fmt::format("  {:12} {:>12} on rank {} of the pipeline, {} there are{}:{}\n", "memory",
                     size_text(p.price->memory.total()), p.price->fullest, size_text(p.machine.memory),
                     p.price->fits ? "" : ", so it does NOT FIT",
                     pp::parts_text(pp::memory_parts(p.price->memory), size_text));
  if (p.price->memory.host > 0)
    out += fmt::format("  {:12} {:>12} of a rank, {} there are\n", "on the host", size_text(p.price->memory.host),
                       size_text(p.machine.host_memory));
  return out + fmt::format("  as JSON: {}\n", prediction_json(p).text());
}

plait::json_object prediction_json(const prediction& p, double step_seconds, double peak_bytes) {
  plait::json_object out;
  if (!p.price) return out.add("unpriced", p.unpriced);
  out = pp::price_json(p.machine, p.job, *p.price);
  out.add("hardware", p.machine.name).add("allocated_bytes", p.price->memory.allocated());
  if (step_seconds > 0) out.add("measured_step_seconds", step_seconds).add("measured_peak_bytes", peak_bytes);
  return out;
}

std::string beside_measured(const prediction& p, double step_seconds, double peak_bytes) {
  if (!p.price) return fmt::format("predicted: nothing, as {}\n", p.unpriced);
  const double step = p.price->step(), bytes = p.price->memory.allocated();
  const auto beside = [](double predicted, double measured) { return 100 * (predicted / measured - 1); };
  return fmt::format("predicted: {} a step and {} of a rank; measured: {} ({:+.1f}%) and {} ({:+.1f}%)\n",
                     duration_text(step), size_text(bytes), duration_text(step_seconds), beside(step, step_seconds),
                     size_text(peak_bytes), beside(bytes, peak_bytes));
}

namespace {

/// Returns a line on what data parallelism cuts over which axes; empty for one data rank.
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

/// Returns a line on the chunks in which linears send; empty if they use none.
std::string tensor_overlap_text(const options& opt) {
  if (opt.tensor_overlap == 1) return {};
  return fmt::format("tensor parallel: linears gather and reduce in {} chunks, while their products run\n",
                     opt.tensor_overlap);
}

}  // namespace

void print_plan(const setup& s) {
  const std::string saved = planned_state_text(s);  // errors come before any output
  const run_plan& plan = fullest_plan(s);
  if (s.opt.plan == "auto") say("{}", plan_text(s));
  say("model: {} parameters\n{}mesh: {}, {}\n{}{}step: {} of {} of {} tokens, {}\n{}\n",
      plait::parameter_count(s.config), adapters_text(s), counted(s.mesh.size(), "rank"), mesh_text(s.mesh),
      data_parallel_text(s), tensor_overlap_text(s.opt) + recompute_text(s),
      counted(s.microbatches, "microbatch", "es"), counted(s.sequences, "sequence"), s.opt.seq, precision_text(s.opt),
      utilisation(s, "").operations());
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
  for (const run_plan& stage : *s.plans)
    for (const run_plan::parameter& p : stage.parameters)
      if (p.name.find("layers.") == std::string::npos || p.name.find("layers.0.") != std::string::npos)
        say("  {:46} stored {}{}\n", p.name, p.stored, p.used.empty() ? "" : ", used " + p.used);
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
  say("  {:12} {:>12}, within a pass\n", "at the peak", size_text(plan.peak));
  if (plan.on_host > 0) row("on the host", plan.on_host);
  if (plan.saved > 0)
    say("  {:12} {:>12}, of the host: two copies of the {} that the rank writes of a step to --checkpoint-dir\n",
        "staging", size_text(2 * plan.saved), size_text(plan.saved));
  if (s.predicted) say("\n{}", prediction_text(*s.predicted));
  if (!saved.empty()) say("\n{}", saved);
}
