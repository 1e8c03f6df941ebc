// expect: the collective between these specs runs over other axes than the group's, or in another order
// errors-at-most: 1
#include "comm_cases.hpp"

using namespace cases;

void gather(any_communicator& comm, const rank_place& here, const float* x, float* y) {
#ifdef PLAIT_FAIL_FIX
  const typed_group<any_communicator, cp, tp> group(comm);
#else
  const typed_group<any_communicator, tp, cp> group(comm);
#endif
  group.all_gather(part<const float, spec<shard<seq, cp, tp>, hidden>>(here, x),
                   part<float, spec<seq, hidden, replicate<cp, tp>>>(here, y));
}
