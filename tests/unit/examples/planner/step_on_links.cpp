// program: plan
#include "plan_llama/planner/step_on_links.hpp"

#include <doctest/doctest.h>

#include <string>

#include "cases.hpp"
#include "plan_llama/planner/hardware_json.hpp"

namespace {

pp::training_job job_on_links(std::int64_t batch) { return llama_job("llama-3-70b", batch); }

/// H100 machines on which `by` accelerators share a link between nodes.
pp::hardware sharing(std::int64_t by) {
  pp::hardware h = h100;
  h.levels.back().shared_by = by;
  return h;
}

double on_links(const pp::hardware& h, const pp::training_job& job, const std::string& text,
                const pp::disturbance& d = {}, std::int64_t replicas = 1) {
  return pp::step_on_links(h, job, priced(h, job, text), d, replicas);
}

}  // namespace

TEST_CASE("neighbours share links, separately in each direction, with the traffic on them") {
  pp::hardware h = pp::hardware_called("cpu", "x");
  REQUIRE(h.levels.size() == 1);
  h.levels[0].shared_by = 2;
  // Four stages as neighbours: 0 and 1 have a link, and 2 and 3.
  pp::link_loads inside(h, layout_of("pp=4,dp=2,order=tp-cp-pp-dp"));
  inside.add(0, 0, 1, 1);
  CHECK(inside.slowing(0, 0, 1, 1) == 1);  // no other traffic
  inside.add(0, 1, 2, 1);
  CHECK(inside.slowing(0, 0, 1, 1) == 2);
  CHECK(inside.slowing(0, 1, 2, 1) == 2);
  inside.add(0, 3, 2, 0.25);
  CHECK(inside.slowing(0, 1, 2, 1) == 2);  // the inbound link of 2 has less bandwidth than the outbound one of 1
  CHECK(inside.slowing(0, 3, 2, 0.25) == 1 + 0.25 * (1.25 - 0.25));
  inside.add(0, 0, 1, -1);
  CHECK(inside.slowing(0, 1, 2, 1) == doctest::Approx(1.25));
  // With replicas as neighbours, both ranks of a link belong to one stage and send the same.
  pp::link_loads outside(h, layout_of("pp=4,dp=2"));
  outside.add(0, 0, 1, 1);
  CHECK(outside.slowing(0, 0, 1, 1) == 2);
  outside.add(0, 1, 2, 1);
  CHECK(outside.slowing(0, 0, 1, 1) == 2);  // other stages' links
  CHECK(pp::hardware_text(pp::parse_hardware(pp::hardware_text(h), "x")) == pp::hardware_text(h));
  CHECK_THROWS_WITH(pp::parse_hardware(R"({"like": "cpu", "name": "x", "levels": [{"name": "l", "ranks": 0,
      "bandwidth": 1e9, "latency": 0, "shared_by": 0}]})",
                                       "x"),
                    "x: levels[0].shared_by is 0; legal is 1 or more");
}

TEST_CASE("a step without collectives between stages is the simulated schedule") {
  const pp::training_job job = job_on_links(16);
  for (const char* schedule : {"gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_v"}) {
    CAPTURE(schedule);
    const pp::layout_price p = priced(h100, job, std::string("tp=8,pp=4,zero=0,schedule=") + schedule);
    pp::step_costing step = pp::cost_schedule(h100, job, p.layout);
    step.costs.link = pp::message_seconds(
        h100, p.layout.pp_axis(), job.program.activation_bytes() * 8192 * static_cast<double>(job.model.hidden) / 8);
    const double on_links = pp::step_on_links(h100, job, p) - p.seconds.optimizer;
    const double alone = plait::simulate(step.schedule, step.costs).makespan;
    CHECK(on_links > (1 - 1e-9) * alone);
    CHECK(on_links < 1.001 * alone);  // a stage can send both ways at once
    if (std::string(schedule) == "gpipe") CHECK(on_links == doctest::Approx(alone).epsilon(1e-9));
  }
}

TEST_CASE("exposed collectives cost their whole time, and those during passes a part") {
  pp::training_job job = job_on_links(64);
  for (const char* zero : {"0", "1", "2"}) {
    CAPTURE(zero);
    const std::string text = std::string("tp=8,dp=4,zero=") + zero;
    job.program.overlaps_data = false;
    pp::hardware h = h100;
    h.straggling = 0;
    const pp::layout_price apart = priced(h, job, text);
    const double whole = pp::step_on_links(h, job, apart);
    CHECK(whole == doctest::Approx(apart.step()).epsilon(0.01));
    job.program.overlaps_data = true;
    const pp::layout_price beside = priced(h, job, text);
    CHECK(pp::step_on_links(h, job, beside) < whole);
    CHECK(pp::step_on_links(h, job, beside) == doctest::Approx(beside.step()).epsilon(0.02));
  }
}

