// Verifies a schedule's policy in a `static_assert`, and includes all of plait's policies.
#pragma once

#include "plait/schedule/errors.hpp"
// Errors come first, because a compiler prints the include path to them.
#include "plait/core/macros_off.hpp"
#include "plait/schedule/generators.hpp"

namespace plait {

/// Arguments of `verify<...>`: the ranks along the pipeline axis, the microbatches of a step, and the most activations
/// that a rank may keep, in microbatch-stages. Each rank holds as many stages as the policy has chunks.
template <int N>
struct pipeline_ranks {
  static_assert(N >= 1, "pipeline_ranks<N> needs at least one rank");
};
template <int N>
struct microbatches {
  static_assert(N >= 1 && N <= max_microbatches, "microbatches<N> needs 1 to 65535 microbatches");
};
template <int N>
struct activations_at_most {};  // negative: no limit

/// The facts of a compile error, as types that the compiler prints.
template <int Rank>
struct at_rank {};
template <int Position>
struct at_position {};
template <action_kind Kind, int Microbatch, int Chunk>
struct at_action {};
template <int Below, int Above>
struct nearest_legal {};
struct no_particular_action {};
struct no_nearest {};

namespace detail {

template <class Policy, int Ranks, int Microbatches>
constexpr schedule_verdict verdict_of(const verify_options& options) {
  const pipeline_shape shape = shape_of<Policy>(Ranks, Microbatches);
  if (const schedule_verdict v = check_shape<Policy>(shape); !v.ok()) return v;
  const schedule s = Policy::make(shape);
  if (s.shape != shape) return {.code = schedule_error::placement_differs};
  return verify(s, options);
}

template <schedule_verdict V>
constexpr auto action_fact() {
  if constexpr (V.rank >= 0 && V.step.op == step_op::pass)
    return at_action<V.step.pass.kind, V.step.pass.microbatch, V.step.pass.chunk>{};
  else
    return no_particular_action{};
}
template <schedule_verdict V>
constexpr auto nearest_fact() {
  if constexpr (V.below > 0 || V.above > 0)
    return nearest_legal<V.below, V.above>{};
  else
    return no_nearest{};
}

template <class Verifier, class... Arguments>
struct schedule_refusal {
  static constexpr schedule_verdict v = Verifier::verdict;
  using type = refused<v.code, Arguments..., at_rank<v.rank>, at_position<v.position>, decltype(action_fact<v>()),
                       decltype(nearest_fact<v>())>;
};

template <class Policy, class Ranks, class Microbatches, class Limit = activations_at_most<-1>>
struct verifier;
template <class Policy, int Ranks, int Microbatches, int Limit>
struct verifier<Policy, pipeline_ranks<Ranks>, microbatches<Microbatches>, activations_at_most<Limit>> {
  static constexpr schedule_verdict verdict =
      verdict_of<Policy, Ranks, Microbatches>({.max_activations = static_cast<double>(Limit)});
};

}  // namespace detail

/// Verifies a schedule at compile time. Returns true; otherwise the compile error has the broken rule and the first
/// wrong action.
///
/// It takes about a tenth of a second for 4 ranks and 16 microbatches. Up to 8 ranks with 2 chunks and 32 microbatches
/// are within the default limits of compilers. Larger schedules need clang's -fconstexpr-steps or g++'s
/// -fconstexpr-ops-limit. `require_verified` checks them at run time in milliseconds.
///
///     static_assert(plait::verify<plait::interleaved<2>, plait::pipeline_ranks<4>, plait::microbatches<16>>());
///     static_assert(plait::verify<plait::zb_h1, plait::pipeline_ranks<4>, plait::microbatches<16>,
///                                 plait::activations_at_most<4>>());
template <schedule_policy Policy, class Ranks, class Microbatches, class... Limits>
constexpr bool verify() {
  using verifier = detail::verifier<Policy, Ranks, Microbatches, Limits...>;
  using consequence =
      detail::consequence_of<verifier::verdict.ok(),
                             detail::schedule_refusal<verifier, Policy, Ranks, Microbatches, Limits...>>;
  // Asking for the size instantiates the class but keeps this function valid, so one mistake gives one error.
  return requires { sizeof(typename consequence::type); } || true;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
