// A schedule as a policy: a struct that makes one for given sizes.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/verify.hpp"

namespace plait {

/// A schedule as a policy: a plain struct with one static function. Four more members are optional.
///
///     struct my_schedule {
///       static constexpr std::string_view name = "mine";                             // default "custom"
///       static constexpr int chunks = 2;                                             // per rank; default 1
///       static constexpr stage_placement placement = stage_placement::vee;           // default straight
///       static constexpr schedule_verdict check(const pipeline_shape&) { ... }       // refuses sizes; default none
///       static constexpr schedule make(const pipeline_shape& shape) { ... }
///     };
///     static_assert(verify<my_schedule, pipeline_ranks<4>, microbatches<16>>());
template <class Policy>
concept schedule_policy = requires(const pipeline_shape& shape) {
  { Policy::make(shape) } -> std::same_as<schedule>;
};

template <schedule_policy Policy>
constexpr std::string_view schedule_name_of() {
  if constexpr (requires { std::string_view(Policy::name); })
    return Policy::name;
  else
    return "custom";
}

/// The shape that a policy has on `ranks` ranks, with `microbatches` microbatches.
template <schedule_policy Policy>
constexpr pipeline_shape shape_of(int ranks, int microbatches) {
  pipeline_shape shape{.ranks = ranks, .chunks = 1, .microbatches = microbatches};
  if constexpr (requires { int{Policy::chunks}; }) shape.chunks = Policy::chunks;
  if constexpr (requires { stage_placement{Policy::placement}; }) shape.placement = Policy::placement;
  return shape;
}

/// Whether a policy can serve a shape at all. The verdict names the nearest numbers of microbatches that it can.
template <schedule_policy Policy>
constexpr schedule_verdict check_shape(const pipeline_shape& shape) {
  if (const schedule_verdict v = detail::check_shape(shape); !v.ok()) return v;
  if constexpr (requires {
                  { Policy::check(shape) } -> std::same_as<schedule_verdict>;
                })
    return Policy::check(shape);
  return {};
}

/// The schedule that a policy makes. Throws `error` for sizes that the policy cannot serve; the schedule itself is not
/// verified.
template <schedule_policy Policy>
constexpr schedule make_schedule(int ranks, int microbatches) {
  const pipeline_shape shape = shape_of<Policy>(ranks, microbatches);
  if (const schedule_verdict v = check_shape<Policy>(shape); !v.ok())
    fail({"schedule ", schedule_name_of<Policy>(), " (", ranks, " ranks, ", microbatches,
          " microbatches): ", describe(v)});
  return Policy::make(shape);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
