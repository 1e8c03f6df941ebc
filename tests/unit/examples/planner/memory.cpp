// program: plan
#include "plan_llama/planner/memory.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "cases.hpp"
#include "plait/device/counting.hpp"
#include "plait/kernels/counting.hpp"
#include "plan_llama/planner/simulated_step.hpp"
#include "support/step_traffic.hpp"
#include "support/temp_folder.hpp"
#include "train_llama/fit_recompute.hpp"

namespace {

constexpr double gibi = 1024.0 * 1024 * 1024;

pp::training_job gpt_job(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t batch) {
  return {{51200, hidden, layers, heads, heads, hidden / heads, 4 * hidden, false, true, true, true, 2048},
          2048,
          batch,
          pp::software_called("megatron-2022", "x")};
}

pp::training_job llama_8b(std::int64_t batch, const char* program = "plait") {
  return llama_job("llama-3-8b", batch, 8192, program);
}

}  // namespace

TEST_CASE("parameters are those of the model") {
  for (const plait::llama_preset& preset : plait::llama_presets) {
    CAPTURE(preset.name);
    const auto counted = static_cast<double>(plait::parameter_count(preset.config));
    CHECK(pp::transformer_shape(plait::plan_shape(preset.config)).parameters() ==
          doctest::Approx(counted).epsilon(1e-4));
    if (!preset.config.qkv_bias && !preset.config.mixture.correction_bias)
      CHECK(plait::plan_shape(preset.config).parameters() == counted);
    // All ranks of a layout together have all parameters, and every rank of tp the norms.
    pp::training_job job;
    job.model = plait::plan_shape(preset.config);
    CHECK(pp::rank_parameters(job, {}, 0) + pp::rank_experts(job, {}, 0) ==
          doctest::Approx(job.model.parameters()).epsilon(1e-12));
    const plait::llama_flops flops = plait::flops_per_token(preset.config, 4096);
    if (!preset.config.qkv_bias && !preset.config.qk_norm)
      CHECK(job.model.operations_per_token(4096, 1) == doctest::Approx(flops.total()).epsilon(2e-3));
    CHECK(job.model.visible(4096) == doctest::Approx(flops.visible));
  }
  CHECK(plait::find_large_llama("llama-3-405b")->parameters() == doctest::Approx(405.85e9).epsilon(1e-4));
  CHECK(plait::find_large_llama("llama-2-70b")->parameters() == doctest::Approx(68.98e9).epsilon(1e-4));
  CHECK(plait::find_large_llama("llama-4") == nullptr);
}

TEST_CASE("the first and the last stage hold a tied embedding, once if they are on one rank") {
  const pp::training_job job = llama_job("llama-3.2-1b", 64);
  REQUIRE(job.model.tied);
  const double table = static_cast<double>(job.model.vocab * job.model.hidden);
  const auto all = [&](const char* text) {
    const pp::training_layout l = layout_of(text);
    double sum = 0;
    for (std::int64_t r = 0; r < l.pp; ++r) sum += pp::rank_parameters(job, l, r);
    return sum;
  };
  const double model = job.model.parameters();
  CHECK(all("pp=4") == doctest::Approx(model + table).epsilon(1e-12));
  CHECK(all("pp=4,schedule=zb_v") == doctest::Approx(model).epsilon(1e-12));
  const auto summed = [&](const char* text, std::int64_t rank) {
    return pp::rank_traffic(job, layout_of(text), rank).ends / table / job.program.reduced_bytes;
  };
  CHECK(summed("pp=4,zero=0", 0) == 1);
  CHECK(summed("pp=4,zero=0", 1) == 0);
  CHECK(summed("tp=2,pp=4,dp=4,zero=2", 3) == 1.0 / 8);
  CHECK(summed("pp=4,schedule=zb_v", 0) == 0);
}

