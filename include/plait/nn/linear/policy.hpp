// Policies of linears and embeddings: two ready-made ones, `overlap`, and the errors for wrong members.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/spec.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/tensor/redistribution.hpp"

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

/// Reports the specs that a policy lacks, and errors in its `mesh`.
template <class P>
struct spec_requirements {
  static_assert(
      requires { requires spec_like<typename P::input>; },
      "a policy names `input`, the spec of the layer's input: using input = spec<...>");
  static_assert(
      requires { requires spec_like<typename P::weight>; },
      "a policy names `weight`, the spec of the weight in use: using weight = spec<...>");
  static_assert(
      requires { requires spec_like<typename P::output>; },
      "a policy names `output`, the spec of the layer's output: using output = spec<...>");

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

/// Reports the members that a policy of a linear or an embedding lacks, and members without a meaning or of a wrong
/// kind. Without this check, misnamed optional members would be ignored silently. Only some similar names are refused,
/// since C++ cannot list the members of a class.
template <class P>
struct policy_requirements : spec_requirements<P> {
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
      "a policy's `stored` is a spec: that of the weight between steps");
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
};

/// Instantiates the requirements.
template <class Policy>
inline constexpr bool policy_checked = sizeof(policy_requirements<Policy>) > 0;

/// The policy from which a layer derives everything, or `Otherwise` if the policy lacks a spec. So a missing spec is
/// one error, without errors for the specs derived from it.
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

// Overlap: a linear's collectives pipelined with its products, and the error for an overlap that hides no
// communication.

/// How a linear overlaps its collectives with its products, named in its policy or in a strategy:
///
///     using overlap = pl::overlap<4>;
///
/// All-gathers (of the input, and backward of the output's gradient) run in chunks of rows. The product of one chunk
/// runs while the next chunk is in flight. Reductions (of the output, and backward of the input's gradient) run in
/// chunks as these are computed. The input gradient's last chunks overlap the product for the weight's gradient (Wang
/// et al. 2023). If recomputation gathers the input again for the weight's gradient, this gather is not chunked and
/// overlaps the product for the input's gradient. Chunks need not divide the rows. Adapters use the same collectives
/// and add to each chunk. Collectives over axes of one rank are not chunked.
///
/// Results have the same bits as without overlap under two conditions. A product's sums must not depend on its number
/// of rows, and a reduction's sums must not depend on its size. Threads with the products of
/// `cpu::options::deterministic` meet both; otherwise results may differ by rounding. Libraries may use another kernel
/// for a product of few rows: oneDNN on some processors, OpenBLAS and cuBLASLt on all. MPI may add in another order
/// with more than two ranks.
template <std::int64_t Chunks>
struct overlap {
  static_assert(Chunks >= 1,
                "overlap<chunks> counts chunks of a linear's collectives: at least 1, which is no overlap");
  static constexpr std::int64_t chunks = Chunks;
};

namespace detail {

template <class T>
inline constexpr bool is_overlap = false;
template <std::int64_t Chunks>
inline constexpr bool is_overlap<plait::overlap<Chunks>> = true;

/// The number of chunks that a policy or a strategy names; 1 if it names none.
template <class Policy>
inline constexpr std::int64_t overlap_of = 1;
template <class Policy>
  requires requires { requires is_overlap<typename Policy::overlap>; }
inline constexpr std::int64_t overlap_of<Policy> = Policy::overlap::chunks;

/// Returns `chunks`, the number that a layer receives at run time, or the policy's number if that is 0.
template <class Policy>
std::int64_t chosen_overlap(std::int64_t chunks, std::string_view name) {
  if (chunks < 0)
    fail({name, ": overlap in ", chunks, " chunks; at least 1, which is no overlap, or 0 for the policy's number"});
  return chunks == 0 ? overlap_of<Policy> : chunks;
}

/// Refuses chunks for a product between two collectives: `before` precedes the product, `after` follows it.
inline void check_overlap(const std::string& name, std::int64_t chunks, const ready_plan& before,
                          const ready_plan& after) {
  if (chunks < 1) fail({name, ": overlap in ", chunks, " chunks; at least 1, which is no overlap"});
  if (!before.trivial() && !after.trivial())
    fail({name, ": overlap needs a product with one collective, before it or after it, and a product here has both: ",
          describe_steps(before.planned()), ", and ", describe_steps(after.planned()), "; leave overlap out"});
}

/// Whether a linear under this policy sends data, forward or backward, on axes of more than one rank. Also true if the
/// policy is refused for another reason.
template <class Policy>
constexpr bool sends() {
  const auto moves = [](const layout& from, const layout& to) {
    const plan there = make_plan(from, to);
    return !there.communicating_axes().empty() || !mirror(there).communicating_axes().empty();
  };
  const linear_derivation<1> d = derive_linear<1>(layout_v<typename Policy::input>, {layout_v<typename Policy::weight>},
                                                  {layout_v<typename Policy::output>});
  return !d.verdict.ok() || moves(d.input, d.gathered) || moves(d.branches[0].product, d.branches[0].output);
}

/// Reports errors in the `overlap` of a linear's policy or of a strategy.
template <class P>
struct overlap_requirements {
  static constexpr bool named = requires { typename P::overlap; };
  static_assert(
      !named || requires { requires is_overlap<typename P::overlap>; },
      "a policy's `overlap` is a plait::overlap<chunks>: using overlap = pl::overlap<4>;");
  static_assert(
      !requires { &P::overlap; }, "a policy's `overlap` is a type: using overlap = pl::overlap<4>;");
  static_assert(
      named || !requires { typename P::overlapped; },
      "the policy has a member `overlapped`, which means nothing: did you mean `overlap`?");
  static_assert(
      named || !requires { typename P::Overlap; },
      "the policy has a member `Overlap`, which means nothing: did you mean `overlap`?");
  static_assert(
      named || !requires { P::overlap_chunks; },
      "the policy has a member `overlap_chunks`, which means nothing: did you mean `overlap`?");
};

/// Refuses an `overlap` if none of the linears under these policies sends data.
template <class P, class... Policies>
constexpr bool check_overlap() {
  if constexpr (overlap_of<P> != 1)
    static_assert((sends<Policies>() || ...),
                  "`overlap` would hide nothing: by their specs, its linears gather no input and reduce no output, "
                  "forward or backward; leave it out");
  return true;
}
template <class P>
inline constexpr bool overlap_checked = sizeof(overlap_requirements<P>) > 0 && check_overlap<P, P>();
/// Accepts a policy that is derived from a strategy, since the strategy itself is checked.
template <class P>
  requires requires { typename P::derived_from; }
inline constexpr bool overlap_checked<P> = true;

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
