// program: kernels
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "support/kernel_support.hpp"

using namespace kernel_support;
using plait::box;
using plait::cpu;
namespace kernels = plait::kernels;

namespace {

box whole_of(int dims, const plait::per_dim& extents) { return {dims, extents, {}, extents}; }

/// The part of a whole tensor in the box.
template <class T>
std::vector<T> cut(const std::vector<T>& whole, const box& b) {
  std::vector<T> part;
  for (int64_t i = 0; i < b.local_size(); ++i) {
    int64_t rest = i, global = 0, step = 1;
    for (int d = b.dims - 1; d >= 0; --d) {
      global += (rest % b.local[d] + b.offset[d]) * step;
      rest /= b.local[d];
      step *= b.global[d];
    }
    part.push_back(whole[static_cast<std::size_t>(global)]);
  }
  return part;
}

const plait::per_dim global{3, 5, 7, 9};
const box parts[] = {{4, global, {0, 0, 0, 0}, global},       {4, global, {1, 0, 0, 0}, {2, 5, 7, 9}},
                     {4, global, {0, 2, 0, 0}, {3, 2, 7, 9}}, {4, global, {0, 0, 0, 4}, {3, 5, 7, 5}},
                     {4, global, {2, 3, 1, 2}, {1, 2, 3, 4}}, {4, global, {0, 1, 6, 0}, {3, 4, 1, 9}},
                     {4, global, {0, 0, 0, 8}, {3, 5, 7, 1}}, {4, global, {0, 0, 0, 0}, {3, 0, 7, 9}}};

}  // namespace

