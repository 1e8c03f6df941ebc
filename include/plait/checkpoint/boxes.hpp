// Boxes of one tensor as a checkpoint meets them: flat ranges as boxes, intersections, and an index that finds which
// boxes another one overlaps.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/static_vector.hpp"

namespace plait {

/// The most boxes that a flat range takes.
inline constexpr std::size_t max_flat_boxes = 2 * max_dims - 1;
using flat_boxes = static_vector<box, max_flat_boxes>;

namespace detail {

/// Adds the elements [begin, end) of what `part` is: one index of each dimension before `d`, all of those from `d` on.
constexpr void add_flat_boxes(const box& part, int d, std::int64_t begin, std::int64_t end, flat_boxes& out) {
  if (begin == end) return;
  if (d == part.dims) return out.push_back(part);
  std::int64_t row = 1;
  for (int i = d + 1; i < part.dims; ++i) row *= part.local[i];
  const auto rows = [&](std::int64_t first, std::int64_t count) {
    box some = part;
    some.offset[d] += first;
    some.local[d] = count;
    return some;
  };
  std::int64_t first = begin / row;
  const std::int64_t last = end / row;
  if (first == last) return add_flat_boxes(rows(first, 1), d + 1, begin - first * row, end - first * row, out);
  if (begin % row != 0) {
    add_flat_boxes(rows(first, 1), d + 1, begin % row, row, out);
    ++first;
  }
  if (first < last) out.push_back(rows(first, last - first));
  add_flat_boxes(rows(last, 1), d + 1, 0, end % row, out);
}

constexpr bool same_tensor(const box& a, const box& b) {
  bool same = a.dims == b.dims;
  for (int d = 0; same && d < a.dims; ++d) same = a.global[d] == b.global[d];
  return same;
}

}  // namespace detail

/// Returns the elements [begin, end) of `whole`, counted row-major in its local part, as boxes of the same tensor: at
/// most 2n-1 for n dimensions, none for an empty range. In this order they follow each other in the range without gaps,
/// each contiguous in it and row-major in itself. Throws `error` unless 0 <= begin <= end <= whole.local_size().
constexpr flat_boxes boxes_of_flat_range(const box& whole, std::int64_t begin, std::int64_t end) {
  if (begin < 0 || begin > end || end > whole.local_size()) {
    fail({"the flat range [", begin, ", ", end, ") is none of a box of ", whole.local_size(), " elements"});
  }
  flat_boxes out;
  detail::add_flat_boxes(whole, 0, begin, end, out);
  return out;
}

/// Returns what `a` and `b`, boxes of one tensor, have in common, or nothing. Throws `error` if the tensors differ in
/// shape.
constexpr std::optional<box> intersection(const box& a, const box& b) {
  if (!detail::same_tensor(a, b)) fail("boxes of tensors of different shape have no intersection");
  box common = a;
  for (int d = 0; d < a.dims; ++d) {
    common.offset[d] = std::max(a.offset[d], b.offset[d]);
    common.local[d] = std::min(a.offset[d] + a.local[d], b.offset[d] + b.local[d]) - common.offset[d];
    if (common.local[d] <= 0) return std::nullopt;
  }
  return common;
}

namespace detail {

/// Returns where an element of a tensor, by its place in each dim, lies in a box of it that is stored row-major.
inline std::int64_t place_in(const box& stored, const per_dim& at) {
  std::int64_t place = 0;
  for (std::size_t d = 0; d < static_cast<std::size_t>(stored.dims); ++d)
    place = place * stored.local[d] + (at[d] - stored.offset[d]);
  return place;
}

/// Returns how many elements of `part` lie without a gap in both `a` and `b`, and the dims before those that these
/// cover.
inline std::pair<std::int64_t, int> common_run(const box& part, const box& a, const box& b) {
  std::int64_t run = 1;
  int outer = part.dims;
  while (outer > 0) {
    const auto d = static_cast<std::size_t>(--outer);
    run *= part.local[d];
    if (part.local[d] != a.local[d] || part.local[d] != b.local[d]) break;
  }
  return {run, outer};
}

/// Calls f(place in `a`, place in `b`, elements) for each run of `part` that lies without a gap in both.
template <class F>
void each_common_run(const box& part, const box& a, const box& b, F&& f) {
  if (part.local_size() == 0) return;
  const auto [run, outer] = common_run(part, a, b);
  per_dim at = part.offset;
  while (true) {
    f(place_in(a, at), place_in(b, at), run);
    int d = outer - 1;
    for (; d >= 0; --d) {
      const auto i = static_cast<std::size_t>(d);
      if (++at[i] < part.offset[i] + part.local[i]) break;
      at[i] = part.offset[i];
    }
    if (d < 0) return;
  }
}

}  // namespace detail

/// Finds which of many boxes of one tensor overlap another: O(n log n) to build; a query costs about as much as it
/// finds, for boxes that tile the tensor. It is a tree of bounding boxes, halved where they spread most.
class box_index {
 public:
  box_index() = default;
  /// Throws `error` if the boxes are not of one tensor.
  explicit box_index(std::span<const box> boxes) : boxes_(boxes.begin(), boxes.end()), order_(boxes.size()) {
    for (const box& b : boxes_) {
      if (!detail::same_tensor(b, boxes_.front())) fail("an index takes boxes of one tensor; their shapes differ");
    }
    std::iota(order_.begin(), order_.end(), 0u);
    if (!boxes_.empty()) build(0, static_cast<std::uint32_t>(boxes_.size()));
  }

