// The cut of a bucket into the pieces of its ranks, and where arrays lie in it, and so which rank owns which, as pure
// functions that every rank computes alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/balance_owners.hpp"

namespace plait {

/// How a bucket is cut into the pieces of its ranks:
///
///     bucket_cut::even        anywhere, so that pieces are equal and nothing is padded but to alignment
///     bucket_cut::whole       between arrays, so that every matrix has one owner, as optimizers need that work on whole
///                             matrices; arrays are shared out by size, and all pieces are as large as the largest;
///                             over the units of a model the costs of updates are balanced (`place_whole`)
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

/// The places of arrays in a bucket of equal pieces, one for each rank. Counts are in elements.
struct bucket_placement {
  std::vector<std::int64_t> begins;  ///< of the arrays
  std::int64_t piece = 0;            ///< the size of each
};

/// Returns the least multiple of `block` that is at least n.
constexpr std::int64_t round_up(std::int64_t n, std::int64_t block) { return (n + block - 1) / block * block; }

/// Places arrays one after the other, each at a multiple of `block`, and cuts all of them evenly at such multiples.
constexpr bucket_placement place_evenly(std::span<const std::int64_t> sizes, std::int64_t pieces, std::int64_t block) {
  bucket_placement out;
  std::int64_t end = 0;
  for (const std::int64_t size : sizes) {
    out.begins.push_back(end);
    end += round_up(size, block);
  }
  out.piece = round_up((end + pieces - 1) / pieces, block);
  return out;
}

/// Places each array whole in one piece, at a multiple of `block`. `loads` are what the updates of each rank's arrays
/// cost in the buckets before, and those of this one are added: `costs`, of each array.
///
/// Arrays are shared out by size, as all pieces are as large as the largest. Which share is whose goes by cost: the
/// dearest one is the rank's with the least load. So pieces are no larger than they must be, and over the units of a
/// model, which are much alike, every rank has about as much to do.
constexpr bucket_placement place_whole(std::span<const std::int64_t> sizes, std::span<const double> costs,
                                       std::int64_t block, std::span<double> loads) {
  const std::size_t pieces = loads.size();
  std::vector<double> as_costs;
  for (const std::int64_t size : sizes) as_costs.push_back(static_cast<double>(size));
  const std::vector<int> share_of = balance_owners(as_costs, static_cast<int>(pieces));
  std::vector<double> share_costs(pieces, 0.0);
  for (std::size_t i = 0; i < sizes.size(); ++i) share_costs[static_cast<std::size_t>(share_of[i])] += costs[i];

  std::vector<std::size_t> dearest, idlest;
  for (std::size_t i = 0; i < pieces; ++i) dearest.push_back(i), idlest.push_back(i);
  std::sort(dearest.begin(), dearest.end(), [&](std::size_t a, std::size_t b) {
    return share_costs[a] > share_costs[b] || (share_costs[a] == share_costs[b] && a < b);
  });
  std::sort(idlest.begin(), idlest.end(),
            [&](std::size_t a, std::size_t b) { return loads[a] < loads[b] || (loads[a] == loads[b] && a < b); });
  std::vector<std::size_t> owner_of(pieces, 0);
  for (std::size_t i = 0; i < pieces; ++i) owner_of[dearest[i]] = idlest[i];
  for (std::size_t share = 0; share < pieces; ++share) loads[owner_of[share]] += share_costs[share];

  bucket_placement out;
  std::vector<std::int64_t> ends(pieces, 0);
  for (std::size_t i = 0; i < sizes.size(); ++i) {  // first within the piece of its owner
    std::int64_t& end = ends[static_cast<std::size_t>(share_of[i])];
    out.begins.push_back(end);
    end += round_up(sizes[i], block);
  }
  out.piece = *std::max_element(ends.begin(), ends.end());
  for (std::size_t i = 0; i < sizes.size(); ++i)
    out.begins[i] += static_cast<std::int64_t>(owner_of[static_cast<std::size_t>(share_of[i])]) * out.piece;
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
