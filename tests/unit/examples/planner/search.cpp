// program: plan
#include "plan_llama/planner/search.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "plait/core/error.hpp"
#include "plan_llama/planner/explain.hpp"
#include "plan_llama/planner/ranking.hpp"

TEST_CASE("the best layout is the best of all that are priced one by one") {
  const pp::training_job job = llama_job("llama-3-70b", 128);
  pp::search_options options;
  options.orders = pp::axis_orders::pipeline_outside;
  options.context = {pp::context_kind::ring};
  options.schedules = {pp::schedule_kind::one_f_one_b, pp::schedule_kind::zb_h1};
  options.replicate = {pp::replication::none};
  options.memory_share = 1;
  options.offload = {{}};
  const pp::search_result found = pp::search_layouts(h100, job, 64, options);
  double best = std::numeric_limits<double>::infinity(), smallest = best;
  std::vector<std::pair<double, double>> fitting;  // bytes and seconds
  for (std::int64_t tp = 1; tp <= 64; ++tp)
    for (std::int64_t cp = 1; tp * cp <= 64; ++cp)
      for (std::int64_t ranks = 1; tp * cp * ranks <= 64; ++ranks)
        for (const auto schedule : options.schedules)
          for (std::int64_t b = 1; b <= 64; b *= 2)
            for (int zero = 0; zero < 4; ++zero)
              for (int mode = 0; mode < plait::recompute_modes; ++mode) {
                if (64 % (tp * cp * ranks) != 0 || (ranks == 1 && schedule != options.schedules[0])) continue;
                pp::training_layout l;
                l.tp = tp, l.cp = cp, l.pp = ranks, l.dp = 64 / (tp * cp * ranks), l.microbatch = b,
                l.schedule = schedule;
                l.zero = static_cast<plait::zero_level>(zero);
                l.recompute = static_cast<plait::recompute>(mode);
                if (l.dp * l.cp == 1 && zero != 0) continue;
                if (!pp::why_illegal(l, job).empty()) continue;
                const pp::layout_price p = pp::price(h100, job, l);
                smallest = std::min(smallest, p.memory.total());
                if (!p.fits) continue;
                fitting.emplace_back(p.memory.total(), p.step());
                best = std::min(best, p.step());
              }
  REQUIRE(!found.best.empty());
  CHECK(found.best.front().step() == best);
  CHECK(found.smallest.memory.total() == smallest);
  CHECK(found.fitting == std::ssize(fitting));
  CHECK(found.front.back().step() == best);
  // The whole front, and the ten fastest.
  std::sort(fitting.begin(), fitting.end());
  std::vector<std::pair<double, double>> front, of_search;
  for (const auto& [bytes, seconds] : fitting)
    if (front.empty() || seconds < front.back().second) front.emplace_back(bytes, seconds);
  for (const pp::layout_price& p : found.front) of_search.emplace_back(p.memory.total(), p.step());
  CHECK(of_search == front);
  std::vector<double> seconds, fastest;
  for (const auto& [bytes, s] : fitting) seconds.push_back(s);
  std::sort(seconds.begin(), seconds.end());
  seconds.resize(options.most);
  for (const pp::layout_price& p : found.best) fastest.push_back(p.step());
  CHECK(fastest == seconds);
}

