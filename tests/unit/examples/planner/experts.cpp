// program: plan
#include <doctest/doctest.h>

#include <set>
#include <string>
#include <utility>

#include "cases.hpp"
#include "plan_llama/planner/search.hpp"
#include "plan_llama/planner/simulated_step.hpp"
#include "support/step_traffic.hpp"

namespace {

/// Qwen3-30B-A3B.
pp::training_job job_with_experts(std::int64_t batch) {
  pp::training_job job;
  job.model.vocab = 151936, job.model.hidden = 2048, job.model.layers = 48, job.model.heads = 32;
  job.model.kv_heads = 4, job.model.head_dim = 128, job.model.ffn = 768, job.model.experts = 128, job.model.chosen = 8;
  job.seq = 4096, job.global_batch = batch;
  return job;
}

}  // namespace

TEST_CASE("a model has the parameters of all experts, and multiplies with those that tokens choose") {
  const pp::transformer_shape m = job_with_experts(16).model;
  CHECK(m.parameters() == doctest::Approx(30.53e9).epsilon(1e-3));
  // 3.35 billion parameters are active; 0.31 billion of them are the embedding's, which is looked up.
  CHECK(m.operations_per_token(4096, 0) == doctest::Approx(6 * (3.35e9 - 151936 * 2048.0)).epsilon(0.01));
  pp::transformer_shape none = m;
  none.chosen = 0;
  CHECK_THROWS_WITH(pp::validate(none, "x"),
                    "x: experts is 128 and chosen 0; legal are 0 and 0, or some experts of which "
                    "a token passes 1 to all");
  pp::transformer_shape first = m;
  first.dense_layers = 2;
  CHECK_THROWS_WITH(pp::validate(first, "x"),
                    "x: dense_layers is 2 and first_ffn 0; legal are 0 and 0, or up to 48 layers in a model of experts "
                    "and the width of their MLPs");
  first.first_ffn = 6144;
  CHECK_NOTHROW(pp::validate(first, "x"));
  CHECK(first.parameters() - m.parameters() == 2 * (3 * 2048.0 * 6144 - 128 * 3 * 2048.0 * 768 - 128 * 2048.0));
  none.chosen = none.experts = 0, none.shared_ffn = 64;
  CHECK_THROWS_WITH(pp::validate(none, "x"),
                    "x: shared_ffn is 64 and experts 0; legal is 0 or more, and 0 without experts");
}

TEST_CASE("one expert for all tokens is an MLP with a router") {
  pp::training_job one = job_with_experts(16), dense = job_with_experts(16);
  one.model.experts = one.model.chosen = 1;
  dense.model.experts = dense.model.chosen = 0;
  const pp::training_layout l = layout_of("dp=8");
  const pp::part_time a = pp::block_time(h100, one, l), b = pp::block_time(h100, dense, l);
  CHECK(a.forward.products == doctest::Approx(b.forward.products).epsilon(0.05));
  CHECK(a.weight.products == doctest::Approx(b.weight.products).epsilon(0.05));
  CHECK(a.forward.products > b.forward.products);
  CHECK(a.forward.experts == 0);
  CHECK(pp::rank_parameters(one, l, 0) + pp::rank_experts(one, l, 0) ==
        doctest::Approx(pp::rank_parameters(dense, l, 0) + 48 * 2048.0));
}

TEST_CASE("first layers without experts cost the same as in a dense model, on the ranks that have them") {
  pp::training_job mixed = job_with_experts(128), all_first = mixed, dense = mixed;
  mixed.model.dense_layers = 5, mixed.model.first_ffn = 6144;
  all_first.model.dense_layers = 48, all_first.model.first_ffn = 6144;
  dense.model.experts = dense.model.chosen = 0, dense.model.ffn = 6144;
  for (const char* text : {"tp=2,dp=8,zero=1", "tp=2,pp=2,dp=4,zero=1", "dp=16,zero=3",
                           "pp=4,dp=4,zero=2,recompute=full", "pp=4,dp=4,schedule=interleaved:2,zero=1"}) {
    const pp::layout_price a = priced(h100, all_first, text), b = priced(h100, dense, text),
                           c = priced(h100, mixed, text);
    CHECK(a.step() == doctest::Approx(b.step()).epsilon(1e-12));
    CHECK(a.memory.total() == doctest::Approx(b.memory.total()).epsilon(1e-12));
    CHECK(pp::simulated_seconds(h100, all_first, a) ==
          doctest::Approx(pp::simulated_seconds(h100, dense, b)).epsilon(1e-12));
    double parameters = 0;
    for (std::int64_t r = 0; r < c.layout.pp; ++r)
      parameters += static_cast<double>(c.layout.tp) * pp::rank_parameters(mixed, c.layout, r) +
                    static_cast<double>(c.layout.expert_pieces()) * pp::rank_experts(mixed, c.layout, r);
    CHECK(parameters == doctest::Approx(mixed.model.parameters()).epsilon(1e-3));  // every rank of tp has the norms
  }
  // 12 layers on each of four ranks, and 3 on each of 16.
  const auto counts = [&](const char* text, std::int64_t rank) {
    const pp::block_counts n = pp::blocks_of_rank(layout_of(text), mixed.model, rank);
    return std::pair(n.alike, n.first);
  };
  CHECK(counts("pp=4", 0) == std::pair<std::int64_t, std::int64_t>(7, 5));
  CHECK(counts("pp=4", 1) == std::pair<std::int64_t, std::int64_t>(12, 0));
  CHECK(counts("pp=16", 1) == std::pair<std::int64_t, std::int64_t>(1, 2));
}