TEST_CASE("gradients of attention in a fixed order hold one of each score, of a ring one of each score of a piece") {
  pp::training_job job = llama_8b(64);  // 32 heads, 8192 tokens
  const auto more = [&](const char* layout) {
    const pp::training_layout l = layout_of(layout);
    job.program.fixed_order_attention = false;
    const double without = pp::rank_load(job, l, 0).passes.working;
    job.program.fixed_order_attention = true;
    return pp::rank_load(job, l, 0).passes.working - without;
  };
  CHECK(more("tp=1") == 2.0 * 32 * 8192 * 8192);
  CHECK(more("tp=4,microbatch=2") == 2.0 * 2 * 8 * 8192 * 8192);
  CHECK(more("cp=4,context=ring") == 2.0 * 32 * 2048 * 2048);
  CHECK(more("cp=4,context=all_gather_kv") == 2.0 * 32 * 2048 * 8192);

  // A dry run counts the bytes of every call in bf16.
  plait::counting_device device;
  plait::kernels::attention_shape s;
  s.batch = 2, s.q_len = s.k_len = 8192, s.heads = 8, s.kv_heads = 2, s.head_dim = 128;
  float* const in_float = nullptr;
  plait::bf16* const in_bf16 = nullptr;
  plait::kernels::attention_backward(device, in_float, s);
  plait::kernels::attention_forward(device, in_bf16, s);
  CHECK(device.fixed_order_attention_bytes() == 0);
  plait::kernels::attention_backward(device, in_bf16, s);
  s.batch = 1;
  plait::kernels::attention_backward(device, in_bf16, s);
  CHECK(static_cast<double>(device.fixed_order_attention_bytes()) == more("tp=4,microbatch=2"));
}

TEST_CASE("ulysses keeps and sends at least one head of keys for each rank") {
  const pp::training_job job = llama_8b(64);  // 32 heads, 8 of keys
  const pp::training_layout ring = layout_of("tp=4,cp=8,context=ring"),
                            ulysses = layout_of("tp=4,cp=8,context=ulysses");
  const pp::rank_sizes z(job, ulysses);
  CHECK(z.query == 8 * 128);
  CHECK(z.kv == 2 * 128);
  CHECK(z.exchanged_kv == 8 * 128);
  const double more = 2 * z.tokens * 2 * (8 - 2) * 128;  // bf16, for k and v
  CHECK(pp::block_kept_bytes(job, ulysses, plait::recompute::none) ==
        doctest::Approx(pp::block_kept_bytes(job, ring, plait::recompute::none) + more));
  // To the engine q, k and v; back the output; forward and backward.
  CHECK(pp::rank_traffic(job, ulysses, 0).context ==
        static_cast<double>(ulysses.microbatches(job)) * 32 * 2 * 2 * z.tokens * (8 + 8 + 8 + 8) * 128);
}

TEST_CASE("activations are those that Korthikanti et al. count (2022, figures 1 and 7)") {
  const auto kept = [](const pp::training_job& job, const char* text) {
    const pp::training_layout l = layout_of(text);
    return pp::rank_memory(pp::hardware_called("a100", "x"), job, l, 0).activations / gibi;
  };
  const pp::training_job b22 = gpt_job(48, 6144, 64, 4);
  CHECK(kept(b22, "tp=8,microbatch=4,sequence_parallel=0") == doctest::Approx(59.25).epsilon(1e-4));
  CHECK(kept(b22, "tp=8,microbatch=4,recompute=selective") == doctest::Approx(9.5625).epsilon(1e-4));
  const pp::training_job b175 = gpt_job(96, 12288, 96, 64);
  CHECK(kept(b175, "tp=8,pp=8,schedule=interleaved:3,sequence_parallel=0") == doctest::Approx(66.84375).epsilon(1e-4));
  CHECK(kept(b175, "tp=8,pp=8,schedule=interleaved:3,recompute=selective") ==
        doctest::Approx(12.3515625).epsilon(1e-4));
  const pp::training_job b1000 = gpt_job(128, 25600, 160, 512);
  CHECK(kept(b1000, "tp=8,pp=64,sequence_parallel=0") == doctest::Approx(131.25).epsilon(1e-4));
  CHECK(kept(b1000, "tp=8,pp=64,recompute=selective") == doctest::Approx(26.5625).epsilon(1e-4));
  // Full recomputation keeps 7.64 % of the bytes of tensor parallelism without it (22B).
  CHECK(kept(b22, "tp=8,microbatch=4,recompute=full,sequence_parallel=0") /
            kept(b22, "tp=8,microbatch=4,sequence_parallel=0") ==
        doctest::Approx(2.0 / (10 + 24.0 / 8 + 5.0 * 64 * 2048 / (6144 * 8))));
  // Parameters and optimizer: 18 bytes for each value of a matrix, 45.5625 GiB of 22B on 8 ranks.
  CHECK(b22.model.layer_matrices() * 48 / 8 * 18 / gibi == doctest::Approx(45.5625));
}

