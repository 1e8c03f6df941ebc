// timeout: 300
// program: gpt2
// GPT-2 (learned positions, biases, LayerNorm) under two-dimensional tensor parallelism, and with its sequence in
// zigzag order, equals one rank in double.
#include <doctest/doctest.h>

#include "support/gpt2_parity.hpp"
#include "support/more_strategies.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("two-dimensional tensor parallelism") {
  using S = grid_sp;
  const auto shape = [](std::int64_t d, std::int64_t r, std::int64_t c) { return S::mesh{d, r, c}.shape(); };
  CHECK(check_model(shape(1, 1, 1), {shape(1, 2, 1), shape(1, 1, 2), shape(2, 2, 2), shape(1, 4, 4)},
                    gpt2_setup<S>(tiny_gpt2(2)), make_gpt2<S>(tiny_gpt2(2)))
            .text() == "");
}

TEST_CASE("a sequence in zigzag order") {
  using S = context_parallel<megatron_sp, ring<cp>, zigzag>;
  const auto shape = [](std::int64_t d, std::int64_t k, std::int64_t t) { return S::mesh{d, k, t, 1}.shape(); };
  CHECK(check_model(shape(1, 1, 1), {shape(1, 2, 1), shape(1, 4, 1), shape(2, 2, 2), shape(1, 2, 2)},
                    gpt2_setup<S>(tiny_gpt2(2)), make_gpt2<S>(tiny_gpt2(2)))
            .text() == "");
}
