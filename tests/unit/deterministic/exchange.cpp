// program: deterministic
// Partial sums of ranks are exchanged and joined. The result has the bits of one rank with all leaves, for all
// assignments of leaves and for all parts of the array. A missing leaf is an error.
#include "plait/deterministic/exchange.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/deterministic/sums.hpp"
#include "plait/device/cpu.hpp"

using namespace plait;

namespace deterministic_exchange_test {  // files of one program may have helpers of the same name

constexpr std::int64_t elements = 7000;  // larger than one exchange of whole arrays with three ranks

/// A leaf's terms: numbers of very different magnitudes, so different orders of addition give different bits.
std::vector<float> terms(std::int64_t leaf) {
  std::minstd_rand random(static_cast<unsigned>(leaf) + 1);
  std::normal_distribution<float> normal;
  std::vector<float> x(elements);
  for (float& v : x) v = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 9));
  return x;
}
void add(deterministic_sum<float, cpu>& sum, cpu& device, std::int64_t leaf) {
  const std::vector<float> x = terms(leaf);
  sum.add(device, leaf, true, [&](float* out, bool adds) {
    for (std::size_t i = 0; i < x.size(); ++i) out[i] = adds ? out[i] + x[i] : x[i];
  });
}
std::vector<float> on_one_rank(std::int64_t leaves) {
  cpu device;
  deterministic_sum<float, cpu> sum(elements, leaves);
  for (std::int64_t leaf = leaves; leaf-- > 0;) add(sum, device, leaf);
  const auto all = sum.parts();
  REQUIRE(all.nodes.size() == 1);
  return {all.values[0], all.values[0] + elements};
}

/// The owner of each leaf.
using owners = std::vector<std::int64_t>;
std::vector<std::vector<tree_node>> members_of(const owners& of, std::int64_t ranks) {
  std::vector<std::vector<tree_node>> members;
  for (std::int64_t r = 0; r < ranks; ++r) {
    std::vector<leaf_range> own;
    for (std::size_t leaf = 0; leaf < of.size(); ++leaf)
      if (of[leaf] == r) own.push_back({static_cast<std::int64_t>(leaf), static_cast<std::int64_t>(leaf) + 1});
    members.push_back(roots_of(own, static_cast<std::int64_t>(of.size())));
  }
  return members;
}

void check(const owners& of, std::int64_t ranks) {
  const auto leaves = static_cast<std::int64_t>(of.size());
  const std::vector<float> expected = on_one_rank(leaves);
  std::vector<std::int64_t> wrong(static_cast<std::size_t>(ranks), 0);
  threads::run(static_cast<int>(ranks), [&](threads::communicator c) {
    any_communicator comm(c);
    cpu device;
    deterministic_sum<float, cpu> sum(elements, leaves);
    for (std::int64_t leaf = 0; leaf < leaves; ++leaf)
      if (of[static_cast<std::size_t>(leaf)] == c.rank()) add(sum, device, leaf);
    const deterministic_exchange exchange(comm, members_of(of, ranks), leaves);
    auto& mine = wrong[static_cast<std::size_t>(c.rank())];
    mine += exchange.joined().size() != 1;
    std::vector<std::vector<float>> before;
    for (const float* values : sum.parts().values) before.emplace_back(values, values + elements);
    const auto everywhere = exchange.run_everywhere(device, sum.parts(), elements);
    for (std::int64_t i = 0; i < elements; ++i)
      mine += everywhere.values[0][i] != expected[static_cast<std::size_t>(i)];
    // With memory of the caller; the inputs are unchanged.
    std::vector<float> into(static_cast<std::size_t>(elements), -1.0f);
    mine += exchange.run_everywhere(device, sum.parts(), elements, into.data()).values[0] != into.data();
    mine += into != expected;
    for (std::size_t i = 0; i < before.size(); ++i)
      mine += !std::equal(before[i].begin(), before[i].end(), sum.parts().values[i]);
    // Uneven parts, one of which is empty.
    std::vector<element_range> parts;
    for (std::int64_t r = 0; r < ranks; ++r) parts.push_back({r * 1000, r == 1 ? 1000 : r * 1000 + 900});
    const auto part = exchange.run(device, sum.parts(), parts);
    const element_range own = parts[static_cast<std::size_t>(c.rank())];
    for (std::int64_t i = 0; i < own.size(); ++i)
      mine += part.values[0][i] != expected[static_cast<std::size_t>(own.begin + i)];
  });
  for (const std::int64_t n : wrong) CHECK(n == 0);
}

