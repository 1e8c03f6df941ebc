// program: prices
// The planner's formulas for a Llama agree with its layers, run on a counting device in a counting world.
#include "plait/plan/dry_run.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/world.hpp"
#include "plait/plan/machine_time.hpp"
#include "plait/schedule/parse.hpp"
#include "plan_llama/planner/hardware_json.hpp"
#include "plan_llama/planner/llama_shape.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "support/death_message.hpp"
#include "support/on_mesh.hpp"
#include "support/step_traffic.hpp"
#include "train_llama/fit_recompute.hpp"

namespace {

using namespace plait;

template <class Precision>
using stage_of = llama<Precision, megatron_sp, counting_device>;

llama_config small_llama() {
  llama_config c;
  c.vocab = 96, c.hidden = 64, c.layers = 4, c.heads = 8, c.kv_heads = 4, c.head_dim = 8, c.ffn = 160;
  return c;
}

constexpr std::int64_t seq_length = 32;

/// A Llama of a precision, and one whose blocks, except the first, are mixtures with a shared expert.
template <class P>
struct dense {
  using precision = P;
  using strategy = megatron_sp;
  using stage = stage_of<P>;
  static llama_config config() { return small_llama(); }
};
template <class P>
struct mixture {
  using precision = P;
  using strategy = megatron_experts;
  using stage = mixture_llama<P, strategy, counting_device>;
  static llama_config config() {
    llama_config c = small_llama();
    c.ffn = 32, c.qk_norm = true, c.qk_norm_over_heads = std::is_same_v<P, bf16>;
    c.mixture = {.experts = 8,
                 .router = {.chosen = 2},
                 .shared_ffn = 48,
                 .shared_gate = true,
                 .dense_layers = 1,
                 .dense_ffn = 80};
    return c;
  }
};

/// The planner's job for plait's trainer, in bf16: the defaults of `planner::software` describe plait.
template <class Model>
planner::training_job job_of(std::int64_t batch) {
  planner::training_job job;
  job.model = plan_shape(Model::config());
  job.seq = seq_length;
  job.global_batch = batch;
  if constexpr (std::is_same_v<typename Model::precision, float>) {
    job.program.products = planner::number_kind::f32;
    job.program.weight_bytes = 4;
    job.program.optimizer_bytes = 8;  // no master copies
    job.program.logit_bytes = 4;
  }
  return job;
}

mesh_shape mesh_of(const planner::training_layout& l, bool experts = false) {
  mesh_shape mesh;
  mesh.add(axis_of<pp>, l.pp);
  mesh.add(axis_of<dp>, l.dp / l.ep);
  if (experts) mesh.add(axis_of<ep>, l.ep);
  mesh.add(axis_of<cp>, l.cp);
  mesh.add(axis_of<tp>, l.tp);
  mesh.add(axis_of<tp_rep>, 1);
  return mesh;
}

/// The work of one rank in a step of a Llama with four layers, for `samples` sequences in a microbatch of all ranks.
template <class Stage, strategy Strategy>
step_plan step_on(const mesh_shape& mesh, std::int64_t rank, const schedule& plan, const llama_config& config,
                  const llama_options& options, const pipeline_options& how, std::int64_t samples,
                  bool offload_optimizer = false) {
  pipeline_world ranks = pipeline_world::counting(mesh, rank);
  counting_device device(offload_optimizer);
  const context<counting_device> ctx{device, ranks.stage(),
                                     llama_sizes<Strategy>(config, ranks.stage().shape(), samples, seq_length), 1};
  const int stages = plan.shape.stages();
  std::vector<stage_layers> parts;
  for (int s = 0; s < stages; ++s) parts.push_back({s * 4 / stages, (s + 1) * 4 / stages, s == 0, s + 1 == stages});
  pipeline<Stage> model(
      ctx, ranks.along(), plan, parts,
      [&](stage_layers part, Stage* first) { return std::make_unique<Stage>(ctx, config, options, part, first); }, how);
  return dry_run_step(ctx, model);
}

/// Bytes of the collectives of an axis, without those of `scalars`, which are calls of a few bytes.
double payload(const ledger& traffic, const std::string& label, std::initializer_list<collective> kinds) {
  double bytes = 0;
  for (const collective kind : kinds) bytes += static_cast<double>(traffic.total(label, kind).payload);
  return bytes;
}

}  // namespace

