// Boxes of one tensor in a checkpoint: boxes of flat ranges and of a rank's shard, and an index that finds overlapping
// boxes. It also plans which rows ranks read for each other.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/strided_copy.hpp"

namespace plait {

/// The most boxes that a flat range consists of.
inline constexpr std::size_t max_flat_boxes = 2 * max_dims - 1;
using flat_boxes = static_vector<box, max_flat_boxes>;

namespace detail {

/// Adds the boxes of elements [begin, end) of a part of `part`. In that part, dimensions before `d` have one index
/// each, and dimensions from `d` on are whole.
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

}  // namespace detail

/// Returns elements [begin, end) of `whole`, counted row-major in its local part, as boxes of its tensor. There are at
/// most 2n-1 boxes for n dimensions, and none for an empty range. They are in the order of the range: each is
/// contiguous in it, row-major, and adjacent to the next. Throws `error` unless 0 <= begin <= end <=
/// whole.local_size().
constexpr flat_boxes boxes_of_flat_range(const box& whole, std::int64_t begin, std::int64_t end) {
  if (begin < 0 || begin > end || end > whole.local_size()) {
    fail({"the flat range [", begin, ", ", end, ") is not in a box of ", whole.local_size(), " elements"});
  }
  flat_boxes out;
  detail::add_flat_boxes(whole, 0, begin, end, out);
  return out;
}

namespace detail {

/// A run is a sequence of elements of `part` that is contiguous in both `a` and `b`. Returns its number of elements,
/// and the number of dims outside of it.
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

/// Calls f(place in `a`, place in `b`, elements) for each run of `part` that is contiguous in both.
template <class F>
void each_common_run(const box& part, const box& a, const box& b, F&& f) {
  if (part.local_size() == 0) return;
  const auto [run, outer] = common_run(part, a, b);
  per_dim at = part.offset;
  while (true) {
    f(kernels::offset_of(a, at), kernels::offset_of(b, at), run);
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

/// Finds the boxes of one tensor that overlap another box. It sorts boxes along the dim that most boxes divide. A query
/// examines only boxes that may reach the wanted range of that dim.
class box_index {
 public:
  box_index() = default;
  /// Throws `error` if the boxes belong to different tensors.
  explicit box_index(std::span<const box> boxes) : boxes_(boxes.begin(), boxes.end()), order_(boxes.size()) {
    for (const box& b : boxes_)
      if (!same_tensor(b, boxes_.front())) fail("an index takes boxes of one tensor; their shapes differ");
    std::iota(order_.begin(), order_.end(), 0u);
    std::size_t most = 0;
    for (int d = 0; !boxes_.empty() && d < boxes_.front().dims; ++d)
      if (const std::size_t cuts = different_offsets(d); cuts > most) most = cuts, along_ = d;
    std::sort(order_.begin(), order_.end(),
              [&](std::uint32_t a, std::uint32_t b) { return begin_of(a) < begin_of(b); });
    for (const box& b : boxes_) longest_ = std::max(longest_, b.local[along_]);
  }

  /// Returns the indices, ascending, of the boxes that overlap `wanted`. Throws `error` if `wanted` belongs to a tensor
  /// of another shape.
  std::vector<std::uint32_t> overlapping(const box& wanted) const {
    const std::int64_t begin = wanted.offset[along_], end = begin + std::max<std::int64_t>(wanted.local[along_], 1);
    const auto before = [&](std::uint32_t i, std::int64_t place) { return begin_of(i) < place; };
    const auto first = std::lower_bound(order_.begin(), order_.end(), begin - longest_, before);
    std::vector<std::uint32_t> found;
    std::copy_if(first, std::lower_bound(first, order_.end(), end, before), std::back_inserter(found),
                 [&](std::uint32_t i) { return intersect(boxes_[i], wanted).has_value(); });
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  std::int64_t begin_of(std::uint32_t i) const { return boxes_[i].offset[along_]; }
  std::size_t different_offsets(int d) const {
    std::vector<std::int64_t> all;
    for (const box& b : boxes_) all.push_back(b.offset[d]);
    std::sort(all.begin(), all.end());
    return static_cast<std::size_t>(std::unique(all.begin(), all.end()) - all.begin());
  }

  std::vector<box> boxes_;
  std::vector<std::uint32_t> order_;  ///< sorted by the start of boxes along `along_`
  int along_ = 0;
  std::int64_t longest_ = 0;  ///< the largest extent of a box along `along_`
};

// A shard has the dims of a layout, with padding. A checkpoint stores a parameter's own shape, without padding.

/// A box of a tensor, and its place in memory: its elements are row-major, without gaps, from `at` on.
struct placed_box {
  box where;            ///< has the dims of the tensor's shape
  std::int64_t at = 0;  ///< index of its first element
};

namespace detail {

/// Returns which dims of a box form each dim of `shape`: dims from `ends[j - 1]` to before `ends[j]` form dim j.
/// Removes padding of the leading dim from `logical`; no other dim may have padding. Throws if the dims cannot be
/// grouped into `shape`.
inline std::vector<int> grouped_dims(box& logical, const std::vector<std::int64_t>& shape, const std::string& name) {
  std::int64_t elements = 1, row = 1;
  for (const std::int64_t n : shape) elements *= n;
  for (int d = 1; d < logical.dims; ++d) row *= logical.global[d];
  if (logical.dims > 0 && row > 0 && elements % row == 0 && elements / row <= logical.global[0])
    logical.global[0] = elements / row;
  std::vector<int> ends;
  int d = 0;
  for (const std::int64_t n : shape) {
    std::int64_t merged = 1;
    while (d < logical.dims && (merged < n || (merged == n && logical.global[d] == 1)))
      merged *= logical.global[static_cast<std::size_t>(d++)];
    if (merged != n) fail({"checkpoint: ", name, ": the dims of its layout do not make its shape"});
    ends.push_back(d);
  }
  if (d != logical.dims || shape.size() > static_cast<std::size_t>(max_dims))
    fail({"checkpoint: ", name, ": the dims of its layout do not make its shape"});
  return ends;
}

/// Returns the dim along which `b` must be split so that groups of dims become contiguous ranges, or -1. It is the
/// first dim with several elements, if such a dim comes before a partial dim of its group.
inline int dim_to_cut(const box& b, const std::vector<int>& ends) {
  int begin = 0, last = -1;
  for (const int end : ends) {
    int partial = -1;  // the last partial dim of the group
    for (int d = begin; d < end; ++d)
      if (b.local[d] != b.global[d]) partial = d;
    for (int d = begin; d < partial; ++d)
      if (b.local[d] > 1) last = d;
    begin = end;
  }
  for (int d = 0; d <= last; ++d)
    if (b.local[d] > 1) return d;
  return -1;
}

inline void add_grouped(const box& b, std::int64_t at, const std::vector<int>& ends, std::vector<placed_box>& out) {
  if (b.local_size() == 0) return;
  if (const int cut = dim_to_cut(b, ends); cut >= 0) {  // into single indices; earlier dims have one element each
    const auto c = static_cast<std::size_t>(cut);
    box one = b;
    one.local[c] = 1;
    for (std::int64_t i = 0; i < b.local[c]; ++i) {
      one.offset[c] = b.offset[c] + i;
      add_grouped(one, at + i * one.local_size(), ends, out);
    }
    return;
  }
  placed_box merged{{}, at};
  std::size_t d = 0;
  for (const int end : ends) {
    const auto j = static_cast<std::size_t>(merged.where.dims++);
    merged.where.global[j] = merged.where.local[j] = 1;
    for (; d < static_cast<std::size_t>(end); ++d) {
      merged.where.global[j] *= b.global[d];
      merged.where.local[j] *= b.local[d];
      merged.where.offset[j] = merged.where.offset[j] * b.global[d] + b.offset[d];
    }
  }
  out.push_back(merged);
}

}  // namespace detail

/// Returns elements [begin, end) of `part`, counted row-major, as boxes of a tensor of `shape`, in that order and
/// without padding. `at` counts from `begin`. A dim of the shape is one dim of the part, or several adjacent ones:
/// [heads * head_dim, hidden] matches (heads, head_dim, hidden). The leading dim of the part may be longer than the
/// shape's. Throws `error` that names `name` if the shape does not match.
inline std::vector<placed_box> boxes_of_part(const box& part, std::int64_t begin, std::int64_t end,
                                             const std::vector<std::int64_t>& shape, const std::string& name) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return {};
  box logical = part;
  const std::vector<int> ends = detail::grouped_dims(logical, shape, name);
  std::vector<placed_box> out;
  std::int64_t at = 0;
  for (const box& flat : boxes_of_flat_range(part, begin, end)) {
    box b = flat;
    if (b.dims > 0) {
      b.global[0] = logical.global[0];
      b.local[0] = std::clamp<std::int64_t>(b.global[0] - b.offset[0], 0, b.local[0]);
    }
    detail::add_grouped(b, at, ends, out);
    at += flat.local_size();
  }
  return out;
}

// A file stores rows one after the other, so a shard that splits rows consists of many short runs with gaps. Ranks that
// hold parts of the same rows read whole rows instead: each reads some rows, and they exchange the parts.

/// A box of a rank's share of a tensor, and how it is read.
struct planned_read {
  placed_box own;            ///< the box that this rank needs
  std::vector<box> parts{};  ///< the boxes that the ranks of an exchange need, by rank; empty: each reads its own
  std::vector<box> slabs{};  ///< the box of whole rows that each of these ranks reads; as wide as all parts together
  std::size_t self = 0;      ///< this rank's index among these ranks

  bool by_rows() const { return !parts.empty(); }
  const box& read() const { return by_rows() ? slabs[self] : own.where; }
};

namespace detail {

/// Returns the smallest box that contains several parts of the same rows, if they tile it. Otherwise returns an empty
/// box.
inline box joined_rows(const std::vector<box>& parts) {
  box all = parts.front();
  std::int64_t elements = 0;
  for (const box& b : parts) {
    if (b.dims != all.dims || b.offset[0] != all.offset[0] || b.local[0] != all.local[0]) return {};
    for (std::size_t d = 1; d < static_cast<std::size_t>(all.dims); ++d) {
      const std::int64_t end = std::max(all.offset[d] + all.local[d], b.offset[d] + b.local[d]);
      all.offset[d] = std::min(all.offset[d], b.offset[d]);
      all.local[d] = end - all.offset[d];
    }
    elements += b.local_size();
  }
  if (elements != all.local_size()) all.dims = 0;
  return all;
}

/// Returns the i-th of `n` groups of rows of a box.
inline box rows_of(box all, std::int64_t i, std::int64_t n) {
  const std::int64_t rows = all.local[0], first = rows * i / n;
  all.offset[0] += first;
  all.local[0] = rows * (i + 1) / n - first;
  return all;
}

}  // namespace detail

/// Plans how rank `self` of several reads its share of a tensor. `shares` has the shares of all ranks
/// (`boxes_of_part`). `short_runs(box)` returns whether the box has short runs with gaps in the files. Both arguments
/// are equal on every rank. Ranks read a box by rows if it has short runs for any of them.
template <class ShortRuns>
std::vector<planned_read> plan_reads(const std::vector<std::vector<placed_box>>& shares, std::size_t self,
                                     ShortRuns&& short_runs) {
  std::vector<planned_read> all;
  const auto ranks = static_cast<std::int64_t>(shares.size());
  const bool alike =
      std::all_of(shares.begin(), shares.end(), [&](const auto& s) { return s.size() == shares.front().size(); });
  for (std::size_t k = 0; k < shares[self].size(); ++k) {
    planned_read& next = all.emplace_back(planned_read{shares[self][k]});
    next.self = self;
    if (ranks == 1 || !alike || next.own.where.dims < 2 || next.own.where.local[0] < 2) continue;
    std::vector<box> parts;
    for (const std::vector<placed_box>& share : shares) parts.push_back(share[k].where);
    const box joined = detail::joined_rows(parts);
    if (joined.dims == 0 || std::none_of(parts.begin(), parts.end(), short_runs)) continue;
    for (std::int64_t i = 0; i < ranks; ++i) next.slabs.push_back(detail::rows_of(joined, i, ranks));
    next.parts = std::move(parts);
  }
  return all;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
