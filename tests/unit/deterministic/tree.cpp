// program: deterministic
// The tree over the leaves of a deterministic sum: its result does not depend on the order of insertion, and its roots
// are as few as possible.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "plait/deterministic/leaves.hpp"

using namespace plait;

namespace deterministic_tree_test {  // files of one program may have helpers of the same name
/// The order in which a tree adds its leaves, in brackets.
std::string sum_of(const std::vector<std::int64_t>& order, std::int64_t leaves) {
  leaf_tree<std::string> tree(leaves);
  for (const std::int64_t leaf : order)
    tree.insert({0, leaf}, std::to_string(leaf), [](std::string& a, std::string& b) { a = "(" + a + " " + b + ")"; });
  std::string all;
  for (const auto& e : tree.roots()) all += e.value;
  CHECK(tree.complete() == (static_cast<std::int64_t>(order.size()) == leaves));
  return all;
}

TEST_CASE("leaves form one tree, in any order of insertion") {
  CHECK(sum_of({0, 1, 2, 3}, 4) == "((0 1) (2 3))");
  CHECK(sum_of({0, 1, 2, 3, 4}, 5) == "(((0 1) (2 3)) 4)");
  CHECK(sum_of({0, 1, 2, 3, 4, 5}, 6) == "(((0 1) (2 3)) (4 5))");
  std::mt19937 random(1);
  for (std::int64_t leaves = 1; leaves <= 19; ++leaves) {
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < leaves; ++i) order.push_back(i);
    const std::string sorted = sum_of(order, leaves);
    for (int i = 0; i < 20; ++i) {
      std::shuffle(order.begin(), order.end(), random);
      CHECK(sum_of(order, leaves) == sorted);
    }
  }
}

TEST_CASE("roots are the fewest nodes that cover some leaves") {
  const auto roots = [](std::vector<leaf_range> ranges, std::int64_t leaves) { return roots_of(ranges, leaves); };
  CHECK(roots({{0, 4}}, 8) == std::vector<tree_node>{{2, 0}});
  CHECK(roots({{2, 8}}, 8) == std::vector<tree_node>{{1, 1}, {2, 1}});
  CHECK(roots({{0, 1}, {3, 4}}, 4) == std::vector<tree_node>{{0, 0}, {0, 3}});
  CHECK(roots({{4, 5}}, 5) == std::vector<tree_node>{{2, 1}});  // that half has no other leaf
  CHECK(roots({{0, 5}}, 5) == std::vector<tree_node>{{3, 0}});
}

TEST_CASE("a leaf that is added twice is refused") {
  leaf_tree<int> tree(4);
  const auto add = [](int&, int&) {};
  tree.insert({0, 0}, 0, add);
  tree.insert({0, 1}, 0, add);
  CHECK_THROWS_WITH_AS(tree.insert({0, 1}, 0, add), "leaf 1 of 4 is added to a deterministic sum twice", error);
  CHECK_THROWS_WITH_AS(leaf_tree<int>(0), "a sum over 0 leaves; at least 1", error);
}

}  // namespace deterministic_tree_test
