// expect: the collective between these specs runs over other axes than the group's, or in another order
// errors-at-most: 1
#include "comm_cases.hpp"

using namespace cases;

// The gradient of a norm's weight is pending over data and tensor ranks; a sum over data ranks alone is not enough.
void reduce(any_communicator& comm, const rank_place& here, float* x) {
#ifdef PLAIT_FAIL_FIX
  const typed_group<any_communicator, dp, tp> group(comm);
#else
  const typed_group<any_communicator, dp> group(comm);
#endif
  group.all_reduce<spec<hidden, invariant<dp, tp>>>(part<float, spec<hidden, partial<dp, tp>>>(here, x));
}
