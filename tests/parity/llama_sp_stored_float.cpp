// timeout: 300
// Sequence parallelism with parameters stored sharded over dp, in float: every factorisation dp x tp of up to 16 ranks
// equals one rank.
#include "../support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("powers of two, fewer kv heads than tensor ranks") {
  check_powers_of_two<float, stored_over_dp<megatron_sp>>({small_config()});
}

TEST_CASE("threes") { check_threes<float, stored_over_dp<megatron_sp>>({small_config()}); }

TEST_CASE("tied embeddings") {
  scenario s{small_config()};
  s.config.tie_embeddings = true;
  check_some<float, stored_over_dp<megatron_sp>>(s);
}
