#pragma once

#include "options.hpp"
#include "plait/nn/strategies.hpp"

/// Calls `f.operator()<S>()` with the strategy S that --strategy and --store name: the one place that reads them.
template <class F>
auto with_strategy(const options& opt, F&& f) {
  using plait::megatron_sp, plait::megatron_tp, plait::stored_over_dp;
  const bool sharded = opt.store == "sharded";
  if (opt.strategy == "sp")
    return sharded ? f.template operator()<stored_over_dp<megatron_sp>>() : f.template operator()<megatron_sp>();
  return sharded ? f.template operator()<stored_over_dp<megatron_tp>>() : f.template operator()<megatron_tp>();
}