TEST_CASE_TEMPLATE("a block keeps the formula's bytes with each mode of recompute, and a rank its parameters", Model,
                   dense<float>, dense<bf16>, mixture<float>, mixture<bf16>) {
  using stage = typename Model::stage;
  const llama_config config = Model::config();
  const bool experts = config.mixture.experts > 0;
  for (const std::int64_t tp_ranks : {1, 2, 4}) {
    CAPTURE(tp_ranks);
    planner::training_layout l;
    l.tp = tp_ranks, l.microbatch = 2;
    if (experts) l.dp = l.ep = 4 / tp_ranks;
    const planner::training_job job = job_of<Model>(2 * l.dp);
    pipeline_world ranks = pipeline_world::counting(mesh_of(l, experts), 0);
    counting_device device;
    const context<counting_device> ctx{
        device, ranks.stage(),
        llama_sizes<typename Model::strategy>(config, ranks.stage().shape(), l.microbatch * l.dp, seq_length), 1};
    stage model(ctx, config, llama_options{}, stage_layers{0, 4, true, true});
    std::int64_t used = 0;
    model.visit([&](auto& p) { used += p.used_size(); });
    CHECK(static_cast<double>(used) == planner::rank_parameters(job, l, 0) + planner::rank_experts(job, l, 0));
    gather_parameters(ctx, model);
    zero_gradients(ctx, model);
    stage* const all[] = {&model};
    const chunk_prices prices = plait::detail::price_stage(ctx, std::span<stage* const>(all), model, 1);
    const double input = planner::block_kept_bytes(job, l, recompute::full);
    for (std::size_t layer = 1; layer <= 4; ++layer) {
      const planner::training_job of_block = layer == 1 && experts ? job.of_first_blocks() : job;
      for (const recompute mode : {recompute::none, recompute::selective, recompute::full})
        // A block's input is kept in addition to its unit.
        CHECK(static_cast<double>(prices[layer][static_cast<std::size_t>(mode)].bytes) + input ==
              planner::block_kept_bytes(of_block, l, mode));
    }
  }
}

