// timeout: 300
// A program for each variant: every factorisation dp x tp of up to 16 ranks equals one rank.
// variant: llama_meshes_double NUMBER=double
// variant: llama_meshes_float NUMBER=float
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

using real = NUMBER;

TEST_CASE_TEMPLATE("powers of two, fewer kv heads than tensor ranks", S, megatron_sp, megatron_tp,
                   stored_over_dp<megatron_sp>, stored_over_dp<megatron_tp>) {
  check_powers_of_two<real, S>({small_config()});
}

TEST_CASE_TEMPLATE("ranks that do not divide the sizes", S, megatron_sp, megatron_tp, stored_over_dp<megatron_sp>,
                   stored_over_dp<megatron_tp>) {
  check_odd<real, S>({small_config()});
}

TEST_CASE_TEMPLATE("tied embeddings", S, megatron_sp, megatron_tp, stored_over_dp<megatron_sp>,
                   stored_over_dp<megatron_tp>) {
  scenario s{small_config()};
  s.config.tie_embeddings = true;
  check_some<real, S>(s);
}
