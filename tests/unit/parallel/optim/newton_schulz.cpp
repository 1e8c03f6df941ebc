// program: training_step
// Compares the Newton-Schulz iteration with loops in double; also the shares of owners.
#include <doctest/doctest.h>

#include <cmath>

#include "plait/parallel/optim/muon.hpp"
#include "support/plain_muon.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using matrix_shape = std::pair<std::int64_t, std::int64_t>;

/// The largest difference from the reference, for numbers near 1.
template <class T>
double error_of(const matrix_shape& s, const newton_schulz_options& how, double magnitude) {
  cpu device;
  std::vector<double> from = random_numbers(s.first * s.second, 3);
  for (double& x : from) x = static_cast<T>(x * magnitude);
  std::vector<T> x(from.begin(), from.end());
  newton_schulz<T>(device, x.data(), s.first, s.second, how);
  const std::vector<double> expected = plain_newton_schulz(from, s.first, s.second, how);
  double most = 0;
  for (std::size_t i = 0; i < x.size(); ++i) most = std::max(most, std::abs(static_cast<double>(x[i]) - expected[i]));
  return most;
}

}  // namespace

TEST_CASE("every shape equals loops, in double and in float") {
  for (const matrix_shape& s :
       {matrix_shape{1, 1}, {1, 7}, {7, 1}, {5, 5}, {3, 17}, {17, 3}, {33, 32}, {32, 33}, {64, 48}}) {
    INFO(s.first << " x " << s.second);
    for (const double magnitude : {1.0, 1e-6, 1e6}) {
      CHECK(error_of<double>(s, {}, magnitude) < 1e-13);
      CHECK(error_of<float>(s, {}, magnitude) < 1e-5);
    }
    CHECK(error_of<double>(s, {.steps = 2, .a = 1.5, .b = -0.5, .c = 0.0, .epsilon = 0.5}, 1.0) < 1e-13);
  }
}

TEST_CASE("the result is nearly orthogonal") {
  cpu device;
  const std::int64_t rows = 24, columns = 40;
  std::vector<double> x = random_numbers(rows * columns, 8);
  newton_schulz<double>(device, x.data(), rows, columns);
  double most = 0;
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j <= i; ++j) {
      double product = 0;
      for (std::int64_t k = 0; k < columns; ++k)
        product += x[static_cast<std::size_t>(i * columns + k)] * x[static_cast<std::size_t>(j * columns + k)];
      most = std::max(most, std::abs(product - (i == j ? 1.0 : 0.0)));
    }
  CHECK(most < 0.6);  // singular values are between 0.7 and 1.2, and not all 1
  CHECK(most > 0.01);
}

TEST_CASE("zeros stay zeros, and empty matrices need no work") {
  cpu device;
  std::vector<double> x(12, 0.0);
  newton_schulz<double>(device, x.data(), 3, 4);
  CHECK(x == std::vector<double>(12, 0.0));
  newton_schulz<double>(device, x.data(), 0, 4);
  CHECK(x == std::vector<double>(12, 0.0));
}