TEST_CASE("a pass that only waits for its last parameters no longer slows their gather") {
  const pp::training_job job = job_on_links(64);
  pp::hardware h = h100;
  h.straggling = 0;
  double before = 0;
  for (const double hidden : {0.9, 0.5, 0.1, 0.05, 0.0}) {
    CAPTURE(hidden);
    h.data_hidden = hidden;
    const pp::layout_price p = priced(h, job, "tp=8,dp=4,zero=1");
    const double on_links = pp::step_on_links(h, job, p);
    CHECK(on_links == doctest::Approx(p.step()).epsilon(0.05));
    CHECK(on_links >= before);  // a machine that hides less takes longer
    before = on_links;
  }
}

TEST_CASE("one stage gathers and reduces its embedding and its head") {
  const pp::training_job job = job_on_links(64);
  const pp::training_layout l = layout_of("tp=8,dp=4,zero=1");
  const double all = pp::collective_seconds(h100, pp::place_group(h100, l.dp_axis()), plait::collective::all_gather,
                                            job.model.parameters() / 8 * job.program.weight_bytes);
  CHECK(pp::detail::work_on_links(h100, job, l).gather[0].seconds == doctest::Approx(all).epsilon(1e-3));
}

TEST_CASE("ranks that share a link slow each other when they overlap, less than if all always did") {
  const pp::training_job job = job_on_links(64);
  for (const char* text : {"tp=8,pp=4,dp=8,schedule=interleaved:5", "tp=2,pp=8,dp=8,order=tp-cp-pp-dp,schedule=1f1b"}) {
    CAPTURE(text);
    const double own = on_links(sharing(1), job, text), two = on_links(sharing(2), job, text),
                 eight = on_links(sharing(8), job, text);
    CHECK(two > own);
    CHECK(eight > two);
    CHECK(eight < 8 * own);
    // The formulas include links that all ranks use at once.
    const double formula = priced(sharing(8), job, text).step() - priced(sharing(1), job, text).step();
    CHECK(formula > 0);
  }
  // Neighbouring stages that share links sometimes compete; with neighbouring replicas they always do.
  pp::hardware flat = sharing(1);
  flat.levels = {flat.levels.back()};
  flat.levels[0].ranks = 0;
  pp::hardware shared = flat;
  shared.levels[0].shared_by = 2;
  const auto slower = [&](const char* text) { return on_links(shared, job, text) / on_links(flat, job, text); };
  CHECK(slower("pp=8,dp=8,zero=0,order=tp-cp-pp-dp,schedule=gpipe") > 1);
  CHECK(slower("pp=8,dp=8,zero=0,order=tp-cp-pp-dp,schedule=gpipe") <
        slower("pp=8,dp=8,zero=0,order=tp-cp-dp-pp,schedule=gpipe"));
}

TEST_CASE("messages of a pipeline and collectives on the same links slow each other") {
  pp::training_job job = job_on_links(64);
  const char* text = "tp=8,pp=4,dp=8,zero=1,schedule=1f1b";
  pp::hardware h = sharing(1);
  h.levels.back().bandwidth /= 20;  // long enough to compete
  h.data_hidden = 0;
  const pp::layout_price p = priced(h, job, text);
  const double both = pp::step_on_links(h, job, p);
  // The same step with equally long messages over another level, which nothing else uses.
  pp::hardware apart = h;
  pp::network_level outer = apart.levels.back();
  outer.message_latency = pp::message_seconds(
      h, p.layout.pp_axis(), job.program.activation_bytes() * 8192 * static_cast<double>(job.model.hidden) / 8);
  outer.message_bandwidth = 1e30;
  apart.levels.back() = outer;  // latency does not occupy the link
  const double separate = pp::step_on_links(apart, job, priced(apart, job, text));
  CHECK(both > 1.001 * separate);
}

TEST_CASE("a hybrid's sums over its copies follow its reductions, on a separate level") {
  pp::training_job job = job_on_links(64);
  job.program.overlaps_data = false;
  pp::hardware h = sharing(1);
  h.straggling = 0;
  for (const char* text : {"tp=2,dp=16,zero=1,replicate=dp:4", "tp=2,cp=2,dp=8,zero=2,replicate=cp",
                           "tp=2,cp=2,dp=8,zero=2,replicate=dp"}) {
    CAPTURE(text);
    CHECK(on_links(h, job, text) == doctest::Approx(priced(h, job, text).step()).epsilon(0.01));
  }
  // The copies are on other nodes: sharing links between nodes slows down copies, not pieces.
  const double own = on_links(h, job, "tp=2,dp=16,zero=1,replicate=dp:4");
  h.levels.back().shared_by = 4;
  CHECK(on_links(h, job, "tp=2,dp=16,zero=1,replicate=dp:4") > own);
  CHECK(on_links(h, job, "tp=2,dp=4,zero=1") == on_links(sharing(1), job, "tp=2,dp=4,zero=1"));
}

