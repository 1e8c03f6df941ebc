// program: plan
#include "plan_llama/planner/calibrate.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "cases.hpp"
#include "plan_llama/planner/hardware_json.hpp"
#include "plan_llama/planner/simulated_step.hpp"

namespace {

using plait::collective;

/// A machine whose numbers a calibration must find: eight ranks on two cores.
pp::hardware made_up() {
  pp::hardware h;
  h.name = "made up";
  h.peak = {8e10, 2e11, 0};
  h.product_share = {1, 1, 0};
  h.product_depth = 24, h.product_area = 900, h.adding_depth = 60;
  h.memory = 4e9, h.memory_bandwidth = 1.2e10, h.memory_share = 1;
  h.launch = 3e-6;
  h.attention_share = 0.3, h.attention_block = 100, h.activation = 5e-10;
  h.cores = 2, h.turn = 2e-3, h.data_hidden = 0.6;
  h.levels = {{.name = "links",
               .bandwidth = 3e9,
               .all_reduce_share = 0.8,
               .latency = 4e-6,
               .launch = 9e-6,
               .fill = 5e-5,
               .message_latency = 3e-5,
               .message_bandwidth = 2e10}};
  return h;
}

/// The times that a calibration measures on a described machine, each changed by `noise` up or down.
pp::measurements measured_on(const pp::hardware& h, double noise) {
  pp::measurements all{.name = h.name, .memory = h.memory, .cores = h.cores};
  double sign = 1;
  const auto off = [&](double seconds) { return seconds * (1 + noise * (sign = -sign)); };
  for (const pp::number_kind kind : {pp::number_kind::f32, pp::number_kind::bf16})
    for (const double m : {16.0, 64.0, 512.0})
      for (const double n : {32.0, 256.0, 1024.0})
        for (const double k : {16.0, 128.0, 1024.0})
          for (const bool adds : {false, true})
            all.products.push_back({kind, m, n, k, off(pp::product_seconds(h, kind, m, n, k, adds)), adds});
  for (const double seq : {64.0, 128.0, 256.0, 512.0})
    all.attention.push_back({1e8, off(1e8 * (1 + h.attention_block / seq) / (h.peak[0] * h.attention_share)), seq});
  for (const double values : {1e4, 1e5, 1e6, 1e7})
    for (const bool backward : {false, true})
      all.activations.push_back({values * (backward ? 2 : 1), off(values * h.activation * (backward ? 2 : 1))});
  for (double bytes = 1e4; bytes < 1e8; bytes *= 4)
    for (const double launches : {1.0, 5.0})
      all.kernels.push_back({bytes, off(pp::memory_seconds(h, bytes, launches)), launches});
  for (const collective kind :
       {collective::all_reduce, collective::all_gather, collective::reduce_scatter, collective::send})
    for (const std::int64_t ranks : {2, 4, 8})
      for (double bytes = 1 << 10; bytes <= 1 << 24; bytes *= 4) {
        pp::measured_collective c{kind, ranks, bytes, 0};
        c.seconds = off(pp::measured_seconds(h, c));
        all.collectives.push_back(c);
      }
  // 1F1B with 4 stages on 2 cores. The time is all the work on both cores, then one forward and one backward pass of
  // the two end stages with an idle core. Then 2 (p - 1) + m - p messages follow one after the other.
  for (const double pass : {1e-3, 8e-3})
    all.pipelines.push_back({4, 8, off(4 * 8 * 2 * pass / 2 + 2 * pass / 2 + 10 * h.turn), 4 * 8 * 2 * pass / 2});
  for (const double alone : {1e-3, 1e-2}) {
    const double computing = alone / 2;
    all.overlaps.push_back({alone, computing, alone + (1 - h.data_hidden) * computing});
  }
  return all;
}

double relative_error(double a, double b) { return std::abs(a / b - 1); }

}  // namespace

