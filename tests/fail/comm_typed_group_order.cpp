// expect: the collective between these specs runs over other axes than the group's, or in another order
// errors-at-most: 1
#include "comm_cases.hpp"

using namespace cases;

void gather(any_communicator& comm, const float* x, float* y) {
#ifdef PLAIT_FAIL_FIX
  const typed_group<any_communicator, cp, tp> group(comm);
#else
  const typed_group<any_communicator, tp, cp> group(comm);
#endif
  group.all_gather(local_part<const float, spec<shard<seq, cp, tp>, hidden>>{x},
                   local_part<float, spec<seq, hidden, replicate<cp, tp>>>{y}, 8);
}