  /// Returns the indices, ascending, of the boxes that have an element in common with `wanted`. Throws `error` if it is
  /// of a tensor of another shape.
  std::vector<std::uint32_t> overlapping(const box& wanted) const {
    std::vector<std::uint32_t> found;
    if (nodes_.empty()) return found;
    std::vector<std::uint32_t> open{0};
    while (!open.empty()) {
      const node& at = nodes_[open.back()];
      const auto self = open.back();
      open.pop_back();
      if (!intersection(at.bounds, wanted)) continue;
      if (at.right != 0) {
        open.push_back(at.right);
        open.push_back(self + 1);
        continue;
      }
      for (std::uint32_t i = at.begin; i < at.end; ++i) {
        if (intersection(boxes_[order_[i]], wanted)) found.push_back(order_[i]);
      }
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  /// A node's left child follows it; a leaf has no right one.
  struct node {
    box bounds;
    std::uint32_t begin = 0, end = 0, right = 0;
  };
  static constexpr std::uint32_t leaf = 8;

  void build(std::uint32_t begin, std::uint32_t end) {
    const auto self = static_cast<std::uint32_t>(nodes_.size());
    nodes_.push_back({bounds_of(begin, end), begin, end, 0});
    if (end - begin <= leaf) return;
    const int d = widest(begin, end);
    const std::uint32_t middle = begin + (end - begin) / 2;
    std::nth_element(order_.begin() + begin, order_.begin() + middle, order_.begin() + end,
                     [&](std::uint32_t a, std::uint32_t b) { return boxes_[a].offset[d] < boxes_[b].offset[d]; });
    build(begin, middle);
    nodes_[self].right = static_cast<std::uint32_t>(nodes_.size());
    build(middle, end);
  }
  box bounds_of(std::uint32_t begin, std::uint32_t end) const {
    box all = boxes_[order_[begin]];
    for (std::uint32_t i = begin + 1; i < end; ++i) {
      const box& b = boxes_[order_[i]];
      for (int d = 0; d < all.dims; ++d) {
        const std::int64_t after = std::max(all.offset[d] + all.local[d], b.offset[d] + b.local[d]);
        all.offset[d] = std::min(all.offset[d], b.offset[d]);
        all.local[d] = after - all.offset[d];
      }
    }
    return all;
  }
  /// The dimension with the most different offsets, in units of the first box's extent: many thin slices divide best.
  int widest(std::uint32_t begin, std::uint32_t end) const {
    int best = 0;
    std::int64_t most = -1;
    for (int d = 0; d < boxes_.front().dims; ++d) {
      std::int64_t low = boxes_[order_[begin]].offset[d], high = low, thinnest = boxes_[order_[begin]].local[d];
      for (std::uint32_t i = begin; i < end; ++i) {
        const box& b = boxes_[order_[i]];
        low = std::min(low, b.offset[d]);
        high = std::max(high, b.offset[d]);
        thinnest = std::min(thinnest, b.local[d]);
      }
      const std::int64_t slices = (high - low) / std::max<std::int64_t>(thinnest, 1);
      if (slices > most) {
        most = slices;
        best = d;
      }
    }
    return best;
  }

  std::vector<box> boxes_;
  std::vector<std::uint32_t> order_;
  std::vector<node> nodes_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
