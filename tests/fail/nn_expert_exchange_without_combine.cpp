// expect: a mixture's exchange is a policy: a type with a constructor X(device, expert_group), a route, and the members open, dispatch and combine
// errors-at-most: 1
#include "plait/nn/moe.hpp"

using namespace plait;

// Without the error, rows would travel to experts and never return.
template <class T, class Device>
struct one_way {
  using route = int;
  one_way(Device&, const expert_group&) {}
  route open(Device&, host_values<std::int32_t, Device>&, expert_rows&) const { return 0; }
  template <class Work>
  buffer<Device> dispatch(Device&, route, buffer<Device> rows, Work&& meanwhile) const {
    meanwhile();
    return rows;
  }
#ifdef PLAIT_FAIL_FIX
  buffer<Device> combine(Device&, route, buffer<Device> rows) const { return rows; }
#endif
};
struct experts_over_ep {
  using input = spec<shard<batch, ep>, seq, hidden>;
  using weight = spec<shard<experts, ep>, ffn, hidden>;
  using output = input;
  template <class T, class Device>
  using exchange = one_way<T, Device>;
};
template class plait::moe<float, experts_over_ep>;