TEST_CASE("leaves with terms in some rows only give the bits of whole leaves") {
  constexpr std::int64_t width = 70, rows = elements / width, leaves = 11;
  cpu device;
  deterministic_sum<float, cpu> whole(elements, leaves), sparse(elements, leaves);
  std::vector<std::int64_t> order(leaves);
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::shuffle(order.begin(), order.end(), std::minstd_rand(7));
  for (const std::int64_t leaf : order) {
    const std::vector<float> x = terms(leaf);
    std::vector<std::int64_t> touched;  // includes a leaf without rows, and rows of no leaf
    for (std::int64_t row = 1; row < rows; ++row)
      if (leaf != 3 && (row * 7 + leaf * 13) % 5 < 2) touched.push_back(row);
    const auto write = [&](float* out) {
      for (const std::int64_t row : touched)
        for (std::int64_t c = row * width; c < (row + 1) * width; ++c) out[c] += x[static_cast<std::size_t>(c)];
    };
    whole.add(device, leaf, false, [&](float* out, bool) {
      std::fill_n(out, elements, 0.0f);
      write(out);
    });
    sparse.add_rows(device, leaf, width, [&](float* out) {
      write(out);
      return touched;
    });
    if (leaf % 4 == 0) sparse.release_rows();
  }
  const auto expected = whole.parts(), got = sparse.parts();
  REQUIRE(expected.nodes.size() == 1);
  REQUIRE(got.nodes == expected.nodes);
  CHECK(std::memcmp(expected.values[0], got.values[0], elements * sizeof(float)) == 0);
}

TEST_CASE("for every assignment of leaves to ranks, the sum has the bits of one rank") {
  check({0, 0, 1, 1}, 2);
  check({0, 1, 1, 0}, 2);        // a zigzag
  check({0, 1, 2, 0, 1, 2}, 3);  // without neighbouring leaves
  check({0, 0, 0, 1, 1, 2, 2}, 3);
  check({3, 3, 1, 0, 0, 1, 2, 2, 2, 1, 3}, 4);
  std::mt19937 random(7);
  for (int i = 0; i < 10; ++i) {
    owners of(3 + random() % 14);
    for (std::size_t leaf = 0; leaf < of.size(); ++leaf)
      of[leaf] = leaf < 3 ? static_cast<std::int64_t>(leaf) : random() % 3;
    check(of, 3);
  }
}

TEST_CASE("other orders of the same leaves give other bits") {
  std::vector<float> sum = terms(0);
  for (std::int64_t leaf = 1; leaf < 8; ++leaf) {
    const std::vector<float> x = terms(leaf);
    for (std::size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
  }
  const std::vector<float> tree = on_one_rank(8);
  std::size_t different = 0;
  for (std::size_t i = 0; i < sum.size(); ++i) different += sum[i] != tree[i];
  CHECK(different > sum.size() / 4);
}

TEST_CASE("a rank without one of its leaves is found") {
  CHECK_THROWS_WITH_AS(threads::run(2,
                                    [&](threads::communicator c) {
                                      any_communicator comm(c);
                                      cpu device;
                                      deterministic_sum<float, cpu> sum(elements, 4);
                                      add(sum, device, c.rank() == 0 ? 0 : 2);
                                      if (c.rank() == 0) add(sum, device, 1);
                                      const deterministic_exchange exchange(comm, members_of({0, 0, 1, 1}, 2), 4);
                                      static_cast<void>(exchange.run_everywhere(device, sum.parts(), elements));
                                    }),
                       doctest::Contains("a deterministic sum over 4 leaves is incomplete on this rank"), error);
}

}  // namespace deterministic_exchange_test
