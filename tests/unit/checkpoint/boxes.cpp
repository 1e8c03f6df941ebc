// program: files
#include "plait/checkpoint/boxes.hpp"

#include <doctest/doctest.h>

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
bool same(const box& a, const box& b) {
  return a.dims == b.dims && a.global == b.global && a.offset == b.offset && a.local == b.local;
}

/// The index in the whole tensor of every element of `b`, row-major.
std::vector<int64_t> elements(const box& b) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < b.local_size(); ++i) {
    int64_t rest = i, stride = 1, index = 0;
    for (int d = b.dims; d-- > 0;) {
      index += (b.offset[d] + rest % b.local[d]) * stride;
      rest /= b.local[d];
      stride *= b.global[d];
    }
    out.push_back(index);
  }
  return out;
}

constexpr std::size_t boxes_of_a_cube() {
  box cube;
  cube.dims = 3;
  for (int d = 0; d < 3; ++d) cube.global[d] = cube.local[d] = 4;
  return plait::boxes_of_flat_range(cube, 1, 63).size();
}

}  // namespace

TEST_CASE("every flat range of small boxes is at most 2n-1 boxes, in order, whole") {
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
