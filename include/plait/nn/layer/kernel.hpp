// A kernel of a program's own, as a layer of its own calls it: it runs on a device, and a program that only counts
// counts it.
#pragma once

#include <utility>

#include "plait/core/dtype.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// The work of a kernel on this rank, as dry runs count and price it.
struct kernel_cost {
  double bytes = 0;        ///< read and written
  double operations = 0;   ///< multiplications and additions at the rate of products of `of`
  dtype of = dtype::bf16;  ///< the numbers that these are of
};

/// Calls f(), which computes on this rank's part of tensors, or launches what does. In a dry run f is not called, since
/// there are no numbers: the kernel counts as `cost` says. Throws where that is negative or no number.
template <compute_device Device, class F>
void kernel(const context<Device>& ctx, const kernel_cost& cost, F&& f) {
  if (!(cost.bytes >= 0 && cost.operations >= 0))
    fail({"kernel_cost: ", cost.bytes, " bytes and ", cost.operations, " operations; legal are 0 or more"});
  if constexpr (only_counts<Device>)
    ctx.device.count_kernel(cost.of, cost.operations, cost.bytes);
  else
    std::forward<F>(f)();
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