TEST_CASE("a search has all hybrids that fit, and the best is the best of those priced one by one") {
  const pp::training_job job = llama_job("llama-3-8b", 128);
  pp::search_options options;
  options.tp = {1}, options.pp = {1}, options.microbatch = {1}, options.memory_share = 1, options.offload = {{}};
  options.context = {pp::context_kind::ring};
  const pp::search_result found = pp::search_layouts(h100, job, 64, options);
  options.replicate = {pp::replication::none};
  const pp::search_result plain = pp::search_layouts(h100, job, 64, options);
  double best = plain.best.front().step();
  std::int64_t fitting = plain.fitting;
  for (std::int64_t cp = 1; cp <= 64; cp *= 2)
    for (int zero = 1; zero < 4; ++zero)
      for (int mode = 0; mode < plait::recompute_modes; ++mode)
        for (std::int64_t copies = -1; copies <= 64; ++copies) {
          if (copies == 1 || copies == 64 / cp) continue;  // -1: all of cp, 0: all of dp
          pp::training_layout l;
          l.cp = cp, l.dp = 64 / cp, l.zero = static_cast<plait::zero_level>(zero);
          l.recompute = static_cast<plait::recompute>(mode);
          l.replicate = copies < 0    ? pp::replication::over_cp
                        : copies == 0 ? pp::replication::over_dp
                                      : pp::replication::over_part_of_dp;
          l.dp_copies = std::max<std::int64_t>(copies, 1);
          if (!pp::why_illegal(l, job).empty()) continue;
          const pp::layout_price p = pp::price(h100, job, l);
          if (!p.fits) continue;
          ++fitting;
          best = std::min(best, p.step());
        }
  CHECK(found.fitting == fitting);
  CHECK(fitting > plain.fitting);
  CHECK(found.best.front().step() == best);
  // If links between nodes are slow, parameters that each microbatch gathers are best sharded within a node.
  pp::hardware slow = h100;
  slow.levels.back().bandwidth /= 16;
  options.zero = {plait::zero_level::parameters};
  options.cp = {1};
  options.replicate = {};
  const pp::layout_price cut = pp::search_layouts(slow, job, 64, options).best.front();
  CHECK(cut.layout.replicate == pp::replication::over_part_of_dp);
  CHECK(cut.layout.dp_copies == 8);
  // If only a hybrid is allowed, the reason is the hybrid's.
  options.replicate = {pp::replication::over_cp};
  const pp::search_result none = pp::search_layouts(h100, job, 64, options);
  CHECK(none.legal == 0);
  CHECK(none.nearest.why == "replicate is cp, an axis of one rank; legal is none");
}

TEST_CASE("results of a search fit, are in order, and no result is better in both than one of the front") {
  const pp::training_job job = llama_job("llama-3-405b", 512);
  pp::search_options options;
  options.most = 25;
  const pp::search_result found = pp::search_layouts(h100, job, 1024, options);
  CHECK(found.best.size() == 25);
  CHECK(found.candidates >= found.legal);
  CHECK(found.legal > found.fitting);
  for (std::size_t i = 0; i < found.best.size(); ++i) {
    CHECK(found.best[i].memory.total() <= pp::usual_memory_share * h100.memory);
    CHECK(found.best[i].layout.ranks() == 1024);
    CHECK(pp::why_illegal(found.best[i].layout, job).empty());
    if (i > 0) CHECK(found.best[i - 1].step() <= found.best[i].step());
  }
  for (std::size_t i = 1; i < found.front.size(); ++i) {
    CHECK(found.front[i - 1].memory.total() < found.front[i].memory.total());
    CHECK(found.front[i - 1].step() > found.front[i].step());
  }
  // The layout of NVIDIA's engineers is no better in the model than the search's.
  pp::training_layout theirs = layout_of("tp=8,cp=2,pp=8,dp=8,schedule=interleaved:8");
  CHECK(pp::price(h100, job, theirs).step() >= found.best.front().step());
}

TEST_CASE("layouts that share a part of the search have the same values without sharing") {
  for (const char* program : {"plait", "llm-foundry", "internevo"}) {
    CAPTURE(program);
    pp::training_job job = llama_job("llama-3-8b", 128, 8192, program);
    job.program.reduced_bytes = 4;  // LLM Foundry packs more bytes than the others add
    pp::search_result found = pp::search_layouts(h100, job, 32, {.most = 1000});
    CHECK(found.best.size() == 1000);
    found.best.insert(found.best.end(), found.front.begin(), found.front.end());
    int cut = 0, differ = 0;
    for (const pp::layout_price& p : found.best) {
      const pp::layout_price alone = pp::price(h100, job, p.layout);
      if (p.step() != alone.step() || p.memory.total() != alone.memory.total()) ++differ;
      if (p.layout.zero >= plait::zero_level::gradients) ++cut;
    }
    CHECK(differ == 0);
    CHECK(cut > 0);
  }
}

TEST_CASE("only the requested extents are searched") {
  pp::search_options options;
  options.tp = {4};
  options.pp = {2, 4};
  options.microbatch = {1};
  options.recompute = {plait::recompute::full};
  for (const pp::layout_price& p : pp::search_layouts(h100, llama_job("llama-3-70b", 128), 64, options).best) {
    CHECK(p.layout.tp == 4);
    CHECK((p.layout.pp == 2 || p.layout.pp == 4));
    CHECK(p.layout.microbatch == 1);
    CHECK(p.layout.recompute == plait::recompute::full);
  }
}

