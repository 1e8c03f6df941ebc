// timeout: 300
// Pipelines, in double: every schedule, on meshes of up to 16 ranks, equals one rank.
#include "../support/pipeline_parity.hpp"
#include "plait/schedule/dualpipe_v.hpp"
#include "plait/schedule/zero_bubble.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// As many layers as the largest pipeline has stages, and an odd number of them.
scenario tiny(std::int64_t layers, std::int64_t microbatches) {
  scenario s{small_config(4, 2)};
  s.config.hidden = 16, s.config.ffn = 24, s.config.vocab = 29;
  s.config.layers = layers;
  s.batch = 16, s.seq = 8, s.microbatches = microbatches;
  s.steps = 3;
  return s;
}

template <class Policy>
void check(const scenario& s, const rank_outcome& one, std::initializer_list<pipeline_mesh> meshes) {
  for (const pipeline_mesh& m : meshes)
    check_pipeline<double, megatron_sp>(
        s, one, m, make_schedule<Policy>(static_cast<int>(m.pp), static_cast<int>(s.microbatches)));
}

}  // namespace

TEST_CASE("one chunk a rank") {
  const scenario s = tiny(17, 8);
  const rank_outcome one = train_one<double, megatron_sp>(s);
  CHECK(one.steps.back().loss < one.steps.front().loss);
  check<gpipe>(s, one, {{1, 2, 1}, {2, 4, 2}, {1, 16, 1}});
  check<one_f_one_b>(s, one, {{1, 1, 1}, {1, 3, 1}, {2, 2, 2}, {2, 2, 4}, {1, 16, 1}});
  check<zb_h1>(s, one, {{1, 4, 2}, {2, 8, 1}, {1, 5, 1}});
  check<zb_h2>(s, one, {{1, 2, 2}, {2, 4, 1}, {1, 4, 4}});
}

TEST_CASE("several chunks a rank") {
  const scenario s = tiny(17, 8);
  const rank_outcome one = train_one<double, megatron_sp>(s);
  check<interleaved<2>>(s, one, {{1, 2, 1}, {2, 4, 2}, {1, 8, 1}});
  check<interleaved<4>>(s, one, {{2, 2, 1}, {1, 4, 1}, {1, 1, 1}});
  check<zb_v>(s, one, {{1, 2, 1}, {2, 4, 2}, {1, 8, 2}});
  check<dualpipe_v>(s, one, {{1, 2, 2}, {1, 4, 1}, {2, 2, 1}});
}

TEST_CASE("tied embeddings, on one rank and on two") {
  scenario s = tiny(5, 4);
  s.config.tie_embeddings = true;
  const rank_outcome one = train_one<double, megatron_sp>(s);
  check<one_f_one_b>(s, one, {{1, 2, 1}, {2, 3, 2}});
  check<zb_h1>(s, one, {{1, 4, 2}});
  check<interleaved<2>>(s, one, {{1, 2, 2}});
  check<zb_v>(s, one, {{2, 2, 2}});
}

TEST_CASE("microbatches that pp does not divide, all tokens of some masked") {
  for (const std::int64_t microbatches : {1, 2, 16}) {
    scenario s = tiny(5, microbatches);
    s.masked_from = 4, s.masked_to = 9;
    const rank_outcome one = train_one<double, megatron_sp>(s);
    check<gpipe>(s, one, {{1, 3, 1}, {1, 4, 2}});
    check<one_f_one_b>(s, one, {{1, 3, 1}, {1, 4, 1}});
    check<zb_h1>(s, one, {{1, 3, 1}, {1, 5, 1}});
    check<zb_v>(s, one, {{1, 2, 1}});
  }
}

TEST_CASE("recomputation, dropout, biases, parameters stored over dp") {
  scenario s = tiny(5, 4);
  s.config.attention_bias = s.config.mlp_bias = true;
  s.options.dropout = 0.1;
  for (const recompute keep : {recompute::none, recompute::selective, recompute::full}) {
    s.options.keep = keep;
    const rank_outcome one = train_one<double, megatron_sp>(s);
    check<one_f_one_b>(s, one, {{2, 2, 1}});
    check<zb_h1>(s, one, {{1, 2, 2}});
    if (keep == recompute::full)
      check_pipeline<double, stored_over_dp<megatron_sp>>(s, one, {2, 2, 2}, make_schedule<zb_v>(2, 4));
  }
}
