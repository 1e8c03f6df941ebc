// program: deterministic
// The tree over the leaves of a deterministic sum: its result does not depend on the order of insertion, and its roots
// are as few as possible. The leaves of tokens: on each mesh every leaf has exactly one owner and the same tokens, for
// every order of the sequence and every number of microbatches. Leaves that ranks cannot divide are refused.
#include "plait/deterministic/leaves.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plait/layout/layout.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/microbatch.hpp"

using namespace plait;

namespace deterministic_leaves_test {  // files of one program may have helpers of the same name

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

using three = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
using text = spec<shard<batch, dp>, shard<seq, cp, tp>>;
using zigzag_text = spec<shard<batch, dp>, shard<zseq, cp, tp>>;
using text_of_rows = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;  // four rows of each token

/// The tokens of each leaf, as (sample of the step, position), and its number of owners.
struct found {
  std::map<std::int64_t, std::set<std::pair<std::int64_t, std::int64_t>>> tokens;
  std::map<std::int64_t, int> owners;
  std::int64_t rows = 0;
};

/// Elements of the batch and of the sequence that ranks do not separate.
struct blocks {
  std::int64_t samples = 1, tokens = 1;
};

template <class Spec>
found leaves_of(const three& m, deterministic_leaves order, std::int64_t microbatches, token_grain grain,
                blocks whole = {}) {
  order.zigzag = m.shape().extent(axis_of<cp>);
  const bool zigzag = layout_v<Spec>.dims[1].dim == dim_of<zseq>;
  dim_sizes sizes = sizes_of<batch, seq, zseq, hidden>(8 / microbatches, 32, 32, 4);
  sizes.set(dim_of<batch>, 8 / microbatches, whole.samples);
  for (const dim_id sequence : {dim_of<seq>, dim_of<zseq>}) sizes.set(sequence, 32, whole.tokens);
  const sequence_order places =
      zigzag ? sequence_order::zigzag(32, order.zigzag, "", "", whole.tokens) : sequence_order::original(32);
  found all;
  for (std::int64_t rank = 0; rank < m.size(); ++rank) {
    const token_leaves leaves(order, layout_v<Spec>, m.shape(), sizes, rank, grain, "layer");
    const box part = local_box(layout_v<Spec>, m.shape(), sizes, rank);
    const std::int64_t of_token = part.local_size() / (part.local[0] * part.local[1]);
    for (const leaf_range& r : leaves.of_step(rank))
      for (std::int64_t leaf = r.begin; leaf < r.end; ++leaf) ++all.owners[leaf];
    for (std::int64_t i = 0; i < microbatches; ++i) {
      const std::int64_t first =
          first_sample_in_step(order, i, microbatches, part.global[0], part.offset[0], part.local[0]);
      for (const auto& leaf : leaves.of_microbatch(i, microbatches))
        for (const auto& rows : leaf.parts)
          for (std::int64_t row = rows.first; row < rows.first + rows.count; ++row, ++all.rows)
            all.tokens[leaf.number].emplace(first + row / of_token / part.local[1],
                                            places.position(part.offset[1] + row / of_token % part.local[1]));
    }
  }
  return all;
}

template <class Spec>
void check(const three& m, std::int64_t microbatches, token_grain grain, blocks whole = {}) {
  const deterministic_leaves order{4, 4, 4};
  const found one = leaves_of<text>(three{1, 1, 1}, order, 1, grain),
              here = leaves_of<Spec>(m, order, microbatches, grain, whole);
  CHECK(one.tokens.size() == (grain == token_grain::fine ? 64 : 16));
  CHECK(here.tokens == one.tokens);
  CHECK(here.rows == one.rows * (layout_v<Spec>.dims.size() == 3 ? 4 : 1));
  CHECK(here.owners.size() == one.tokens.size());
  for (const auto& [leaf, times] : here.owners) CHECK(times == 1);
}

TEST_CASE("leaves have the same tokens on every mesh") {
  for (const token_grain grain : {token_grain::coarse, token_grain::fine})
    for (const std::int64_t microbatches : {1, 2, 4}) {
      check<text>(three{1, 1, 1}, microbatches, grain);
      check<zigzag_text>(three{1, 2, 1}, microbatches, grain);
      check<text>(three{1, 4, 1}, microbatches, grain);
      check<text_of_rows>(three{1, 2, 1}, microbatches, grain);
      if (microbatches < 4) check<zigzag_text>(three{2, 2, 1}, microbatches, grain);
      if (grain == token_grain::coarse) continue;
      check<text>(three{1, 2, 4}, microbatches, grain);
      if (microbatches == 1) check<zigzag_text>(three{4, 2, 2}, microbatches, grain);
    }
}

TEST_CASE("ranks have whole leaves in unequal numbers") {
  for (const token_grain grain : {token_grain::coarse, token_grain::fine}) {
    check<text>(three{3, 1, 1}, 1, grain, {2, 1});
    check<text>(three{1, 3, 1}, 1, grain, {1, 8});
    check<text>(three{1, 3, 1}, 4, grain, {1, 8});
    check<text_of_rows>(three{3, 3, 1}, 1, grain, {2, 8});
    check<zigzag_text>(three{3, 2, 1}, 1, grain, {2, 1});
    check<zigzag_text>(three{1, 3, 1}, 2, grain, {1, 8});
  }
  check<text>(three{1, 2, 3}, 1, token_grain::fine, {1, 2});
  check<zigzag_text>(three{1, 2, 3}, 1, token_grain::fine, {1, 2});
  check<text>(three{1, 1, 5}, 2, token_grain::fine, {1, 2});
  check<text_of_rows>(three{3, 1, 7}, 1, token_grain::fine, {2, 2});
}

TEST_CASE("leaves that the ranks cannot divide are refused, with the field and valid values") {
  const dim_sizes sizes = sizes_of<batch, seq, zseq, hidden>(8, 32, 32, 4);
  const auto make = [&](const three& m, deterministic_leaves order, const layout& tokens) {
    return token_leaves(order, tokens, m.shape(), sizes, 0, token_grain::coarse, "layer");
  };
  CHECK_THROWS_WITH_AS(make(three{4, 1, 1}, {4, 6, 4}, layout_v<text>),
                       doctest::Contains("deterministic_leaves::samples = 6 leaves of samples, which 4 ranks"), error);
  CHECK_THROWS_WITH_AS(
      make(three{1, 1, 1}, {4, 4, 5}, layout_v<text>),
      doctest::Contains("cut a sequence of 32 tokens into 5 chunks (deterministic_leaves::sequence = 5)"), error);
  CHECK_THROWS_WITH_AS(make(three{1, 4, 1}, {4, 4, 2}, layout_v<text>),
                       doctest::Contains("makes chunks of 16 of the 32 tokens, and one of 4 ranks has 8 neighbours of"),
                       error);
  CHECK_THROWS_WITH_AS(make(three{1, 4, 1}, {4, 4, 2}, layout_v<text>), doctest::Contains("legal are multiples of 4"),
                       error);
  CHECK_THROWS_WITH_AS(make(three{1, 2, 1}, {4, 4, 4}, layout_v<zigzag_text>),
                       doctest::Contains("give the context leaves_under<strategy>(leaves, mesh)"), error);
  // Where parts are unequal, on every rank alike.
  for (const std::int64_t rank : {0, 1, 2}) {
    const auto refuse = [&](const three& m, const char* why) {
      CHECK_THROWS_WITH_AS(
          token_leaves({4, 4, 4}, layout_v<text>, m.shape(), sizes, rank, token_grain::coarse, "layer"),
          doctest::Contains(why), error);
    };
    refuse(three{3, 1, 1},
           "which 3 ranks of <shard<batch, dp>, shard<seq, cp, tp>> cannot divide; legal for batch = 8 "
           "are multiples of 8, or batch in blocks of 2 (dim_sizes::set)");
    refuse(three{1, 3, 1},
           "makes chunks of 8 of the 32 tokens, and one of 3 ranks has 10 neighbours of <shard<batch, dp>, "
           "shard<seq, cp, tp>>; legal are multiples of 32, or seq in blocks of 8 (dim_sizes::set)");
  }
  CHECK_THROWS_WITH_AS(make(three{1, 5, 1}, {4, 4, 4}, layout_v<text>),
                       "layer: deterministic_leaves::sequence = 4 makes chunks of 8 of the 32 tokens, and one of 5 "
                       "ranks has 6 neighbours of <shard<batch, dp>, shard<seq, cp, tp>>; legal are multiples of 32",
                       error);
  const char* const no_order =
      "layer: deterministic sums have an order for rows of [batch, seq], of [batch, zseq], or of another first dim, "
      "with "
      "further dims whole on every rank; these are of ";
  CHECK_THROWS_WITH_AS(make(three{1, 1, 1}, {4, 4, 4}, layout_v<spec<zseq, hidden>>), doctest::Contains(no_order),
                       error);
  CHECK_THROWS_WITH_AS(make(three{1, 1, 2}, {4, 4, 4}, layout_v<spec<batch, seq, shard<hidden, tp>>>),
                       doctest::Contains(no_order), error);
  CHECK_THROWS_WITH_AS(make(three{1, 1, 1}, {4, 4, 4}, layout_v<spec<hidden>>).of_microbatch(0, 2),
                       doctest::Contains("layer: deterministic sums over 2 microbatches of a step support only rows "
                                         "of batch, and these are rows of <hidden>; use one microbatch"),
                       error);
  CHECK_THROWS_WITH_AS(make(three{1, 1, 1}, {4, 16, 4}, layout_v<text>).of_microbatch(0, 1),
                       doctest::Contains("deterministic_leaves::samples = 16 leaves of 8 samples in a step are uneven"),
                       error);
  CHECK_THROWS_WITH_AS(
      make(three{1, 1, 1}, {4, 2, 4}, layout_v<text>).of_microbatch(0, 4),
      doctest::Contains("ranks have multiples of 8 in a microbatch; legal are multiples of 4 that divide 32"), error);
}

}  // namespace deterministic_leaves_test
