// expect: workspace_bytes: make returns a layer on the counting_device
#include "plait/nn/norm.hpp"
#include "plait/plan/dry_run.hpp"

using namespace plait;

using two = mesh<axis<tp>>;
using rows = spec<shard<seq, tp>, hidden>;

std::int64_t forward_bytes(const dim_sizes& sizes) {
#ifdef PLAIT_FAIL_FIX
  const auto make = [](const auto& ctx) { return rms_norm<float, rows, counting_device>(ctx); };
#else
  const auto make = [](const auto& ctx) { return ctx.sizes; };
#endif
  return workspace_bytes(two{2}.shape(), sizes, 0, make).forward;
}
