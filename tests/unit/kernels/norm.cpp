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

std::vector<double> rms_reference(const std::vector<double>& x, const std::vector<double>& w) {
  const std::size_t columns = w.size();
  std::vector<double> y(x.size());
  for (std::size_t at = 0; at < x.size(); at += columns) {
    double squares = 0;
    for (std::size_t c = 0; c < columns; ++c) squares += x[at + c] * x[at + c];
    const double inverse = 1 / std::sqrt(squares / static_cast<double>(columns) + eps);
    for (std::size_t c = 0; c < columns; ++c) y[at + c] = x[at + c] * w[c] * inverse;
  }
  return y;
}

std::vector<double> layer_reference(const std::vector<double>& x, const std::vector<double>& w,
                                    const std::vector<double>& b) {
  const std::size_t columns = w.size();
  const auto n = static_cast<double>(columns);
  std::vector<double> y(x.size());
  for (std::size_t at = 0; at < x.size(); at += columns) {
    double mean = 0, variance = 0;
    for (std::size_t c = 0; c < columns; ++c) mean += x[at + c] / n;
    for (std::size_t c = 0; c < columns; ++c) variance += (x[at + c] - mean) * (x[at + c] - mean) / n;
    for (std::size_t c = 0; c < columns; ++c) y[at + c] = (x[at + c] - mean) / std::sqrt(variance + eps) * w[c] + b[c];
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

template <class T>
void check_rms(int64_t rows, int64_t columns, double tolerance) {
  cpu device;
  const auto x = random_values<double>(rows * columns, 1, 2.0), w = random_values<double>(columns, 2);
  const auto dy = random_values<double>(rows * columns, 3);
  const auto xt = as<T>(x), wt = as<T>(w), dyt = as<T>(dy);
  std::vector<T> y(x.size()), inv(static_cast<std::size_t>(rows)), dx(x.size()), dw(w.size(), T(1));
  check_sum(device, xt, [&](const T* from, const T* addend, T* sum, T* to) {
    kernels::norm_forward(device, from, wt.data(), nullptr, to, nullptr, inv.data(), rows, columns, eps, addend, sum);
  });
  kernels::norm_forward(device, xt.data(), wt.data(), nullptr, y.data(), nullptr, inv.data(), rows, columns, eps);
  kernels::norm_backward(device, xt.data(), wt.data(), dyt.data(), nullptr, inv.data(), dx.data(), dw.data(), nullptr,
                         rows, columns);
  for (auto& v : dw) v -= T(1);  // the gradient was added to ones
  CHECK(difference(y, rms_reference(x, w)) < tolerance);
  CHECK(difference(dx, numeric_gradient(x, [&](const auto& in) { return dot(rms_reference(in, w), dy); })) <
        std::max(tolerance, 1e-8));
  CHECK(difference(dw, numeric_gradient(w, [&](const auto& in) { return dot(rms_reference(x, in), dy); })) <
        std::max(tolerance, 1e-8));

  // Only dx, in place of dy; only the weight gradient.
  auto in_place = dyt;
  std::vector<T> dw_alone(w.size());
  kernels::norm_backward(device, xt.data(), wt.data(), in_place.data(), nullptr, inv.data(), in_place.data(),
                         static_cast<T*>(nullptr), nullptr, rows, columns);
  kernels::norm_backward(device, xt.data(), wt.data(), dyt.data(), nullptr, inv.data(), static_cast<T*>(nullptr),
                         dw_alone.data(), nullptr, rows, columns);
  CHECK(in_place == dx);
  CHECK(difference(dw_alone, dw) < tolerance);

  // Rows split over three ranks, unevenly.
  const int64_t cuts[] = {0, columns / 4, columns / 2, columns};
  std::vector<T> squares(static_cast<std::size_t>(rows)), dots(squares.size());
  const auto parts = [&](auto f) {
    for (int p = 0; p < 3; ++p) {
      const int64_t first = cuts[p], count = cuts[p + 1] - cuts[p];
      const std::vector<T> wp(wt.begin() + first, wt.begin() + first + count);
      f(columns_of(xt, columns, first, count), wp, columns_of(dyt, columns, first, count), first, count);
    }
  };
  parts([&](const auto& xp, const auto& wp, const auto&, int64_t, int64_t count) {
    std::vector<T> mine(squares.size());
    kernels::row_squares(device, xp.data(), nullptr, mine.data(), rows, count, count);
    kernels::accumulate(device, mine.data(), squares.data(), rows);
    CHECK(wp.size() == static_cast<std::size_t>(count));
  });
  std::vector<T> inverse(squares.size());
  kernels::norm_statistics(device, nullptr, squares.data(), nullptr, inverse.data(), rows, columns, eps);
  CHECK(difference(inverse, inv) < tolerance);
  parts([&](const auto& xp, const auto& wp, const auto& dyp, int64_t first, int64_t count) {
    std::vector<T> yp(xp.size()), mine(squares.size());
    kernels::norm_apply(device, xp.data(), nullptr, inverse.data(), wp.data(), nullptr, yp.data(), rows, count);
    CHECK(difference(yp, columns_of(y, columns, first, count)) < tolerance);
    kernels::norm_backward_dots(device, xp.data(), wp.data(), dyp.data(), nullptr, inverse.data(), mine.data(), rows,
                                count);
    kernels::accumulate(device, mine.data(), dots.data(), rows);
  });
  parts([&](const auto& xp, const auto& wp, const auto& dyp, int64_t first, int64_t count) {
    std::vector<T> dxp(xp.size()), dwp(wp.size());
    kernels::norm_backward_dx(device, xp.data(), wp.data(), dyp.data(), nullptr, inverse.data(), dots.data(),
                              dxp.data(), rows, count, columns);
    kernels::norm_backward_dweight(device, xp.data(), dyp.data(), nullptr, inverse.data(), dwp.data(), nullptr, rows,
                                   count);
    CHECK(difference(dxp, columns_of(dx, columns, first, count)) < 3 * tolerance);
    CHECK(difference(dwp, columns_of(dw, columns, first, count)) < 3 * tolerance);
  });
}

template <class T>
void check_layer(int64_t rows, int64_t columns, double tolerance) {
  cpu device;
  auto x = random_values<double>(rows * columns, 1, 2.0);
  for (auto& v : x) v += 3;  // a mean that is not near 0
  const auto w = random_values<double>(columns, 2), b = random_values<double>(columns, 4);
  const auto dy = random_values<double>(rows * columns, 3);
  const auto xt = as<T>(x), wt = as<T>(w), bt = as<T>(b), dyt = as<T>(dy);
  const auto n = static_cast<std::size_t>(rows);
  std::vector<T> y(x.size()), mean(n), inv(n), dx(x.size()), dw(w.size()), db(w.size());
  check_sum(device, xt, [&](const T* from, const T* addend, T* sum, T* to) {
    kernels::norm_forward(device, from, wt.data(), bt.data(), to, mean.data(), inv.data(), rows, columns, eps, addend,
                          sum);
  });
  kernels::norm_forward(device, xt.data(), wt.data(), bt.data(), y.data(), mean.data(), inv.data(), rows, columns, eps);
  kernels::norm_backward(device, xt.data(), wt.data(), dyt.data(), mean.data(), inv.data(), dx.data(), dw.data(),
                         db.data(), rows, columns);
  const double numeric = std::max(tolerance, 1e-7);
  CHECK(difference(y, layer_reference(x, w, b)) < tolerance);
  CHECK(difference(dx, numeric_gradient(x, [&](const auto& in) { return dot(layer_reference(in, w, b), dy); })) <
        numeric);
  CHECK(difference(dw, numeric_gradient(w, [&](const auto& in) { return dot(layer_reference(x, in, b), dy); })) <
        numeric);
  CHECK(difference(db, numeric_gradient(b, [&](const auto& in) { return dot(layer_reference(x, w, in), dy); })) <
        numeric);

  const int64_t cuts[] = {0, columns / 3, columns};
  std::vector<T> sums(n), squares(n), dots(2 * n), mine(n), mean2(n), inv2(n);
  const auto parts = [&](auto f) {
    for (int p = 0; p < 2; ++p) f(cuts[p], cuts[p + 1] - cuts[p]);
  };
  parts([&](int64_t first, int64_t count) {
    kernels::row_sums(device, columns_of(xt, columns, first, count).data(), mine.data(), rows, count);
    kernels::accumulate(device, mine.data(), sums.data(), rows);
  });
  parts([&](int64_t first, int64_t count) {
    kernels::row_squares(device, columns_of(xt, columns, first, count).data(), sums.data(), mine.data(), rows, count,
                         columns);
    kernels::accumulate(device, mine.data(), squares.data(), rows);
  });
  kernels::norm_statistics(device, sums.data(), squares.data(), mean2.data(), inv2.data(), rows, columns, eps);
  CHECK(difference(mean2, mean) < tolerance);
  CHECK(difference(inv2, inv) < tolerance);
  parts([&](int64_t first, int64_t count) {
    const auto xp = columns_of(xt, columns, first, count), dyp = columns_of(dyt, columns, first, count);
    std::vector<T> yp(xp.size()), mine2(2 * n);
    kernels::norm_apply(device, xp.data(), mean2.data(), inv2.data(), wt.data() + first, bt.data() + first, yp.data(),
                        rows, count);
    CHECK(difference(yp, columns_of(y, columns, first, count)) < tolerance);
    kernels::norm_backward_dots(device, xp.data(), wt.data() + first, dyp.data(), mean2.data(), inv2.data(),
                                mine2.data(), rows, count);
    kernels::accumulate(device, mine2.data(), dots.data(), 2 * rows);
  });
  parts([&](int64_t first, int64_t count) {
    const auto xp = columns_of(xt, columns, first, count);
    auto dxp = columns_of(dyt, columns, first, count);  // in place
    kernels::norm_backward_dx(device, xp.data(), wt.data() + first, dxp.data(), mean2.data(), inv2.data(), dots.data(),
                              dxp.data(), rows, count, columns);
    CHECK(difference(dxp, columns_of(dx, columns, first, count)) < 5 * tolerance);
  });
}

}  // namespace

TEST_CASE("rms norm: reference, differences, split rows") {
  for (const int64_t columns : {4, 16, 37, 130}) {
    check_rms<double>(5, columns, 1e-13);
    check_rms<float>(5, columns, 1e-6);
  }
  check_rms<double>(70, 8, 1e-13);
}

TEST_CASE("layer norm: reference, differences, split rows") {
  for (const int64_t columns : {4, 16, 37, 130}) {
    check_layer<double>(5, columns, 1e-13);
    check_layer<float>(5, columns, 3e-6);
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
