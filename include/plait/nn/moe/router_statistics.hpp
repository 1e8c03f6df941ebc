// Statistics of a mixture's router over all tokens of a step, for logs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "plait/core/macros_off.hpp"

namespace plait {

/// Statistics of one layer over all tokens of a step on the whole mesh. Counts are equal on every mesh.
struct router_statistics {
  std::vector<std::int64_t> load{};  ///< [experts]: how often each was chosen; empty before the first step
  std::vector<std::int64_t>
      dropped{};       ///< [experts]: how many of these choices exceeded the limit; empty without a limit
  double entropy = 0;  ///< in nats: the entropy of a router's probabilities, which sum to 1; mean over tokens

  /// The largest load divided by the mean load; 0 before the first step.
  double imbalance() const {
    const double all = static_cast<double>(std::accumulate(load.begin(), load.end(), std::int64_t{0}));
    if (all == 0) return 0;
    return static_cast<double>(*std::max_element(load.begin(), load.end())) * static_cast<double>(load.size()) / all;
  }
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
