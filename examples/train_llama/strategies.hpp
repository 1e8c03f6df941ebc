#pragma once

#include "options.hpp"
#include "plait/core/precision.hpp"
#include "plait/nn/strategies.hpp"

/// Calls `f.operator()<S>()` with the strategy S that --strategy names: the one place that reads it.
template <class F>
auto with_strategy(const options& opt, F&& f) {
  return opt.strategy == "sp" ? f.template operator()<plait::megatron_sp>()
                              : f.template operator()<plait::megatron_tp>();
}

/// Calls `f.operator()<Precision, S>()` with what --precision, --gradients and --strategy name. check_options.cpp
/// refuses what it does not have: every instantiation takes its time to compile.
template <class F>
auto with_types(const options& opt, F&& f) {
  using plait::megatron_sp;
  if (opt.precision == "bf16-no-masters")
    return has_bf16_gradients(opt) ? f.template operator()<plait::bf16_gradients, megatron_sp>()
                                   : f.template operator()<plait::bf16_no_masters, megatron_sp>();
  if (has_bf16_gradients(opt)) return f.template operator()<plait::bf16_gradients_float_masters, megatron_sp>();
  return with_strategy(opt, [&]<class S>() {
    if (opt.precision == "double") return f.template operator()<double, S>();
    if (opt.precision == "bf16") return f.template operator()<plait::bf16, S>();
    return f.template operator()<float, S>();
  });
}
