// The silent bugs of ports to plait, in a program whose kernels are typed.
// expect: an invariant value mixes with nothing but invariant values
// expect: the output of a kernel does not lie as its rule derives it from the operands
// expect: states<plait::state::replicated, plait::state::partial>
// expect: the tensor given does not lie as the layer, or the first of several, takes its input
// expect: a gradient with the wrong spec: the gradient of a value has the dual spec
// expect: the array for the result of a layer lies otherwise than the result
// errors-at-most: 8
#include "plait/layout/apply.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/parameter/free.hpp"

using namespace plait;

using rows = spec<shard<seq, tp>, hidden>;
using whole_rows = spec<seq, hidden, invariant<tp>>;
using table = spec<seq, hidden>;
using up = linear<float, layer_policy<rows, spec<shard<ffn, tp>, hidden>, spec<seq, shard<ffn, tp>>>>;
using down = linear<float, layer_policy<up::output, spec<hidden, shard<ffn, tp>>, rows>>;
void add(float*, const float*, const float*, std::int64_t) {}
void loss_backward(float*, const float*, const float*, std::int64_t) {}

// A learned offset is added to sharded rows, and its parameter says that it meets whole ones: no sum over ranks.
#ifdef PLAIT_FAIL_FIX
using met = spec<shard<batch, tp>, seq, hidden>;
#else
using met = spec<batch, seq, hidden, invariant<tp>>;
#endif
void wrong_met(const context<cpu>& ctx, free_parameter<float, table, met>& offset,
               const part<float, spec<shard<batch, tp>, seq, hidden>>& x) {
  apply(rule::sum, add, x, x, offset.values(ctx));
}

// The output of a layer is said to be replicated, and every rank computes the whole gradient of it: tp times too much.
#ifdef PLAIT_FAIL_FIX
using output = spec<seq, hidden, invariant<tp>>;
#else
using output = spec<seq, hidden, replicate<tp>>;
#endif
void gradient_of_whole(const part<float, dual_t<output>>& dy, const part<const float, output>& y,
                       const part<const float, output>& target) {
  apply(rule::product, loss_backward, dy, y, target);
}

// A forgotten gather, a forgotten reduction of an input's gradient, and a row-parallel product into whole rows.
void calls(const context<cpu>& ctx, up& first, down& second, up::saved& kept, const part<float, rows>& x,
           const part<float, up::output>& h, [[maybe_unused]] const part<float, whole_rows>& whole,
           [[maybe_unused]] const part<float, spec<seq, ffn, partial<tp>>>& terms) {
#ifdef PLAIT_FAIL_FIX
  first.forward(ctx, x, h, &kept);
  second.forward(ctx, h, x);
  first.backward(ctx, x, kept, h, x);
#else
  first.forward(ctx, whole, h, &kept);
  second.forward(ctx, h, whole);
  first.backward(ctx, x, kept, terms, x);
#endif
}
