// program: devices
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "plait/device/cpu.hpp"
#include "plait/device/gemm_problem.hpp"

using namespace plait;

namespace {

using std::int64_t;

/// The largest error compared with a triple loop, relative to the sum of the magnitudes. Also checks that the gaps
/// between rows of C do not change.
template <class In, class Out, class Multiply>
double gemm_error(const Multiply& multiply, bool ta, bool tb, int64_t m, int64_t n, int64_t k, arithmetic<Out> alpha,
                  arithmetic<Out> beta, int64_t gap) {
  std::mt19937 generator(static_cast<unsigned>(m * 131 + n * 17 + k + (ta ? 7 : 0) + (tb ? 3 : 0)));
  std::uniform_int_distribution<int> values(-64, 64);
  const int64_t lda = (ta ? m : k) + gap, ldb = (tb ? k : n) + gap, ldc = n + gap;
  std::vector<In> a(static_cast<std::size_t>((ta ? k : m) * lda + 1)),
      b(static_cast<std::size_t>((tb ? n : k) * ldb + 1));
  std::vector<Out> c(static_cast<std::size_t>(m * ldc + 1));
  for (auto& v : a) v = converted<In>(values(generator) / 32.0);  // eight significant bits
  for (auto& v : b) v = converted<In>(values(generator) / 32.0);
  for (auto& v : c) v = converted<Out>(beta == 0 ? NAN : static_cast<double>(values(generator)));
  std::vector<Out> before = c;
  multiply(gemm_problem{ta, tb, m, n, k, lda, ldb, ldc}, alpha, a.data(), b.data(), beta, c.data());
  double worst = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, magnitude = 1;
      for (int64_t l = 0; l < k; ++l) {
        const double x = converted<double>(a[static_cast<std::size_t>(ta ? l * lda + i : i * lda + l)]);
        const double y = converted<double>(b[static_cast<std::size_t>(tb ? j * ldb + l : l * ldb + j)]);
        sum += x * y;
        magnitude += std::abs(x * y);
      }
      const auto at = static_cast<std::size_t>(i * ldc + j);
      double expected = static_cast<double>(alpha) * sum;
      if (beta != 0) expected += static_cast<double>(beta) * converted<double>(before[at]);
      if (std::is_same_v<Out, bf16>) magnitude = std::abs(expected) + 1e-5 * magnitude;  // rounded once
      const double error = std::abs(converted<double>(c[at]) - expected) / magnitude;
      worst = error < worst ? worst : error;  // NaN counts as the largest error
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

/// `multiply` takes a problem, alpha, A, B, beta and C.
template <class In, class Out, class Multiply>
void check_all(double tolerance, const Multiply& multiply) {
  using A = arithmetic<Out>;
  for (const auto& [m, n, k] : sizes) {
    for (int transposed = 0; transposed < 4; ++transposed) {
      for (const int64_t gap : {0, 5}) {
        for (const A alpha : {A(1), A(-0.5)}) {
          for (const A beta : {A(0), A(1), A(0.25)}) {
            CAPTURE(m);
            CAPTURE(n);
            CAPTURE(k);
            CAPTURE(transposed);
            CAPTURE(alpha);
            CAPTURE(beta);
            const bool ta = (transposed & 1) != 0, tb = (transposed & 2) != 0;
            CHECK(gemm_error<In, Out>(multiply, ta, tb, m, n, k, alpha, beta, gap) < tolerance);
          }
        }
      }
    }
  }
}

template <class In, class Out>
void check_all(double tolerance) {
  cpu device;
  check_all<In, Out>(tolerance, [&](const gemm_problem& p, auto alpha, const In* a, const In* b, auto beta, Out* c) {
    device.gemm(p.trans_a, p.trans_b, p.m, p.n, p.k, alpha, a, p.lda, b, p.ldb, beta, c, p.ldc);
  });
}

}  // namespace

TEST_CASE("float products: transpositions, strides, alpha, beta, tiny and empty") { check_all<float, float>(3e-7); }

TEST_CASE("double products: transpositions, strides, alpha, beta, tiny and empty") { check_all<double, double>(1e-15); }

TEST_CASE("bf16 products with float results") { check_all<bf16, float>(3e-7); }

TEST_CASE("bf16 products with bf16 results, rounded once") { check_all<bf16, bf16>(0x1.01p-8); }

TEST_CASE("bf16 products computed with floats, as on a processor without bf16 instructions") {
  detail::float_gemm gemm;
  std::vector<float> scratch;
  const auto multiply = [&](const gemm_problem& p, float alpha, const bf16* a, const bf16* b, float beta, auto* c) {
    if (p.m == 0 || p.n == 0) return;
    if (p.k == 0) return scale_matrix(p.m, p.n, beta, c, p.ldc);
    widened_product(gemm, scratch, p, alpha, a, b, beta, c);
  };
  check_all<bf16, float>(3e-7, multiply);
  check_all<bf16, bf16>(0x1.01p-8, multiply);
}

TEST_CASE("splitting m or n of float products changes no bit where oneDNN adds in order") {
  if (!onednn_gemm::adds_in_order(dtype::f32)) {
    MESSAGE("skipped: there is no AVX-512; deterministic products have a test of their own");
    return;
  }
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
                       error);
  CHECK_THROWS_AS(device.gemm(false, false, -1, 2, 4, 1.0f, x, 4, x, 2, 0.0f, x, 2), error);
}

// The numbers have few bits, so plain sums are exact in float and double.
TEST_CASE("plain products, without a library") {
  const auto multiply = [](const gemm_problem& p, auto alpha, const auto* a, const auto* b, auto beta, auto* c) {
    plain_product(p, alpha, a, b, beta, c);
  };
  check_all<float, float>(1e-30, multiply);
  check_all<double, double>(1e-30, multiply);
  check_all<bf16, float>(1e-30, multiply);
  check_all<bf16, bf16>(0x1.01p-8, multiply);
  CHECK_FALSE(plain_gemm::supports_bf16());
}