TEST_CASE("the state of Llama 3.1 8B on 8 H100 is the allocated memory in its log (dgxc-benchmarking)") {
  const pp::training_job job = llama_8b(128, "nemo");
  const pp::memory_split m = pp::rank_memory(h100, job, layout_of("cp=2,dp=4,zero=1"), 0);
  CHECK(m.state() == doctest::Approx(44271689728.0).epsilon(0.005));
  CHECK(m.total() < 85.5e9);
}

TEST_CASE("data-parallel policies shard their arrays over the ranks of dp and cp") {
  const pp::training_job job = llama_8b(16);
  const auto at = [&](const char* zero) {
    return pp::rank_memory(h100, job, layout_of(std::string("cp=2,dp=4,zero=") + zero), 0);
  };
  const double n = job.model.parameters();
  CHECK(at("0").state() == doctest::Approx(18 * n));
  CHECK(at("1").state() == doctest::Approx((6 + 12.0 / 8) * n));
  CHECK(at("2").state() == doctest::Approx((2 + 16.0 / 8) * n));
  CHECK(at("3").state() == doctest::Approx(18.0 / 8 * n));
  // In a hybrid, over those of its ranks that have no copies.
  CHECK(at("1,replicate=dp").state() == doctest::Approx((6 + 12.0 / 2) * n));
  CHECK(at("1,replicate=cp").state() == doctest::Approx((6 + 12.0 / 4) * n));
  CHECK(at("2,replicate=dp:2").state() == doctest::Approx((2 + 16.0 / 4) * n));
  CHECK(at("3,replicate=dp:2").state() == doctest::Approx(18.0 / 4 * n));
  CHECK(at("3,replicate=dp:2").buffers == at("3").buffers);
}

TEST_CASE("programs differ in the memory of sharded parameters, of logits and of inputs in fp8") {
  pp::training_job job = llama_8b(64);
  const auto at = [&](const char* program, const char* text) {
    job.program = pp::software_called(program, "x");
    return pp::most_memory(h100, job, layout_of(text)).memory;
  };
  // FSDP: a float master, a float gradient and two moments; the gathered bf16 of two layers and one layer's gradient.
  const double n = job.model.parameters(), layer = job.model.layer_parameters();
  CHECK(at("fsdp", "dp=8,zero=3").state() == doctest::Approx(16 * n / 8));
  CHECK(at("fsdp", "dp=8,zero=3").buffers == doctest::Approx(2 * 2 * layer + 2 * layer));
  CHECK(at("fsdp", "dp=8,zero=1").state() > 16 * n / 8);
  const double logits = 8192.0 * static_cast<double>(job.model.vocab);
  CHECK(at("fsdp", "dp=8,zero=3").logits == 14 * logits);
  CHECK(at("llm-foundry", "dp=8,zero=3").logits == 4 * logits);
  CHECK(at("plait", "dp=8,zero=3").logits == 2 * logits);
  CHECK(at("plait", "dp=8,zero=3,loss_chunks=16").logits == 2 * logits / 16);
  CHECK(at("plait", "tp=2,dp=4,zero=3,loss_chunks=3").logits == logits * 1366 / 4096);  // of 8192 / tp positions
  // Transformer Engine: one byte for each value of two norms' outputs and of the MLP's product, and one more for
  // attention's output.
  job.program = pp::software_called("nemo", "x");
  job.program.products = pp::number_kind::fp8;
  const pp::training_layout l = layout_of("dp=8");
  const double kept = pp::block_kept_bytes(job, l, plait::recompute::none);
  job.program.keeps_fp8 = false;
  const auto& m = job.model;
  CHECK(pp::block_kept_bytes(job, l, plait::recompute::none) - kept ==
        8192.0 * static_cast<double>(2 * m.hidden + m.ffn - m.hidden));
}

