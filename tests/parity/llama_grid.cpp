// timeout: 300
// program: llama_strategies
// Llama under two-dimensional tensor parallelism, a strategy that the library does not have, equals one rank in double.
#include <doctest/doctest.h>

#include "support/more_strategies.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("two-dimensional tensor parallelism") {
  CHECK(check_llama<grid>({{1, 2, 1}, {1, 1, 2}, {1, 2, 3}, {2, 2, 2}, {1, 4, 4}, {4, 2, 2}}).text() == "");
}

TEST_CASE("with the sequence sharded between the layers") {
  CHECK(check_llama<grid_sp>({{1, 2, 1}, {1, 1, 2}, {1, 2, 3}, {2, 2, 2}, {1, 4, 4}, {4, 2, 2}}).text() == "");
}

TEST_CASE("with a tied head, biases, normed queries and keys, dropout and recomputation") {
  llama_config config = tiny_llama();
  config.tie_embeddings = config.attention_bias = config.mlp_bias = config.qk_norm = true;
  for (const recompute keep : {recompute::selective, recompute::full})
    CHECK(check_llama<grid_sp>({{1, 2, 1}, {1, 1, 3}, {2, 2, 2}, {1, 4, 2}}, config, {.keep = keep, .dropout = 0.1})
              .text() == "");
}
