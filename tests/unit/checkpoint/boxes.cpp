// program: files
#include "plait/checkpoint/boxes.hpp"

#include <doctest/doctest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

#include "support/temp_folder.hpp"

namespace {

using plait::box;
using std::int64_t;

box make(std::vector<int64_t> global, std::vector<int64_t> offset, std::vector<int64_t> local) {
  box b;
  b.dims = static_cast<int>(global.size());
  for (std::size_t d = 0; d < global.size(); ++d) {
    b.global[d] = global[d];
    b.offset[d] = offset[d];
    b.local[d] = local[d];
  }
  return b;
}
box make(const std::vector<int64_t>& global) { return make(global, std::vector<int64_t>(global.size()), global); }
bool same(const box& a, const box& b) {
  return a.dims == b.dims && a.global == b.global && a.offset == b.offset && a.local == b.local;
}

/// The index in the whole tensor of element `i` of a box, row-major.
int64_t global_place(const box& b, int64_t i) {
  int64_t stride = 1, place = 0;
  for (int d = b.dims; d-- > 0;) {
    const auto k = static_cast<std::size_t>(d);
    place += (b.offset[k] + i % b.local[k]) * stride;
    i /= b.local[k];
    stride *= b.global[k];
  }
  return place;
}
/// The index in the whole tensor of every element of a box.
std::vector<int64_t> elements(const box& b) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < b.local_size(); ++i) out.push_back(global_place(b, i));
  return out;
}

constexpr std::size_t boxes_of_a_cube() {
  box cube;
  cube.dims = 3;
  for (int d = 0; d < 3; ++d) cube.global[d] = cube.local[d] = 4;
  return plait::boxes_of_flat_range(cube, 1, 63).size();
}

}  // namespace

TEST_CASE("every flat range of small boxes is at most 2n-1 boxes, in order, without gaps") {
  static_assert(boxes_of_a_cube() == 5);
  std::set<std::size_t> counts;
  for (const box& whole : {make({}, {}, {}), make({7}, {2}, {5}), make({5, 6}, {1, 2}, {3, 4}),
                           make({4, 4, 4}, {0, 1, 0}, {3, 3, 4}), make({3, 3, 2, 3}, {0, 0, 0, 0}, {3, 3, 2, 3}),
                           make({2, 9, 1, 4}, {1, 0, 0, 1}, {1, 5, 1, 3}), make({3, 0}, {0, 0}, {3, 0})}) {
    const std::vector<int64_t> all = elements(whole);
    for (int64_t begin = 0; begin <= whole.local_size(); ++begin) {
      for (int64_t end = begin; end <= whole.local_size(); ++end) {
        std::vector<int64_t> found;
        const auto boxes = plait::boxes_of_flat_range(whole, begin, end);
        for (const box& b : boxes) {
          CHECK(b.global == whole.global);
          CHECK(b.local_size() > 0);
          const auto part = elements(b);
          found.insert(found.end(), part.begin(), part.end());
        }
        CHECK(found == std::vector<int64_t>(all.begin() + begin, all.begin() + end));
        CHECK(boxes.size() <= static_cast<std::size_t>(std::max(2 * whole.dims - 1, 1)));
        if (whole.dims == 4) counts.insert(boxes.size());
      }
    }
  }
  CHECK(counts.count(7) == 1);
  const box row = make({7}, {2}, {5});
  CHECK_ERROR(plait::boxes_of_flat_range(row, -1, 2), "[-1, 2)", "5 elements");
  CHECK_ERROR(plait::boxes_of_flat_range(row, 3, 2), "[3, 2)");
  CHECK_ERROR(plait::boxes_of_flat_range(row, 0, 6), "[0, 6)");
}

TEST_CASE("intersections") {
  const box a = make({8, 8}, {0, 2}, {4, 4}), b = make({8, 8}, {2, 4}, {6, 4});
  CHECK(same(plait::intersect(a, b).value(), make({8, 8}, {2, 4}, {2, 2})));
  CHECK(same(plait::intersect(b, a).value(), make({8, 8}, {2, 4}, {2, 2})));
  CHECK_FALSE(plait::intersect(a, make({8, 8}, {4, 2}, {4, 4})));
  CHECK_FALSE(plait::intersect(a, make({8, 8}, {1, 3}, {0, 1})));
  CHECK(plait::intersect(make({}, {}, {}), make({}, {}, {})));
  CHECK_ERROR(plait::intersect(a, make({8, 9}, {0, 0}, {1, 1})), "different shape");
  CHECK_ERROR(plait::intersect(a, make({8}, {0}, {1})), "different shape");
}

