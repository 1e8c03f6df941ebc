// timeout: 120
// program: llama_options
// Context parallelism in a Llama, for cases that four_axes.cpp does not have: ranks without a counted token, windows,
// packed documents, dropout and recomputation, parameters stored over dp. Every rank has the results of one rank.
#include "support/llama_parity.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

namespace {

template <class Placement>
using under = stored_over_dp<context_parallel<megatron_tp, chosen<cp>, Placement>>;

using four = megatron_sp::mesh;

scenario of_two_steps() {
  scenario s{small_config(8, 2)};
  s.config.hidden = 16, s.config.ffn = 32;
  s.batch = 4, s.steps = 2, s.learning_rate = 1e-2;
  return s;
}

/// Both placements on dp x cp x tp ranks.
void check(const scenario& s, std::initializer_list<four> meshes) {
  scenario whole = s;
  whole.microbatches = 1;
  const model_outcome one = train_one<double, under<contiguous>>(whole);
  CHECK(std::isfinite(one.steps[1].loss));
  for (const four& mesh : meshes) {
    check_ranks<double, under<contiguous>>(s, one, mesh.shape());
    check_ranks<double, under<zigzag>>(s, one, mesh.shape());
  }
}

}  // namespace

TEST_CASE("ranks without a counted token") {
  for (const chosen_policy how : {chosen_policy::ring, chosen_policy::all_gather_kv, chosen_policy::ulysses}) {
    scenario s = of_two_steps();
    s.options.attention.context = how;
    s.masked_positions = {0,  1,  12,
                          13, 14, 15};  // the last of four ranks has them in original order, the first one in zigzag
    check(s, {four{1, 4, 1, 1}, four{2, 4, 1, 1}});
  }
}

TEST_CASE("dropout and recomputation") {
  for (const recompute keep : {recompute::selective, recompute::full}) {
    scenario s = of_two_steps();
    s.options.keep = keep;
    s.options.dropout = 0.2;
    check(s, {four{1, 2, 2, 1}});
  }
}

TEST_CASE("windows and packed documents, recomputed") {
  scenario s = of_two_steps();
  s.options.keep = recompute::full;
  s.options.attention.mask = kernels::attention_mask::window(5);
  check(s, {four{2, 2, 1, 1}});
  s.options.attention = {.documents = true, .context = chosen_policy::ulysses};
  s.microbatches = 2;
  check(s, {four{1, 2, 2, 1}, four{1, 4, 1, 2}});
}

TEST_CASE("starts of documents that are missing or impossible are refused") {
  const auto refused = [](auto&& fill) {
    using strategy_type = under<zigzag>;
    const llama_config config = small_config(4, 2);
    const megatron_sp::mesh mesh{1, 1, 1, 1};
    const dim_sizes sizes = llama_sizes<strategy_type>(config, mesh.shape(), 1, 16);
    const std::string text = error_on_mesh(mesh, sizes, 5, [&](const context<cpu>& ctx) {
      llama<double, strategy_type> model(ctx, config, {.attention = {.documents = true}});
      adamw<double> optimizer;
      training_step step(ctx, model, optimizer, 1, 1.0);
      step.load(ctx, 0, fill);
    });
    return text.substr(0, text.find('\n'));
  };
  CHECK(refused([](std::int64_t, host_tokens&, host_tokens&) {}) ==
        "rank 0: training_step: attention_options::documents is set, so fill must take (i, ids, labels, starts)");
  const auto with = [&](auto&& start) {
    return refused([&](std::int64_t, host_tokens&, host_tokens&, host_starts& starts) {
      starts.fill([&](std::int64_t, std::int64_t position) { return start(position); });
    });
  };
  CHECK(with([](std::int64_t p) { return p / 4 * 4; }).empty());
  CHECK(with([](std::int64_t p) { return p / 4 * 4 + 4; }) ==  // ends of documents instead of starts
        "rank 0: training step: the token at position 0 of sample 0 has the document start 4; legal is its own "
        "position, where a document begins, or one before it, from 0");
  CHECK(with([](std::int64_t p) { return p / 4; }) ==  // indices of documents instead of starts
        "rank 0: training step: the token at position 4 of sample 0 has the document start 1; legal is its own "
        "position, where a document begins, or that of the token before, 0");
  CHECK(has(with([](std::int64_t p) { return p - 100; }), "position 0"));
  CHECK(has(with([](std::int64_t p) { return p < 8 ? 4 : 0; }), "position 0"));
  CHECK(has(with([](std::int64_t p) { return p < 8 ? p : 0; }), "position 8 of sample 0 has"));
}
