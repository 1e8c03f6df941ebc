// timeout: 300
// program: llama_options
// Recompute and dropout: every mesh has the same results, and kept bytes are as predicted.
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("recompute changes only the bytes that are kept") {
  scenario s{small_config()};
  s.options.dropout = 0.1;
  const model_outcome one = train_one<double, megatron_sp>(s);
  std::int64_t kept_by_last = INT64_MAX;
  for (const recompute policy : {recompute::none, recompute::selective, recompute::full}) {
    s.options.keep = policy;
    INFO(name_of(policy));
    check_some<double, megatron_sp>(s);
    const model_outcome same = train_one<double, megatron_sp>(s);
    check_parity(one, same, 1e-13);
    CHECK(same.kept_bytes < kept_by_last);
    kept_by_last = same.kept_bytes;
  }
}

TEST_CASE("dropout does not depend on the mesh or the number of microbatches") {
  scenario s{small_config()};
  const model_outcome without = train_one<double, megatron_tp>(s);
  s.options.dropout = 0.1;
  const model_outcome one = train_one<double, megatron_tp>(s);
  CHECK(std::abs(one.steps[0].loss - without.steps[0].loss) > 1e-6);
  check_some<double, megatron_tp>(s);
  s.microbatches = 4;
  check_mesh<double, megatron_tp>(s, one, 1, 1);
  check_mesh<double, megatron_tp>(s, one, 2, 2);
  check_mesh<double, megatron_tp>(s, one, 4, 2);
}

TEST_CASE("biases of all linears") {
  scenario s{small_config()};
  s.config.attention_bias = s.config.mlp_bias = true;
  check_some<double, megatron_sp>(s);
  check_some<double, megatron_tp>(s);
}

TEST_CASE("recompute with biases, tied embeddings and stored parameters") {
  scenario s{small_config()};
  s.config.attention_bias = s.config.mlp_bias = s.config.tie_embeddings = true;
  s.options.keep = recompute::selective;
  check_some<double, stored_over_dp<megatron_sp>>(s);
  s.options.keep = recompute::full;
  check_some<double, stored_over_dp<megatron_tp>>(s);
}
