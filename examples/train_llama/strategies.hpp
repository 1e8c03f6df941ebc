#pragma once

#include "options.hpp"
#include "plait/nn/strategies.hpp"

/// Calls `f.operator()<S>()` with the strategy S that --strategy names: the one place that reads it.
template <class F>
auto with_strategy(const options& opt, F&& f) {
  return opt.strategy == "sp" ? f.template operator()<plait::megatron_sp>()
                              : f.template operator()<plait::megatron_tp>();
}