TEST_CASE_TEMPLATE(
    "a step's peak is within 3.5 % of the formulas, 6 % with offload or one microbatch, and so is its traffic", Model,
    dense<float>, dense<bf16>, mixture<float>, mixture<bf16>) {
  using stage = typename Model::stage;
  const llama_config config = Model::config();
  const bool experts = config.mixture.experts > 0;
  for (const char* text : {"tp=2,pp=2,dp=2,microbatch=2,zero=0",
                           "tp=2,pp=2,dp=2,microbatch=2,zero=1",
                           "tp=4,pp=2,dp=1,microbatch=2,zero=0",
                           "tp=2,pp=2,dp=2,microbatch=2,zero=1,recompute=full",
                           "tp=2,pp=4,dp=1,microbatch=2,zero=0,recompute=selective",
                           "tp=2,cp=2,dp=2,microbatch=2,zero=1",
                           "tp=1,cp=4,dp=1,microbatch=2,zero=0",
                           "tp=2,dp=4,microbatch=2,zero=2",
                           "tp=1,dp=4,microbatch=2,zero=3",
                           "tp=2,cp=2,dp=2,microbatch=2,zero=1,replicate=dp",
                           "tp=1,cp=2,dp=4,microbatch=2,zero=2,replicate=cp",
                           "tp=1,cp=2,dp=4,microbatch=2,zero=3,replicate=dp",
                           "tp=1,cp=4,dp=2,microbatch=2,zero=3,replicate=cp",
                           "tp=1,dp=4,ep=2,microbatch=2,zero=0",
                           "tp=2,pp=2,dp=2,ep=2,microbatch=2,zero=1",
                           "tp=2,pp=2,dp=2,ep=2,microbatch=2,zero=1,recompute=full",
                           "tp=2,dp=2,ep=2,microbatch=2,recompute=selective",
                           "tp=1,cp=2,dp=4,ep=4,microbatch=2,zero=2",
                           "tp=2,dp=4,ep=2,microbatch=2,zero=3",
                           "tp=2,cp=2,dp=2,microbatch=2,zero=1,loss_chunks=4",
                           "tp=2,pp=2,dp=2,microbatch=2,zero=1,loss_chunks=2",
                           "tp=2,dp=2,microbatch=2,zero=1,offload=activations",
                           "tp=2,pp=2,dp=2,microbatch=2,zero=1,offload=activations",
                           "tp=2,pp=2,dp=2,microbatch=2,zero=1,recompute=full,offload=activations",
                           "tp=2,dp=4,microbatch=2,zero=2,offload=optimizer",
                           "tp=2,dp=4,microbatch=2,zero=1,recompute=selective,offload=both"}) {
    CAPTURE(text);
    const planner::training_layout l = planner::parse_layout(text, "x");
    if (experts ? l.replicate != planner::replication::none : l.ep > 1) continue;
    if (experts && (l.offload_activations || l.offload_optimizer)) continue;
    // With one microbatch and pieces of gradients, at most three units have whole gradients.
    const bool frees = l.zero >= zero_level::gradients && !l.offload_optimizer;
    for (std::int64_t run = 0; run < l.pp + (frees ? 1 : 0); ++run) {
      const std::int64_t at = run % l.pp;
      const int microbatches = run < l.pp ? 4 : 1;
      CAPTURE(at);
      CAPTURE(microbatches);
      planner::training_job job = job_of<Model>(microbatches * l.microbatch * l.dp);
      job.model.limited = experts && l.zero == zero_level::optimizer;
      pipeline_options how;
      how.parallel.level = l.zero;
      how.offload_activations = l.offload_activations;
      if (l.replicate == planner::replication::over_dp)
        how.axes = {.shard = axis_list(axis_of<cp>), .replicate = axis_list(axis_of<dp>)};
      if (l.replicate == planner::replication::over_cp)
        how.axes = {.shard = axis_list(axis_of<dp>), .replicate = axis_list(axis_of<cp>)};
      llama_options options;
      options.keep = layer_recompute(l.recompute);
      options.loss_chunks = l.loss_chunks;
      options.expert_limit = job.model.limited ? 1.25 : 0;
      const step_plan step = step_on<stage, typename Model::strategy>(
          mesh_of(l, experts), at * l.dp * l.cp * l.tp, parse_schedule("1f1b", static_cast<int>(l.pp), microbatches),
          config, options, how, l.microbatch * l.dp, l.offload_optimizer);
      const planner::memory_split m = planner::rank_memory({}, job, l, at);
      const double peak_error = l.offload_activations || microbatches == 1 ? 0.06 : 0.035;  // of a model this small
      CHECK(static_cast<double>(step.peak_bytes) == doctest::Approx(m.allocated()).epsilon(peak_error));
      CHECK(static_cast<double>(step.host_bytes) ==
            doctest::Approx(m.host).epsilon(l.offload_optimizer ? 0.035 : 1e-9));
      const planner::step_traffic sent = planner::rank_traffic(job, l, at);
      using enum collective;
      CHECK(payload(step.traffic, "tp", {all_gather, reduce_scatter}) == sent.tensor);
      CHECK(payload(step.traffic, "pp", {send}) == sent.pipeline);
      CHECK(payload(step.traffic, "ep", {all_to_all}) == sent.experts);
      double data = 0;
      for (const char* label : {"dp", "cp", "dp+cp", "ep", "dp+ep", "ep+cp", "dp+ep+cp"})
        data += payload(step.traffic, label, {all_gather, reduce_scatter, all_reduce});
      // The measured bytes also have losses and norms, and parts padded to equal sizes; ZeRO-3 may gather less.
      CHECK(data == doctest::Approx(sent.data).epsilon(experts ? 0.055 : 0.04));
    }
  }
}

