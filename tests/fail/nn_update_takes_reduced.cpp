// expect: an optimizer takes what `reduce` returns, so that no reduction is forgotten: write optimizer.update(ctx, parameter.reduce(ctx))
// errors-at-most: 1
#include "plait/nn/linear.hpp"
#include "plait/parallel/optim/adamw.hpp"

using namespace plait;

struct up_policy {
  using input = spec<shard<batch, dp>, hidden>;
  using weight = spec<ffn, hidden>;
  using output = spec<shard<batch, dp>, ffn>;
};
void step(const context<cpu>& ctx, adamw<float>& optimizer, linear<float, up_policy>& up) {
#ifdef PLAIT_FAIL_FIX
  optimizer.update(ctx, up.weight()->reduce(ctx));
#else
  optimizer.update(ctx, *up.weight());
#endif
}
