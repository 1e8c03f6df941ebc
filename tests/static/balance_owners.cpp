// Shares work among owners, in constant expressions.
#include "plait/parallel/placement.hpp"

using plait::balance_owners;

namespace {

constexpr bool gives(std::vector<double> costs, int owners, std::vector<int> expected) {
  return balance_owners(costs, owners) == expected;
}
/// The largest cost of an owner.
constexpr double most(std::vector<double> costs, int owners) {
  const std::vector<int> owner_of = balance_owners(costs, owners);
  std::vector<double> load(static_cast<std::size_t>(owners), 0.0);
  for (std::size_t i = 0; i < costs.size(); ++i) load[static_cast<std::size_t>(owner_of[i])] += costs[i];
  return *std::max_element(load.begin(), load.end());
}

}  // namespace

static_assert(gives({}, 3, {}));
static_assert(gives({5, 1, 2}, 1, {0, 0, 0}));
static_assert(gives({1, 1, 1, 1}, 2, {0, 1, 0, 1}), "of equal pieces and owners the first comes first");
static_assert(gives({1, 2, 3, 4}, 2, {0, 1, 1, 0}), "the longest piece first");
static_assert(gives({7, 7}, 4, {0, 1}), "owners without work");
static_assert(most({7, 6, 5, 4, 3}, 2) == 14, "a greedy rule is not the best one, which is 13");
static_assert(most({8, 8, 8, 8, 8, 8, 8, 8}, 4) == 16);
