// timeout: 300
// program: four_axes
// Every factorisation dp x pp x cp x tp of 2, 4, 8 and 16 ranks equals one rank, in double.
#include "support/four_axes.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("every factorisation of up to 16 ranks") {
  using in_zigzag = context_parallel<megatron_sp, chosen<cp>, zigzag>;
  using in_original_order = context_parallel<megatron_sp, chosen<cp>>;
  CHECK(check_four_axes<double, in_zigzag, in_original_order>({2, 4, 8, 16}) == 4 + 10 + 20 + 35);
}
