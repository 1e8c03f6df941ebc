// expect: the dims are not the ones expected here, in this order
// errors-at-most: 1
#include "comm_cases.hpp"

using namespace cases;

void gather(any_communicator& comm, const rank_place& here, const float* x, float* y) {
  const typed_group<any_communicator, tp> group(comm);
#ifdef PLAIT_FAIL_FIX
  group.all_gather(part<const float, scattered>(here, x), part<float, complete>(here, y));
#else
  group.all_gather(part<const float, scattered>(here, x), part<float, spec<hidden, seq, replicate<tp>>>(here, y));
#endif
}
