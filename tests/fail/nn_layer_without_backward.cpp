// expect: a layer needs a member `backward(mb, x, saved, dy)` that returns a tensor of dual_t<input>
// expect: mine
// errors-at-most: 1
#include "plait/nn/combinators.hpp"
#include "plait/nn/norm.hpp"

using namespace plait;
using stream = spec<shard<batch, dp>, seq, hidden>;

template <class Spec>
struct half_a_layer {
  using value_type = float;
  using device = cpu;
  using input = Spec;
  using output = Spec;
  struct saved {};
  tensor<float, Spec> forward(const microbatch<cpu>& mb, const tensor<float, Spec>&, saved*) {
    return tensor<float, Spec>(mb.ctx);
  }
  template <class F>
  void visit(F&&) {}
};
struct mine : half_a_layer<stream> {
#ifdef PLAIT_FAIL_FIX
  tensor<float, dual_t<stream>> backward(const microbatch<cpu>& mb, const tensor<float, stream>&, saved&,
                                         const tensor<float, dual_t<stream>>&) {
    return tensor<float, dual_t<stream>>(mb.ctx);
  }
#endif
};
using net = sequential<rms_norm<float, stream>, mine>;
net make(context<cpu>& ctx) { return net(rms_norm<float, stream>(ctx), mine{}); }
