#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

#include "check_files.hpp"
#include "number_lists.hpp"
#include "open_inputs.hpp"
#include "options.hpp"
#include "plait/device/product_choices.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/models/llama_config.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/models/weights_order.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/schedule/parse.hpp"
#include "set_deterministic.hpp"
#include "set_parallel.hpp"

namespace {

constexpr std::int64_t max_threads = 1024;
constexpr std::int64_t max_threads_of_a_gpu = 64;

/// `value`, which the user may choose freely, must be a multiple of `parts`.
void divides(const char* flag, std::int64_t value, const std::string& by, std::int64_t parts) {
  if (value % parts == 0) return;
  const std::int64_t below = value / parts * parts, above = below + parts;
  const std::string nearest = below == 0 ? fmt::format("the least that is: {}", above)
                                         : fmt::format("the nearest that are: {} and {}", below, above);
  plait::fail(fmt::format("{} is {}, which is not divisible by {} = {}; {}", flag, value, by, parts, nearest));
}

/// The schedule and who has which layers.
void plan_stages(setup& s, std::int64_t pp) {
  const auto ranks = static_cast<int>(pp), microbatches = static_cast<int>(s.microbatches);
  plait::llama_part_times parts = plait::llama_part_flops(s.config, s.opt.seq);
  if (s.opt.split == "even") parts = {.layer = {1, 2, 1, 1}, .embedding = {0, 0, 0, 0}, .head = {0, 0, 0, 0}};
  const plait::stage_costs balance = plait::stage_costs_of(parts, s.config.layers);
  const auto split = [&](const plait::schedule& plan) {
    if (plan.shape.stages() > s.config.layers)
      plait::fail(
          fmt::format("--schedule {} has {} stages on pp={} ranks, but the model has {}; legal are a smaller "
                      "pp, fewer chunks, and a model of at least as many layers",
                      s.opt.schedule, plan.shape.stages(), pp,
                      s.config.layers == 1 ? "1 layer" : fmt::format("{} layers", s.config.layers)));
    return plait::split_layers(balance, plan.shape.stages());
  };
  // What an automatic schedule costs depends on who has which layers, and that on its number of chunks.
  plait::schedule_costs costs;
  if (s.opt.schedule.starts_with("automatic")) {
    plait::schedule like =
        plait::parse_schedule(s.opt.schedule.ends_with(":2") ? "zb_v" : "zb_h1", ranks, microbatches);
    costs = plait::schedule_costs_of(parts, split(like));
  }
  s.schedule = parse_schedule(s.opt, ranks, microbatches, costs);
  s.stages = split(s.schedule);
}

/// What the learning rate of a step depends on. Where it does not fall, that is not when the run ends.
std::string rate_text(const plait::lr_schedule_config& c) {
  const std::string warm = fmt::format(", {} of warm-up", c.warmup_steps);
  if (c.decay == plait::lr_decay::constant) return fmt::format("constant at {}{}", c.peak, warm);
  return fmt::format("{} from {} to {} of it in {} steps{}", plait::name_of(c.decay), c.peak, c.min_ratio, c.steps,
                     warm);
}

}  // namespace

