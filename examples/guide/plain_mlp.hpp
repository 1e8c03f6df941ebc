// A plain program: an MLP with its own arrays, kernels and gradient descent. 13_port.cpp is its port to several ranks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace plain {

using array = std::vector<double>;

constexpr std::int64_t rows = 8, width = 16, inner = 32;
constexpr int steps = 4;

inline void matmul(double* y, const double* x, const double* w, std::int64_t n, std::int64_t in, std::int64_t out) {
  for (std::int64_t i = 0; i < n * out; ++i) y[i] = 0;
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t o = 0; o < out; ++o)
      for (std::int64_t i = 0; i < in; ++i) y[r * out + o] += x[r * in + i] * w[o * in + i];
}
inline void matmul_backward(double* dx, double* dw, const double* dy, const double* x, const double* w, std::int64_t n,
                            std::int64_t in, std::int64_t out) {
  for (std::int64_t i = 0; i < n * in; ++i) dx[i] = 0;
  for (std::int64_t i = 0; i < out * in; ++i) dw[i] = 0;
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t o = 0; o < out; ++o)
      for (std::int64_t i = 0; i < in; ++i) {
        dx[r * in + i] += dy[r * out + o] * w[o * in + i];
        dw[o * in + i] += dy[r * out + o] * x[r * in + i];
      }
}
inline void activate(double* a, const double* h, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) a[i] = std::tanh(h[i]);
}
inline void activate_backward(double* dh, const double* da, const double* a, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dh[i] = da[i] * (1 - a[i] * a[i]);
}
inline double loss_of(double* dy, const double* y, const double* x) {  // the mean of (y - x)^2
  double loss = 0;
  for (std::int64_t i = 0; i < rows * width; ++i) {
    loss += (y[i] - x[i]) * (y[i] - x[i]) / (rows * width);
    dy[i] = 2 * (y[i] - x[i]) / (rows * width);
  }
  return loss;
}
inline void update(array& w, const array& dw) {
  for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 2.0 * dw[i];
}
inline array numbers(std::int64_t n, double scale) {
  array a(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = scale * std::sin(static_cast<double>(i * i));
  return a;
}

inline void train() {
  array x = numbers(rows * width, 1), w1 = numbers(inner * width, 0.3), w2 = numbers(width * inner, 0.3);
  array h(rows * inner), a(h), y(x), dy(x), dx(x), da(h), dh(h), dw1(w1), dw2(w2);
  for (int step = 0; step < steps; ++step) {
    matmul(h.data(), x.data(), w1.data(), rows, width, inner);
    activate(a.data(), h.data(), rows * inner);
    matmul(y.data(), a.data(), w2.data(), rows, inner, width);
    std::printf("plain    step %d  loss %.6f\n", step, loss_of(dy.data(), y.data(), x.data()));
    matmul_backward(da.data(), dw2.data(), dy.data(), a.data(), w2.data(), rows, inner, width);
    activate_backward(dh.data(), da.data(), a.data(), rows * inner);
    matmul_backward(dx.data(), dw1.data(), dh.data(), x.data(), w1.data(), rows, width, inner);
    update(w1, dw1), update(w2, dw2);
  }
}

}  // namespace plain
