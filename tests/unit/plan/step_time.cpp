// program: plan
#include "plait/plan/step_time.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <string>

#include "plait/models/llama_plan.hpp"
#include "plait/plan/hardware_table.hpp"
#include "plait/plan/parse_layout.hpp"
#include "plait/plan/simulated_step.hpp"
#include "plait/plan/software_table.hpp"

namespace {

namespace pp = plait::planner;

pp::training_job large_job(std::int64_t batch, const char* program = "nemo") {
  pp::training_job job;
  job.model = *plait::find_large_llama("llama-3-405b");
  job.seq = 8192;
  job.global_batch = batch;
  job.program = pp::software_called(program, "x");
  return job;
}

double seconds(const pp::hardware& h, const pp::training_job& job, const char* text) {
  const pp::training_layout l = pp::parse_layout(text, "x");
  REQUIRE(pp::why_illegal(l, job).empty());
  return pp::price(h, job, l).step();
}

}  // namespace

TEST_CASE("a product takes its operations over a share of the peak, or its bytes where it is thin") {
  pp::hardware h = pp::hardware_called("h100", "x");
  h.launch = h.product_depth = h.product_area = 0;
  h.product_share[1] = 0.5;
  h.peak[1] = 1e15;
  CHECK(pp::product_seconds(h, pp::number_kind::bf16, 8192, 4096, 4096) ==
        doctest::Approx(2.0 * 8192 * 4096 * 4096 / 0.5e15));
  // One row: the matrix is read once.
  CHECK(pp::product_seconds(h, pp::number_kind::bf16, 1, 8192, 8192) ==
        doctest::Approx(2.0 * (8192 + 8192.0 * 8192 + 8192) / (h.memory_bandwidth * h.memory_share)));
  // At the depth of half the share, half of the share.
  h.product_depth = 4096;
  CHECK(pp::product_seconds(h, pp::number_kind::bf16, 8192, 4096, 4096) ==
        doctest::Approx(2 * 2.0 * 8192 * 4096 * 4096 / 0.5e15));
}

TEST_CASE("attention computes half of the square, and a window's band, 3.5 times forward") {
  pp::hardware h = pp::hardware_called("h100", "x");
  h.launch = 0;
  pp::software program;
  pp::transformer_shape m = *plait::find_large_llama("llama-3-70b");
  const double rate = h.peak_of(pp::number_kind::bf16) * h.attention_share;
  const pp::attention_seconds whole = pp::attention_time(h, program, m, 4096, 4096, 8192);
  CHECK(whole.forward == doctest::Approx(4 * 4096.0 * 4096 * 8192 * 0.5 / rate));
  CHECK(whole.backward == doctest::Approx(2.5 * whole.forward));
  m.window = 1024;
  CHECK(pp::attention_time(h, program, m, 4096, 4096, 8192).forward ==
        doctest::Approx(4 * 4096.0 * 4096 * 8192 * (0.25 - 0.25 * 0.25 / 2) / rate));
  program.attention = pp::attention_kernel::flash1;
  CHECK(pp::attention_time(h, program, m, 4096, 4096, 8192).forward * h.flash1 ==
        doctest::Approx(4 * 4096.0 * 4096 * 8192 * (0.25 - 0.25 * 0.25 / 2) / rate));
}

TEST_CASE("the parts of a step are all of it, and none is negative") {
  const pp::hardware h = pp::hardware_called("h100", "x");
  for (const char* text : {"tp=8,cp=2,pp=8,dp=8,schedule=interleaved:8", "tp=8,dp=128,zero=3",
                           "tp=8,pp=16,dp=8,schedule=zb_v,recompute=full", "tp=16,cp=4,pp=4,dp=4,context=ulysses",
                           "tp=8,cp=2,pp=8,dp=8,order=tp-cp-pp-dp,schedule=zb_h1"}) {
    CAPTURE(text);
    const pp::layout_price p = pp::price(h, large_job(512), pp::parse_layout(text, "x"));
    const pp::step_split& s = p.seconds;
    for (const double part : {s.products, s.attention, s.memory, s.recompute, s.tensor, s.context, s.bubble, s.data,
                              s.optimizer, s.straggling})
      CHECK(part >= 0);
    CHECK(p.step() == doctest::Approx(s.products + s.attention + s.memory + s.tensor + s.context + s.bubble + s.data +
                                      s.optimizer + s.straggling));
    CHECK(pp::utilisation(h, large_job(512), p.layout, p.step()) < 0.8);
  }
}

TEST_CASE("a part disappears with what causes it") {
  const pp::hardware h = pp::hardware_called("h100", "x");
  const pp::step_split s = pp::price(h, large_job(8), pp::parse_layout("", "x")).seconds;
  CHECK(s.tensor == 0);
  CHECK(s.context == 0);
  CHECK(s.bubble == 0);
  CHECK(s.data == 0);
  CHECK(s.straggling == 0);
  CHECK(s.recompute == 0);
  CHECK(s.optimizer > 0);
}

