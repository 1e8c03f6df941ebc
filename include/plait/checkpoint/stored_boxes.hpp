// Which boxes of a saved tensor a wanted one overlaps, and how the elements of both lie in the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// Indices of the boxes of tensors, each made when it is first asked for. Used by one thread at a time.
class stored_boxes {
 public:
  /// Runs at least so long are read one by one; shorter ones with what lies between them. In bytes.
  static constexpr std::int64_t long_run = 16 << 10;

  /// Returns the indices, ascending, of the boxes of `tensor` that have an element in common with `wanted`. The tensor
  /// stays where it is.
  std::vector<std::uint32_t> overlapping(const stored_tensor& tensor, const box& wanted) {
    const auto [found, is_new] = indices_.try_emplace(&tensor);
    if (is_new) {
      std::vector<box> boxes;
      for (const stored_box& b : tensor.boxes) boxes.push_back(tensor.box_of(b));
      found->second = box_index(boxes);
    }
    return found->second.overlapping(wanted);
  }
  /// Returns whether `wanted` lies in some box of the tensor as short runs with gaps between them, which are read too.
  bool has_short_runs(const stored_tensor& tensor, const box& wanted) {
    for (const std::uint32_t i : overlapping(tensor, wanted)) {
      const box whole = tensor.box_of(tensor.boxes[i]);
      const std::optional<box> common = intersection(whole, wanted);
      if (!common) continue;
      const std::int64_t elements = common->local_size(), run = detail::common_run(*common, whole, whole).first;
      if (run < elements && run * static_cast<std::int64_t>(size_of(tensor.dtype)) < long_run) return true;
    }
    return false;
  }
  /// Returns the place in its file of the first element of `wanted`, a box of the tensor; 0 where it has none.
  std::uint64_t place_of(const stored_tensor& tensor, const box& wanted) {
    for (const std::uint32_t i : overlapping(tensor, wanted)) {
      const box whole = tensor.box_of(tensor.boxes[i]);
      const std::optional<box> common = intersection(whole, wanted);
      if (!common || common->offset != wanted.offset) continue;
      const auto at = static_cast<std::uint64_t>(detail::place_in(whole, common->offset));
      return tensor.boxes[i].stored.position + at * size_of(tensor.dtype);
    }
    return 0;
  }

 private:
  std::map<const stored_tensor*, box_index> indices_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
