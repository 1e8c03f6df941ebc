// program: plan
// Activations and optimizer state in host memory: the memory and waits of a layout, and when a search chooses
// offloading.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "cases.hpp"
#include "plait/core/error.hpp"
#include "plan_llama/planner/explain.hpp"
#include "plan_llama/planner/simulated_step.hpp"

TEST_CASE("offloaded activations leave two blocks on the device, and only their copies cost time") {
  const pp::training_job job = llama_job("llama-3-8b", 8, 8192);
  pp::hardware h = h100;
  h.straggling = 0;
  const pp::layout_price here = priced(h, job, "dp=8"), away = priced(h, job, "dp=8,offload=activations");
  const double block = pp::block_kept_bytes(job, here.layout, plait::recompute::none);
  CHECK(here.memory.activations == 32 * block);
  CHECK(away.memory.activations == 2 * block);
  CHECK(away.memory.host == 31 * block);  // the last block is used again before its copy would finish
  CHECK(here.memory.host == 0);
  CHECK(away.memory.state() == here.memory.state());
  CHECK(away.step() - here.step() == doctest::Approx(away.seconds.offload));
  // On an infinitely fast link nothing waits; on a slow one the step takes as long as its copies, both ways.
  h.host_bandwidth = 1e18;
  CHECK(priced(h, job, "dp=8,offload=activations").seconds.offload == doctest::Approx(0).epsilon(1e-9));
  h.host_bandwidth = 1e8;
  CHECK(priced(h, job, "dp=8,offload=activations").step() == doctest::Approx(2 * 31 * block / 1e8).epsilon(0.1));
  // More microbatches in flight need more host memory, and a pipeline's price includes the waits.
  const pp::training_job more = llama_job("llama-3-8b", 64, 8192);
  const pp::layout_price piped = priced(h, more, "pp=4,dp=2,offload=activations");
  CHECK(piped.memory.host > 20 * block);
  CHECK(pp::simulated_seconds(h, more, piped) > piped.seconds.offload);
}

TEST_CASE("an offloaded optimizer's state is on the host, and its update takes the link's time") {
  const pp::training_job job = llama_job("llama-3-8b", 8, 2048);
  pp::hardware h = h100;
  const pp::layout_price here = priced(h, job, "dp=8"), away = priced(h, job, "dp=8,offload=optimizer");
  CHECK(away.memory.optimizer == 0);
  CHECK(away.memory.host == here.memory.optimizer);
  CHECK(away.memory.activations == here.memory.activations);
  CHECK(away.seconds.offload == 0);
  const double link = 2 * here.memory.optimizer / h.host_bandwidth;
  CHECK(away.seconds.optimizer > link);
  CHECK(away.seconds.optimizer < link + here.seconds.optimizer);
  // It fits if the host has enough memory.
  CHECK(away.fits);
  h.host_memory = away.memory.host - 1;
  CHECK(!priced(h, job, "dp=8,offload=optimizer").fits);
}

TEST_CASE("offloading is refused where it has no price") {
  const pp::training_job job = llama_job("llama-3-8b", 8, 128);
  CHECK_THROWS_WITH_AS(pp::price(pp::hardware_called("cpu", "x"), job, layout_of("dp=8,offload=activations")),
                       "offload is activations and CPU has no host_bandwidth; legal is none, or a description that "
                       "gives host_bandwidth",
                       plait::error);
  CHECK_THROWS_WITH_AS(pp::search_layouts(pp::hardware_called("cpu", "x"), job, 8, {.offload = {{true, true}}}),
                       doctest::Contains("offload is both and CPU has no host_bandwidth"), plait::error);
  const auto why = [](pp::training_job of, const char* text) { return pp::why_illegal(layout_of(text), of); };
  CHECK(why(job, "pp=2,dp=4,schedule=automatic,offload=both") ==
        "offload of activations with schedule automatic is not priced; legal are offload none and optimizer");
  CHECK(why(llama_job("llama-3-8b", 1 << 20, 128), "offload=activations") ==
        plait::cat({"offload of activations is simulated, here of 1 ranks and 1048576 microbatches; legal are at most ",
                    plait::max_pipeline_ranks, " and ", plait::max_microbatches}));
  pp::training_job other = job;
  other.program = pp::software_called("megatron", "x");
  CHECK(why(other, "dp=8,offload=optimizer") ==
        "offload is for the program plait, and the program is megatron; legal is none");
  CHECK_THROWS_WITH_AS(pp::search_layouts(h100, other, 8, {.offload = {{.optimizer = true}}}),
                       "offload is for the program plait, and the program is megatron; legal is none", plait::error);
  other = job;
  other.model.experts = 8, other.model.chosen = 2;
  CHECK(why(other, "dp=8,offload=activations") ==
        "offload of activations in a model of experts is not priced; legal are offload none and optimizer");
}

TEST_CASE("a search offloads if nothing else fits, or if it is faster than recomputation") {
  const pp::hardware h = pp::hardware_called("gh200", "x");
  const auto best = [](const pp::hardware& machine, const pp::training_job& job, std::int64_t ranks,
                       const pp::search_options& options = {}) {
    const pp::ranked_search found = pp::search_ranked(machine, job, ranks, options);
    return found.ranked.empty() ? pp::layout_price{} : found.ranked.front().price;
  };
  const auto offloads = [](const pp::layout_price& p) { return std::string(pp::offload_text(p.layout)) != "none"; };
  const std::vector<pp::offload_choice> none{{}};
  // All fits, so nothing is offloaded.
  const pp::training_job small = llama_job("llama-3.2-1b", 64, 4096);
  CHECK(!offloads(best(h, small, 8)));
  // Only offloading fits.
  const pp::training_job large = llama_job("llama-3-8b", 8, 8192);
  CHECK(!best(h, large, 1, {.offload = none}).fits);
  const pp::layout_price alone = best(h, large, 1);
  CHECK(alone.fits);
  CHECK(alone.layout.offload_optimizer);
  CHECK(alone.step() == pp::price(h, large, alone.layout).step());
  CHECK(alone.memory.total() == pp::price(h, large, alone.layout).memory.total());
  // Offloading is faster than recomputation on a fast link, and not on a slow one.
  pp::search_options one{.tp = {1}, .cp = {1}, .pp = {1}, .microbatch = {1}};
  const pp::training_job lengthy = llama_job("llama-3-8b", 8, 32768);
  const pp::layout_price fast = best(h, lengthy, 8, one);
  one.offload = none;
  const pp::layout_price recomputed = best(h, lengthy, 8, one);
  CHECK(fast.layout.offload_activations);
  CHECK(recomputed.fits);
  CHECK(recomputed.layout.recompute != plait::recompute::none);
  CHECK(fast.step() < recomputed.step());
  one.offload.clear();
  pp::hardware slow = h;
  slow.host_bandwidth = 1e9;
  CHECK(!offloads(best(slow, lengthy, 8, one)));
  // The search tries only the requested offloading.
  one.offload = {{.activations = true}};
  for (const pp::layout_price& p : pp::search_layouts(h, lengthy, 8, one).best)
    CHECK(std::string(pp::offload_text(p.layout)) == "activations");
}
