// program: kernels
// Sums of squares as integers: exact for every order, every split and all exponents; NaN if a term is not finite.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "plait/kernels/sums.hpp"

using namespace plait;
namespace squares = plait::kernels::exact_squares;

namespace {
template <class T>
double sum_of(std::vector<std::vector<T>> parts) {
  cpu device;
  std::vector<std::int64_t> all(squares::words, 0);
  for (const std::vector<T>& part : parts) {
    std::vector<std::int64_t> own(squares::words, 0);
    const kernels::const_elements<T> one[] = {{part.data(), static_cast<std::int64_t>(part.size())}};
    kernels::add_exact_squares(device, std::span<const kernels::const_elements<T>>(one), own.data());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += own[i];
  }
  double out = 0;
  kernels::sum_of_bins(device, all.data(), &out);
  return out;
}
}  // namespace

TEST_CASE_TEMPLATE("no order and no split changes a bit, and the sum is right", T, float, double) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (const int spread : {0, 20, sizeof(T) == 4 ? 60 : 400}) {
    std::vector<T> x(5000);
    for (T& v : x)
      v = static_cast<T>(
          std::ldexp(normal(random), spread == 0 ? 0 : static_cast<int>(random() % 200) * spread / 100 - spread));
    const double whole = sum_of<T>({x});
    long double expected = 0;
    for (const T v : x) expected += static_cast<long double>(static_cast<double>(v) * static_cast<double>(v));
    CHECK(whole == doctest::Approx(static_cast<double>(expected)).epsilon(1e-14));
    for (int i = 0; i < 5; ++i) {
      std::shuffle(x.begin(), x.end(), random);
      const auto cut = x.begin() + static_cast<std::ptrdiff_t>(random() % x.size());
      CHECK(sum_of<T>({{x.begin(), cut}, {cut, x.end()}}) == whole);
    }
  }
}

TEST_CASE("the smallest and the largest squares count, and the sum is NaN if one is not finite") {
  CHECK(sum_of<double>({{3.0, 4.0}}) == 25.0);
  CHECK(sum_of<double>({{}}) == 0.0);
  CHECK(sum_of<double>({{1e-160, 1e-160}}) == doctest::Approx(2e-320).epsilon(1e-3));
  CHECK(sum_of<double>({{1e150}, {-1e150}}) == doctest::Approx(2e300).epsilon(1e-15));
  CHECK(std::isnan(sum_of<double>({{1.0, std::numeric_limits<double>::infinity()}})));
  CHECK(std::isnan(sum_of<float>({{1.0f}, {std::numeric_limits<float>::quiet_NaN()}})));
}

TEST_CASE("squares of bf16 equal those of the same numbers as floats") {
  std::vector<bf16> narrow;
  std::vector<float> wide;
  for (int i = 0; i < 5000; ++i) {
    narrow.push_back(converted<bf16>(std::ldexp(std::sin(0.3 * i), i % 40 - 20)));
    wide.push_back(converted<float>(narrow.back()));
  }
  CHECK(sum_of<bf16>({narrow}) == sum_of<float>({wide}));
}

TEST_CASE("sums of multiples are exact") {
  cpu device;
  std::mt19937 random(2);
  std::vector<float> x(1000);
  for (float& v : x) v = std::uniform_real_distribution<float>(0, 10)(random);
  const double quantum = std::ldexp(1.0, -35);
  double whole = 0, a = 0, b = 0;
  kernels::sum_of_multiples(device, x.data(), 1000, quantum, &whole);
  for (const std::int64_t cut : {1, 333, 999}) {
    kernels::sum_of_multiples(device, x.data(), cut, quantum, &a);
    kernels::sum_of_multiples(device, x.data() + cut, 1000 - cut, quantum, &b);
    CHECK(a + b == whole);
  }
}
