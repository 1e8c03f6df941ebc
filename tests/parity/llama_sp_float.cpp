// timeout: 300
// Tensor and sequence parallelism, in float: every factorisation dp x tp of up to 16 ranks equals one rank.
#include "../support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("powers of two, fewer kv heads than tensor ranks") {
  check_powers_of_two<float, megatron_sp>({small_config()});
}

TEST_CASE("threes") { check_threes<float, megatron_sp>({small_config()}); }

TEST_CASE("tied embeddings") {
  scenario s{small_config()};
  s.config.tie_embeddings = true;
  check_some<float, megatron_sp>(s);
}