TEST_CASE("experts are sharded over ep, their tokens travel, and their gradients are summed over fewer ranks") {
  const pp::training_job job = job_with_experts(128);
  const pp::layout_price whole = priced(h100, job, "dp=16,ep=1"), eight = priced(h100, job, "dp=16,ep=8"),
                         far = priced(h100, job, "dp=16,ep=16");
  CHECK(whole.seconds.experts == 0);
  CHECK(eight.seconds.experts > 0);
  CHECK(far.seconds.experts > 2 * eight.seconds.experts);  // across nodes
  CHECK(pp::rank_experts(job, eight.layout, 0) == job.model.layer_experts() * 48 / 8);
  CHECK(eight.memory.weights < 0.2 * whole.memory.weights);
  // The optimizer's state of an expert is sharded over the ranks that have it. Over all ranks it is complete in both
  // cases.
  CHECK(eight.memory.optimizer == doctest::Approx(whole.memory.optimizer));
  CHECK(far.seconds.data < whole.seconds.data);
  CHECK(eight.seconds.total() == doctest::Approx(eight.step()));
  const pp::step_traffic sent = pp::rank_traffic(job, eight.layout, 0);
  // 8 microbatches, 4 times, bf16, 8 copies of a token; and before them the number of tokens for each expert.
  CHECK(sent.experts == 8.0 * 48 * (4 * 2 * 4096 * 8 * 2048 + 4 * 128));
  CHECK(pp::rank_traffic(job, whole.layout, 0).experts == 0);
}

TEST_CASE("tp shards experts with a separate axis like an MLP, and leaves folded ones whole") {
  pp::training_job job = job_with_experts(128), dense = job;
  dense.model.experts = dense.model.chosen = 0;
  const double attention_and_mlp = pp::block_time(h100, dense, layout_of("tp=2,dp=8")).forward.tensor;
  const auto block = [&] { return pp::block_time(h100, job, layout_of(job, "tp=2,dp=8,ep=8")); };
  const auto own = [&] { return pp::rank_experts(job, layout_of(job, "tp=2,dp=8,ep=8"), 0); };
  const double all = job.model.layer_experts() * 48;
  CHECK(block().forward.tensor == doctest::Approx(attention_and_mlp));
  CHECK(own() == all / 16);
  job.model.shared_ffn = 512;
  CHECK(block().forward.tensor == doctest::Approx(1.5 * attention_and_mlp));
  job.model.shared_ffn = 0, job.program.folds_experts = true;
  CHECK(block().forward.tensor == doctest::Approx(attention_and_mlp / 2));
  CHECK(own() == all / 8);
}

TEST_CASE("an axis of experts lies within a stage, and a search chooses it by the speed of its links") {
  const pp::training_job job = job_with_experts(128);
  const pp::training_layout l = layout_of(job, "tp=2,cp=2,pp=2,dp=8,ep=4,order=tp-cp-pp-dp");
  CHECK(l.ep_axis().extent == 4);
  CHECK(l.ep_axis().stride == 4);
  CHECK(l.pp_axis().stride == 16);
  CHECK(l.dp_axis().extent == 2);
  CHECK(l.dp_axis().stride == 32);
  CHECK(l.expert_copies() == 4);
  CHECK(l.cut_cp_axis().extent * l.cut_dp_axis().extent == l.pieces());
  pp::hardware fast = h100, slow = fast;
  for (pp::network_level& level : slow.levels) level.bandwidth = 1e8;
  const auto seconds = [&](const pp::hardware& h, const char* text) { return priced(h, job, text).seconds.experts; };
  CHECK(seconds(fast, "dp=16,ep=4") < seconds(fast, "dp=16,ep=8"));
  CHECK(2 * seconds(fast, "dp=16,ep=8") < seconds(fast, "dp=16,ep=16"));
  const auto first = [&](pp::hardware h) {
    h.memory = 1e12;  // so that memory does not matter
    pp::search_options how;
    how.tp = how.cp = how.pp = how.microbatch = {1}, how.zero = {plait::zero_level::optimizer};
    how.recompute = {plait::recompute::none};
    return pp::search_layouts(h, job, 16, how).best.front().layout.ep;
  };
  CHECK(first(fast) == 8);
  CHECK(first(slow) == 1);
}