TEST_CASE("the error for a model that cannot fit gives the excess and a remedy") {
  const pp::training_job job = llama_job("llama-3-405b", 64);
  const pp::search_options stays{.offload = {{}}};
  const pp::search_result found = pp::search_layouts(h100, job, 64, stays);
  CHECK(found.best.empty());
  const std::string why = pp::why_nothing(h100, job, 64, found, stays);
  CHECK(why.starts_with("no layout fits: the smallest, "));
  CHECK(why.find(" more than a H100 has; of that, ") != why.npos);
  CHECK(why.find("; 128 accelerators would do, as in ") != why.npos);
  const pp::training_job odd = llama_job("llama-3-405b", 7, 8191);
  const pp::search_result none = pp::search_layouts(h100, odd, 128);
  CHECK(none.legal == 0);
  CHECK(pp::why_nothing(h100, odd, 128, none).starts_with("no layout of 128 accelerators is legal: "));
  // A size without divisors is the reason why nothing can be sharded.
  const pp::training_job uncut = llama_job("llama-3-8b", 8, 262147);
  const std::string sizes =
      pp::why_nothing(h100, uncut, 4, pp::search_layouts(h100, uncut, 4, {.pp = {1}}), {.pp = {1}});
  CHECK(sizes.starts_with("no layout fits: the smallest, "));
  CHECK(
      sizes.ends_with("; seq is 262147, which has no divisor in common with the 4 accelerators, so that cp and tp "
                      "cannot cut it; the nearest that can be cut are 262144 and 262152"));
}

TEST_CASE("a search keeps a margin of memory, and reports the first layout without it") {
  const pp::training_job job = llama_job("llama-3-8b", 64, 4096);
  const auto search = [&](double share) { return pp::search_ranked(h100, job, 16, {.memory_share = share}); };
  const pp::ranked_search all = search(1);
  const double most = all.ranked.front().price.memory.total();
  CHECK(!all.fuller.has_value());
  const double share = 0.99 * most / h100.memory;
  const pp::ranked_search less = search(share);
  CHECK(less.found.within_share);
  CHECK(less.found.fitting == all.found.fitting);
  for (const pp::ranked_layout& r : less.ranked) CHECK(r.price.memory.total() <= share * h100.memory);
  REQUIRE(less.fuller.has_value());
  CHECK(less.fuller->price.memory.total() > share * h100.memory);
  CHECK(less.fuller->seconds < less.ranked.front().seconds);
  // If no layout keeps it, the result has those that fit, and reports this.
  const pp::ranked_search none = search(0.01);
  CHECK(!none.found.within_share);
  REQUIRE(!none.ranked.empty());
  CHECK(none.ranked.front().price.layout == none.found.front.back().layout);
  CHECK_THROWS_WITH_AS(search(0), "memory_share is 0; legal is a share above 0, at most 1", plait::error);
}

TEST_CASE("layouts are ranked with shared links simulated, and variants of a layout count as one") {
  // 10 Gbit/s for each GPU: messages that the formulas hide behind passes compete for the links.
  pp::hardware h = h100;
  for (double* speed : {&h.levels.back().bandwidth, &h.levels.back().message_bandwidth}) *speed = 1.25e9;
  const pp::training_job job = llama_job("llama-3-8b", 128);
  const pp::ranked_search s = pp::search_ranked(h, job, 32);
  REQUIRE(s.ranked.size() == 10);
  const pp::ranked_layout& first = s.ranked.front();
  CHECK(first.simulated);
  CHECK(first.seconds == pp::seconds_on_links(h, job, first.price));
  const pp::layout_price& by_formulas = s.found.best.front();
  CHECK(first.price.step() > by_formulas.step());
  CHECK(first.seconds < 0.9 * pp::seconds_on_links(h, job, by_formulas));
  std::int64_t variants = 0;
  for (std::size_t i = 0; i < s.ranked.size(); ++i) {
    variants += s.ranked[i].variants;
    CHECK(s.ranked[i].apart <= pp::variant_share);
    if (i > 0) CHECK(s.ranked[i - 1].seconds <= s.ranked[i].seconds);
    for (std::size_t k = 0; k < i; ++k) {
      pp::training_layout l = s.ranked[k].price.layout;
      const pp::training_layout& other = s.ranked[i].price.layout;
      l.zero = other.zero, l.replicate = other.replicate, l.dp_copies = other.dp_copies;
      const double a = s.ranked[i].price.step(), b = s.ranked[k].price.step();
      if (l == other) CHECK(std::max(a, b) > (1 + pp::variant_share) * std::min(a, b));
    }
  }
  CHECK(variants > 10);
  // The first place does not depend on the number of shown layouts.
  CHECK(pp::search_ranked(h, job, 32, {.most = 1}).ranked.front().price.layout == first.price.layout);
  // Layouts that take too long to simulate keep the order of the formulas.
  const pp::training_job large = llama_job("llama-3-8b", 4096);
  std::vector<pp::ranked_layout> long_ones;
  for (const char* text : {"pp=32,schedule=zb_h1", "pp=32"}) {
    const pp::layout_price p = pp::price(h, large, layout_of(text));
    long_ones.push_back({p, p.step()});
  }
  const std::vector<pp::ranked_layout> kept = pp::rank_on_links(h, large, long_ones, 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(!kept[i].simulated);
    CHECK(kept[i].seconds == long_ones[i].seconds);
    CHECK(kept[i].price.layout == long_ones[i].price.layout);
  }
}

