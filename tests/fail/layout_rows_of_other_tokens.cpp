// expect: the rows of experts are not with the tokens that they were made of: `slot` is sharded over exactly the axes that shard tokens when rows come back. Redistribute the rows first
// expect: on_axis<plait::ep>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"
#include "plait/layout/experts.hpp"

using namespace cases;

template <class Rows, class Weights>
struct mixture_of {
  static constexpr verdict value =
      combine_rows(layout_v<Rows>, layout_v<Weights>, {dim_of<experts>, dim_of<expert_slot>, dim_of<expert_choice>}).verdict;
};

#ifdef PLAIT_FAIL_FIX
using rows = spec<experts, shard<expert_slot, dp, ep>, hidden>;
#else
using rows = spec<shard<experts, ep>, shard<expert_slot, dp>, hidden>;  // still with the experts
#endif
using weights = spec<shard<batch, dp, ep>, seq, expert_choice>;
static_assert(enforced<mixture_of<rows, weights>, my_policy, rows, weights>);
