// How pieces of work are shared out among owners, by their costs, as a pure function that every rank computes alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "plait/version.hpp"

namespace plait {

/// Returns the owner of each piece of work, 0 to `owners` - 1 (at least 1): the longest piece goes to the owner with
/// the least so far, then the next one (Graham 1969: at most 4/3 of the shortest time). Of equal pieces and of equal
/// owners the first comes first.
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

}  // namespace plait