setup prepare(const options& opt, std::int64_t ranks) {
  if (const std::int64_t wanted = parse_mesh(opt).size(); ranks == 1 && wanted > 1)
    plait::fail(fmt::format("--mesh {} has {} ranks, but --backend {} was started as one process: start it with {} {}",
                            opt.mesh, wanted, opt.backend,
                            opt.backend == "nccl" ? "torchrun --nproc-per-node" : "mpirun -n", wanted));
  const plait::mesh_shape given = parse_mesh(opt, ranks);
  const std::int64_t dp = given.extent(plait::axis_of<plait::dp>), tp = given.extent(plait::axis_of<plait::tp>);
  const std::int64_t pp = given.extent(plait::axis_of<plait::pp>), cp = given.extent(plait::axis_of<plait::cp>);
  const std::int64_t all = given.size();

  setup s{opt,
          {},
          {},
          {},
          {},
          {},
          plait::chosen_policy::ring,
          cp > 1 && !opt.attention.ends_with(":contiguous"),  // on one rank the orders are the same
          1,
          1,
          {},
          plait::lr_schedule({.peak = opt.lr,
                              .steps = std::max<std::int64_t>(opt.steps, 1),
                              .warmup_steps = opt.warmup < 0 ? std::min(opt.steps, (opt.steps + 9) / 10) : opt.warmup,
                              .min_ratio = opt.min_lr_ratio,
                              .decay = plait::lr_decay_from(opt.lr_schedule, "--lr-schedule"),
                              .peak_field = "--lr",
                              .steps_field = "--steps",
                              .warmup_field = "--warmup",
                              .min_ratio_field = "--min-lr-ratio"}),
          0};
  s.rate_text = rate_text(s.rate.config());
  opened_model m = open_model(opt);
  s.config = m.config;
  s.weights = std::move(m.weights);
  s.first_step = std::move(m.first_step);
  s.passed_over = std::move(m.passed_over);
  plait::require_order(plait::weights_order_from(opt.export_order, "--export-order"), s.config, "--export-order");
  const plait::llama_config& c = s.config;
  const std::string by = "the extent of tp";
  plait::check_tensor_ranks(c, tp, "--mesh");
  if (opt.attention.starts_with("all_gather_kv")) s.context = plait::chosen_policy::all_gather_kv;
  if (opt.attention.starts_with("ulysses")) s.context = plait::chosen_policy::ulysses;
  if (cp > 1 && !s.zigzag && (opt.device == "cuda" || opt.strategy != "sp" || has_bf16_gradients(opt)))
    plait::fail(fmt::format("--attention {} is built for {} alone; legal here is {}:zigzag", opt.attention,
                            has_bf16_gradients(opt) ? "--gradients full" : "--device cpu and --strategy sp",
                            opt.attention.substr(0, opt.attention.find(':'))));
  if (opt.attention_given && cp == 1 && opt.plan != "auto")
    plait::fail(
        fmt::format("--attention {} says how ranks along cp share a sequence, and --mesh {} has one; leave it "
                    "out, or give cp in --mesh",
                    opt.attention, opt.mesh));
  if (cp > 1 && s.zigzag) divides("--seq", opt.seq, "2 x cp, the pieces of a sequence in zigzag order,", 2 * cp);
  if (cp > 1) divides("--seq", opt.seq, "the extent of cp", cp);
  if (opt.strategy == "sp") divides("--seq", opt.seq, cp > 1 ? "the extents of cp and tp, cp x tp" : by, cp * tp);
  if (opt.backend == "threads" && !opt.dry_run) {
    const std::int64_t most = opt.device == "cuda" ? max_threads_of_a_gpu : max_threads;
    if (all > most)
      plait::fail(fmt::format("--mesh {}: {} ranks; one {} (--backend threads) runs at most {}", opt.mesh, all,
                              opt.device == "cuda" ? "GPU" : "process", most));
  }
  const plait::tensor_extents t = plait::split_tensor_ranks(tp, c.kv_heads);
  if (opt.seq > c.max_position)
    plait::fail(fmt::format("--seq is {}, but the model's max_position_embeddings is {}", opt.seq, c.max_position));
  s.mesh.add(plait::axis_of<plait::dp>, dp);
  s.mesh.add(plait::axis_of<plait::pp>, pp);
  s.mesh.add(plait::axis_of<plait::cp>, cp);
  s.mesh.add(plait::axis_of<plait::tp>, t.tp);
  s.mesh.add(plait::axis_of<plait::tp_rep>, t.tp_rep);
  s.devices = opt.backend == "threads" ? 1 : all;
  const bool meets_on_host = opt.backend == "threads" && all > 1;
  const bool watched = !opt.trace.empty() || !opt.timeline.empty();
  if (opt.graph == "on" && watched)
    plait::fail("--graph on with --trace or --timeline: nobody sees what a replayed step does; legal is --graph off");
  if (opt.graph == "on" && meets_on_host)
    plait::fail(
        fmt::format("--graph on: {} ranks that share a GPU (--backend threads) meet on the host for every collective, "
                    "which a graph "
                    "cannot replay; legal are --graph off, one rank, and --backend nccl",
                    all));
  s.as_graph = opt.device == "cuda" && opt.graph != "off" && opt.dropout == 0 && !meets_on_host && !watched;
  s.sequences = opt.micro_batch * dp;
  const std::int64_t global = opt.global_batch == 0 ? s.sequences : opt.global_batch;
  divides("--global-batch", global, fmt::format("--micro-batch {} times dp={}", opt.micro_batch, dp), s.sequences);
  s.microbatches = global / s.sequences;
  if (s.microbatches > plait::max_microbatches)
    plait::fail(fmt::format("--global-batch {} has {} microbatches; at most {} are legal", global, s.microbatches,
                            plait::max_microbatches));
  plan_stages(s, pp);
  set_parallel(s, dp, cp);
  check_tensor_overlap(opt, cp, tp);
  set_deterministic(s, dp, cp, tp);
  if (!opt.data.empty())
    open_data(s);
  else if (!opt.dry_run && ((opt.steps > 0 && opt.resume == "none") || opt.held_out > 0))
    plait::fail("--data is missing: name a text file, or token files (.bin)");
  if (!opt.sample_given && !s.bytes) s.opt.sample = 0;
  if (opt.dry_run) return s;
  for (const unsigned char byte : s.opt.sample > 0 ? opt.prompt : std::string())
    if (byte >= c.vocab)
      plait::fail(
          fmt::format("--prompt: its byte {} is no token, as the model's vocab_size is {}; choose another prompt, or "
                      "--sample 0",
                      static_cast<int>(byte), c.vocab));
  check_files(opt, !s.first_step.empty());
  if (std::filesystem::exists(opt.products)) {
    const plait::mapped_file file(opt.products, "--products");
    const std::span<const std::byte> bytes = file.bytes();
    s.products.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    static_cast<void>(plait::product_choices::parse(s.products, "--products: '" + opt.products + "'"));
  }
  return s;
}
