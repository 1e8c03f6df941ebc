// The definitions of ranks.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

PLAIT_INLINE data_ranks::data_ranks(world& ranks, const data_axes& axes) : ranks_(&ranks) {
  for (const axis_id axis : ranks.shape().axes) {
    const bool cuts = axes.shard.find(axis) >= 0, copies = axes.replicate.find(axis) >= 0;
    if (cuts && copies) fail({"data_axes: ", axis.text(), " is among shard and replicate; legal is one of them"});
    if (ranks.shape().extent(axis) == 1) continue;
    if (cuts) shard_.push_back(axis);
    if (copies) replicate_.push_back(axis);
    if (cuts || copies) all_.push_back(axis);
  }
}

PLAIT_INLINE std::vector<double>& data_ranks::loads(const axis_list& axes, std::int64_t owners) {
  for (auto& [of, loads] : loads_)
    if (of == axes) return loads;
  return loads_.emplace_back(axes, std::vector<double>(static_cast<std::size_t>(owners), 0.0)).second;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
