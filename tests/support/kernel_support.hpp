#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

/// Helpers of the tests of kernels.
namespace kernel_support {

using std::int64_t;

template <class T>
std::vector<T> random_values(int64_t n, unsigned seed, double spread = 1.0) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0.0, spread);
  std::vector<T> values(static_cast<std::size_t>(n));
  for (auto& v : values) v = static_cast<T>(normal(generator));
  return values;
}

/// The largest difference relative to the largest magnitude (at least 0.01). NaN counts as infinitely wrong.
template <class A, class B>
double difference(const std::vector<A>& got, const std::vector<B>& expected) {
  if (got.size() != expected.size()) return HUGE_VAL;
  double worst = 0, largest = 0.01;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    worst = error <= worst ? worst : error;
    if (std::isnan(error)) return HUGE_VAL;
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  return worst / largest;
}

/// The gradient of a scalar function by central differences of step 1e-5.
inline std::vector<double> numeric_gradient(std::vector<double> x,
                                            const std::function<double(const std::vector<double>&)>& f) {
  std::vector<double> gradient(x.size());
  constexpr double step = 1e-5;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + step;
    const double above = f(x);
    x[i] = at - step;
    const double below = f(x);
    x[i] = at;
    gradient[i] = (above - below) / (2 * step);
  }
  return gradient;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Columns first ... first + count - 1 of a matrix with `columns` columns.
template <class T>
std::vector<T> columns_of(const std::vector<T>& matrix, int64_t columns, int64_t first, int64_t count) {
  std::vector<T> part;
  for (std::size_t row = 0; row * static_cast<std::size_t>(columns) < matrix.size(); ++row) {
    const auto begin = matrix.begin() + static_cast<int64_t>(row) * columns + first;
    part.insert(part.end(), begin, begin + count);
  }
  return part;
}

}  // namespace kernel_support
