// program: kernels
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "support/kernel_support.hpp"

using namespace kernel_support;
using plait::cpu;
namespace kernels = plait::kernels;

namespace {

constexpr double eps = 1e-5;

/// RMS norm; with a bias, layer norm.
std::vector<double> reference(const std::vector<double>& x, const std::vector<double>& w,
                              const std::vector<double>& bias) {
  const std::size_t columns = w.size();
  const auto n = static_cast<double>(columns);
  std::vector<double> y(x.size());
  for (std::size_t at = 0; at < x.size(); at += columns) {
    double mean = 0, square = 0;
    for (std::size_t c = 0; c < bias.size(); ++c) mean += x[at + c] / n;
    for (std::size_t c = 0; c < columns; ++c) square += (x[at + c] - mean) * (x[at + c] - mean) / n;
    for (std::size_t c = 0; c < columns; ++c)
      y[at + c] = (x[at + c] - mean) / std::sqrt(square + eps) * w[c] + (bias.empty() ? 0 : bias[c]);
  }
  return y;
}

template <class T>
std::vector<T> as(const std::vector<double>& x) {
  return std::vector<T>(x.begin(), x.end());
}

/// A norm of x + addend equals the norm of a sum that was computed before. The sum may replace x.
template <class T, class Norm>
void check_sum(cpu& device, std::vector<T> x, const Norm& norm) {
  const auto n = static_cast<int64_t>(x.size());
  const auto addend = as<T>(random_values<double>(n, 9));
  std::vector<T> sum(x.size()), y(x.size()), expected_y(x.size()), expected = x;
  kernels::accumulate(device, addend.data(), expected.data(), n);
  norm(expected.data(), nullptr, nullptr, expected_y.data());
  norm(x.data(), addend.data(), sum.data(), y.data());
  CHECK(sum == expected);
  CHECK(y == expected_y);
  norm(x.data(), addend.data(), x.data(), y.data());
  CHECK(x == expected);
  CHECK(y == expected_y);
}

/// RMS norm, or with `centred` layer norm: inputs, and the results for whole rows.
template <class T>
struct norm_case {
  int64_t rows, columns;
  bool centred;
  double tolerance;
  cpu device{};
  std::vector<double> x = random_values<double>(rows * columns, 1, 2.0), w = random_values<double>(columns, 2),
                      b = random_values<double>(centred ? columns : 0, 4),
                      dy = random_values<double>(rows * columns, 3);
  std::vector<T> xt{}, wt = as<T>(w), bt = as<T>(b), dyt = as<T>(dy);
  std::vector<T> y = dyt, means = std::vector<T>(centred ? static_cast<std::size_t>(rows) : 0),
                 inv = std::vector<T>(static_cast<std::size_t>(rows)), dx = dyt, dw = std::vector<T>(w.size(), T(1)),
                 db = std::vector<T>(b.size(), T(1));

  void check() {
    for (auto& v : x) v += centred ? 3 : 0;  // a mean that is not near 0
    xt = as<T>(x);
    check_whole();
    check_split();
  }

  T* if_centred(std::vector<T>& array) { return centred ? array.data() : nullptr; }

  void check_whole() {
    const auto forward = [&](const T* from, const T* addend, T* sum, T* to) {
      kernels::norm_forward(device, from, wt.data(), if_centred(bt), to, if_centred(means), inv.data(), rows, columns,
                            eps, addend, sum);
    };
    const auto backward = [&](const T* gradient, T* to, T* dweight, T* dbias) {
      kernels::norm_backward(device, xt.data(), wt.data(), gradient, if_centred(means), inv.data(), to, dweight, dbias,
                             rows, columns);
    };
    check_sum(device, xt, forward);
    forward(xt.data(), nullptr, nullptr, y.data());
    backward(dyt.data(), dx.data(), dw.data(), if_centred(db));
    for (auto* gradient : {&dw, &db})
      for (T& v : *gradient) v -= T(1);  // the gradients were added to ones
    const double numeric = std::max(tolerance, centred ? 1e-7 : 1e-8);
    CHECK(difference(y, reference(x, w, b)) < tolerance);
    CHECK(difference(dx, numeric_gradient(x, [&](const auto& in) { return dot(reference(in, w, b), dy); })) < numeric);
    CHECK(difference(dw, numeric_gradient(w, [&](const auto& in) { return dot(reference(x, in, b), dy); })) < numeric);
    CHECK(difference(db, numeric_gradient(b, [&](const auto& in) { return dot(reference(x, w, in), dy); })) < numeric);

    // Only dx, in place of dy; only the weight gradient.
    auto in_place = dyt;
    std::vector<T> dw_alone(w.size());
    backward(in_place.data(), in_place.data(), nullptr, nullptr);
    backward(dyt.data(), nullptr, dw_alone.data(), nullptr);
    CHECK(in_place == dx);
    CHECK(difference(dw_alone, dw) < tolerance);
  }

