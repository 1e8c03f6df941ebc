// expect: dry_run: make returns a layer on the counting_device
#include "plait/nn/norm.hpp"
#include "plait/plan/dry_run.hpp"

using namespace plait;

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
