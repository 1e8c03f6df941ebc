// program: kernels
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/core/box.hpp"
#include "plait/kernels/cpu/random.hpp"
#include "plait/kernels/cuda/kernels.hpp"

namespace kernel_random {  // files of one program may have helpers of the same name

using namespace plait::test;
using plait::bf16;
using plait::box;
using plait::cuda;
using std::int64_t;

std::vector<box> boxes() {
  return {
      {1, {1}, {0}, {1}},
      {1, {1003}, {0}, {1003}},
      {1, {4000}, {1001}, {1002}},                    // starts and ends inside a block of four words
      {1, {4000}, {1003}, {1006}},                    // an element, whole blocks, an element
      {2, {37, 50}, {11, 0}, {7, 50}},                // whole rows
      {2, {37, 50}, {3, 13}, {20, 9}},                // a tile
      {2, {37, 50}, {0, 49}, {37, 1}},                // a column
      {3, {6, 5, 8}, {2, 0, 4}, {3, 5, 4}},           // innermost dim split
      {4, {3, 4, 5, 6}, {1, 2, 0, 0}, {2, 1, 5, 6}},  // one index of a dim
      {4, {3, 4, 5, 6}, {0, 1, 2, 0}, {3, 3, 1, 6}},  //
      {3, {std::int64_t{1} << 20, 1 << 20, 8}, {(1 << 20) - 2, (1 << 20) - 3, 0}, {2, 3, 8}},  // beyond 2^32
      {1, {4096}, {1024}, {2048}},                                                             // whole 16-byte vectors
      {3, {5, 9, 64}, {1, 2, 16}, {3, 6, 32}},                                                 // the same in runs
      {2, {4, 4}, {0, 0}, {0, 4}},
      {0, {}, {}, {}},
  };
}

template <class T>
values rounded(const values& x) {
  values y;
  for (const double value : x) y.push_back(widened(typed<T>(value)));
  return y;
}

TEST_CASE_TEMPLATE("random numbers are those of the processor", T, float, double, bf16) {
  // A double on the border of two values of T may be rounded either way.
  constexpr double near = sizeof(T) == 8 ? 1e-15 : sizeof(T) == 4 ? 1e-7 : 1e-3;
  cuda device;
  plait::cpu host;
  const std::uint64_t seed = 0x123456789abcdefull, stream = 0x4d0000004dull;
  for (const box& part : boxes()) {
    CAPTURE(part.dims);
    CAPTURE(part.global[0]);
    CAPTURE(part.local[0]);
    for (const std::size_t lead : {0, 1}) {
      const values x = random_values<T>(part.local_size(), 3);
      values expected = x;
      number_array<T> y(device, values(x.size(), 7.0), lead), from(device, x, lead);
      plait::kernels::fill_normal(host, expected.data(), part, seed, stream, 0.5, 2.0);
      plait::kernels::fill_normal(device, y.data(), part, seed, stream, 0.5, 2.0);
      CHECK(difference(y.read(), rounded<T>(expected)) < near);
      plait::kernels::fill_uniform(host, expected.data(), part, seed, stream, -1.0, 3.0);
      plait::kernels::fill_uniform(device, y.data(), part, seed, stream, -1.0, 3.0);
      CHECK(difference(y.read(), rounded<T>(expected)) < near);
      plait::kernels::dropout_forward(host, x.data(), expected.data(), part, seed, stream, 0.3);
      plait::kernels::dropout_forward(device, from.view(), y.data(), part, seed, stream, 0.3);
      CHECK(difference(y.read(), expected) < tolerance<T>);
      const std::vector<T> once = y.raw();
      plait::kernels::dropout_backward(device, from.view(), from.data(), part, seed, stream, 0.3);  // in place
      CHECK(plait::test::same_bits(from.raw(), once));
    }
  }
  device.synchronize();
}

TEST_CASE("dropout refuses values that are not probabilities") {
  cuda device;
  number_array<float> x(device, 4);
  const box part{1, {4}, {0}, {4}};
  CHECK_THROWS_WITH_AS(plait::kernels::dropout_forward(device, x.view(), x.data(), part, 1, 2, 1.0),
                       "dropout: p = 1, must be at least 0 and below 1", plait::error);
}

}  // namespace kernel_random
