// expect: only the parts of a first dim lie one after the other: let redistribute gather and scatter the rest
// errors-at-most: 1
#include "comm_cases.hpp"

using namespace cases;

void gather(any_communicator& comm, const rank_place& here, const float* x, float* y) {
  const typed_group<any_communicator, tp> group(comm);
#ifdef PLAIT_FAIL_FIX
  group.all_gather(part<const float, scattered>(here, x), part<float, complete>(here, y));
#else
  group.all_gather(part<const float, spec<seq, shard<hidden, tp>>>(here, x), part<float, complete>(here, y));
#endif
}