TEST_CASE("a search for a program has only the schedules of that program") {
  pp::training_job job = llama_job("llama-3-8b", 64, 4096);
  using enum pp::schedule_kind;
  for (const char* program : {"megatron", "nemo", "nanotron", "llm-foundry"}) {
    CAPTURE(program);
    job.program = pp::software_called(program, "x");
    for (const pp::layout_price& p : pp::search_layouts(h100, job, 16, {.most = 1000}).best)
      CHECK((p.layout.pp == 1 || p.layout.schedule == one_f_one_b ||
             (p.layout.schedule == interleaved && job.program.name != "nanotron")));
  }
  CHECK(pp::search_layouts(h100, job, 16, {.pp = {4}}).nearest.why ==
        "pp is 4 and the program llm-foundry has no pipeline; legal is 1");
  job.program = pp::software_called("megatron", "x");
  CHECK_THROWS_WITH_AS(pp::search_layouts(h100, job, 16, {.schedules = {one_f_one_b, zb_h1}}),
                       "the program megatron lacks the schedule zb_h1; legal are 1f1b, interleaved", plait::error);
  for (const pp::software& known : pp::known_software())
    for (const pp::schedule_kind kind : pp::schedules_of(known)) CHECK(pp::why_lacking(known, {kind}).empty());
}

TEST_CASE("if no layout is valid, the error is that of the candidate that passed the most checks") {
  // Llama 3 70B has 64 heads: tp = 3 fails at the first check; all others lack a batch that dp divides.
  const pp::training_job odd = llama_job("llama-3-70b", 7);
  pp::search_options options;
  options.tp = {3, 1};
  options.cp = {1};
  options.pp = {1, 3};
  const pp::search_result none = pp::search_layouts(h100, odd, 96, options);
  CHECK(none.legal == 0);
  CHECK(none.nearest.passed > pp::refusal_of(layout_of("tp=3,dp=32"), odd).passed);
  CHECK(pp::why_nothing(h100, odd, 96, none, options) ==
        "no layout of 96 accelerators is legal: batch is 7 sequences and dp 96 ranks take microbatches of 1; the "
        "nearest legal batches are 96");
}

TEST_CASE("a search gives the reason if none of the requested extents or policies is a candidate") {
  const pp::training_job job = llama_job("llama-3-70b", 128);
  const auto why = [&](std::int64_t accelerators, const pp::search_options& options) {
    return pp::why_nothing(h100, job, accelerators, pp::search_layouts(h100, job, accelerators, options), options);
  };
  CHECK(why(64, {.tp = {3}}) ==
        "no layout of 64 accelerators is legal: tp = 3, cp = 1 and pp = 1 are 3 ranks, which must divide the 64; the "
        "nearest are 2 and 4");
  CHECK(why(96, {.pp = {96}}) ==
        "no layout of 96 accelerators is legal: pp is 96 with 1 chunks on a rank: 96 stages for 80 layers; use at most "
        "80 stages");
  CHECK(why(64, {.microbatch = {256}}) ==
        "no layout of 64 accelerators is legal: batch is 128 sequences and dp 64 ranks take microbatches of 256; the "
        "nearest legal batches are 16384");
  CHECK(why(64, {.pp = {4}, .zero = {plait::zero_level::parameters}})
            .starts_with("no layout of 64 accelerators is legal: zero is 3 and pp above 1"));
  CHECK(why(64, {.pp = {64}, .schedules = {pp::schedule_kind::interleaved}})
            .starts_with("no layout of 64 accelerators is legal: pp is 64 with 2 chunks on a rank: 128 stages for 80"));
}

