// Shares work among owners, and assigns each array of a bucket to one owner, in constant expressions. Slices are as
// small as the sizes allow, and the owners' work is balanced over the units of a model.
#include "plait/parallel/placement.hpp"

using plait::balance_owners;
using plait::bucket_placement;
using plait::place_whole;

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

struct unit {
  std::vector<std::int64_t> sizes;
  std::vector<double> costs;
};

/// A block of hidden size 8, kv heads for 2 and ffn 24 in units of 128: norms, q, k, v, o, gate, up and down. A matrix
/// costs rows x columns x min(rows, columns); a norm costs its number of elements.
constexpr unit block() {
  unit u;
  const auto matrix = [&](std::int64_t rows, std::int64_t columns) {
    u.sizes.push_back(rows * columns * 128 * 128);
    u.costs.push_back(static_cast<double>(rows * columns * std::min(rows, columns)) * 128 * 128 * 128);
  };
  for (int norm = 0; norm < 2; ++norm) u.sizes.push_back(8 * 128), u.costs.push_back(8 * 128);
  matrix(8, 8), matrix(2, 8), matrix(2, 8), matrix(8, 8), matrix(24, 8), matrix(24, 8), matrix(8, 24);
  return u;
}

struct outcome {
  double most = 0, mean = 0;  ///< of the ranks' costs
  std::int64_t largest = 0;   ///< slice of a rank, in elements
};

constexpr outcome place_blocks(int blocks, std::size_t ranks) {
  const unit u = block();
  std::vector<double> loads(ranks, 0.0);
  outcome out{};
  for (int i = 0; i < blocks; ++i) out.largest = std::max(out.largest, place_whole(u.sizes, u.costs, 128, loads).slice);
  for (const double load : loads) {
    out.most = std::max(out.most, load);
    out.mean += load / static_cast<double>(ranks);
  }
  return out;
}

constexpr bool balanced(int blocks, std::size_t ranks, double by) {
  const outcome all = place_blocks(blocks, ranks);
  return all.most <= by * all.mean;
}
/// Whether the slices of `blocks` units are no larger than those of one unit.
constexpr bool as_small(int blocks, std::size_t ranks) {
  return place_blocks(blocks, ranks).largest == place_blocks(1, ranks).largest;
}
constexpr bool lies(const bucket_placement& p, std::vector<std::int64_t> begins, std::int64_t slice) {
  return p.begins == begins && p.slice == slice;
}
constexpr bool second_unit_goes_to_the_other() {
  std::vector<double> loads(2, 0.0);
  const std::vector<std::int64_t> sizes{100, 300};
  const std::vector<double> costs{1, 3};
  return lies(place_whole(sizes, costs, 128, loads), {384, 0}, 384) &&
         lies(place_whole(sizes, costs, 128, loads), {0, 384}, 384) && loads == std::vector<double>{4, 4};
}
/// Two small arrays with a high cost go to the owner with less work, a large array with a low cost to the other.
constexpr bool cost_decides_who() {
  std::vector<double> loads{5, 0};
  const std::vector<std::int64_t> sizes{512, 256, 256};
  const std::vector<double> costs{1, 4, 4};
  return lies(place_whole(sizes, costs, 128, loads), {0, 512, 768}, 512) && loads == std::vector<double>{6, 8};
}

}  // namespace

static_assert(gives({}, 3, {}));
static_assert(gives({5, 1, 2}, 1, {0, 0, 0}));
static_assert(gives({1, 1, 1, 1}, 2, {0, 1, 0, 1}), "of equal pieces and owners the first comes first");
static_assert(gives({1, 2, 3, 4}, 2, {0, 1, 1, 0}), "the longest piece first");
static_assert(gives({7, 7}, 4, {0, 1}), "owners without work");
static_assert(most({7, 6, 5, 4, 3}, 2) == 14, "a greedy rule is not the best one, which is 13");
static_assert(most({8, 8, 8, 8, 8, 8, 8, 8}, 4) == 16);

static_assert(second_unit_goes_to_the_other());
static_assert(cost_decides_who());
// With one block some rank has more than twice the mean cost; with the blocks of a model no rank has.
static_assert(!balanced(1, 8, 2.0));
// Separate expressions, because compilers limit the steps of one.
static_assert(balanced(32, 2, 1.01));
static_assert(balanced(32, 3, 1.03));
static_assert(balanced(32, 4, 1.03));
static_assert(balanced(32, 8, 1.05));
static_assert(balanced(32, 16, 1.15));
static_assert(as_small(32, 2));
static_assert(as_small(32, 3));
static_assert(as_small(32, 4));
static_assert(as_small(32, 8));
static_assert(as_small(32, 16));