namespace {

/// The calls of every rank of a mesh in a step of a Llama whose head is its embedding.
std::vector<posted_program> posted_of(const planner::training_layout& l, const char* schedule_name, zero_level level,
                                      bool hybrid = false) {
  const mesh_shape mesh = mesh_of(l);
  const schedule plan = parse_schedule(schedule_name, static_cast<int>(l.pp), 4);
  llama_config config = small_llama();
  config.tie_embeddings = true;
  pipeline_options how;
  how.parallel.level = level;
  if (hybrid) how.axes = {.shard = axis_list(axis_of<dp>), .replicate = axis_list(axis_of<cp>)};
  llama_options options;
  options.attention.context = chosen_policy::ring;
  std::vector<posted_program> all;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank)
    all.push_back(step_on<stage_of<float>, megatron_sp>(mesh, rank, plan, config, options, how, 2 * l.dp).posted);
  return all;
}

/// The index of the `which`-th call over `group` in passes of one kind.
std::size_t call_in(const posted_program& p, const char* group, action_kind pass, int which = 0) {
  for (std::size_t i = 0; i < p.calls.size(); ++i) {
    const posted_call& c = p.calls[i];
    if (c.entry < 0 || static_cast<std::size_t>(c.entry) >= p.entries.size()) continue;
    const step_entry& e = p.entries[static_cast<std::size_t>(c.entry)];
    if (e.op == step_op::pass && e.pass.kind == pass && p.group_of(c).name == group && which-- == 0) return i;
  }
  FAIL("there is no such call");
  return 0;
}

}  // namespace

TEST_CASE("all collectives and messages of a step have one order on every rank, including those within layers") {
  for (const char* name : {"1f1b", "zb_h1", "interleaved:2"})
    for (const zero_level level : {zero_level::replicated, zero_level::gradients, zero_level::parameters}) {
      CAPTURE(name);
      CAPTURE(static_cast<int>(level));
      const std::vector<posted_program> all = posted_of(planner::parse_layout("dp=2,pp=2,cp=2,tp=2", "x"), name, level);
      const order_verdict v = verify_order(all);
      CHECK(describe(v) == "ok");
      CHECK(v.completed > 400);
      // No rank waits for others before its first pass; such a wait would delay gathers that the last step started.
      for (const posted_program& p : all)
        for (const posted_call& c : p.calls) {
          REQUIRE(c.entry >= 0);
          if (c.kind != collective::all_reduce || c.count != 1) continue;
          const step_entry& e = p.entries[static_cast<std::size_t>(c.entry)];
          CHECK((e.op == step_op::norm || adds_gradient(e.pass.kind) || gives_input_gradient(e.pass.kind)));
        }
    }
}