  /// Rows split over three ranks, unevenly, equal whole rows.
  void check_split() {
    const int64_t cuts[] = {0, columns / 4, columns / 2, columns};
    const auto parts = [&](auto f) {
      for (int p = 0; p < 3; ++p) {
        const int64_t first = cuts[p], count = cuts[p + 1] - first;
        f(first, count, columns_of(xt, columns, first, count), columns_of(dyt, columns, first, count));
      }
    };
    std::vector<T> sums(means.size()), squares(inv.size()), dots((centred ? 2 : 1) * inv.size()), mine(dots.size()),
        mean(means.size()), inverse(inv.size());
    if (centred)
      parts([&](int64_t, int64_t count, const auto& xp, const auto&) {
        kernels::row_sums(device, xp.data(), mine.data(), rows, count);
        kernels::accumulate(device, mine.data(), sums.data(), rows);
      });
    parts([&](int64_t, int64_t count, const auto& xp, const auto&) {
      kernels::row_squares(device, xp.data(), if_centred(sums), mine.data(), rows, count, columns);
      kernels::accumulate(device, mine.data(), squares.data(), rows);
    });
    kernels::norm_statistics(device, if_centred(sums), squares.data(), if_centred(mean), inverse.data(), rows, columns,
                             eps);
    CHECK(difference(mean, means) < tolerance);
    CHECK(difference(inverse, inv) < tolerance);
    parts([&](int64_t first, int64_t count, const auto& xp, const auto& dyp) {
      std::vector<T> yp(xp.size());
      kernels::norm_apply(device, xp.data(), if_centred(mean), inverse.data(), wt.data() + first,
                          centred ? bt.data() + first : nullptr, yp.data(), rows, count);
      CHECK(difference(yp, columns_of(y, columns, first, count)) < tolerance);
      kernels::norm_backward_dots(device, xp.data(), wt.data() + first, dyp.data(), if_centred(mean), inverse.data(),
                                  mine.data(), rows, count);
      kernels::accumulate(device, mine.data(), dots.data(), static_cast<int64_t>(dots.size()));
    });
    parts([&](int64_t first, int64_t count, const auto& xp, const auto& dyp) {
      std::vector<T> dxp(xp.size()), dwp(static_cast<std::size_t>(count)), in_place = dyp;
      for (auto* d : {&dxp, &in_place})
        kernels::norm_backward_dx(device, xp.data(), wt.data() + first, d == &dxp ? dyp.data() : d->data(),
                                  if_centred(mean), inverse.data(), dots.data(), d->data(), rows, count, columns);
      kernels::norm_backward_dweight(device, xp.data(), dyp.data(), if_centred(mean), inverse.data(), dwp.data(),
                                     nullptr, rows, count);
      CHECK(in_place == dxp);
      CHECK(difference(dxp, columns_of(dx, columns, first, count)) < (centred ? 5 : 3) * tolerance);
      CHECK(difference(dwp, columns_of(dw, columns, first, count)) < (centred ? 5 : 3) * tolerance);
    });
  }
};

}  // namespace

TEST_CASE("rms norm: reference, differences, split rows") {
  for (const int64_t columns : {4, 16, 37, 130}) {
    norm_case<double>{5, columns, false, 1e-13}.check();
    norm_case<float>{5, columns, false, 1e-6}.check();
  }
  norm_case<double>{70, 8, false, 1e-13}.check();
}

TEST_CASE("layer norm: reference, differences, split rows") {
  for (const int64_t columns : {4, 16, 37, 130}) {
    norm_case<double>{5, columns, true, 1e-13}.check();
    norm_case<float>{5, columns, true, 3e-6}.check();
  }
}

TEST_CASE_TEMPLATE("a norm's input gradient takes an addend", T, float, double) {
  cpu device;
  const int64_t rows = 3, columns = 37, n = rows * columns;
  const auto x = random_values<T>(n, 1), w = random_values<T>(columns, 2), dy = random_values<T>(n, 3);
  const auto addend = random_values<T>(n, 4);
  const auto mean = random_values<T>(rows, 5), inv = random_values<T>(rows, 6), dots = random_values<T>(2 * rows, 7);
  const auto check = [&](auto&& backward) {
    std::vector<T> expected(x.size()), dx(x.size());
    backward(expected.data(), static_cast<const T*>(nullptr));
    backward(dx.data(), addend.data());
    kernels::accumulate(device, addend.data(), expected.data(), n);
    CHECK(difference(dx, expected) < (sizeof(T) == 4 ? 1e-6 : 1e-14));
  };
  T* const none = nullptr;
  check([&](T* dx, const T* add) {
    kernels::norm_backward(device, x.data(), w.data(), dy.data(), nullptr, inv.data(), dx, none, nullptr, rows, columns,
                           add);
  });
  check([&](T* dx, const T* add) {
    kernels::norm_backward_dx(device, x.data(), w.data(), dy.data(), nullptr, inv.data(), dots.data(), dx, rows,
                              columns, 2 * columns, add);
  });
  check([&](T* dx, const T* add) {
    kernels::norm_backward(device, x.data(), w.data(), dy.data(), mean.data(), inv.data(), dx, none, none, rows,
                           columns, add);
  });
  check([&](T* dx, const T* add) {
    kernels::norm_backward_dx(device, x.data(), w.data(), dy.data(), mean.data(), inv.data(), dots.data(), dx, rows,
                              columns, 2 * columns, add);
  });
}
