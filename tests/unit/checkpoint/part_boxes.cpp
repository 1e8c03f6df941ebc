// program: files
#include <doctest/doctest.h>

#include <map>
#include <random>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::box;
using std::int64_t;

/// The place of element `i` of a box, row-major, in the whole tensor.
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

/// Every element of the range that is no padding lies in one of the boxes, at its own place; none else does.
void check_range(const box& part, int64_t begin, int64_t end, const std::vector<int64_t>& shape) {
  int64_t all = 1;
  for (const int64_t n : shape) all *= n;
  std::map<int64_t, int64_t> expected, got;  // place in the tensor, place in the range
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

box make(const std::vector<int64_t>& global) {
  box b;
  b.dims = static_cast<int>(global.size());
  for (std::size_t d = 0; d < global.size(); ++d) b.global[d] = b.local[d] = global[d];
  return b;
}

}  // namespace

TEST_CASE("any range of any part is boxes of the tensor's own shape, without padding") {
  struct {
    std::vector<int64_t> global, shape;
  } const tensors[] = {
      {{}, {}},
      {{7}, {7}},
      {{9}, {7}},                  // padded
      {{6, 4}, {6, 4}},            //
      {{8, 4}, {5, 4}},            // padded rows: a vocabulary
      {{3, 4, 5}, {12, 5}},        // heads and their dims are one dim of a weight
      {{4, 2, 3, 2}, {24, 2}},     // three dims in one
      {{5, 3, 4}, {5, 12}},        // the input's heads and their dims
      {{3, 2, 2, 3, 2}, {12, 6}},  // both
      {{4, 3, 2}, {4, 3, 2}},      //
      {{1, 6, 1, 4}, {6, 4}},      // dims of one element
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

TEST_CASE("ranges and parts that are boxes already stay one box each") {
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

TEST_CASE("dims that make no shape are refused by name") {
  CHECK_ERROR(plait::boxes_of_part(make({4, 6}), 0, 24, {6, 4}, "layer.weight"), "layer.weight",
              "the dims of its layout do not make its shape");
  CHECK_ERROR(plait::boxes_of_part(make({4, 6}), 0, 24, {4, 6, 2}, "layer.weight"), "layer.weight");
  CHECK_ERROR(plait::boxes_of_part(make({4, 6}), 0, 24, {4, 5}, "layer.weight"), "layer.weight");
}
