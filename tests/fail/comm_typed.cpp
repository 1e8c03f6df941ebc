// errors-at-most: 1
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/typed.hpp"

using namespace plait;

using pending = spec<seq, hidden, partial<tp>>;
using complete = spec<seq, hidden, replicate<tp>>;
using scattered = spec<shard<seq, tp>, hidden>;

// case: group_order
// expect: the collective between these specs runs over other axes than the group's, or in another order
void gather(any_communicator& comm, const rank_place& here, const float* x, float* y) {
#ifdef PLAIT_FAIL_FIX
  const typed_group<any_communicator, cp, tp> group(comm);
#else
  const typed_group<any_communicator, tp, cp> group(comm);
#endif
  group.all_gather(part<const float, spec<shard<seq, cp, tp>, hidden>>(here, x),
                   part<float, spec<seq, hidden, replicate<cp, tp>>>(here, y));
}

// case: inner_dim
// expect: only parts of a first dim are contiguous: use redistribute to gather or scatter another dim
void gather(any_communicator& comm, const rank_place& here, const float* x, float* y) {
  const typed_group<any_communicator, tp> group(comm);
#ifdef PLAIT_FAIL_FIX
  group.all_gather(part<const float, scattered>(here, x), part<float, complete>(here, y));
#else
  group.all_gather(part<const float, spec<seq, shard<hidden, tp>>>(here, x), part<float, complete>(here, y));
#endif
}

// case: other_dims
// expect: the dims are not the ones expected here, in this order
void gather(any_communicator& comm, const rank_place& here, const float* x, float* y) {
  const typed_group<any_communicator, tp> group(comm);
#ifdef PLAIT_FAIL_FIX
  group.all_gather(part<const float, scattered>(here, x), part<float, complete>(here, y));
#else
  group.all_gather(part<const float, scattered>(here, x), part<float, spec<hidden, seq, replicate<tp>>>(here, y));
#endif
}

// case: wrong_state
// expect: this one collective does not convert between these specs: use redistribute, which plans the steps
void reduce(any_communicator& comm, const rank_place& here, float* x) {
  const typed_group<any_communicator, tp> group(comm);
#ifdef PLAIT_FAIL_FIX
  group.all_reduce<complete>(part<float, pending>(here, x));
#else
  group.all_reduce<complete>(part<float, scattered>(here, x));
#endif
}
