// expect: the collective between these specs runs over other axes than the group's, or in another order
// errors-at-most: 1
#include "comm_cases.hpp"

using namespace cases;

void reduce(any_communicator& comm, const rank_place& here, float* x) {
#ifdef PLAIT_FAIL_FIX
  const typed_group<any_communicator, tp> group(comm);
#else
  const typed_group<any_communicator, dp> group(comm);
#endif
  group.all_reduce<complete>(part<float, pending>(here, x));
}
