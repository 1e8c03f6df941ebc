// The leaves of deterministic sums: into how many parts sums are cut, so that they have equal bits on every layout.
#pragma once

#include <cstdint>

#include "plait/version.hpp"

namespace plait {

/// The leaves of deterministic sums. Each sum that some layout may cut is cut into leaves whose number and places
/// depend on no layout. The terms of a leaf are added one after the other, and leaves by a binary tree. A program then
/// has equal bits on every mesh, schedule, number of microbatches and backend. Runs are comparable where these numbers
/// are equal. A context with none, which is the default, makes sums in the fastest way.
struct deterministic_leaves {
  /// Leaves of each dim of features that may be sharded: heads, kv_heads, ffn, vocab, and those that a policy shards. A
  /// dim whose size they do not divide has as many as are common divisors. 0: sums are made in the fastest way.
  std::int64_t features = 0;
  /// Leaves of the samples of a step, so at least as many as ranks along dp times microbatches.
  std::int64_t samples = 0;
  /// Leaves of a sequence, so at least as many as ranks along cp, twice as many in zigzag order. Attention meets keys
  /// by these leaves.
  std::int64_t sequence = 0;
  /// Ranks of a zigzag order, which `leaves_under<strategy>` knows; 0: not known, as for sequences in original order.
  std::int64_t zigzag = 0;

  /// Whether sums are deterministic.
  constexpr explicit operator bool() const { return features > 0; }
  friend constexpr bool operator==(const deterministic_leaves&, const deterministic_leaves&) = default;
};

/// Deterministic sums as a policy: `context{device, world, sizes, seed, deterministic<8, 8, 2>{}}`.
template <std::int64_t Features, std::int64_t Samples = Features, std::int64_t Sequence = 1>
struct deterministic {
  static_assert(Features > 0 && Samples > 0 && Sequence > 0,
                "deterministic<Features, Samples, Sequence> are numbers of leaves: 1 or more each");
  constexpr operator deterministic_leaves() const { return {Features, Samples, Sequence}; }  // NOLINT: equal values
};

}  // namespace plait
