#include <utility>
#include <vector>

#include "plait/nn/combinators.hpp"
#include "plait/nn/norm.hpp"

using namespace plait;
using stream = spec<shard<batch, dp>, seq, hidden, replicate<tp>>;

struct forward_only {
  using value_type = float;
  using device = cpu;
  using input = stream;
  using output = stream;
  struct saved {};
  tensor<float, stream> forward(const microbatch<cpu>& mb, const tensor<float, stream>&, saved*) {
    return tensor<float, stream>(mb.ctx);
  }
};
struct both_ways : forward_only {
  tensor<float, dual_t<stream>> backward(const microbatch<cpu>& mb, const tensor<float, stream>&, saved&,
                                         const tensor<float, dual_t<stream>>&) {
    return tensor<float, dual_t<stream>>(mb.ctx);
  }
};
template <class Calls>
struct visited : Calls {
  template <class F>
  void visit(F&&) {}
};

// case: without_backward
// expect: a layer needs a member `backward(mb, x, saved, dy)` that returns a tensor of dual_t<input>
// expect: mine
// expect: a layer needs a member `visit(f)` that calls f with each of its parameters
// expect: unvisited
// errors-at-most: 2
// lines-at-most: 60
#ifdef PLAIT_FAIL_FIX
struct mine : visited<both_ways> {};
#else
struct mine : visited<forward_only> {};
#endif
using net = sequential<rms_norm<float, stream>, mine>;
net make(context<cpu>& ctx) { return net(rms_norm<float, stream>(ctx), mine{}); }

#ifdef PLAIT_FAIL_FIX
struct unvisited : visited<both_ways> {};
#else
struct unvisited : both_ways {};
#endif
void train(context<cpu>& ctx) {  // uses of the types add no further errors
  using block = residual<rms_norm<float, stream>, unvisited>;
  std::vector<block> blocks;
  blocks.emplace_back(rms_norm<float, stream>(ctx), unvisited{});
  sequential all(stack(std::move(blocks)), rms_norm<float, stream>(ctx));
  gather_parameters(ctx, all);
  const tensor<float, stream> x(ctx);
  decltype(all)::saved kept;
  all.forward(ctx, x, &kept);
  all.backward(ctx, x, kept, tensor<float, dual_t<stream>>(ctx));
}

// case: backward_not_dual
// expect: a layer's `backward(mb, x, saved, dy)` takes dy as a tensor of dual_t<output> and returns one of dual_t<input>
// expect: mine
// errors-at-most: 1
#ifdef PLAIT_FAIL_FIX
struct mine : visited<both_ways> {};
#else  // the gradient has the dual spec: partial where the value is replicated
struct mine : visited<forward_only> {
  tensor<float, stream> backward(const microbatch<cpu>& mb, const tensor<float, stream>&, saved&,
                                 const tensor<float, stream>&) {
    return tensor<float, stream>(mb.ctx);
  }
};
#endif
using net = sequential<rms_norm<float, stream>, mine>;
net make(context<cpu>& ctx) { return net(rms_norm<float, stream>(ctx), mine{}); }
