#include "plait/nn/norm.hpp"
#include "plait/plan/dry_run.hpp"

using namespace plait;

// case: plan_dry_run_no_layer
// expect: dry_run: make returns a layer on the counting_device
using value = spec<shard<batch, dp>, hidden>;
struct norm {
  int mine;
};
struct make {
  template <class Device>
  auto operator()(const context<Device>& ctx) const {
#ifdef PLAIT_FAIL_FIX
    return rms_norm<float, value, Device>(ctx);
#else
    return norm{static_cast<int>(ctx.seed)};
#endif
  }
};
layer_plan planned() { return dry_run(mesh<axis<dp>>{2}.shape(), sizes_of<batch, hidden>(4, 8), 0, make{}); }

// case: workspace_of_no_layer
// expect: workspace_bytes: make returns a layer on the counting_device
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
