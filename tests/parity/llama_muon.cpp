// timeout: 120
// program: pipelines
// A Llama trained with Muon equals one rank, in double, on meshes of every axis.
#include "plait/schedule/generators.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

scenario with_muon(muon_options options = {}) {
  scenario s{small_config(4, 2)};
  s.config.hidden = 16, s.config.ffn = 24, s.config.vocab = 29;
  s.config.layers = 3;
  s.batch = s.seq = 8, s.microbatches = 2;
  s.steps = 3;
  s.optimizer = options;
  return s;
}

void check_on(const scenario& s, std::initializer_list<pipeline_mesh> meshes) {
  const model_outcome one = train_one<double, megatron_sp>(s);
  for (const pipeline_mesh& m : meshes)
    check_pipeline<double, megatron_sp>(
        s, one, m, make_schedule<one_f_one_b>(static_cast<int>(m.pp), static_cast<int>(s.microbatches)));
}

}  // namespace

TEST_CASE("each axis separately, and all together") {  // of dp, pp, tp, cp
  check_on(with_muon(), {{2, 1, 1, 1}, {1, 2, 1, 1}, {1, 1, 2, 1}, {1, 1, 1, 2}, {1, 1, 4, 1}, {2, 2, 2, 2}});
}

TEST_CASE("tied embeddings, and another scale") {
  scenario s = with_muon({.scale = muon_scale::original, .learning_rate_ratio = 3.0});
  s.config.tie_embeddings = true;
  check_on(s, {{1, 2, 2, 1}, {2, 1, 2, 1}});
}
