// expect: the tensor given has another spec than the input of the layer, or of the first of several: put layers in order, make the specs agree, or redistribute the tensor first
// expect: expected_dims<plait::batch, plait::ffn>, plait::given_dims<plait::batch, plait::hidden>
// expect: given_tensor<plait::placed<
// expect: input_of_layer<0, plait::linear<float, down_policy
// expect: input_of_layer<0, plait::rms_norm<float
// expect: an array has numbers of another type than the layer's: make the layer of that precision, as in linear<double, ...>, or convert the numbers
// expect: a layer takes tensors, or typed pointers: give an array its spec once, as in plait::part<float, Spec> x(ctx, pointer), and pass x to layers
// expect: the array for the result of a layer has another spec than the result: make the part with the layer's `output`, or, for an input's gradient, with the dual of its `input`
// expect: a backward pass takes the `saved` that a forward pass of the same layer has made
// errors-at-most: 8
// lines-at-most: 160
#include <vector>

#include "if_fixed.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"

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
using norm = rms_norm<float, up_policy::input>;
using mlp = if_fixed<sequential<up, down>, sequential<down, up>>;
using numbers = if_fixed<float, double>;
auto step(const microbatch<cpu>& mb, mlp& net, const tensor<float, up_policy::input>& x, mlp::saved& kept) {
  return net.forward(mb, x, &kept);
}
auto alone(const microbatch<cpu>& mb, norm& layer, [[maybe_unused]] const tensor<float, up_policy::input>& x,
           [[maybe_unused]] const tensor<float, up_policy::output>& y) {
#ifdef PLAIT_FAIL_FIX
  return layer.forward(mb, x);
#else
  return layer.forward(mb, y);
#endif
}
auto backward(const microbatch<cpu>& mb, norm& layer, const tensor<float, up_policy::input>& x, norm::saved& kept,
              const tensor<numbers, norm::input>& dy) {
  return layer.backward(mb, x, kept, dy);
}
using written = part<float, up::output>;
void on_memory(const microbatch<cpu>& mb, up& layer, const part<const numbers, up::input>& x, const written& y) {
  layer.forward(mb, x, y);
}
void on_vector(const microbatch<cpu>& mb, up& layer, const std::vector<float>& x, const written& y) {
#ifdef PLAIT_FAIL_FIX
  layer.forward(mb, part<const float, up::input>(mb.ctx, x.data()), y);
#else
  layer.forward(mb, x, y);
#endif
}
void on_pointers(const microbatch<cpu>& mb, with_saved<up>& layer, const float* x, float* y) {
#ifdef PLAIT_FAIL_FIX
  layer.forward(mb, part<const float, up::input>(mb.ctx, x), written(mb.ctx, y));
#else
  layer.forward(mb, x, y);
#endif
}
void into_another(const microbatch<cpu>& mb, up& layer, const part<const float, up::input>& x,
                  [[maybe_unused]] const part<float, up::input>& wrong, [[maybe_unused]] const written& y) {
#ifdef PLAIT_FAIL_FIX
  layer.forward(mb, x, y);
#else
  layer.forward(mb, x, wrong);
#endif
}
void of_another([[maybe_unused]] norm::saved& other, const microbatch<cpu>& mb, up& layer, const tensor<float, up::input>& x,
                [[maybe_unused]] up::saved& kept, const tensor<float, up::output>& dy) {
#ifdef PLAIT_FAIL_FIX
  layer.backward(mb, x, kept, dy);
#else
  layer.backward(mb, x, other, dy);
#endif
}
