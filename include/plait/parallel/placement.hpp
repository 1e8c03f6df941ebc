// The placement of a pipeline's parameters: the places of arrays in a bucket, the owner of each slice, and the stage of
// each layer. Step options that choose among placements are also here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tag.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/version.hpp"

namespace plait {

/// Returns the owner of each piece of work, 0 to `owners` - 1 (at least 1). The longest piece goes to the owner with
/// the least work so far, then the next one (Graham 1969: at most 4/3 of the shortest time). Ties go to the first piece
/// and owner, so all ranks compute the same result.
constexpr std::vector<int> balance_owners(std::span<const double> costs, int owners) {
  std::vector<std::size_t> order(costs.size(), 0);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return costs[a] > costs[b] || (costs[a] == costs[b] && a < b); });
  std::vector<double> load(static_cast<std::size_t>(owners), 0.0);
  std::vector<int> owner_of(costs.size(), 0);
  for (const std::size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += costs[i];
    owner_of[i] = static_cast<int>(least - load.begin());
  }
  return owner_of;
}

/// How a bucket is split into the slices of its ranks:
///
///     bucket_cut::even        anywhere, so that slices are equal, with padding for alignment only
///     bucket_cut::whole       between arrays, so that every matrix has one owner, for optimizers that need whole
///                             matrices; arrays are distributed by size, and all slices have the size of the largest;
///                             over the units of a model the costs of updates are balanced (`place_whole`)
///     bucket_cut::blocks(n)   only at multiples of n elements of an array, for states that are quantised by blocks,
///                             which then do not depend on the number of ranks; slices are equal, and padded to n
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
  /// Slices and arrays begin at multiples of this number of elements: 256 bytes of the narrowest type, an alignment
  /// that libraries prefer.
  static constexpr std::int64_t alignment = 128;

  constexpr bool is_whole() const { return block_ == 0; }
  /// Slices and arrays begin at multiples of this number of elements in a bucket.
  constexpr std::int64_t block() const { return is_whole() ? alignment : block_; }
  friend constexpr bool operator==(const bucket_cut&, const bucket_cut&) = default;

 private:
  static constexpr std::int64_t most_block = 65536;
  explicit constexpr bucket_cut(std::int64_t block) : block_(block) {}
  std::int64_t block_;  ///< 0: whole arrays
};
inline constexpr bucket_cut bucket_cut::even{bucket_cut::alignment};
inline constexpr bucket_cut bucket_cut::whole{0};

/// The places of arrays in a bucket with one equal slice for each rank. Counts are in elements.
struct bucket_placement {
  std::vector<std::int64_t> begins;  ///< where each array begins
  std::int64_t slice = 0;            ///< elements of each slice
};

/// Returns the least multiple of `block` that is at least n.
constexpr std::int64_t round_up(std::int64_t n, std::int64_t block) { return (n + block - 1) / block * block; }

/// Places arrays one after another, each at a multiple of `block`, and splits the bucket evenly at such multiples.
constexpr bucket_placement place_evenly(std::span<const std::int64_t> sizes, std::int64_t slices, std::int64_t block) {
  bucket_placement out;
  std::int64_t end = 0;
  for (const std::int64_t size : sizes) {
    out.begins.push_back(end);
    end += round_up(size, block);
  }
  out.slice = round_up((end + slices - 1) / slices, block);
  return out;
}

/// Places each array whole in one slice, at a multiple of `block`. `loads` are the update costs of each rank's arrays
/// in earlier buckets. `costs` are the costs of this bucket's arrays, which are added to `loads`.
///
/// Arrays are distributed by size, because all slices have the size of the largest, so slices are as small as possible.
/// The cost then determines the rank of each share: the costliest share goes to the rank with the least load. A model's
/// units are similar, so over all of them every rank has about the same load.
constexpr bucket_placement place_whole(std::span<const std::int64_t> sizes, std::span<const double> costs,
                                       std::int64_t block, std::span<double> loads) {
  const std::size_t slices = loads.size();
  std::vector<double> as_costs;
  for (const std::int64_t size : sizes) as_costs.push_back(static_cast<double>(size));
  const std::vector<int> share_of = balance_owners(as_costs, static_cast<int>(slices));
  std::vector<double> share_costs(slices, 0.0);
  for (std::size_t i = 0; i < sizes.size(); ++i) share_costs[static_cast<std::size_t>(share_of[i])] += costs[i];

  std::vector<std::size_t> costliest, idlest;
  for (std::size_t i = 0; i < slices; ++i) costliest.push_back(i), idlest.push_back(i);
  std::sort(costliest.begin(), costliest.end(), [&](std::size_t a, std::size_t b) {
    return share_costs[a] > share_costs[b] || (share_costs[a] == share_costs[b] && a < b);
  });
  std::sort(idlest.begin(), idlest.end(),
            [&](std::size_t a, std::size_t b) { return loads[a] < loads[b] || (loads[a] == loads[b] && a < b); });
  std::vector<std::size_t> owner_of(slices, 0);
  for (std::size_t i = 0; i < slices; ++i) owner_of[costliest[i]] = idlest[i];
  for (std::size_t share = 0; share < slices; ++share) loads[owner_of[share]] += share_costs[share];

  bucket_placement out;
  std::vector<std::int64_t> ends(slices, 0);
  for (std::size_t i = 0; i < sizes.size(); ++i) {  // relative to its owner's slice
    std::int64_t& end = ends[static_cast<std::size_t>(share_of[i])];
    out.begins.push_back(end);
    end += round_up(sizes[i], block);
  }
  out.slice = *std::max_element(ends.begin(), ends.end());
  for (std::size_t i = 0; i < sizes.size(); ++i)
    out.begins[i] += static_cast<std::int64_t>(owner_of[static_cast<std::size_t>(share_of[i])]) * out.slice;
  return out;
}

