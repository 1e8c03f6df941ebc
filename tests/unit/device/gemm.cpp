// program: devices
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "plait/device/cpu.hpp"

namespace {

using plait::bf16;
using plait::cpu;
using std::int64_t;

template <class In>
In from_double(double value) {
  if constexpr (std::is_same_v<In, bf16>) {
    const auto f = static_cast<float>(value);
    std::uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bf16{static_cast<std::uint16_t>(bits >> 16)};  // the values used have eight significant bits
  } else {
    return static_cast<In>(value);
  }
}

template <class In>
double to_double(In value) {
  if constexpr (std::is_same_v<In, bf16>) {
    const std::uint32_t bits = std::uint32_t{value.bits} << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  } else {
    return static_cast<double>(value);
  }
}

/// The largest error against a triple loop, relative to the sum of the magnitudes; also checks that the gaps between
/// rows of C stay untouched.
template <class In, class Out>
double gemm_error(cpu& device, bool ta, bool tb, int64_t m, int64_t n, int64_t k, Out alpha, Out beta, int64_t gap) {
  std::mt19937 generator(static_cast<unsigned>(m * 131 + n * 17 + k + (ta ? 7 : 0) + (tb ? 3 : 0)));
  std::uniform_int_distribution<int> values(-64, 64);
  const int64_t lda = (ta ? m : k) + gap, ldb = (tb ? k : n) + gap, ldc = n + gap;
  std::vector<In> a(static_cast<std::size_t>((ta ? k : m) * lda + 1)),
      b(static_cast<std::size_t>((tb ? n : k) * ldb + 1));
  std::vector<Out> c(static_cast<std::size_t>(m * ldc + 1));
  for (auto& v : a) v = from_double<In>(values(generator) / 32.0);
  for (auto& v : b) v = from_double<In>(values(generator) / 32.0);
  for (auto& v : c) v = beta == Out(0) ? Out(NAN) : static_cast<Out>(values(generator));
  std::vector<Out> before = c;
  device.gemm(ta, tb, m, n, k, alpha, a.data(), lda, b.data(), ldb, beta, c.data(), ldc);
  double worst = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, magnitude = 1;
      for (int64_t l = 0; l < k; ++l) {
        const double x = to_double(a[static_cast<std::size_t>(ta ? l * lda + i : i * lda + l)]);
        const double y = to_double(b[static_cast<std::size_t>(tb ? j * ldb + l : l * ldb + j)]);
        sum += x * y;
        magnitude += std::abs(x * y);
      }
      const auto at = static_cast<std::size_t>(i * ldc + j);
      double expected = static_cast<double>(alpha) * sum;
      if (beta != Out(0)) expected += static_cast<double>(beta) * static_cast<double>(before[at]);
      const double error = std::abs(static_cast<double>(c[at]) - expected) / magnitude;
      worst = error < worst ? worst : error;  // a NaN counts as worst
    }
    for (int64_t j = n; j < ldc && i + 1 < m; ++j) {
      const auto at = static_cast<std::size_t>(i * ldc + j);
      CHECK(std::memcmp(&c[at], &before[at], sizeof(Out)) == 0);
    }
  }
  return worst;
}

const int64_t sizes[][3] = {{1, 1, 1},    {2, 3, 5},     {8, 8, 8},    {1, 64, 33}, {65, 1, 17}, {16, 16, 1},
                            {33, 47, 65}, {128, 64, 96}, {3, 200, 70}, {0, 4, 4},   {4, 0, 4},   {4, 4, 0}};

template <class In, class Out>
void check_all(double tolerance) {
  cpu device;
  for (const auto& [m, n, k] : sizes) {
    for (int transposed = 0; transposed < 4; ++transposed) {
      for (const int64_t gap : {0, 5}) {
        for (const Out alpha : {Out(1), Out(-0.5)}) {
          for (const Out beta : {Out(0), Out(1), Out(0.25)}) {
            CAPTURE(m);
            CAPTURE(n);
            CAPTURE(k);
            CAPTURE(transposed);
            CAPTURE(alpha);
            CAPTURE(beta);
            const bool ta = (transposed & 1) != 0, tb = (transposed & 2) != 0;
            CHECK(gemm_error<In, Out>(device, ta, tb, m, n, k, alpha, beta, gap) < tolerance);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("float products: transpositions, strides, alpha, beta, tiny and empty") { check_all<float, float>(3e-7); }

TEST_CASE("double products: transpositions, strides, alpha, beta, tiny and empty") { check_all<double, double>(1e-15); }

TEST_CASE("bf16 products with float results, or an error that says why not") {
  if (cpu::supports_bf16()) {
    check_all<bf16, float>(3e-7);
  } else {
    cpu device;
    const bf16 x{};
    float y = 0;
    CHECK_THROWS_AS(device.gemm(false, false, 1, 1, 1, 1.0f, &x, 1, &x, 1, 0.0f, &y, 1), plait::error);
  }
}

TEST_CASE("float products do not change a bit when m or n is split") {
  cpu device;
  const int64_t m = 96, n = 160, k = 72;
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  std::vector<float> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n));
  std::vector<float> whole(static_cast<std::size_t>(m * n)), split(whole.size());
  for (auto& v : a) v = normal(generator);
  for (auto& v : b) v = normal(generator);
  device.gemm(false, false, m, n, k, 1.0f, a.data(), k, b.data(), n, 0.0f, whole.data(), n);
  for (int64_t i = 0; i < m; i += 32) {
    for (int64_t j = 0; j < n; j += 40) {
      device.gemm(false, false, 32, 40, k, 1.0f, a.data() + i * k, k, b.data() + j, n, 0.0f, split.data() + i * n + j,
                  n);
    }
  }
  CHECK(split == whole);
}

TEST_CASE("impossible shapes are refused by name") {
  cpu device;
  float x[16] = {};
  CHECK_THROWS_WITH_AS(device.gemm(false, false, 2, 2, 4, 1.0f, x, 3, x, 2, 0.0f, x, 2),
                       "gemm(trans_a=0, trans_b=0, m=2, n=2, k=4, lda=3, ldb=2, ldc=2): lda must be at least 4, the "
                       "length of a stored row",
                       plait::error);
  CHECK_THROWS_AS(device.gemm(false, false, -1, 2, 4, 1.0f, x, 4, x, 2, 0.0f, x, 2), plait::error);
}
