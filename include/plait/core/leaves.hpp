// The binary tree over the leaves of a canonical sum, as numbers: which partial sums exist, and in which order they
// join.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// Leaves `begin` to `end` - 1.
struct leaf_range {
  std::int64_t begin = 0, end = 0;
  friend constexpr bool operator==(const leaf_range&, const leaf_range&) = default;
};

/// A partial sum: of leaves index * 2^level to (index + 1) * 2^level - 1, as far as there are.
struct tree_node {
  int level = 0;
  std::int64_t index = 0;
  constexpr std::int64_t first() const { return index << level; }
  friend constexpr bool operator==(const tree_node&, const tree_node&) = default;
};

/// The partial sums of a canonical sum that are here. What is inserted joins its neighbour in the tree as soon as both
/// are here, so that the result does not depend on who has inserted what, or when. A tree over a number of leaves that
/// is no power of two is the one over the next power, without the leaves that do not exist.
template <class Value>
class leaf_tree {
 public:
  struct entry {
    tree_node node;
    Value value;
  };

  explicit leaf_tree(std::int64_t leaves = 1) : leaves_(leaves) {
    if (leaves < 1) fail({"a sum over ", leaves, " leaves; at least 1"});
    while ((std::int64_t{1} << top_) < leaves) ++top_;
  }

  std::int64_t leaves() const { return leaves_; }
  /// The partial sums, in the order of their first leaves.
  const std::vector<entry>& roots() const { return roots_; }
  std::vector<entry>& roots() { return roots_; }
  bool complete() const { return roots_.size() == 1 && roots_[0].node == tree_node{top_, 0}; }
  void clear() { roots_.clear(); }

  /// The node that `node` joins, where that is here; null otherwise.
  entry* neighbour(const tree_node& node) {
    const tree_node n = promoted(node);
    if (n.level == top_) return nullptr;
    const auto at = place({n.level, n.index ^ 1});
    return at != roots_.end() && at->node == tree_node{n.level, n.index ^ 1} ? &*at : nullptr;
  }

  /// Inserts a partial sum; add(a, b) adds b, whose leaves come later, to a. Throws where some leaf is here already.
  template <class Add>
  void insert(tree_node node, Value value, Add&& add) {
    for (;;) {
      node = promoted(node);
      entry* const other = neighbour(node);
      if (other == nullptr) break;
      Value theirs = std::move(other->value);
      const bool after = other->node.index > node.index;
      roots_.erase(roots_.begin() + (other - roots_.data()));
      if (!after) std::swap(value, theirs);
      add(value, theirs);
      node = {node.level + 1, node.index >> 1};
    }
    const auto at = place(node);
    if ((at != roots_.end() && overlap(at->node, node)) || (at != roots_.begin() && overlap(std::prev(at)->node, node)))
      fail({"leaf ", node.first(), " of ", leaves_, " is added to a canonical sum twice"});
    roots_.insert(at, entry{node, std::move(value)});
  }

 private:
  static bool overlap(const tree_node& a, const tree_node& b) {
    const int level = std::max(a.level, b.level);
    return a.index >> (level - a.level) == b.index >> (level - b.level);
  }
  /// A node without a neighbour, as all leaves on that side do not exist, is its parent.
  tree_node promoted(tree_node n) const {
    while (n.level < top_ && ((n.index ^ 1) << n.level) >= leaves_) n = {n.level + 1, n.index >> 1};
    return n;
  }
  typename std::vector<entry>::iterator place(const tree_node& n) {
    return std::lower_bound(roots_.begin(), roots_.end(), n.first(),
                            [](const entry& e, std::int64_t first) { return e.node.first() < first; });
  }

  std::int64_t leaves_;
  int top_ = 0;
  std::vector<entry> roots_;
};

/// The partial sums that a rank with the leaves of `ranges` ends with.
inline std::vector<tree_node> roots_of(std::span<const leaf_range> ranges, std::int64_t leaves) {
  leaf_tree<char> tree(leaves);
  for (const leaf_range& r : ranges)
    for (std::int64_t leaf = r.begin; leaf < r.end; ++leaf) tree.insert({0, leaf}, 0, [](char&, char&) {});
  std::vector<tree_node> nodes;
  for (const auto& e : tree.roots()) nodes.push_back(e.node);
  return nodes;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