TEST_CASE("a search of a small mixture on 8 ranks tries every ep, as an axis of the trainer's mesh") {
  const pp::training_job job = llama_job("tiny-experts", 16, 128);
  pp::search_options how;
  how.most = 100000;
  const pp::hardware h = pp::hardware_called("cpu", "x");
  std::set<std::int64_t> found;
  for (const pp::layout_price& p : pp::search_layouts(h, job, 8, how).best) found.insert(p.layout.ep);
  CHECK(found == std::set<std::int64_t>{1, 2, 4, 8});
  how.ep = {4};
  for (const pp::layout_price& p : pp::search_layouts(h, job, 8, how).best) CHECK(p.layout.ep == 4);
  how.ep = {3};
  CHECK(pp::search_layouts(h, job, 8, how).legal == 0);
}

TEST_CASE("folded experts are on ranks of dp, which are distant if the pipeline lies between them") {
  pp::training_job job = job_with_experts(128);
  job.program.folds_experts = true;
  const pp::layout_price beside = priced(h100, job, "pp=8,dp=8,ep=8"),
                         apart = priced(h100, job, "pp=8,dp=8,ep=8,order=tp-cp-pp-dp");
  CHECK(apart.seconds.experts > 2 * beside.seconds.experts);  // the ranks are on different nodes
  CHECK(pp::part_time(pp::block_time(h100, job, apart.layout)).forward.experts ==
        doctest::Approx(2 * pp::exchange_seconds(h100, pp::place_group(h100, {8, 8}), 4096 * 2048 * 2, 8,
                                                 job.program.sends_tokens_once)));
  // Two of the four ranks of tp have the same experts, and two of the four of dp.
  const pp::training_layout both = layout_of(job, "tp=2,pp=2,dp=4,ep=4,order=tp-cp-pp-dp");
  CHECK(both.ep_axis().extent == 2);
  CHECK(both.ep_over_dp().extent == 2);
  CHECK(both.ep_over_dp().stride == 4);
  CHECK(both.expert_copies() == 2);
  CHECK(both.expert_copies_axis().extent == 1);
  CHECK(both.expert_copies_over_dp().extent == 2);
  CHECK(both.expert_copies_over_dp().stride == 8);
}

TEST_CASE("tokens sent once to each node cross fewer links than copies for each expert") {
  const pp::group_place across = pp::place_group(h100, {32, 1}), node = pp::place_group(h100, {8, 1});
  const auto seconds = [&](const pp::group_place& g, double chosen, bool once) {
    return pp::exchange_seconds(h100, g, 1e8, chosen, once);
  };
  CHECK(seconds(across, 8, true) < 0.6 * seconds(across, 8, false));  // at most 3 other nodes, for 6 copies
  CHECK(seconds(node, 1, true) == doctest::Approx(seconds(node, 1, false)).epsilon(0.05));
  CHECK(seconds(across, 8, true) > seconds(across, 1, true));
}

TEST_CASE("experts that the ranks cannot divide are refused, and a search finds a valid number") {
  pp::training_job job = job_with_experts(128);
  const auto why = [&](const char* text) { return pp::why_illegal(layout_of(job, text), job); };
  CHECK(why("dp=12,ep=3") ==
        "ep is 3, the model has 128 experts and dp 12 ranks, which it must both divide; legal is 1, and here 4 and "
        "what divides that");
  CHECK(why("tp=4,dp=2,ep=8").starts_with("ep is 8, the model has 128 experts and dp 2 ranks"));
  job.program.folds_experts = true;
  CHECK(why("tp=4,dp=2,ep=8") == "");
  CHECK(
      why("dp=12,ep=3") ==
      "ep is 3, the model has 128 experts and tp, cp and dp together 12 ranks, which it must both divide; legal is 1, "
      "and here 4 and what divides that");
  job.program.folds_experts = false;
  CHECK(why("tp=2,dp=8,sequence_parallel=0") ==
        "experts with tp above 1 and sequence_parallel 0 are not priced; use sequence_parallel 1");
  job.model.shared_ffn = 33;
  CHECK(why("tp=2,dp=8") == "tp is 2 and shared_ffn 33, which it must divide; the nearest are 1 and 3");
  job.model.shared_ffn = 0;
  const pp::training_layout l = layout_of("dp=16,ep=8");
  CHECK(pp::layout_text(l) == "tp=1,cp=1,pp=1,dp=16,microbatch=1,ep=8,recompute=none,zero=1");
  CHECK(layout_of(pp::layout_text(l)) == l);
  pp::search_options plain;
  plain.tp = plain.cp = plain.pp = {1}, plain.zero = {plait::zero_level::optimizer};
  const pp::search_result found = pp::search_layouts(h100, job, 16, plain);
  REQUIRE_FALSE(found.best.empty());
  CHECK(found.best.front().layout.ep > 1);  // whole experts do not fit
}
