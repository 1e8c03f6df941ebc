// timeout: 300
// A program for each variant: every factorisation dp x tp of up to 16 ranks equals one rank.
// variant: llama_sp_double NUMBER=double STRATEGY=megatron_sp
// variant: llama_sp_float NUMBER=float STRATEGY=megatron_sp
// variant: llama_tp_double NUMBER=double STRATEGY=megatron_tp
// variant: llama_tp_float NUMBER=float STRATEGY=megatron_tp
// variant: llama_sp_stored_double NUMBER=double STRATEGY=stored_over_dp<megatron_sp>
// variant: llama_sp_stored_float NUMBER=float STRATEGY=stored_over_dp<megatron_sp>
// variant: llama_tp_stored_double NUMBER=double STRATEGY=stored_over_dp<megatron_tp>
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

using real = NUMBER;
using under = STRATEGY;

TEST_CASE("powers of two, fewer kv heads than tensor ranks") { check_powers_of_two<real, under>({small_config()}); }

TEST_CASE("threes") { check_threes<real, under>({small_config()}); }

TEST_CASE("tied embeddings") {
  scenario s{small_config()};
  s.config.tie_embeddings = true;
  check_some<real, under>(s);
}