TEST_CASE("sums of a hybrid's copies start in the order of a step, and its norm waits for them") {
  std::vector<posted_program> all;
  for (const zero_level level : {zero_level::optimizer, zero_level::gradients, zero_level::parameters}) {
    CAPTURE(static_cast<int>(level));
    all = posted_of(planner::parse_layout("dp=2,pp=2,cp=2,tp=2", "x"), "1f1b", level, true);
    CHECK(describe(verify_order(all)) == "ok");
    std::size_t among_passes = 0;
    for (const posted_program& p : all) {
      std::size_t units = 0, copies = 0;
      for (const step_entry& e : p.entries) units += e.op == step_op::reduce;
      for (const posted_call& c : p.calls) {
        if (p.group_of(c).name != "cp reductions") continue;
        const auto entry = static_cast<std::size_t>(c.entry);
        CHECK(c.kind == collective::all_reduce);
        CHECK(c.asynchronous);
        CHECK(p.entries[entry].op == step_op::reduce_copies);
        ++copies;
        among_passes += std::any_of(p.entries.begin() + c.entry, p.entries.end(),
                                    [](const step_entry& e) { return e.op == step_op::pass; });
      }
      CHECK(copies >= units);  // one for each bucket
    }
    CHECK(among_passes > 0);  // a stage has two units that are not tied, and one before them
  }
  // On two of four ranks the copies come before the next unit's reduction: each rank waits for the next.
  const auto peer_in = [&](std::size_t rank, const char* group) {
    for (const posted_group& g : all[rank].groups)
      if (g.name == group)
        return static_cast<std::size_t>(g.ranks[0] == static_cast<int>(rank) ? g.ranks[1] : g.ranks[0]);
    FAIL("there is no such group");
    return std::size_t{0};
  };
  const std::size_t across = peer_in(peer_in(0, "dp reductions"), "cp reductions");
  for (const std::size_t rank : {std::size_t{0}, across}) {
    std::vector<posted_call>& calls = all[rank].calls;
    const auto copy = std::find_if(calls.begin(), calls.end(),
                                   [&](const posted_call& c) { return all[rank].group_of(c).name == "cp reductions"; });
    const auto next = std::find_if(std::make_reverse_iterator(copy), calls.rend(),
                                   [&](const posted_call& c) { return all[rank].group_of(c).name == "dp reductions"; });
    std::rotate(std::prev(next.base()), copy, std::next(copy));
  }
  const std::string text = describe(verify_order(all));
  CHECK(test::has(text, "over cp reductions in reduction of the copies of unit"));
  CHECK(test::has(text, "over dp reductions in reduction of unit"));
}

TEST_CASE("faults in the order of collectives within layers are refused, naming both passes") {
  const std::vector<posted_program> good =
      posted_of(planner::parse_layout("dp=2,pp=2,cp=2,tp=2", "x"), "1f1b", zero_level::gradients);
  REQUIRE(verify_order(good).ok());
  const auto text = [](const std::vector<posted_program>& all) { return describe(verify_order(all)); };

  std::vector<posted_program> all = good;  // one rank of tp does not run a collective of a pass
  std::vector<posted_call>& own = all[1].calls;
  own.erase(own.begin() + static_cast<std::ptrdiff_t>(call_in(all[1], "tp", action_kind::forward, 1)));
  CHECK(text(all) ==
        "rank 1, reduce_scatter of 1024 over tp in F0.0 of unit 1: it meets another call on this communicator; see "
        "rank 0, all_gather of 1024 over tp in F0.0 of unit 1");

  all = good;  // tensor and data parallelism in opposite orders
  for (const std::size_t rank : {std::size_t{1}, std::size_t{4}}) {
    std::vector<posted_call>& calls = all[rank].calls;
    const posted_program& p = all[rank];
    std::size_t reduction = 0;
    while (p.group_of(calls[reduction]).name.find(" reductions") == std::string::npos) ++reduction;
    std::size_t layer = reduction;
    while (p.group_of(calls[layer]).name != "tp") ++layer;
    std::swap(calls[reduction], calls[layer]);
  }
  CHECK(text(all) ==
        "rank 0, reduce_scatter of 5504 over dp+cp reductions in reduction of unit 2: 4 ranks wait for each other, "
        "which can deadlock; see rank 1, all_gather of 1024 over tp in B3.0 of unit 1");
}