TEST_CASE("if nothing is sharded, a search has the requested level that shards least") {
  const pp::training_job job = llama_job("llama-3-8b", 8);
  const pp::search_result found = pp::search_layouts(
      h100, job, 8,
      {.tp = {8}, .cp = {1}, .pp = {1}, .zero = {plait::zero_level::gradients, plait::zero_level::optimizer}});
  REQUIRE(found.legal > 0);
  for (const pp::layout_price& p : found.best) CHECK(p.layout.zero == plait::zero_level::optimizer);
}

TEST_CASE("the error for a layout that is too large gives the excess and a remedy") {
  const auto why = [&](const char* model, const char* text) {
    const pp::training_job job = llama_job(model, 128);
    return pp::why_too_large(h100, job, pp::price(h100, job, layout_of(text)));
  };
  const std::string one = why("llama-3-70b", "tp=8,dp=8");
  CHECK(
      one.starts_with("it does not fit: rank 0 of the pipeline needs 116.8 GB, 31.3 GB more than a H100 has; with "
                      "recompute=full it would, in 1."));
  CHECK(one.ends_with(" times its time"));
  CHECK(why("llama-3-70b", "dp=64,zero=0").find("; the fastest that fits is tp=") != std::string::npos);
  CHECK(why("llama-3-405b", "tp=8,dp=1").find("; no layout fits: the smallest, ") != std::string::npos);
}

TEST_CASE("a search keeps a requested order of pp and dp, number of chunks and whole sequences") {
  const pp::training_job job = llama_job("llama-3-70b", 128);
  pp::search_options options;
  options.orders = pp::axis_orders::pipeline_inside;
  options.tp = {2};
  options.cp = {1};
  options.pp = {4, 8};
  options.schedules = {pp::schedule_kind::interleaved};
  options.chunks = {2};
  options.sequence_parallel = false;
  const pp::search_result found = pp::search_layouts(h100, job, 64, options);
  REQUIRE(!found.best.empty());
  for (const pp::layout_price& p : found.best) {
    CHECK(p.layout.pipeline_inside);
    CHECK(p.layout.chunks == 2);
    CHECK(!p.layout.sequence_parallel);
  }
}

TEST_CASE("the rule of thumb is valid, fits, and is never better than the search") {
  for (const char* name : {"llama-3-8b", "llama-3-70b"}) {
    CAPTURE(name);
    const pp::training_job job = llama_job(name, 256);
    const auto thumb = pp::rule_of_thumb(h100, job, 256);
    REQUIRE(thumb.has_value());
    CHECK(thumb->fits);
    CHECK(thumb->layout.ranks() == 256);
    CHECK(pp::why_illegal(thumb->layout, job).empty());
    CHECK(thumb->step() >= pp::search_layouts(h100, job, 256, {.memory_share = 1}).best.front().step());
  }
  CHECK(pp::rule_of_thumb(h100, llama_job("llama-3-8b", 256), 256)->layout.tp == 1);
  CHECK(pp::rule_of_thumb(h100, llama_job("llama-3-70b", 256), 256)->layout.tp == 8);
  CHECK(!pp::rule_of_thumb(h100, llama_job("llama-3-405b", 64), 8).has_value());
}

TEST_CASE("alternatives give the cost of each change") {
  const pp::training_job job = llama_job("llama-3-405b", 512);
  const pp::layout_price best = pp::search_ranked(h100, job, 1024, {.offload = {{}}}).ranked.front().price;
  CHECK(pp::what_binds(best).find(" % of the step is computing; the largest loss is ") != std::string::npos);
  int slower = 0, others = 0;
  for (const pp::alternative& a : pp::alternatives(h100, job, best)) {
    CAPTURE(a.effect);
    // The best layout has no faster neighbour.
    CHECK(a.effect.find("faster") == std::string::npos);
    if (a.effect.find(" % slower") != std::string::npos)
      ++slower;
    else if (a.effect.starts_with("needs ") || a.effect.starts_with("is not legal: "))
      ++others;
  }
  CHECK(slower >= 3);
  CHECK(slower + others == static_cast<int>(pp::alternatives(h100, job, best).size()));
}