TEST_CASE("no better part makes a step slower") {
  const pp::hardware h = pp::hardware_called("h100", "x");
  const pp::training_job job = large_job(512, "megatron");
  const char* layouts[] = {"tp=8,cp=2,pp=8,dp=8,schedule=interleaved:8", "tp=16,dp=64,zero=3,recompute=full",
                           "tp=8,pp=16,dp=8,schedule=1f1b,recompute=selective"};
  const std::function<void(pp::hardware&)> better[] = {[](pp::hardware& m) { m.peak[1] *= 1.3; },
                                                       [](pp::hardware& m) { m.memory_bandwidth *= 1.3; },
                                                       [](pp::hardware& m) { m.launch /= 2; },
                                                       [](pp::hardware& m) { m.levels[0].bandwidth *= 1.5; },
                                                       [](pp::hardware& m) { m.levels[1].bandwidth *= 1.5; },
                                                       [](pp::hardware& m) { m.levels[1].latency /= 2; },
                                                       [](pp::hardware& m) { m.attention_share *= 1.2; },
                                                       [](pp::hardware& m) { m.straggling /= 2; },
                                                       [](pp::hardware& m) { m.data_hidden = 0.99; }};
  for (const char* text : layouts)
    for (std::size_t i = 0; i < std::size(better); ++i) {
      CAPTURE(text);
      CAPTURE(i);
      pp::hardware m = h;
      better[i](m);
      CHECK(seconds(m, job, text) <= seconds(h, job, text));
    }
  // Twice the batch takes less than twice the time, and more than half of it again.
  for (const char* text : layouts) {
    CHECK(seconds(h, large_job(1024), text) < 2 * seconds(h, large_job(512), text));
    CHECK(seconds(h, large_job(1024), text) > 1.5 * seconds(h, large_job(512), text));
  }
}

TEST_CASE("what tensor parallelism gathers and scatters of several sequences is copied, four times in a block") {
  const pp::hardware h = pp::hardware_called("h100", "x");
  pp::training_job job = large_job(64, "plait");
  const auto memory = [&](const char* text) {
    return pp::block_time(h, job, pp::parse_layout(text, "x")).forward.memory;
  };
  const double packed = memory("tp=8,microbatch=2"), one = memory("tp=8"), whole = memory("tp=8,sequence_parallel=0");
  job.program.packs = false;
  CHECK(packed - memory("tp=8,microbatch=2") ==
        doctest::Approx(4 * pp::memory_seconds(h, 2 * 2.0 * 2 * 8192 * static_cast<double>(job.model.hidden), 1)));
  CHECK(one == memory("tp=8"));  // one sequence lies as it is gathered
  CHECK(whole == memory("tp=8,sequence_parallel=0"));
}

TEST_CASE("published steps of H100 in bf16 are within 8 %") {
  const pp::hardware h = pp::hardware_called("h100", "x");
  // NVIDIA/dgxc-benchmarking@v25.04.02 llama3.1/README.md
  CHECK(seconds(h, large_job(512), "tp=8,cp=2,pp=8,dp=8,schedule=interleaved:8") ==
        doctest::Approx(19.84).epsilon(0.08));
  pp::training_job job = large_job(128);
  job.model = plait::plan_shape(plait::llama_preset_config("llama-3.1-8b"));
  CHECK(seconds(h, job, "cp=2,dp=4") == doctest::Approx(12.27).epsilon(0.08));
  job.program.products = pp::number_kind::fp8;
  CHECK(seconds(h, job, "cp=2,dp=4") == doctest::Approx(9.33).epsilon(0.08));
}

TEST_CASE("formulas of pipelines are near the simulated schedules") {
  const pp::hardware h = pp::hardware_called("h100", "x");
  for (const char* schedule :
       {"gpipe", "1f1b", "interleaved:2", "interleaved:4", "interleaved:8", "zb_h1", "zb_v", "automatic"})
    for (const std::int64_t m : {8, 16, 64}) {
      CAPTURE(schedule);
      CAPTURE(m);
      const pp::training_job job = large_job(8 * m);
      const pp::layout_price p =
          pp::price(h, job, pp::parse_layout(std::string("tp=8,cp=2,pp=8,dp=8,schedule=") + schedule, "x"));
      CHECK(p.step() == doctest::Approx(pp::simulated_seconds(h, job, p)).epsilon(0.035));
    }
}

TEST_CASE("slow ranks and jitter lengthen a simulated step, more so with more replicas") {
  const pp::hardware h = pp::hardware_called("h100", "x");
  const pp::training_job job = large_job(512);
  const pp::training_layout l = pp::parse_layout("tp=8,cp=2,pp=8,dp=8,schedule=interleaved:2", "x");
  const double even = pp::disturbed_seconds(h, job, l, {}, 1);
  const double jittered = pp::disturbed_seconds(h, job, l, {.jitter = 0.02}, 1);
  CHECK(pp::disturbed_seconds(h, job, l, {.jitter = 0.02}, 8) >= jittered);
  CHECK(jittered > even);
  CHECK(jittered < 1.02 * even * 1.001);
  CHECK(pp::disturbed_seconds(h, job, l, {.slow_rank = 1.1, .slow_at = 3}, 1) ==
        doctest::Approx(1.1 * even).epsilon(0.03));
  CHECK(pp::disturbed_seconds(h, job, l, {.jitter = 0.02, .seed = 7}, 4) ==
        pp::disturbed_seconds(h, job, l, {.jitter = 0.02, .seed = 7}, 4));
}
