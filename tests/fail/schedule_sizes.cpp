// expect: the number of microbatches must be divisible by the number of ranks
// expect: nearest_legal<12, 16>
// expect: it needs more microbatches
// expect: nearest_legal<0, 8>
// expect: a forward would keep more activations than the limit allows
// expect: activations_at_most<4>, plait::at_rank<0>, plait::at_position<4>
// expect: nearest_legal<0, 7>
// expect: pipeline_ranks<N> needs at least one rank
// expect: microbatches<N> needs 1 to 65535 microbatches
// expect: interleaved<V> needs 2 to 255 chunks per rank; with one chunk it is one_f_one_b
// errors-at-most: 6
#include "if_fixed.hpp"
#include "plait/schedule/verified.hpp"

using namespace plait;

static_assert(verify<interleaved<2>, pipeline_ranks<4>, microbatches<fixed ? 16 : 14>>());
static_assert(verify<dualpipe_v, pipeline_ranks<4>, microbatches<fixed ? 8 : 6>>());
static_assert(verify<if_fixed<zb_h1, zb_h2>, pipeline_ranks<4>, microbatches<8>, activations_at_most<4>>());
constexpr auto sizes = sizeof(pipeline_ranks<fixed ? 1 : 0>) + sizeof(microbatches<fixed ? 1 : 0>);
constexpr int chunks = interleaved<fixed ? 2 : 1>::chunks;
