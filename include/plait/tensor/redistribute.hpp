// The function that brings a tensor from one spec to another, planned at each call. As a layer with a backward pass it
// is `redistribution` in nn/combinators.hpp.
#pragma once

#include <string>

#include "plait/core/macros_off.hpp"
#include "plait/layout/check.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/executor.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {
namespace detail {
template <class From, class To>
struct redistribution_value {
  static constexpr verdict value = compare_dims(operand::output, layout_v<From>.dim_order(), layout_v<To>.dim_order());
};
/// Throws with deterministic sums where a plan adds terms of ranks in the backend's order.
template <compute_device Device>
void require_no_sum(const context<Device>& ctx, const executor& moves, const std::string& name) {
  if (!ctx.deterministic) return;
  for (const redistribution_step& s : moves.planned().steps)
    if (s.kind == transition_kind::all_reduce || s.kind == transition_kind::reduce_scatter)
      fail({name, ": deterministic sums have no order for this sum over ranks: ", describe_steps(moves.planned())});
}
}  // namespace detail

/// Brings a tensor from its spec to `To`, which has the same dims in the same order: the plan of least bytes. Its
/// adjoint is `redistribute<dual_t<From>>` of a gradient.
template <spec_like To, class T, spec_like From, compute_device Device>
tensor<T, To, Device> redistribute(const context<Device>& ctx, const tensor<T, From, Device>& x) {
  static_assert(enforced<detail::redistribution_value<From, To>, among<From, To>, From, To>);
  const executor moves(layout_v<From>, layout_v<To>, ctx.ranks, ctx.sizes, "redistribute");
  detail::require_no_sum(ctx, moves, "redistribute");
  if (x.size() != moves.source().local_size())
    fail({"redistribute: x has ", x.size(), " elements, and in this context there are ", moves.source().local_size()});
  tensor<T, To, Device> y(ctx);
  moves.run(ctx.device, x.data(), y.data(), dtype_of<T>);
  return y;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
