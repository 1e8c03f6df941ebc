// Policies of linears and embeddings in one line each, and the refusals of a policy's members.
#pragma once

#include <type_traits>

#include "plait/layout/mesh.hpp"
#include "plait/layout/spec.hpp"

namespace plait {

/// The policy of a linear without a bias, or of an embedding: `linear<float, layer_policy<input, weight, output>>`.
template <spec_like Input, spec_like Weight, spec_like Output>
struct layer_policy {
  using input = Input;
  using weight = Weight;
  using output = Output;
};
/// The policy of a linear with a bias.
template <spec_like Input, spec_like Weight, spec_like Output>
struct biased_policy : layer_policy<Input, Weight, Output> {
  static constexpr bool bias = true;
};

namespace detail {

/// Says which members a linear's or an embedding's policy lacks, and which mean nothing or are of the wrong kind: the
/// optional ones would be dropped in silence. Some names near to an optional member's are refused where that member is
/// missing; C++ cannot see what other names a class has.
template <class P>
struct policy_requirements {
  static_assert(
      requires { requires spec_like<typename P::input>; },
      "a policy names `input`, a spec: using input = spec<...>, how what goes in lies");
  static_assert(
      requires { requires spec_like<typename P::weight>; },
      "a policy names `weight`, a spec: using weight = spec<...>, how the weight lies while it is used");
  static_assert(
      requires { requires spec_like<typename P::output>; },
      "a policy names `output`, a spec: using output = spec<...>, how what comes out lies");

  static constexpr bool names_bias = requires { P::bias; } || requires { typename P::bias; };
  static_assert(
      !names_bias || requires { typename std::bool_constant<P::bias>; },
      "a policy's `bias` is a constant: static constexpr bool bias = true;");
  static_assert(
      names_bias || !requires { P::has_bias; },
      "the policy has a member `has_bias`, which means nothing: did you mean `bias`?");
  static_assert(
      names_bias || !requires { P::use_bias; },
      "the policy has a member `use_bias`, which means nothing: did you mean `bias`?");
  static_assert(
      names_bias || !requires { P::with_bias; },
      "the policy has a member `with_bias`, which means nothing: did you mean `bias`?");
  static_assert(
      names_bias || !requires { P::add_bias; },
      "the policy has a member `add_bias`, which means nothing: did you mean `bias`?");
  static_assert(
      names_bias || !requires { P::Bias; },
      "the policy has a member `Bias`, which means nothing: did you mean `bias`?");

  static constexpr bool names_stored = requires { typename P::stored; };
  static_assert(
      !names_stored || requires { requires spec_like<typename P::stored>; },
      "a policy's `stored` is a spec: how the weight lies between steps");
  static_assert(
      !requires { &P::stored; }, "a policy's `stored` is a type: using stored = spec<...>;");
  static_assert(
      names_stored || !requires { typename P::store; },
      "the policy has a member `store`, which means nothing: did you mean `stored`?");
  static_assert(
      names_stored || !requires { typename P::Stored; },
      "the policy has a member `Stored`, which means nothing: did you mean `stored`?");
  static_assert(
      names_stored || !requires { typename P::storage; },
      "the policy has a member `storage`, which means nothing: did you mean `stored`?");
  static_assert(
      names_stored || !requires { typename P::stored_as; },
      "the policy has a member `stored_as`, which means nothing: did you mean `stored`?");

  static constexpr bool names_mesh = requires { typename P::mesh; };
  static_assert(
      !names_mesh || requires { requires mesh_like<typename P::mesh>; },
      "a policy's `mesh` is a plait::mesh<axis<...>...>");
  static_assert(
      names_mesh || !requires { typename P::Mesh; },
      "the policy has a member `Mesh`, which means nothing: did you mean `mesh`?");
  static_assert(
      names_mesh || !requires { typename P::device_mesh; },
      "the policy has a member `device_mesh`, which means nothing: did you mean `mesh`?");
  static_assert(
      names_mesh || !requires { typename P::mesh_type; },
      "the policy has a member `mesh_type`, which means nothing: did you mean `mesh`?");
};

/// Instantiates the requirements.
template <class Policy>
inline constexpr bool policy_checked = sizeof(policy_requirements<Policy>) > 0;

/// A layer derives everything from this: its policy, or, where that lacks a spec, `Otherwise`, so that what is missing
/// is one error and not one for each that follows from it.
template <class Policy, class Otherwise>
struct policy_or {
  using type = Otherwise;
};
template <class Policy, class Otherwise>
  requires spec_like<typename Policy::input> && spec_like<typename Policy::weight> && spec_like<typename Policy::output>
struct policy_or<Policy, Otherwise> {
  using type = Policy;
};

}  // namespace detail
}  // namespace plait
