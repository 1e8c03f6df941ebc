// expect: the schedule cannot finish: ranks wait for each other's actions in a circle
// expect: at_rank<0>, plait::at_position<1>
// expect: the policy's number of chunks or placement of stages differs from the shape's
// expect: a schedule has one list of actions for each rank
// errors-at-most: 3
#include "if_fixed.hpp"
#include "plait/schedule/verified.hpp"

using namespace plait;

/// Two ranks with different orders of microbatches: the second starts with one that the first does not send next.
struct at_odds {
  static constexpr schedule make(const pipeline_shape& shape) {
    schedule s{"at_odds", shape, {}};
    const int a = fixed ? 0 : 1, b = 1 - a;
    s.order = {{forward_of(0, 0), backward_of(0, 0), forward_of(0, 1), backward_of(0, 1)},
               {forward_of(0, a), backward_of(0, a), forward_of(0, b), backward_of(0, b)}};
    return s;
  }
};
static_assert(verify<at_odds, pipeline_ranks<2>, microbatches<2>>());

/// Places stages in a V, but does not declare it.
struct forgot {
  static constexpr int chunks = fixed ? 2 : 1;
  static constexpr stage_placement placement = fixed ? stage_placement::vee : stage_placement::straight;
  static constexpr schedule make(const pipeline_shape& shape) {
    return zb_v::make(shape_of<zb_v>(shape.ranks, shape.microbatches));
  }
};
static_assert(verify<forgot, pipeline_ranks<2>, microbatches<4>>());

/// Supports two ranks only.
struct two_ranks {
  static constexpr schedule make(const pipeline_shape& shape) {
    schedule s = one_f_one_b::make(shape);
    if (!fixed) s.order.resize(2);
    return s;
  }
};
static_assert(verify<two_ranks, pipeline_ranks<3>, microbatches<4>>());