// The split of a model's layers into stages of balanced cost.

/// The part of a model that one pipeline stage holds: consecutive layers. The first stage also has the embedding before
/// them. The last stage also has the final norm, the output projection and the loss after them.
struct stage_layers {
  std::int64_t begin = 0, end = 0;
  bool first = true, last = true;

  std::int64_t size() const { return end - begin; }
  friend bool operator==(const stage_layers&, const stage_layers&) = default;
};

/// The costs by which stages are balanced, in any unit: those of the layers, and the additional costs of the first and
/// the last stage.
struct stage_costs {
  std::vector<double> layers;
  double embedding = 0;
  double head = 0;
};

/// Distributes all layers over `stages` stages, at least one each. It minimises the cost of the most expensive stage,
/// then the sum of squares of costs. If several splits remain, early stages get more layers. Throws if there are fewer
/// layers than stages.
std::vector<stage_layers> split_layers(const stage_costs& costs, std::int64_t stages);
#ifndef PLAIT_COMPILED
PLAIT_INLINE std::vector<stage_layers> split_layers(const stage_costs& costs, std::int64_t stages) {
  const auto layers = static_cast<std::int64_t>(costs.layers.size());
  if (stages < 1) fail({"pipeline: ", stages, " stages, must be at least 1"});
  if (stages > layers)
    fail({"pipeline: ", layers, " layers for ", stages,
          " stages (pp times the chunks of a rank), and each needs at least one: use at most ", layers,
          " stages, or a model of more layers"});
  std::vector<double> before(static_cast<std::size_t>(layers + 1), 0.0);
  for (std::size_t i = 0; i < costs.layers.size(); ++i) before[i + 1] = before[i] + costs.layers[i];
  const auto cost = [&](std::int64_t begin, std::int64_t end, std::int64_t stage) {
    return before[static_cast<std::size_t>(end)] - before[static_cast<std::size_t>(begin)] +
           (stage == 0 ? costs.embedding : 0) + (stage == stages - 1 ? costs.head : 0);
  };
  // Two tables over (stage, first layer), filled from the end: the least possible maximum; then, within that limit, the
  // least sum of squares.
  constexpr double never = std::numeric_limits<double>::infinity();
  const auto width = static_cast<std::size_t>(layers + 1);
  using table = std::vector<double>;
  const auto at = [&](auto& values, std::int64_t stage, std::int64_t from) -> auto& {
    return values[static_cast<std::size_t>(stage) * width + static_cast<std::size_t>(from)];
  };
  const auto solve = [&](auto&& join) {
    table best(static_cast<std::size_t>(stages + 1) * width, never);
    at(best, stages, layers) = 0;
    for (std::int64_t s = stages; s-- > 0;)
      for (std::int64_t from = s; from < layers; ++from)
        for (std::int64_t to = from + 1; to <= layers - (stages - 1 - s); ++to)
          at(best, s, from) = std::min(at(best, s, from), join(cost(from, to, s), at(best, s + 1, to)));
    return best;
  };
  constexpr double slack = 1 + 1e-12;  // sums of equal costs may differ by their order
  const table most = solve([](double c, double rest) { return std::max(c, rest); });
  const double limit = at(most, 0, 0) * slack;
  const auto even = [&](double c, double rest) { return c <= limit ? c * c + rest : never; };
  const table squares = solve(even);
  std::vector<stage_layers> parts;
  std::int64_t from = 0;
  for (std::int64_t s = 0; s < stages; ++s) {
    std::int64_t to = layers - (stages - 1 - s);
    while (even(cost(from, to, s), at(squares, s + 1, to)) > at(squares, s, from) * slack) --to;
    parts.push_back({from, to, s == 0, s == stages - 1});
    from = to;
  }
  return parts;
}
#endif

/// The axes over which a step's data is distributed, so gradients of parameters are sums over them. With a `zero_level`
/// above `replicated`, parameters are split over `shard`. Over `replicate` the pieces are equal; with both, it is a
/// hybrid.
struct data_axes {
  axis_list shard = axis_list(axis_of<dp>, axis_of<ep>, axis_of<cp>);
  axis_list replicate{};
};

/// The type in which gradients travel and are summed over the data axes.
enum class gradient_wire : std::uint8_t {
  full,  ///< the gradients' own type, in place
  /// Rounded to the nearest bf16, for half the bytes of floats. A step then needs memory for a copy of a bucket's
  /// gradients in flight. Each term, and each partial sum that a backend forwards, is rounded by at most a factor of
  /// 2^-9.
  bf16,
  /// For gradients in bf16: widened to float, for twice their bytes, so the sum over ranks is rounded once. A step
  /// needs memory for this copy too.
  f32
};
constexpr const char* name_of(gradient_wire wire) {
  return wire == gradient_wire::full ? "full" : wire == gradient_wire::bf16 ? "bf16" : "f32";
}

/// How the parameters of a pipeline's stages are distributed over data-parallel ranks, and when they are communicated.
struct pipeline_options {
  data_parallel parallel{};
  data_axes axes{};
  bucket_cut cut = bucket_cut::even;
  gradient_wire wire = gradient_wire::full;
  schedule_costs costs{};
  /// Whether the values that layers keep for the backward pass are in the host's memory between the passes of their
  /// unit (`with_offload`). Results have the same bits.
  bool offload_activations = false;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