TEST_CASE("a calibration finds the machine that made-up measurements come from") {
  const pp::hardware truth = made_up(), found = pp::calibrated(measured_on(truth, 0));
  CHECK(relative_error(found.peak[0], truth.peak[0]) < 0.02);
  CHECK(relative_error(found.peak[1], truth.peak[1]) < 0.02);
  CHECK(relative_error(found.product_depth, truth.product_depth) < 0.05);
  CHECK(relative_error(found.product_area, truth.product_area) < 0.05);
  CHECK(relative_error(found.memory_bandwidth, truth.memory_bandwidth) < 0.02);
  CHECK(relative_error(found.launch, truth.launch) < 0.02);
  CHECK(relative_error(found.adding_depth, truth.adding_depth) < 0.05);
  CHECK(relative_error(found.attention_share, truth.attention_share) < 0.02);
  CHECK(relative_error(found.attention_block, truth.attention_block) < 0.02);
  CHECK(relative_error(found.activation, truth.activation) < 0.02);
  const pp::network_level &link = found.levels.at(0), &meant = truth.levels[0];
  CHECK(relative_error(link.bandwidth, meant.bandwidth) < 0.02);
  CHECK(relative_error(link.all_reduce_share, meant.all_reduce_share) < 0.02);
  CHECK(relative_error(link.latency, meant.latency) < 0.05);
  CHECK(relative_error(link.launch, meant.launch) < 0.05);
  CHECK(relative_error(link.fill, meant.fill) < 0.05);
  CHECK(relative_error(link.message_latency, meant.message_latency) < 0.02);
  CHECK(relative_error(link.message_bandwidth, meant.message_bandwidth) < 0.02);
  CHECK(relative_error(found.turn, truth.turn) < 0.02);
  CHECK(relative_error(found.data_hidden, truth.data_hidden) < 0.02);
  // The result is a valid description.
  const pp::hardware read = pp::parse_hardware(pp::hardware_text(found), "x");
  CHECK(read.cores == 2);
  CHECK(read.levels[0].latency == link.latency);
  CHECK(read.levels[0].message_latency == link.message_latency);
  CHECK(read.levels[0].message_bandwidth == link.message_bandwidth);
  CHECK(read.turn == found.turn);
  CHECK(read.adding_depth == found.adding_depth);
  CHECK(read.attention_block == found.attention_block);
  CHECK(read.activation == found.activation);
  CHECK(pp::hardware_text(pp::hardware_called("cpu", "x")).find("cores") == std::string::npos);
}

TEST_CASE("measurements with errors of a tenth are fitted within a tenth on average") {
  const pp::hardware truth = made_up();
  const pp::measurements all = measured_on(truth, 0.1);
  const pp::hardware found = pp::calibrated(all);
  double sum = 0;
  for (const pp::measured_product& p : all.products)
    sum += relative_error(pp::product_seconds(found, p.kind, p.m, p.n, p.k, p.adds), p.seconds);
  CHECK(sum / static_cast<double>(all.products.size()) < 0.12);
  sum = 0;
  for (const pp::measured_collective& c : all.collectives)
    sum += relative_error(pp::measured_seconds(found, c), c.seconds);
  CHECK(sum / static_cast<double>(all.collectives.size()) < 0.12);
}

TEST_CASE("times shorter than their noise do not affect the fit of links") {
  const pp::hardware truth = made_up();
  pp::measurements all = measured_on(truth, 0);
  for (pp::measured_collective& c : all.collectives)
    if (c.bytes < 1e4) c.noise = 100 * c.seconds, c.seconds = 0;
  const pp::network_level link = pp::calibrated(all).levels.at(0);
  CHECK(relative_error(link.bandwidth, truth.levels[0].bandwidth) < 0.05);
  CHECK(relative_error(link.launch, truth.levels[0].launch) < 0.3);
  // A machine whose ranks do not share cores measures no such pipeline, and no message may take longer.
  all.pipelines.clear();
  CHECK(pp::calibrated(all).turn == 0);
  // Overlaps that hide nothing, or less than the noise.
  all.overlaps = {{1e-3, 5e-4, 1.49e-3}, {1e-3, 5e-4, 1.7e-3}};
  CHECK(pp::calibrated(all).data_hidden == 0);
  // Overlaps that took no longer than their longest part, as measured on a busy machine; a description has less than 1.
  all.overlaps = {{1e-3, 5e-4, 1e-3}, {1e-3, 5e-4, 9e-4}};
  CHECK(pp::calibrated(all).data_hidden == 0.99);
  all.overlaps.clear();
  CHECK(pp::calibrated(all).data_hidden == 0);
}

TEST_CASE("a pipeline on fewer cores than ranks waits for cores, and for work at its ends") {
  pp::training_layout l;
  l.pp = 4;
  CHECK(pp::messages_in_turn(l, 8) == 2 * 3 + 4);
  CHECK(pp::shared_cores_seconds(l, 8, 2, 1, 3e-3, 0) == doctest::Approx(3e-3 / 2));
  CHECK(pp::shared_cores_seconds(l, 8, 4, 1, 3e-3, 0) == doctest::Approx((3 + 2 + 1) / 4.0 * 3e-3));
  CHECK(pp::shared_cores_seconds(l, 8, 2, 2, 3e-3, 1e-3) == doctest::Approx(10e-3));  // all cores have work
  l.schedule = pp::schedule_kind::interleaved, l.chunks = 2;
  CHECK(pp::shared_cores_seconds(l, 8, 2, 1, 3e-3, 0) == doctest::Approx(3e-3 / 4));
  l.pp = 1, l.chunks = 1;
  CHECK(pp::shared_cores_seconds(l, 8, 2, 1, 3e-3, 1e-3) == 0);
}

