// expect: these specs are not this one collective apart: let redistribute find the way between them
// errors-at-most: 1
#include "comm_cases.hpp"

using namespace cases;

void reduce(any_communicator& comm, const rank_place& here, float* x) {
  const typed_group<any_communicator, tp> group(comm);
#ifdef PLAIT_FAIL_FIX
  group.all_reduce<complete>(part<float, pending>(here, x));
#else
  group.all_reduce<complete>(group.all_reduce<complete>(part<float, pending>(here, x)));
#endif
}
