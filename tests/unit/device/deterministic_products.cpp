// program: devices
// Products in a deterministic order: a sum of fused multiply-adds in float and double. The bits are the same for every
// split and every layout of rows. Also the errors.
#include "plait/device/deterministic_products.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "plait/device/cpu.hpp"

using namespace plait;

namespace {

template <class T>
std::vector<T> random_numbers(std::mt19937& random, std::int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<T> x(static_cast<std::size_t>(n));
  for (T& v : x) v = converted<T>(normal(random));
  return x;
}

struct sizes {
  std::int64_t m, n, k;
};
constexpr sizes all_sizes[] = {{1, 1, 1},     {8, 24, 40},    {16, 16, 16},   {33, 70, 300},
                               {48, 96, 513}, {64, 160, 256}, {128, 40, 520}, {200, 16, 31}};

/// Calls f(transposed a, transposed b, m, n, k, lda, ldb) for products of all kinds.
template <class F>
void each_product(F&& f) {
  for (const sizes& s : all_sizes)
    for (const bool ta : {false, true})
      for (const bool tb : {false, true})
        for (const std::int64_t gap : {0, 7}) f(ta, tb, s.m, s.n, s.k, (ta ? s.m : s.k) + gap, (tb ? s.k : s.n) + gap);
}

}  // namespace

TEST_CASE_TEMPLATE("terms are added one after the other, 256 at a time", T, float, double) {
  cpu device({.deterministic = true});
  std::mt19937 random(1);
  each_product(
      [&](bool ta, bool tb, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t lda, std::int64_t ldb) {
        const auto a = random_numbers<T>(random, (ta ? k : m) * lda), b = random_numbers<T>(random, (tb ? n : k) * ldb);
        auto c = random_numbers<T>(random, m * n);
        const auto before = c;
        device.gemm(ta, tb, m, n, k, T(1), a.data(), lda, b.data(), ldb, T(1), c.data(), n);
        std::int64_t different = 0;
        for (std::int64_t i = 0; i < m; ++i)
          for (std::int64_t j = 0; j < n; ++j) {
            T sum = before[static_cast<std::size_t>(i * n + j)];
            for (std::int64_t at = 0; at < k; at += 256) {
              T part = 0;
              for (std::int64_t l = at; l < std::min(k, at + 256); ++l)
                part = std::fma(a[static_cast<std::size_t>(ta ? l * lda + i : i * lda + l)],
                                b[static_cast<std::size_t>(tb ? j * ldb + l : l * ldb + j)], part);
              sum = sum + part;
            }
            different += std::memcmp(&sum, &c[static_cast<std::size_t>(i * n + j)], sizeof sum) != 0;
          }
        CHECK_MESSAGE(different == 0, m, " x ", n, " x ", k, ta, tb, lda, ldb);
      });
}

TEST_CASE_TEMPLATE("splitting rows or columns changes no bit", T, float, double, bf16) {
  cpu device({.deterministic = true});
  std::mt19937 random(2);
  const auto check = [&]<class Out>(Out) {
    each_product([&](bool ta, bool tb, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t lda,
                     std::int64_t ldb) {
      const auto a = random_numbers<T>(random, (ta ? k : m) * lda), b = random_numbers<T>(random, (tb ? n : k) * ldb);
      std::vector<Out> whole(static_cast<std::size_t>(m * n)), cut(whole.size());
      device.gemm(ta, tb, m, n, k, 1, a.data(), lda, b.data(), ldb, 0, whole.data(), n);
      for (const std::int64_t parts : {2, 3, 8}) {
        for (std::int64_t p = 0; p < parts; ++p) {
          const std::int64_t first = p * m / parts, rows = (p + 1) * m / parts - first;
          device.gemm(ta, tb, rows, n, k, 1, a.data() + (ta ? first : first * lda), lda, b.data(), ldb, 0,
                      cut.data() + first * n, n);
        }
        CHECK(std::memcmp(whole.data(), cut.data(), whole.size() * sizeof(Out)) == 0);
        for (std::int64_t p = 0; p < parts; ++p) {
          const std::int64_t first = p * n / parts, columns = (p + 1) * n / parts - first;
          device.gemm(ta, tb, m, columns, k, 1, a.data(), lda, b.data() + (tb ? first * ldb : first), ldb, 0,
                      cut.data() + first, n);
        }
        CHECK(std::memcmp(whole.data(), cut.data(), whole.size() * sizeof(Out)) == 0);
      }
    });
  };
  check(T{});
  if constexpr (std::is_same_v<T, bf16>) check(float{});
}

TEST_CASE("other factors than 1 and 0 scale complete sums") {
  cpu device({.deterministic = true}), usual;
  std::mt19937 random(3);
  const auto a = random_numbers<float>(random, 40 * 300), b = random_numbers<float>(random, 300 * 50);
  auto c = random_numbers<float>(random, 40 * 50);
  auto d = c;
  device.gemm(false, false, 40, 50, 300, 0.5f, a.data(), 300, b.data(), 50, 2.0f, c.data(), 50);
  usual.gemm(false, false, 40, 50, 300, 0.5f, a.data(), 300, b.data(), 50, 2.0f, d.data(), 50);
  for (std::size_t i = 0; i < c.size(); ++i) CHECK(c[i] == doctest::Approx(d[i]).epsilon(1e-4));
}

TEST_CASE("a library that adds in another order is refused") {
  struct backwards {
    static bool adds_in_order(dtype) { return true; }
    static bool supports_bf16() { return false; }
    void run(const gemm_problem& p, float, const float* a, const float* b, float, float* c) {
      for (std::int64_t i = 0; i < p.m; ++i)
        for (std::int64_t j = 0; j < p.n; ++j) {
          float sum = 0;
          for (std::int64_t k = p.k; k-- > 0;) sum = std::fma(a[i * p.lda + k], b[k * p.ldb + j], sum);
          c[i * p.ldc + j] = sum;
        }
    }
  } library;
  std::mt19937 random(4);
  const auto a = random_numbers<float>(random, 32 * 64), b = random_numbers<float>(random, 64 * 32);
  std::vector<float> c(32 * 32);
  deterministic_products products;
  CHECK_THROWS_WITH_AS(
      products.run(library, {false, false, 32, 32, 64, 64, 32, 32}, 1.0f, a.data(), b.data(), 0.0f, c.data()),
      doctest::Contains("does not add the terms of this product one after the other"), error);
  CHECK_THROWS_WITH_AS(cpu({.threads = 2, .deterministic = true}),
                       "cpu: options::deterministic is for options::threads = 1, and here they are 2", error);
}
