// expect: an action comes twice: each stage computes each microbatch once
// expect: at_rank<1>, plait::at_position<1>
// expect: a backward comes before the forward of its microbatch in the same stage
// expect: a backward is missing: each stage needs one B, or one I and one W, of each microbatch
// expect: a forward is missing: each stage needs one F of each microbatch
// expect: a microbatch has both a whole backward B and a split one, I and W, in one stage
// expect: a weight gradient W comes before the input gradient I of its microbatch in the same stage
// expect: an action names a chunk that its rank does not have
// expect: an action names a microbatch that the step does not have
// errors-at-most: 8
#include "plait/schedule/verified.hpp"

using namespace plait;

/// 1F1B on three ranks with four microbatches, with one action changed. Rank 2: F0 B0 F1 B1 F2 B2 F3 B3.
template <int Rank, int Position, action_kind Kind, int Microbatch, int Chunk = 0>
struct but {
  static constexpr schedule make(const pipeline_shape& shape) {
    schedule s = one_f_one_b::make(shape);
    s.order[Rank][Position] = {Kind, Chunk, Microbatch};
    return s;
  }
};
/// Rank 1 lacks one forward action and its backward.
struct without {
  static constexpr schedule make(const pipeline_shape& shape) {
    schedule s = one_f_one_b::make(shape);
#ifndef PLAIT_FAIL_FIX
    s.order[1].pop_back();
    std::erase(s.order[1], forward_of(0, 3));
#endif
    return s;
  }
};
template <class Policy>
constexpr bool legal = verify<Policy, pipeline_ranks<3>, microbatches<4>>();

using enum action_kind;
static_assert(legal<without>);
#ifdef PLAIT_FAIL_FIX
static_assert(legal<but<1, 1, forward, 1>>);
#else
static_assert(legal<but<1, 1, forward, 0>>);
static_assert(legal<but<2, 1, backward, 1>>);
static_assert(legal<but<2, 7, input_backward, 3>>);
static_assert(legal<but<2, 2, input_backward, 0>>);
static_assert(legal<but<2, 1, weight_backward, 0>>);
static_assert(legal<but<0, 0, forward, 0, 1>>);
static_assert(legal<but<0, 0, forward, 4>>);
#endif
