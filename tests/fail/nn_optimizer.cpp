#include "if_fixed.hpp"
#include "plait/nn/linear.hpp"
#include "plait/parallel/optim/adamw.hpp"

using namespace plait;

struct up_policy {
  using input = spec<shard<batch, dp>, hidden>;
  using weight = spec<ffn, hidden>;
  using output = spec<shard<batch, dp>, ffn>;
};

// case: update_takes_reduced
// expect: an optimizer takes what `reduce` returns, so that no reduction is forgotten: write optimizer.update(ctx, parameter.reduce(ctx))
// errors-at-most: 1
void step(const context<cpu>& ctx, adamw<float>& optimizer, linear<float, up_policy>& up) {
#ifdef PLAIT_FAIL_FIX
  optimizer.update(ctx, up.weight()->reduce(ctx));
#else
  optimizer.update(ctx, *up.weight());
#endif
}

// case: optimizer_of_other_precision
// expect: the optimizer is of another precision than the parameters: write adamw<double> or muon<double> for layers of double
// expect: is_same_v<float, double>
// errors-at-most: 2
using one_of_these = if_fixed<adamw<double>, adamw<float>>;
void step(const context<cpu>& ctx, one_of_these& optimizer, linear<double, up_policy>& up) {
  optimizer.update(ctx, up.weight()->reduce(ctx));
  optimizer.update(ctx, up);
}