TEST_CASE("the index finds what a scan finds") {
  std::mt19937 random(3);
  const auto number = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int trial = 0; trial < 200; ++trial) {
    const int dims = static_cast<int>(number(0, 4));
    const auto some = [&](const std::vector<int64_t>& global) {
      std::vector<int64_t> offset, local;
      for (const int64_t extent : global) {
        offset.push_back(number(0, extent - 1));
        local.push_back(number(0, extent - offset.back()));
      }
      return make(global, offset, local);
    };
    std::vector<int64_t> global;
    for (int d = 0; d < dims; ++d) global.push_back(number(1, 12));
    std::vector<box> boxes;
    for (int64_t n = number(0, 60); n > 0; --n) boxes.push_back(some(global));
    const plait::box_index index(boxes);
    for (int query = 0; query < 20; ++query) {
      const box wanted = some(global);
      std::vector<std::uint32_t> expected;
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        if (plait::intersect(boxes[i], wanted)) expected.push_back(static_cast<std::uint32_t>(i));
      }
      CHECK(index.overlapping(wanted) == expected);
    }
  }
  CHECK(plait::box_index().overlapping(make({4}, {0}, {4})).empty());
  const std::vector<box> mixed{make({4}, {0}, {4}), make({5}, {0}, {4})};
  CHECK_ERROR(plait::box_index{mixed}, "shapes differ");
}

namespace {

/// Every element of the range except padding lies in exactly one of the boxes, at its index; no other element does.
void check_range(const box& part, int64_t begin, int64_t end, const std::vector<int64_t>& shape) {
  int64_t all = 1;
  for (const int64_t n : shape) all *= n;
  std::map<int64_t, int64_t> expected, got;  // index in the tensor, index in the range
  for (int64_t i = begin; i < end; ++i) {
    const int64_t place = global_place(part, i);
    if (place < all) expected[place] = i - begin;
  }
  int64_t after = 0;
  for (const plait::placed_box& b : plait::boxes_of_part(part, begin, end, shape, "x")) {
    REQUIRE(b.where.dims == static_cast<int>(shape.size()));
    for (std::size_t d = 0; d < shape.size(); ++d) {
      REQUIRE(b.where.global[d] == shape[d]);
      REQUIRE(b.where.offset[d] >= 0);
      REQUIRE(b.where.offset[d] + b.where.local[d] <= shape[d]);
    }
    REQUIRE(b.where.local_size() > 0);
    REQUIRE(b.at >= after);  // in the order of the range
    after = b.at + b.where.local_size();
    for (int64_t i = 0; i < b.where.local_size(); ++i) {
      const int64_t place = global_place(b.where, i);
      REQUIRE(!got.contains(place));
      got[place] = b.at + i;
    }
  }
  REQUIRE(got == expected);
}

}  // namespace

TEST_CASE("any range of any part is boxes of the tensor's own shape, without padding") {
  struct {
    std::vector<int64_t> global, shape;
  } const tensors[] = {
      {{}, {}},
      {{7}, {7}},
      {{9}, {7}},                  // with padding
      {{6, 4}, {6, 4}},            //
      {{8, 4}, {5, 4}},            // padded rows: a vocabulary
      {{3, 4, 5}, {12, 5}},        // the weight has one dim for heads and their dims
      {{4, 2, 3, 2}, {24, 2}},     // one dim for three
      {{5, 3, 4}, {5, 12}},        // the input's heads and their dims
      {{3, 2, 2, 3, 2}, {12, 6}},  // both
      {{4, 3, 2}, {4, 3, 2}},      //
      {{1, 6, 1, 4}, {6, 4}},      // dims with one element
      {{6, 2, 3}, {10, 3}},        // padded groups: 5 of 6
      {{0, 3}, {0, 3}},
  };
  std::mt19937 random(7);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<std::uint64_t>(n)); };
  for (const auto& t : tensors) {
    for (int round = 0; round < 200; ++round) {
      box part = make(t.global);
      for (std::size_t d = 0; d < t.global.size() && round > 0; ++d) {
        if (t.global[d] == 0) continue;
        part.local[d] = 1 + below(t.global[d]);
        part.offset[d] = below(t.global[d] - part.local[d] + 1);
      }
      const int64_t begin = below(part.local_size() + 1), end = begin + below(part.local_size() - begin + 1);
      CAPTURE(round);
      check_range(part, begin, end, t.shape);
      check_range(part, 0, part.local_size(), t.shape);
    }
  }
}

TEST_CASE("ranges and parts that are boxes stay one box each") {
  box heads = make({8, 16, 64});
  heads.local[0] = 2, heads.offset[0] = 4;
  const auto whole = plait::boxes_of_part(heads, 0, heads.local_size(), {128, 64}, "x");
  REQUIRE(whole.size() == 1);
  CHECK(whole[0].where.offset[0] == 64);
  CHECK(whole[0].where.local[0] == 32);
  box columns = make({64, 8, 16});  // a row-sharded linear: some heads of the input
  columns.local[1] = 2, columns.offset[1] = 6;
  const auto part = plait::boxes_of_part(columns, 0, columns.local_size(), {64, 128}, "x");
  REQUIRE(part.size() == 1);
  CHECK(part[0].where.offset[1] == 96);
  CHECK(part[0].where.local[1] == 32);
}

TEST_CASE("dims without a valid shape are refused by name") {
  CHECK_ERROR(plait::boxes_of_part(make({4, 6}), 0, 24, {6, 4}, "layer.weight"), "layer.weight",
              "the dims of its layout do not make its shape");
  CHECK_ERROR(plait::boxes_of_part(make({4, 6}), 0, 24, {4, 6, 2}, "layer.weight"), "layer.weight");
  CHECK_ERROR(plait::boxes_of_part(make({4, 6}), 0, 24, {4, 5}, "layer.weight"), "layer.weight");
}