TEST_CASE("sharded parameters are gathered for every pass and reduced after it, or during passes with overlap") {
  pp::training_job job = llama_job("llama-3-8b", 64);
  pp::hardware h = sharing(1);
  h.straggling = 0;
  for (const char* text : {"dp=16,zero=3", "dp=32,zero=3,recompute=full", "tp=2,dp=16,zero=3",
                           "dp=32,zero=3,replicate=dp:4", "dp=16,microbatch=2,zero=3,recompute=full"})
    for (const bool each : {false, true}) {
      CAPTURE(text);
      CAPTURE(each);
      job.program.reduces_each_microbatch = each;
      job.program.overlaps_data = false;
      const pp::layout_price apart = priced(h, job, text);
      const double whole = pp::step_on_links(h, job, apart);
      // The formula gathers the last layer again between a forward and its backward pass.
      CHECK(whole == doctest::Approx(apart.step()).epsilon(0.02));
      job.program.overlaps_data = true;
      const pp::layout_price beside = priced(h, job, text);
      CHECK(pp::step_on_links(h, job, beside) < whole);
      CHECK(pp::step_on_links(h, job, beside) == doctest::Approx(beside.step()).epsilon(0.02));
    }
}

TEST_CASE("gathers on slow and shared links delay passes, and reductions on the same links slow them") {
  pp::training_job job = llama_job("llama-3-8b", 32);
  const char* text = "dp=32,zero=3";
  CHECK(on_links(sharing(8), job, text) > on_links(sharing(1), job, text));
  CHECK(on_links(sharing(8), job, text) < 8 * on_links(sharing(1), job, text));
  pp::hardware slow = sharing(1);
  slow.levels.back().bandwidth /= 50;  // links determine the time, and are never idle
  slow.levels.back().latency = slow.levels.back().launch = slow.levels.back().fill = 0;
  const double gathers = pp::collective_seconds(slow, pp::place_group(slow, {32, 1}), plait::collective::all_gather,
                                                2 * job.model.parameters());
  job.program.reduced_bytes = 2;
  const double step = on_links(slow, job, text);
  CHECK(step > 2.8 * gathers);  // two gathers and a reduction, except for the layer at the turn
  CHECK(step < 3.1 * gathers);
  pp::hardware half = slow;
  half.data_hidden = 0.5;  // during a pass collectives have half of the links
  CHECK(on_links(half, job, text) > step);
  job.program.reduced_bytes = 4;
  CHECK(on_links(slow, job, text) > step + 0.9 * gathers);
  // A head that is tied to the embedding is gathered separately, and reduced with it.
  job.model.tied = true;
  job.program.reduced_bytes = 2;
  CHECK(on_links(slow, job, text) < step);
}

TEST_CASE("late gathers delay backward passes, and broadcasts of pieces run one by one") {
  pp::training_job job = llama_job("llama-3-8b", 64);
  pp::hardware h = sharing(1);
  h.straggling = 0;
  const double early = on_links(h, job, "dp=32,zero=3");
  job.program.gathers_late = true;
  CHECK(on_links(h, job, "dp=32,zero=3") > early);
  CHECK(on_links(h, job, "dp=32,zero=3") == doctest::Approx(priced(h, job, "dp=32,zero=3").step()).epsilon(0.02));
  job.program.reduces_whole = job.program.broadcasts_slices = true;
  // Whole sums cross machines, while pieces are summed within one.
  const pp::training_layout hybrid = layout_of("tp=2,pp=2,dp=16,zero=1,replicate=dp:4");
  CHECK(pp::detail::work_on_links(h, job, hybrid).reduce.front().level == 1);
  job.program.reduces_whole = false;
  CHECK(pp::detail::work_on_links(h, job, hybrid).reduce.front().level == 0);
  job.program.reduces_whole = true;
  job.program.overlaps_data = false;
  for (const char* text : {"dp=64,zero=1", "dp=64,zero=1,replicate=dp:8"}) {
    CAPTURE(text);
    CHECK(on_links(h, job, text) == doctest::Approx(priced(h, job, text).step()).epsilon(0.01));
  }
}

TEST_CASE("slow ranks and jitter lengthen a step on links, more so with more replicas") {
  const pp::hardware h = sharing(2);
  const pp::training_job job = job_on_links(128);
  for (const char* text : {"tp=8,pp=4,dp=8,schedule=interleaved:2", "dp=32,zero=3"}) {
    CAPTURE(text);
    const std::int64_t at = std::string(text).find("pp") == std::string::npos ? 0 : 3;
    const double even = on_links(h, job, text), one = on_links(h, job, text, {.jitter = 0.02}, 1);
    CHECK(one > even);
    CHECK(on_links(h, job, text, {.jitter = 0.02}, 8) >= one);
    CHECK(on_links(h, job, text, {.slow_rank = 1.1, .slow_at = at}, 8) == doctest::Approx(1.1 * even).epsilon(0.03));
  }
}