TEST_CASE("philox gives the known answers of its authors' library") {
  using words = kernels::four_words;
  CHECK(kernels::philox4x32({{0, 0, 0, 0}}, 0, 0) == words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(kernels::philox4x32({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff) ==
        words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(kernels::philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0) ==
        words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("a uniform number is strictly between 0 and 1, and a normal one finite, for any words") {
  CHECK(kernels::to_unit(0) == 0x1p-33);
  CHECK(kernels::to_unit(0xffffffffu) == 1 - 0x1p-33);
  for (const std::uint32_t a : {0u, 1u, 0x7fffffffu, 0xfffffffeu, 0xffffffffu})
    for (const std::uint32_t b : {0u, 1u, 0xffffffffu})
      for (const double x : kernels::normal_pair(a, b)) {
        CHECK(std::isfinite(x));
        CHECK(std::abs(x) < 6.8);  // sqrt(-2 ln 2^-33) = 6.76
      }
}

TEST_CASE("both halves of the seed, the stream and the number of a block matter") {
  // The authors' third known answer; and all ways to generate numbers for a block that a tensor can have.
  constexpr std::uint64_t seed = 0x299f31d0a4093822, stream = 0x0370734413198a2e, block = 0x05a308d3243f6a88;
  constexpr kernels::four_words words =
      kernels::philox4x32({{0x243f6a88, 0x05a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0);
  CHECK(kernels::random_words(seed, stream, block) == words);
  CHECK(kernels::random_words(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88) ==
        kernels::four_words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  cpu device;
  // The block's four numbers, in a box of one large dim.
  const std::int64_t first = static_cast<std::int64_t>(block * 4);
  const box four{1, {first + 1000}, {first}, {4}};
  std::array<double, 4> uniforms{}, normals{};
  kernels::fill_uniform(device, uniforms.data(), four, seed, stream, 0.0, 1.0);
  kernels::fill_normal(device, normals.data(), four, seed, stream, 0.0, 1.0);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(uniforms[i] == kernels::to_unit(words[i]));
    CHECK(kernels::uniform(seed, stream, block * 4 + i) == uniforms[i]);
    CHECK(kernels::normal(seed, stream, block * 4 + i) == normals[i]);
  }
  CHECK(normals[0] == kernels::normal_pair(words[0], words[1])[0]);
  // Each of the 64 bits of a seed and of a stream changes the numbers, also those generated many at a time.
  std::array<double, 100> plain{}, other{};
  const box hundred = whole_of(1, {100});
  kernels::fill_uniform(device, plain.data(), hundred, 0, 0, 0.0, 1.0);
  for (int bit = 0; bit < 64; ++bit)
    for (const bool of_seed : {true, false}) {
      CAPTURE(bit);
      const std::uint64_t set = std::uint64_t{1} << bit, its_seed = of_seed ? set : 0, its_stream = of_seed ? 0 : set;
      kernels::fill_uniform(device, other.data(), hundred, its_seed, its_stream, 0.0, 1.0);
      int equal = 0;
      for (std::size_t i = 0; i < other.size(); ++i) {
        equal += other[i] == plain[i] ? 1 : 0;
        CHECK(other[i] == kernels::uniform(its_seed, its_stream, i));
      }
      CHECK(equal == 0);
    }
}

TEST_CASE_TEMPLATE("filling depends on the global index only", T, float, double) {
  cpu device;
  const box whole = whole_of(4, global);
  std::vector<T> normals(static_cast<std::size_t>(whole.local_size())), uniforms(normals.size());
  kernels::fill_normal(device, normals.data(), whole, 42, 7, 1.0, 0.5);
  kernels::fill_uniform(device, uniforms.data(), whole, 42, 8, -2.0, 3.0);
  for (std::size_t i = 0; i < normals.size(); i += 13) {
    CHECK(normals[i] == static_cast<T>(1.0 + 0.5 * kernels::normal(42, 7, i)));
    CHECK(uniforms[i] == static_cast<T>(-2.0 + 5.0 * kernels::uniform(42, 8, i)));
  }
  for (const box& part : parts) {
    std::vector<T> mine(static_cast<std::size_t>(part.local_size()));
    kernels::fill_normal(device, mine.data(), part, 42, 7, 1.0, 0.5);
    CHECK(mine == cut(normals, part));
    kernels::fill_uniform(device, mine.data(), part, 42, 8, -2.0, 3.0);
    CHECK(mine == cut(uniforms, part));
  }
}

TEST_CASE("the numbers have the moments they should, and streams and seeds differ") {
  cpu device;
  const int64_t n = 200000;
  std::vector<double> x(static_cast<std::size_t>(n)), u(x.size()), other(x.size());
  kernels::fill_normal(device, x.data(), whole_of(1, {n}), 1, 0, 0.0, 1.0);
  kernels::fill_uniform(device, u.data(), whole_of(1, {n}), 1, 1, 0.0, 1.0);
  double mean = 0, square = 0, fourth = 0, u_mean = 0, neighbours = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    mean += x[i] / static_cast<double>(n);
    square += x[i] * x[i] / static_cast<double>(n);
    fourth += x[i] * x[i] * x[i] * x[i] / static_cast<double>(n);
    u_mean += u[i] / static_cast<double>(n);
    if (i > 0) neighbours += x[i] * x[i - 1] / static_cast<double>(n);
  }
  CHECK(std::abs(mean) < 0.01);
  CHECK(std::abs(square - 1) < 0.02);
  CHECK(std::abs(fourth - 3) < 0.1);
  CHECK(std::abs(u_mean - 0.5) < 0.005);
  CHECK(std::abs(neighbours) < 0.01);
  kernels::fill_normal(device, other.data(), whole_of(1, {n}), 1, 5, 0.0, 1.0);
  CHECK(std::abs(dot(x, other)) / static_cast<double>(n) < 0.01);
  kernels::fill_normal(device, other.data(), whole_of(1, {n}), 2, 0, 0.0, 1.0);
  CHECK(std::abs(dot(x, other)) / static_cast<double>(n) < 0.01);
  CHECK(kernels::uniform(1, 1, std::uint64_t{1} << 40) != kernels::uniform(1, 1, 0));
}

TEST_CASE_TEMPLATE("dropout keeps the right share, the same elements on any shard, and in backward", T, float, double) {
  cpu device;
  const box whole = whole_of(4, global);
  const auto n = static_cast<std::size_t>(whole.local_size());
  const std::vector<T> ones(n, T(1));
  std::vector<T> y(n), dx(n);
  kernels::dropout_forward(device, ones.data(), y.data(), whole, 3, 4, 0.25);
  kernels::dropout_backward(device, ones.data(), dx.data(), whole, 3, 4, 0.25);
  CHECK(y == dx);
  double kept = 0;
  for (const T v : y) {
    CHECK((v == T(0) || v == static_cast<T>(1 / 0.75)));
    kept += v != T(0) ? 1 : 0;
  }
  CHECK(std::abs(kept / static_cast<double>(n) - 0.75) < 0.05);
  for (const box& part : parts) {
    std::vector<T> mine(static_cast<std::size_t>(part.local_size()), T(1));
    kernels::dropout_forward(device, mine.data(), mine.data(), part, 3, 4, 0.25);  // in place
    CHECK(mine == cut(y, part));
  }
  kernels::dropout_forward(device, ones.data(), y.data(), whole, 3, 4, 0.0);
  CHECK(y == ones);
  CHECK_THROWS_WITH_AS(kernels::dropout_forward(device, ones.data(), y.data(), whole, 3, 4, 1.0),
                       "dropout: p = 1, must be at least 0 and below 1", plait::error);
}