TEST_CASE("sums over tied stages start in the order of a step, the same on both ends, and are waited for later") {
  std::vector<posted_program> all;
  for (const char* mesh : {"dp=2,pp=2,cp=2,tp=2", "pp=4,tp=2"})
    for (const zero_level level : {zero_level::replicated, zero_level::gradients, zero_level::parameters})
      for (const bool hybrid : {false, true}) {
        CAPTURE(mesh);
        CAPTURE(static_cast<int>(level));
        const planner::training_layout l = planner::parse_layout(mesh, "x");
        if ((level != zero_level::replicated && l.dp == 1) || (hybrid && level == zero_level::replicated)) continue;
        all = posted_of(l, "1f1b", level, hybrid);
        CHECK(describe(verify_order(all)) == "ok");
        std::size_t sums = 0;
        for (const posted_program& p : all)
          for (const posted_call& c : p.calls) {
            if (p.group_of(c).name != "pp ends") continue;
            ++sums;
            CHECK(c.kind == collective::all_reduce);
            CHECK(c.asynchronous);
            CHECK(p.entries[static_cast<std::size_t>(c.entry)].op == step_op::reduce_ties);
          }
        CHECK(sums == all.size() * 2 / static_cast<std::size_t>(l.pp));  // one on each rank of the two end stages
      }
  // One end stage sums the tied gradients after the norm.
  all = posted_of(planner::parse_layout("dp=2,pp=2,cp=2,tp=2", "x"), "1f1b", zero_level::gradients);
  std::vector<posted_call>& calls = all[0].calls;
  const auto in = [&](const char* group) {
    return [&, group](const posted_call& c) { return all[0].group_of(c).name == group; };
  };
  const auto sum = std::find_if(calls.begin(), calls.end(), in("pp ends"));
  const auto norm = std::find_if(calls.rbegin(), calls.rend(), in("pp"));
  REQUIRE(sum != calls.end());
  std::rotate(sum, std::next(sum), norm.base());
  const std::string text = describe(verify_order(all));
  CHECK(test::has(text, "over pp ends in reduction of unit"));
  CHECK(test::has(text, "over tied stages"));
  CHECK(test::has(text, "in the norm"));
}

TEST_CASE("a dry run counts and prices a program's kernels, which must not touch its memory") {
  using rows = spec<shard<batch, dp>, hidden>;
  const auto square = [](const auto& ctx, const auto& x, auto& y) {
    const auto n = static_cast<double>(x.size());
    kernel(ctx, {.bytes = 2 * n * sizeof(float), .operations = n, .of = dtype::f32}, [&] {
      for (std::int64_t i = 0; i < x.size(); ++i) y.data()[i] = x.data()[i] * x.data()[i];
    });
  };
  test::on_mesh(mesh<axis<dp>>(1), sizes_of<batch, hidden>(2, 3), 1, [&](const context<cpu>& ctx) {
    tensor<float, rows> x(ctx), y(ctx);
    std::fill(x.data(), x.data() + 6, 3.0f);
    square(ctx, x, y);
    CHECK(y.data()[5] == 9.0f);
    CHECK_THROWS_WITH(kernel(ctx, {.bytes = -1}, [] {}), "kernel_cost: -1 bytes and 0 operations; legal are 0 or more");
  });
  mesh_shape shape;
  shape.add(axis_of<dp>, 4);
  world ranks = world::counting(shape, 1);
  counting_device device;
  const context<counting_device> ctx{device, ranks, sizes_of<batch, hidden>(1 << 20, 1 << 12), 1};
  const tensor<float, rows, counting_device> x(ctx);
  tensor<float, rows, counting_device> y(ctx);
  const planner::hardware h = planner::load_hardware("h100", "hardware");
  planner::work_clock clock(h);
  device.report_to(&clock);
  square(ctx, x, y);
  device.report_to(nullptr);
  const auto n = static_cast<double>(x.size());
  CHECK(device.operations() == n);
  CHECK(clock.now().total() == doctest::Approx(planner::memory_seconds(h, 8 * n, 1)));
  const std::string text = test::death_message([&] { y.data()[1] = 1; });
  CHECK(test::has(text, "plait: a kernel of the program's own touched memory of a dry run"));
}
