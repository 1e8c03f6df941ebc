#pragma once

#include <fmt/format.h>

#include <string_view>

#include "options.hpp"
#include "plait/core/error.hpp"
#include "plait/core/types.hpp"
#include "plait/nn/strategy.hpp"

/// Calls `f.operator()<S>()` with the strategy S that --strategy names: the one place that reads it.
template <class F>
auto with_strategy(const options& opt, F&& f) {
  return opt.strategy == "sp" ? f.template operator()<plait::megatron_sp>()
                              : f.template operator()<plait::megatron_tp>();
}

/// What CMake's option PLAIT_TRAINER_PRECISIONS calls a precision.
template <class Precision>
inline constexpr std::string_view precision_name{};
template <>
inline constexpr std::string_view precision_name<float> = "float";
template <>
inline constexpr std::string_view precision_name<double> = "double";
template <>
inline constexpr std::string_view precision_name<plait::bf16> = "bf16";
template <>
inline constexpr std::string_view precision_name<plait::bf16_no_masters> = "bf16_no_masters";
template <>
inline constexpr std::string_view precision_name<plait::bf16_gradients> = "bf16_gradients";
template <>
inline constexpr std::string_view precision_name<plait::bf16_gradients_float_masters> = "bf16_gradients_float_masters";

/// Whether this program is built for a precision: for all of them, unless the option says for which.
template <class Precision>
constexpr bool is_built() {
#ifdef PLAIT_TRAINER_PRECISIONS
  std::string_view rest = PLAIT_TRAINER_PRECISIONS;  // with a blank behind each
  for (std::size_t end; (end = rest.find(' ')) != rest.npos; rest.remove_prefix(end + 1))
    if (rest.substr(0, end) == precision_name<Precision>) return true;
  return false;
#else
  return true;
#endif
}

/// Calls `f.operator()<Precision, S>()`, which is there where the program is built for it. Throws `error` where not.
template <class Precision, class S, class F>
auto if_built(const options& opt, F& f) -> decltype(f.template operator()<Precision, S>()) {
  if constexpr (is_built<Precision>()) {
    return f.template operator()<Precision, S>();
  } else {
    plait::fail(
        fmt::format("--precision {}{}: this program was built without it, as examples/run.sh does; build it with "
                    "-DPLAIT_TRAINER_PRECISIONS=all",
                    opt.precision, has_bf16_gradients(opt) ? " with --gradients bf16" : ""));
  }
}

/// Calls `f.operator()<Precision, S>()` with what --precision, --gradients and --strategy name. check_options.cpp
/// refuses what it does not have: every instantiation takes its time to compile.
template <class F>
auto with_types(const options& opt, F&& f) {
  using plait::megatron_sp;
  if (opt.precision == "bf16-no-masters")
    return has_bf16_gradients(opt) ? if_built<plait::bf16_gradients, megatron_sp>(opt, f)
                                   : if_built<plait::bf16_no_masters, megatron_sp>(opt, f);
  if (has_bf16_gradients(opt)) return if_built<plait::bf16_gradients_float_masters, megatron_sp>(opt, f);
  return with_strategy(opt, [&]<class S>() {
    if (opt.precision == "double") return if_built<double, S>(opt, f);
    if (opt.precision == "bf16") return if_built<plait::bf16, S>(opt, f);
    return if_built<float, S>(opt, f);
  });
}
