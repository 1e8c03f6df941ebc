// timeout: 300
// program: four_axes
// Every factorisation dp x pp x cp x tp of 4 and 8 ranks equals one rank, in float; with the residual stream whole on
// the tensor-parallel ranks, and with parameters stored over dp.
#include "support/four_axes.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("every factorisation of 4 and 8 ranks") {
  using whole = context_parallel<megatron_tp, chosen<cp>, zigzag>;
  using stored = context_parallel<stored_over_dp<megatron_sp>, chosen<cp>, zigzag>;
  CHECK(check_four_axes<float, whole, stored>({4, 8}) == 10 + 20);
}
