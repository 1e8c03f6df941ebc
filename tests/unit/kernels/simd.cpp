// program: kernels
#include "plait/kernels/cpu/simd.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/kernel_support.hpp"

namespace simd = plait::kernels::simd;
using namespace kernel_support;

namespace {

template <class T>
T exp_of(T x) {
  return simd::exp<T>(simd::splat(x))[0];
}

template <class T>
double worst_exp_error(double low, double high, int steps) {
  double worst = 0;
  for (int i = 0; i <= steps; ++i) {
    const T x = static_cast<T>(low + (high - low) * i / steps);
    const long double expected = std::exp(static_cast<long double>(x));
    const double error = static_cast<double>(std::abs((static_cast<long double>(exp_of(x)) - expected) / expected));
    worst = error <= worst ? worst : error;
  }
  return worst;
}

}  // namespace

TEST_CASE("exp is accurate to the last bit or two over its whole range") {
  CHECK(worst_exp_error<float>(-87.3, 88.7, 1000003) < 1e-7);
  CHECK(worst_exp_error<float>(-1.0, 1.0, 1000003) < 1e-7);
  CHECK(worst_exp_error<double>(-708.0, 709.7, 1000003) < 4e-16);
  CHECK(worst_exp_error<double>(-1.0, 1.0, 1000003) < 4e-16);
}

TEST_CASE_TEMPLATE("exp at the edges", T, float, double) {
  const T infinity = std::numeric_limits<T>::infinity();
  CHECK(exp_of<T>(0) == T(1));
  CHECK(exp_of<T>(-infinity) == T(0));
  CHECK(exp_of<T>(infinity) == infinity);
  CHECK(exp_of<T>(T(-1e30)) == T(0));
  CHECK(exp_of<T>(T(1e30)) == infinity);
  CHECK(std::isnan(exp_of<T>(std::numeric_limits<T>::quiet_NaN())));
}

TEST_CASE_TEMPLATE("sums and maxima of every length", T, float, double) {
  for (int64_t n = 0; n < 200; ++n) {
    const auto x = random_values<T>(n, static_cast<unsigned>(n)), y = random_values<T>(n, 77);
    double sum = 0, magnitude = 1;
    T largest = -std::numeric_limits<T>::infinity();
    for (std::size_t i = 0; i < x.size(); ++i) {
      sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
      magnitude += std::abs(static_cast<double>(x[i]) * static_cast<double>(y[i]));
      largest = std::max(largest, x[i]);
    }
    const auto product = [](simd::pack<T> a, simd::pack<T> b) { return a * b; };
    CHECK(std::abs(simd::sum_of<T>(n, product, x.data(), y.data()) - sum) < 1e-7 * magnitude);
    CHECK(simd::max_of(x.data(), n) == largest);
  }
}

TEST_CASE("a long float sum keeps seven digits") {
  const std::vector<float> x(3000001, 0.1f);
  const double sum = simd::sum_of<float>(
      3000001, [](simd::pack<float> v) { return v; }, x.data());
  CHECK(std::abs(sum / (3000001.0 * static_cast<double>(0.1f)) - 1) < 2e-7);
}

TEST_CASE_TEMPLATE("transform gives an element the same bits in the vector loop and in the tail", T, float, double) {
  const auto x = random_values<T>(100, 5);
  const auto f = [](simd::pack<T> v) { return simd::exp<T>(v) / (v * v + T(1)); };
  std::vector<T> whole(100);
  simd::transform(int64_t{100}, whole.data(), f, x.data());
  for (int64_t first = 0; first < 100; ++first) {
    std::vector<T> part(100);
    const int64_t n = std::min<int64_t>(7, 100 - first);
    simd::transform(n, part.data(), f, x.data() + first);
    for (int64_t i = 0; i < n; ++i) {
      CHECK(part[static_cast<std::size_t>(i)] == whole[static_cast<std::size_t>(first + i)]);
    }
    CHECK(part[static_cast<std::size_t>(n)] == T(0));
  }
}

TEST_CASE_TEMPLATE("column sums over many rows and odd widths", T, float, double) {
  for (const int64_t columns : {1, 7, 256, 300}) {
    for (const int64_t rows : {0, 1, 31, 33, 500}) {
      const auto x = random_values<T>(rows * columns, 9);
      std::vector<T> out(static_cast<std::size_t>(columns), T(2));
      simd::add_column_sums(rows, columns, out.data(),
                            [&](int64_t r, int64_t c) { return x[static_cast<std::size_t>(r * columns + c)]; });
      std::vector<double> expected(static_cast<std::size_t>(columns), 2.0);
      for (std::size_t i = 0; i < x.size(); ++i)
        expected[i % static_cast<std::size_t>(columns)] += static_cast<double>(x[i]);
      CHECK(difference(out, expected) < 1e-6);
    }
  }
}
