// expect: these specs are not this one collective apart: let redistribute find the way between them
// errors-at-most: 1
#include "comm_cases.hpp"

using namespace cases;

void reduce(any_communicator& comm, float* x) {
  const typed_group<any_communicator, tp> group(comm);
#ifdef PLAIT_FAIL_FIX
  group.all_reduce<complete>(local_part<float, pending>{x}, 8);
#else
  group.all_reduce<complete>(group.all_reduce<complete>(local_part<float, pending>{x}, 8), 8);
#endif
}
