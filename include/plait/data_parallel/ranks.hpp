// The axes of data parallelism and its communicators, apart from those of layers. It moves nothing itself. Next:
// data_parallel/bucket.hpp.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tag.hpp"

namespace plait {

/// The axes over which a step's data is spread, so that the gradients of parameters are sums over them. With levels of
/// `zero_level` beyond `replicated`, parameters are cut over `shard`; over `replicate` the pieces are equal, which
/// makes a hybrid: sharded within, replicated over.
struct data_axes {
  axis_list shard = axis_list(axis_of<dp>, axis_of<cp>);
  axis_list replicate{};
};

/// How a bucket is cut into the pieces of its ranks:
///
///     bucket_cut::even        anywhere, so that pieces are equal and nothing is padded but to alignment
///     bucket_cut::whole       between arrays, so that every matrix has one owner, as optimizers need that work on whole
///                             matrices; arrays are shared out by size, and all pieces are as large as the largest;
///                             over the units of a model the costs of updates are balanced (placement.hpp)
///     bucket_cut::blocks(n)   every n elements of an array at most, for states that are quantised by blocks, which
///                             then do not depend on the number of ranks; pieces are equal, and padded to n
class bucket_cut {
 public:
  static const bucket_cut even, whole;
  /// Throws unless n is legal: a multiple of 128 (`alignment`) up to 65536.
  static constexpr bucket_cut blocks(std::int64_t n) {
    if (n < alignment || n > most_block || n % alignment != 0)
      fail(
          {"bucket_cut::blocks(", n, "): legal are multiples of ", alignment, " from ", alignment, " to ", most_block});
    return bucket_cut(n);
  }
  /// Pieces and arrays begin at multiples of so many elements: 256 bytes of the narrowest type, as libraries like it.
  static constexpr std::int64_t alignment = 128;

  constexpr bool is_whole() const { return block_ == 0; }
  /// Pieces and arrays begin at multiples of so many elements in a bucket.
  constexpr std::int64_t block() const { return is_whole() ? alignment : block_; }
  friend constexpr bool operator==(const bucket_cut&, const bucket_cut&) = default;

 private:
  static constexpr std::int64_t most_block = 65536;
  explicit constexpr bucket_cut(std::int64_t block) : block_(block) {}
  std::int64_t block_;  ///< 0: whole
};
inline constexpr bucket_cut bucket_cut::even{bucket_cut::alignment};
inline constexpr bucket_cut bucket_cut::whole{0};

/// The form in which gradients travel over the data axes, where they are summed.
enum class gradient_wire : std::uint8_t {
  full,  ///< in their own type, in place
  /// Rounded to the nearest bf16, for half the bytes of floats: a step then has memory for a copy of a bucket's
  /// gradients while they travel, and each term, and each partial sum that a backend sends on, is rounded by at most
  /// 2^-9 of itself.
  bf16,
  /// Of gradients in bf16: widened to float, for twice their bytes, so that the sum over ranks is rounded once. A step
  /// has memory for such a copy as well.
  f32
};
constexpr const char* name_of(gradient_wire wire) {
  return wire == gradient_wire::full ? "full" : wire == gradient_wire::bf16 ? "bf16" : "f32";
}

/// The communicators of data parallelism on one rank. Gathers and reductions have their own, so that a gather of the
/// next unit does not queue behind the reduction of the last, and neither behind a collective of a layer.
class data_ranks {
 public:
  /// Throws where an axis is named twice; those that the mesh does not have, or has one rank along, do not count.
  data_ranks(world& ranks, const data_axes& axes);

  world& ranks() const { return *ranks_; }
  /// In the mesh's order, of more than one rank.
  const axis_list& shard() const { return shard_; }
  const axis_list& replicate() const { return replicate_; }
  const axis_list& all() const { return all_; }

  /// The communicators over some axes, in the mesh's order; made at the first use, which is collective over the world.
  any_communicator& gathers(const axis_list& axes) { return ranks_->group(axes, world::channel::gathers); }
  any_communicator& reductions(const axis_list& axes) { return ranks_->group(axes, world::channel::reductions); }
  /// The cost of updating the arrays that each of so many ranks along `axes` owns so far, with bucket_cut::whole.
  std::vector<double>& loads(const axis_list& axes, std::int64_t owners);

 private:
  world* ranks_;
  axis_list shard_, replicate_, all_;
  std::vector<std::pair<axis_list, std::vector<double>>> loads_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/data_parallel/ranks.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
