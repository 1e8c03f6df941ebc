// Statistics of the router of a mixture of experts over all tokens of a step, for a log.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "plait/core/macros_off.hpp"

namespace plait {

/// Of one layer and of all tokens of a step over the whole mesh. Counts are equal on every mesh.
struct router_statistics {
  std::vector<std::int64_t> load{};  ///< [experts]: how often each was chosen; none before the first step
  std::vector<std::int64_t>
      dropped{};       ///< [experts]: how many of these choices were beyond the limit; none without one
  double entropy = 0;  ///< in nats, the mean over tokens of that of a router's probabilities, which add up to 1

  /// The largest load by the mean; 0 before the first step.
  double imbalance() const {
    const double all = static_cast<double>(std::accumulate(load.begin(), load.end(), std::int64_t{0}));
    if (all == 0) return 0;
    return static_cast<double>(*std::max_element(load.begin(), load.end())) * static_cast<double>(load.size()) / all;
  }
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