TEST_CASE("memory grows with the microbatch and the sequence, and falls with recomputation and every axis") {
  const auto total = [&](const char* text, std::int64_t batch = 64) {
    return pp::most_memory(h100, llama_8b(batch), layout_of(text)).memory.total();
  };
  CHECK(total("dp=8,microbatch=2") > total("dp=8"));
  CHECK(total("dp=8") > total("dp=8,recompute=selective"));
  CHECK(total("dp=8,recompute=selective") > total("dp=8,recompute=full"));
  CHECK(total("dp=8,recompute=every:2") > total("dp=8,recompute=full"));
  CHECK(total("dp=8,recompute=every:2") < total("dp=8"));
  CHECK(total("tp=1,dp=8") > total("tp=2,dp=8"));
  CHECK(total("cp=1,dp=8") > total("cp=2,dp=8"));
  CHECK(total("pp=1,dp=8") > total("pp=2,dp=8"));
  CHECK(total("tp=4,dp=8,sequence_parallel=0") > total("tp=4,dp=8"));
}

TEST_CASE("microbatches in flight are those of the schedules themselves") {
  for (const char* schedule : {"gpipe", "1f1b", "interleaved:2", "interleaved:4", "zb_h1", "zb_h2", "zb_v"})
    for (const int p : {2, 4, 8})
      for (const int m : {8, 16, 32}) {
        CAPTURE(schedule);
        CAPTURE(p);
        CAPTURE(m);
        const pp::training_layout l = layout_of(plait::cat({"pp=", p, ",schedule=", std::string(schedule)}));
        const plait::schedule s = plait::parse_schedule(schedule, p, m);
        for (int r = 0; r < p; ++r) {
          double most = 0;
          for (const auto& at : plait::most_in_flight(s, r)) {
            double held = 0;
            for (const plait::chunk_in_flight& c : at) held += c.forward + c.deferred;
            most = std::max(most, held / static_cast<double>(l.chunks));
          }
          CHECK(most <= pp::microbatches_in_flight(l, m, r) + 1e-9);
          // The formula is for the fullest rank of zero-bubble schedules, and exact for the others.
          if (r == 0 && m >= 2 * p) CHECK(most == doctest::Approx(pp::microbatches_in_flight(l, m, r)));
        }
      }
}

TEST_CASE("a searched schedule keeps its limit of memory, and is as long as its formula") {
  pp::training_job job = llama_8b(32);
  job.program.delayed_norm = true;
  const pp::training_layout l = layout_of("pp=4,schedule=automatic");
  const pp::step_costing step = pp::cost_schedule(h100, job, l);
  for (int r = 0; r < 4; ++r) {
    double held = 0;
    for (const auto& at : plait::most_in_flight(step.schedule, r))
      for (const plait::chunk_in_flight& c : at) held = std::max(held, static_cast<double>(c.forward + c.deferred));
    CHECK(held <= pp::microbatches_in_flight(l, 32, r));
  }
  const pp::layout_price p = pp::price(h100, job, l);
  double longest = 0;
  const plait::simulation times = plait::simulate(step.schedule, step.costs);
  for (int r = 0; r < 4; ++r) longest = std::max(longest, times.span(r));
  CHECK(p.step() - p.seconds.data - p.seconds.optimizer - p.seconds.straggling ==
        doctest::Approx(longest).epsilon(0.03));
}

TEST_CASE("the even split gives each end stage one layer, the middle the rest") {
  for (const std::int64_t layers : {1, 2, 7, 32, 126})
    for (std::int64_t stages = 1; stages <= layers; ++stages) {
      const pp::stage_split split{layers, stages};
      std::int64_t sum = 0;
      for (std::int64_t s = 0; s < stages; ++s) {
        sum += split.of_stage(s);
        CHECK(split.of_stage(s) >= layers / stages);
        CHECK(split.of_stage(s) <= (layers + stages - 1) / stages);
      }
      CHECK(sum == layers);
    }
  // Llama 3.1 405B: 126 layers on 64 stages; the first and the last stage have one layer.
  CHECK(pp::stage_split{126, 64}.of_stage(0) == 1);
  CHECK(pp::stage_split{126, 64}.of_stage(63) == 1);
  CHECK(pp::stage_split{126, 64}.of_stage(1) == 2);
}
