// The bytes that a layer's calls take from its device, for a program that gives the device its own allocator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "plait/comm/world.hpp"
#include "plait/device/counting.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// The bytes that the first calls of a layer take from a device, in blocks as a program's allocator sees them. Later
/// calls of the same sizes find these blocks in the device's cache and take nothing.
struct call_workspace {
  std::int64_t forward = 0;   ///< with what `saved` keeps
  std::int64_t backward = 0;  ///< beyond what the forward pass has left
};

/// Finds out by running a layer on a device and in a world that only count. `make(ctx)` makes it from a
/// `const context<counting_device>&`, with memory of its own, which is not counted, nor are input, output and their
/// gradients, which are the caller's where the layer takes them; a layer that only returns them takes them from the
/// device. A kernel may take more for itself on another device: attention does. `peak_bytes` of the device tells.
template <class Make>
call_workspace workspace_bytes(const mesh_shape& mesh, const dim_sizes& sizes, std::int64_t rank, Make&& make,
                               recompute policy = recompute::none) {
  world ranks = world::counting(mesh, rank);
  counting_device device;
  const context<counting_device> ctx{device, ranks, sizes, 0};
  auto one = make(ctx);
  using L = decltype(one);
  call_workspace found;
  static_assert(layer<L>, "workspace_bytes: make returns a layer on the counting_device");
  if constexpr (layer<L>) {  // or one mistake makes a page of messages
    gather_parameters(ctx, one);
    zero_gradients(ctx, one);
    each_parameter(
        [&](auto& p) {
          if (p.trainable()) p.used_gradient(device);  // makes its memory now
        },
        one);
    const microbatch<counting_device> mb = microbatch<counting_device>(ctx).keeping(policy);
    const typename L::template tensor_of<typename L::input> x(ctx);
    const typename L::template tensor_of<dual_t<typename L::output>> dy(ctx);
    // Only a layer that writes into results of the caller's is given some: others' would be spare memory, which a
    // program has not.
    typename L::template tensor_of<typename L::output> y;
    typename L::template tensor_of<dual_t<typename L::input>> dx;
    typename L::saved kept;
    constexpr bool takes_y = requires { one.forward(mb, x, y, &kept); };
    constexpr bool takes_dx = requires { one.backward(mb, x, kept, dy, dx); };
    if constexpr (takes_y) y = decltype(y)(ctx);
    if constexpr (takes_dx) dx = decltype(dx)(ctx);
    device.release_cache();
    const auto reserved = [&] { return static_cast<std::int64_t>(device.reserved_bytes()); };
    const std::int64_t before = reserved();
    if constexpr (takes_y)
      one.forward(mb, x, y, &kept);
    else
      y = one.forward(mb, x, &kept);
    found.forward = reserved() - before;
    if constexpr (takes_dx)
      one.backward(mb, x, kept, dy, dx);
    else
      dx = one.backward(mb, x, kept, dy);
    found.backward = reserved() - before - found.forward;
  }
  return found;
}

}  // namespace plait
