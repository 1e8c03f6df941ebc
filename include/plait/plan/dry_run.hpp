// Counts the bytes that a layer or a training step sends, holds and allocates, by running it without computation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/comm/metrics.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/counting.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/schedule/order.hpp"

namespace plait {

/// The work of a layer in one forward and one backward pass, on one rank.
struct layer_plan {
  ledger forward, backward;     ///< traffic of the passes
  std::int64_t kept_bytes = 0;  ///< that the forward pass keeps, in addition to input and output
  std::int64_t peak_bytes = 0;  ///< the most in use at a time, including input, output and parameters
};

/// Runs a layer on a counting device in a counting world, and returns its work. `make(ctx)` constructs the layer from a
/// `const context<counting_device>&`. It measures the layer's own code, so a layer needs no further code for this.
/// `unequal_parts` as for `world::counting`.
template <class Make>
layer_plan dry_run(const mesh_shape& mesh, const dim_sizes& sizes, std::int64_t rank, Make&& make,
                   recompute policy = recompute::none, const deterministic_leaves& leaves = {},
                   unequal_parts_rule unequal_parts = nullptr) {
  world ranks = world::counting(mesh, rank, {}, unequal_parts);
  counting_device device;
  const context<counting_device> ctx{device, ranks, sizes, 0, leaves};
  auto one = make(ctx);
  using L = decltype(one);
  layer_plan plan;
  static_assert(layer<L>, "dry_run: make returns a layer on the counting_device");
  if constexpr (layer<L>) {  // otherwise one mistake causes a page of errors
    gather_parameters(ctx, one);
    zero_gradients(ctx, one);
    ranks.ledger().clear();
    microbatch<counting_device> mb = microbatch<counting_device>(ctx).keeping(policy);
    auxiliary_sum auxiliary;
    mb.auxiliary = &auxiliary;
    const typename L::template tensor_of<typename L::input> x(ctx);
    const typename L::template tensor_of<dual_t<typename L::output>> dy(ctx);
    typename L::saved kept;
    {
      const auto before = static_cast<std::int64_t>(device.bytes_in_use());
      const auto y = one.forward(mb, x, &kept);
      plan.kept_bytes = static_cast<std::int64_t>(device.bytes_in_use()) - before -
                        y.size() * static_cast<std::int64_t>(sizeof(typename L::value_type));
      plan.forward = ranks.ledger();
    }
    ranks.ledger().clear();
    one.backward(mb, x, kept, dy);
    plan.backward = ranks.ledger();
    plan.peak_bytes = static_cast<std::int64_t>(device.peak_bytes());
  }
  return plan;
}

/// The work of a training step on one rank.
struct step_plan {
  ledger traffic;
  std::int64_t peak_bytes = 0;  ///< the most in use at a time, in total
  std::int64_t kept_bytes = 0;  ///< the most that is kept at a time between passes, including messages in flight
  std::int64_t host_bytes = 0;  ///< the most of the host's memory for offloaded values
  posted_program posted;        ///< its calls in order; `verify_order` takes the programs of all ranks
};

/// Runs two steps of a pipeline on the `counting_device`, in a `pipeline_world::counting`. Returns the work of the
/// second, for which the optimizer's state exists.
template <model Stage>
step_plan dry_run_step(const context<counting_device>& ctx, pipeline<Stage>& stages,
                       optimizer_ref<typename Stage::precision_type, counting_device> optimizer) {
  training_step step(ctx, stages, optimizer, 1.0);
  step_plan plan;
  const auto fill = [](auto&&...) {};
  for (int i = 0; i < 2; ++i) {  // the optimizer's state exists in the second one
    ctx.ranks.ledger().clear();
    if (ctx.ranks.calls()) ctx.ranks.calls()->posted.calls.clear();
    step.load(ctx, 0, fill);
    optimizer.begin_step(ctx, 1.0);
    ctx.device.reset_peak();
    const std::size_t before = ctx.device.bytes_in_use();
    std::vector<pipeline_event> events;
    stages.executor().events = &events;
    step.run(ctx);
    stages.executor().events = nullptr;
    plan.peak_bytes = static_cast<std::int64_t>(ctx.device.peak_bytes());
    plan.kept_bytes = 0;
    for (const pipeline_event& e : events)
      if (e.memory > before) plan.kept_bytes = std::max(plan.kept_bytes, static_cast<std::int64_t>(e.memory - before));
  }
  plan.traffic = ctx.ranks.ledger();
  plan.host_bytes = static_cast<std::int64_t>(ctx.device.host_peak_bytes());
  if (ctx.ranks.calls()) {
    auto& executor = stages.executor();
    plan.posted = ctx.ranks.calls()->posted;
    plan.posted.entries = executor.step().programs[static_cast<std::size_t>(executor.along().rank())];
  }
  return plan;
}
/// This overload uses AdamW.
template <model Stage>
step_plan dry_run_step(const context<counting_device>& ctx, pipeline<Stage>& stages) {
  adamw<typename Stage::precision_type, counting_device> optimizer;
  return dry_run_step(ctx, stages, optimizer);
}

/// The bytes that the first calls of a layer allocate from a device, in blocks as in a program's allocator. Later calls
/// of equal sizes reuse these blocks from the device's cache and allocate nothing.
struct call_workspace {
  std::int64_t forward = 0;   ///< including the values in `saved`
  std::int64_t backward = 0;  ///< in addition to those of the forward pass
};

/// Counts by running a layer on a counting device in a counting world. `make(ctx)` makes a layer that owns its memory,
/// which is not counted; `ctx` is a `const context<counting_device>&`. If the layer takes the caller's input, output
/// and gradients, these are not counted. If it only returns them, it allocates them from the device. A kernel may
/// allocate more on another device, as attention does; that device's `peak_bytes` shows it.
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
  if constexpr (layer<L>) {  // otherwise one mistake causes a page of errors
    gather_parameters(ctx, one);
    zero_gradients(ctx, one);
    each_parameter(
        [&](auto& p) {
          if (p.trainable()) p.used_gradient(device);  // allocates its memory now
        },
        one);
    const microbatch<counting_device> mb = microbatch<counting_device>(ctx).keeping(policy);
    const typename L::template tensor_of<typename L::input> x(ctx);
    const typename L::template tensor_of<dual_t<typename L::output>> dy(ctx);
    // Only layers that write into the caller's results receive some. For others they would be spare memory that no
    // program has.
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

#include "plait/core/macros_on.hpp"