TEST_CASE("the median of an even number of values is the larger of the two in the middle") {
  CHECK(plait::median({3, 1, 2}) == 2);
  CHECK(plait::median({4, 1, 3, 2}) == 3);
  CHECK_THROWS_WITH_AS(plait::median({}), "median: there are no values; legal is one or more", plait::error);
}

TEST_CASE("a calibration that lacks a kind of measurement, or has one of zero time, is refused by name") {
  pp::measurements all = measured_on(made_up(), 0);
  all.kernels.clear();
  CHECK_THROWS_WITH(pp::calibrated(all), "calibration: no kernel was measured; legal is one or more");
  all = measured_on(made_up(), 0);
  all.attention[1].seconds = 0;
  CHECK_THROWS_WITH(pp::calibrated(all), "calibration: attention took 0 seconds; legal is a positive number");
  all = measured_on(made_up(), 0);
  all.overlaps[0].computing = 0;
  CHECK_THROWS_WITH(pp::calibrated(all),
                    "calibration: what a collective was started before took 0 seconds; legal is a positive number");
  CHECK_THROWS_WITH(pp::parse_hardware(R"({"like": "cpu", "name": "x", "cores": -1})", "x"),
                    "x: cores is -1; legal is 1 or more, or 0 where each rank has its own");
}

TEST_CASE("products that add, blocks that a mask cuts and activations take the times of the description") {
  const pp::hardware full = made_up();
  pp::hardware none = full;
  none.adding_depth = none.attention_block = none.activation = 0;
  CHECK(pp::product_seconds(full, pp::number_kind::f32, 64, 64, 64) ==
        pp::product_seconds(none, pp::number_kind::f32, 64, 64, 64));
  CHECK(pp::product_seconds(full, pp::number_kind::f32, 64, 64, 64, true) - full.launch ==
        doctest::Approx((64 + 24 + 60.0) / (64 + 24) *
                        (pp::product_seconds(none, pp::number_kind::f32, 64, 64, 64, true) - none.launch)));
  pp::training_job job = llama_job("tiny", 4, 128);
  job.program.products = pp::number_kind::f32;
  const auto once = [&](const pp::hardware& h) { return pp::block_time(h, job, {.microbatch = 4}); };
  CHECK(once(full).forward.attention - full.launch ==
        doctest::Approx((1 + 100.0 / 128) * (once(none).forward.attention - none.launch)));
  const double values = 512 * static_cast<double>(job.model.ffn);
  const double moved = pp::memory_seconds(none, 3 * 4 * values, 0);
  REQUIRE(values * full.activation > 0);
  CHECK(once(full).forward.memory - once(none).forward.memory ==
        doctest::Approx(std::max(0.0, values * full.activation - moved)));
  CHECK(once(full).weight.products > once(none).weight.products);
  CHECK(once(full).input.products == once(none).input.products);
}

TEST_CASE("with shared cores, a step takes at least the busy seconds of all ranks over the cores") {
  pp::hardware shared = made_up(), apart_ = shared;
  apart_.cores = 0;
  pp::training_job job = llama_job("tiny", 32, 128);
  job.program.products = pp::number_kind::f32;
  pp::training_layout l;
  l.dp = 8;
  const pp::layout_price own = pp::price(apart_, job, l), eight = pp::price(shared, job, l);
  CHECK(own.seconds.turns == 0);
  CHECK(eight.step() == doctest::Approx(4 * (own.step() - own.seconds.straggling)));  // equal ranks, two cores
  l.dp = 2;
  CHECK(pp::price(shared, job, l).step() == pp::price(apart_, job, l).step());
  // Other ranks use the bubble of a pipeline, so it costs no extra time.
  l.dp = 1, l.pp = 4;
  shared.turn = 0;
  const pp::layout_price bubble = pp::price(apart_, job, l), filled = pp::price(shared, job, l);
  REQUIRE(bubble.seconds.bubble > 0);
  CHECK(filled.step() < 2 * bubble.step());
  CHECK(filled.step() > bubble.step());
  CHECK(pp::simulated_seconds(shared, job, filled) >= filled.step());
  // Each message that a pass waits for also waits for a core.
  shared.turn = 1e-3;
  CHECK(pp::price(shared, job, l).step() ==
        doctest::Approx(filled.step() + 1e-3 * pp::messages_in_turn(l, l.microbatches(job))));
}
