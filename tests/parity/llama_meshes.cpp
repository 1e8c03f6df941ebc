// timeout: 300
// A program for each variant: every factorisation dp x tp of up to 16 ranks equals one rank.
// variant: llama_meshes_double NUMBER=double
// variant: llama_meshes_float NUMBER=float
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

using real = NUMBER;

// Every factorisation dp x tp of 1, 2, 4, 8 and 16 ranks.
TEST_CASE_TEMPLATE("powers of two, fewer kv heads than tensor ranks", S, megatron_sp, megatron_tp,
                   stored_over_dp<megatron_sp>, stored_over_dp<megatron_tp>) {
  check_meshes<real, S>({small_config(16, 2)}, {{1, 1},
                                                {2, 1},
                                                {1, 2},
                                                {4, 1},
                                                {2, 2},
                                                {1, 4},
                                                {8, 1},
                                                {4, 2},
                                                {2, 4},
                                                {1, 8},
                                                {16, 1},
                                                {8, 2},
                                                {4, 4},
                                                {2, 8},
                                                {1, 16}});
}

// Ranks that divide few of the sizes; at tp = 12 each kv head is on two ranks, and at tp = 5 one rank has two.
TEST_CASE_TEMPLATE("ranks that do not divide the sizes", S, megatron_sp, megatron_tp, stored_over_dp<megatron_sp>,
                   stored_over_dp<megatron_tp>) {
  scenario s{small_config(18, 6)};
  s.config.ffn = 97, s.batch = 13, s.seq = 14;
  if (sizeof(real) == 4) {  // AdamW divides a small gradient by itself, so its rounding becomes a whole step
    s.steps = 2;
    s.optimizer = adamw_options{.epsilon = 1e-3};
  }
  check_meshes<real, S>(
      s, {{3, 1}, {1, 3}, {5, 1}, {1, 5}, {3, 2}, {2, 3}, {1, 6}, {7, 1}, {3, 3}, {3, 5}, {2, 6}, {1, 12}});
}

// The keys of a layer begin at another place on each rank, and their gradients are summed over these ranks.
TEST_CASE_TEMPLATE("ranks of one kv head with unequally many query heads", S, megatron_sp, megatron_tp) {
  scenario s{small_config(3, 1)};
  s.config.qkv_bias = true, s.batch = 12, s.steps = 2;
  check_meshes<real, S>(s, {{2, 2}, {3, 2}});
}

TEST_CASE_TEMPLATE("tied embeddings", S, megatron_sp, megatron_tp, stored_over_dp<megatron_sp>,
                   stored_over_dp<megatron_tp>) {
  scenario s{small_config()};
  s.config.tie_embeddings = true;
  check_some<real, S>(s);
}
