// Which boxes of a saved tensor a rank's elements are: its part lies in the dims of a layout, with padding, and a
// checkpoint knows a parameter's own shape, without. Boxes of a flat range: checkpoint/boxes.hpp. Test:
// tests/unit/checkpoint/part_boxes.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// A box of a tensor, and where it lies in memory: its elements are row-major, without gaps, from `at` on.
struct placed_box {
  box where;            ///< its dims are those of the tensor's shape
  std::int64_t at = 0;  ///< of its first element
};

namespace detail {

/// Which dims of a box each dim of `shape` is: those before `ends[j]`, from the end of the one before. Only the leading
/// dim of the box may have padding, which `logical` loses. Throws where the shape is no such grouping.
inline std::vector<int> grouped_dims(box& logical, const std::vector<std::int64_t>& shape, const std::string& name) {
  std::int64_t elements = 1, row = 1;
  for (const std::int64_t n : shape) elements *= n;
  for (int d = 1; d < logical.dims; ++d) row *= logical.global[static_cast<std::size_t>(d)];
  if (logical.dims > 0 && row > 0 && elements % row == 0 && elements / row <= logical.global[0])
    logical.global[0] = elements / row;
  std::vector<int> ends;
  int d = 0;
  for (const std::int64_t n : shape) {
    std::int64_t merged = 1;
    while (d < logical.dims && (merged < n || (merged == n && logical.global[static_cast<std::size_t>(d)] == 1)))
      merged *= logical.global[static_cast<std::size_t>(d++)];
    if (merged != n) fail({"checkpoint: ", name, ": the dims of its layout do not make its shape"});
    ends.push_back(d);
  }
  if (d != logical.dims || shape.size() > static_cast<std::size_t>(max_dims))
    fail({"checkpoint: ", name, ": the dims of its layout do not make its shape"});
  return ends;
}

/// The dim along which `b` has to be cut so that groups become ranges, or -1: the first of several elements before (or
/// at) a dim whose group goes on with one that `b` has in part.
inline int dim_to_cut(const box& b, const std::vector<int>& ends) {
  int begin = 0, last = -1;
  for (const int end : ends) {
    int partial = -1;  // the last dim of the group that is not whole
    for (int d = begin; d < end; ++d)
      if (b.local[static_cast<std::size_t>(d)] != b.global[static_cast<std::size_t>(d)]) partial = d;
    for (int d = begin; d < partial; ++d)
      if (b.local[static_cast<std::size_t>(d)] > 1) last = d;
    begin = end;
  }
  for (int d = 0; d <= last; ++d)
    if (b.local[static_cast<std::size_t>(d)] > 1) return d;
  return -1;
}

inline void add_grouped(const box& b, std::int64_t at, const std::vector<int>& ends, std::vector<placed_box>& out) {
  if (b.local_size() == 0) return;
  if (const int cut = dim_to_cut(b, ends); cut >= 0) {  // one by one, since what comes before has one element each
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

/// Returns the elements [begin, end) of `part`, counted row-major, as boxes of a tensor of `shape`, in that order and
/// without what is padding; `at` counts from `begin`. A dim of the shape is one dim of the part or several that follow
/// each other, as [heads * head_dim, hidden] is of (heads, head_dim, hidden); the leading dim of the part may be longer
/// than the shape's. Throws `error` naming `name` where it is otherwise.
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

}  // namespace plait

#include "plait/core/macros_on.hpp"
