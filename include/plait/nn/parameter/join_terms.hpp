// The completion of a gradient that is a canonical sum, for a parameter by itself. Those in a bucket are completed
// together: data_parallel/bucket.hpp.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/nn/parameter/array.hpp"
#include "plait/tensor/executor.hpp"

namespace plait {

/// Writes the complete gradient of elements from `begin` on in `array`: the sums of all its users over all axes over
/// which `gradient` is partial, and then of the users. Throws where the parameter is not stored as it is used.
/// Collective over those axes.
template <class Precision, compute_device Device>
void join_terms(const context<Device>& ctx, parameter_array<Precision, Device>& array, std::int64_t begin,
                const layout& gradient, const executor& gather, gradient_of<Precision>* out, const std::string& name) {
  using G = gradient_of<Precision>;
  if (!gather.trivial())
    fail({"parameter ", name,
          ": canonical numerics have an order for gradients of what is stored as it is used, and its ",
          "strategy's `stored` cuts it; use a level of data parallelism for that"});
  const axis_list axes = ctx.ranks.pruned(ctx.ranks.shape().in_order(gradient.partial));
  const std::int64_t n = gather.source().local_size();
  bool first = true;
  for (const auto& user : array.terms()) {
    if (user->empty()) continue;
    partial_sums<G, Device> sums = user->parts(begin);
    if (!axes.empty()) sums = user->exchange(ctx.ranks, axes, {}).run_everywhere(ctx.device, std::move(sums), n);
    const G* const sum = detail::complete_sum(sums, user->leaves().leaves(), name);
    if (first)
      ctx.device.copy(out, sum, static_cast<std::size_t>(n) * sizeof(G), ctx.device.main_stream());
    else
      kernels::accumulate(ctx.device, sum, out, n);
    first = false;
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
