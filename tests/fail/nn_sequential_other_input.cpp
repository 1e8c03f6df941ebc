// expect: the tensor given does not lie as the first layer takes its input: put the layers in their order, let the specs agree, or redistribute the tensor first
// expect: expected_dims<plait::batch, plait::ffn>, plait::given_dims<plait::batch, plait::hidden>
// expect: given_tensor<plait::placed<
// expect: input_of_layer<0, plait::linear<float, down_policy
// errors-at-most: 1
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"

using namespace plait;

struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
};
struct down_policy {
  using input = up_policy::output;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = up_policy::input;
};
using up = linear<float, up_policy>;
using down = linear<float, down_policy>;
#ifdef PLAIT_FAIL_FIX
using mlp = sequential<up, down>;
#else
using mlp = sequential<down, up>;
#endif
auto step(const microbatch<cpu>& mb, mlp& net, const tensor<float, up_policy::input>& x, mlp::saved& kept) {
  return net.forward(mb, x, &kept);
}
