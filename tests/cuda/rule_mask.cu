// A mask with a rule of the program, in its own file: nvcc compiles the kernels of the rule here, and any compiler can
// compile the tests that use the mask.
#include "plait/kernels/cuda/kernels.hpp"

namespace pl = plait;

namespace plait::test {

PLAIT_HOST_DEVICE bool same_chunk(std::int64_t query, std::int64_t key) { return query / 24 == key / 24; }
pl::kernels::attention_mask chunks() { return pl::kernels::attention_mask::causal().where<same_chunk>(); }

}  // namespace plait::test
