// The policy that pipelines a linear's collectives with its products, and the refusals of one that hides nothing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/make_plan.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/tensor/executor.hpp"

namespace plait {

/// How a linear overlaps its collectives with its products, named in its policy or in a strategy:
///
///     using overlap = pl::overlap<4>;
///
/// The all-gather of its input, and backward that of its output's gradient, comes in chunks of rows: the
/// product of those that have come runs while the next are on their way. The reduction of its output, and backward that
/// of its input's gradient, goes in chunks as they are computed. The last chunks of the gradient go beside the product
/// for the weight's gradient (Wang et al. 2023). Chunks need not divide the rows. What recomputation gathers again for
/// the weight's gradient comes whole, beside the product for the input's gradient. Adapters, which share all of these
/// collectives, add to each chunk. Along axes of one rank there is nothing to hide, and nothing is cut.
///
/// The results are the same in every bit as without, where neither the number of rows changes the sums of a product nor
/// its size those of a reduction. So it is between threads with the products of `cpu::options::canonical`. Libraries
/// may take another kernel for a product of few rows (oneDNN does on some processors, OpenBLAS and cuBLASLt anywhere),
/// and MPI may add in another order where ranks are more than two: then they are the same but for rounding.
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

/// The chunks that a policy or a strategy asks for; 1: none.
template <class Policy>
inline constexpr std::int64_t overlap_of = 1;
template <class Policy>
  requires requires { requires is_overlap<typename Policy::overlap>; }
inline constexpr std::int64_t overlap_of<Policy> = Policy::overlap::chunks;

/// Returns the number of chunks that a layer is given at run time, or its policy's if that is 0.
template <class Policy>
std::int64_t chosen_overlap(std::int64_t chunks, std::string_view name) {
  if (chunks < 0)
    fail({name, ": overlap in ", chunks,
          " chunks; at least 1, which is no overlap, or 0 for as many as the policy says"});
  return chunks == 0 ? overlap_of<Policy> : chunks;
}

/// Refuses chunks for a product that nothing overlaps with: `before` is the collective that it waits for, `after` the
/// one that waits for it.
inline void check_overlap(const std::string& name, std::int64_t chunks, const executor& before, const executor& after) {
  if (chunks < 1) fail({name, ": overlap in ", chunks, " chunks; at least 1, which is no overlap"});
  if (!before.trivial() && !after.trivial())
    fail({name, ": overlap is of what a product waits for or of what waits for it, and a product here has both: ",
          describe_steps(before.planned()), ", and ", describe_steps(after.planned()), "; leave overlap out"});
}

/// Whether a linear under this policy sends anything, forward or backward, on axes of more than one rank; true also
/// where it is refused for something else.
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

/// Says what is wrong with the `overlap` of a linear's policy or of a strategy.
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

/// Refuses an `overlap` that hides nothing in any of the linears of these policies.
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
/// A policy that is derived from a strategy is refused with it.
template <class P>
  requires requires { typename P::derived_from; }
inline constexpr bool overlap_checked<P> = true;

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
