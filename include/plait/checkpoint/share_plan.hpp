// Which boxes of a training state a rank writes, and where it stages them. It reads no value and asks no other rank: a
// rank knows from its layouts alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/part_boxes.hpp"
#include "plait/checkpoint/share.hpp"

namespace plait {

/// One rank's part of a save.
struct share_plan {
  /// Elements [begin, end) of a tensor, which go to byte `to` of what is staged.
  struct copy {
    const held_tensor* from;
    std::int64_t begin, end;
    std::size_t to;
  };
  std::vector<staged_share::staged_box> boxes;
  std::vector<copy> copies;  ///< one for each box
  std::size_t bytes = 0;
};

/// Plans what this rank writes of `held`, which is sorted by the size of elements, so that each of them lies on a
/// multiple of its size. Ranks that hold the same elements write a part of them each.
template <compute_device Device>
share_plan plan_share(const context<Device>& ctx, std::vector<held_tensor>& held) {
  std::stable_sort(held.begin(), held.end(),
                   [](const held_tensor& a, const held_tensor& b) { return a.element_bytes() > b.element_bytes(); });
  share_plan plan;
  for (const held_tensor& h : held) {
    if (!h.counts) continue;
    const auto [begin, end] = own_share(ctx, h);
    for (const placed_box& b : boxes_of_part(h.part, begin, end, h.shape, h.name)) {
      const std::int64_t at = begin + b.at;
      plan.boxes.push_back({h.name, safetensors_dtype_of(h.type), b.where});
      plan.copies.push_back({&h, at, at + b.where.local_size(), plan.bytes});
      plan.bytes += static_cast<std::size_t>(b.where.local_size()) * h.element_bytes();
    }
  }
  return plan;
}

}  // namespace plait
