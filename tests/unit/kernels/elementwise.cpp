// program: kernels
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "support/kernel_support.hpp"

using namespace kernel_support;
using plait::bf16;
using plait::cpu;
namespace kernels = plait::kernels;

TEST_CASE_TEMPLATE("arithmetic", T, float, double) {
  cpu device;
  const int64_t n = 37;
  const auto a = random_values<T>(n, 1), b = random_values<T>(n, 2);
  std::vector<T> y(a.size());
  kernels::add(device, a.data(), b.data(), y.data(), n);
  CHECK(y[36] == a[36] + b[36]);
  kernels::accumulate(device, a.data(), y.data(), n);
  CHECK(y[5] == a[5] + b[5] + a[5]);
  kernels::scale(device, y.data(), n, T(0.5));
  CHECK(y[5] == (a[5] + b[5] + a[5]) * T(0.5));
  kernels::fill(device, y.data(), n, T(3));
  kernels::axpy(device, a.data(), y.data(), n, T(2));
  CHECK(y[36] == doctest::Approx(static_cast<double>(T(3) + T(2) * a[36])));
  kernels::multiply(device, a.data(), b.data(), y.data(), n);
  CHECK(y[0] == a[0] * b[0]);
  kernels::add(device, y.data(), b.data(), y.data(), n);  // in place
  CHECK(y[1] == doctest::Approx(static_cast<double>(a[1] * b[1] + b[1])));
  double squares = 0, total = 0;
  for (const T v : a) {
    squares += static_cast<double>(v) * static_cast<double>(v);
    total += static_cast<double>(v);
  }
  double result = 7;
  kernels::sum(device, a.data(), n, &result);
  CHECK(result == doctest::Approx(total));
  const kernels::const_elements<T> parts[] = {{a.data(), 5}, {nullptr, 0}, {a.data() + 5, n - 5}};
  result = 1;
  kernels::add_sum_squares(device, std::span<const kernels::const_elements<T>>(parts), &result);
  CHECK(result == doctest::Approx(squares + 1));
  kernels::fill_from(device, y.data(), n, &result);
  CHECK(y[36] == static_cast<T>(result));
}

TEST_CASE("a clipping factor and a reciprocal are made from numbers in memory") {
  cpu device;
  const double squares = 16, zero = 0;
  double inverse = 7;
  const auto clip = [&](double sum, double limit) {
    kernels::clip_numbers out{7, 7, 7};
    kernels::clip(device, &sum, limit, &out);
    return out;
  };
  CHECK(clip(squares, 1.0).norm == 4.0);
  CHECK(clip(squares, 1.0).factor == 1.0 / (4.0 + 1e-6));
  CHECK(clip(squares, 5.0).factor == 1.0);
  CHECK(clip(squares, 0.0).factor == 1.0);
  CHECK(clip(squares, 0.0).update == 1.0);
  for (const double sum : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(), -1.0}) {
    CHECK(clip(sum, 1.0).update == 0.0);
    CHECK(clip(sum, 1.0).factor == 0.0);
    CHECK(clip(sum, 0.0).update == 0.0);
  }
  kernels::reciprocal(device, &squares, &inverse);
  CHECK(inverse == 1.0 / 16);
  kernels::reciprocal(device, &zero, &inverse);
  CHECK(inverse == 0.0);
}

TEST_CASE("casts round to the nearest, ties to even") {
  cpu device;
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x{1.0f, 1.00390625f, 1.01171875f, -3.3895314e38f, infinity,
                             nan,  1e-40f,      0x1.01p0f,   0x1.010002p0f};
  std::vector<bf16> half(x.size());
  std::vector<float> back(x.size());
  kernels::cast(device, x.data(), half.data(), static_cast<int64_t>(x.size()));
  kernels::cast(device, half.data(), back.data(), static_cast<int64_t>(x.size()));
  CHECK(back[0] == 1.0f);
  CHECK(back[1] == 1.0f);       // 1 + 1/256 lies between 1 and 1 + 1/128; 1 is even
  CHECK(back[2] == 1.015625f);  // 1 + 3/256 lies between 1 + 1/128 and 1 + 2/128; the latter is even
  CHECK(back[3] == -3.3895314e38f);
  CHECK(back[4] == infinity);
  CHECK(std::isnan(back[5]));
  CHECK(back[7] == 1.0f);
  CHECK(back[8] == 0x1.02p0f);  // just above the tie
  const auto doubles = random_values<double>(50, 3);
  std::vector<float> floats(50);
  kernels::cast(device, doubles.data(), floats.data(), 50);
  CHECK(floats[49] == static_cast<float>(doubles[49]));
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {  // converting every bf16 to float and back gives the same bits
    const bf16 value{static_cast<std::uint16_t>(bits)};
    const float f = plait::to_float(value);
    if (!std::isnan(f)) CHECK(plait::to_bf16(f).bits == value.bits);
  }
}

TEST_CASE_TEMPLATE("bias and its gradient", T, float, double) {
  cpu device;
  const int64_t rows = 45, columns = 19;
  const auto bias = random_values<T>(columns, 1), x = random_values<T>(rows * columns, 2);
  auto y = x;
  kernels::add_bias(device, bias.data(), y.data(), rows, columns);
  CHECK(y[static_cast<std::size_t>(3 * columns + 4)] == x[static_cast<std::size_t>(3 * columns + 4)] + bias[4]);
  std::vector<T> gradient(static_cast<std::size_t>(columns), T(1));
  kernels::bias_gradient(device, x.data(), gradient.data(), rows, columns);
  std::vector<double> expected(static_cast<std::size_t>(columns), 1.0);
  for (std::size_t i = 0; i < x.size(); ++i)
    expected[i % static_cast<std::size_t>(columns)] += static_cast<double>(x[i]);
  CHECK(difference(gradient, expected) < 1e-6);
}

namespace {

using enum kernels::activation_function;

struct activation {
  void (*forward)(cpu&, const double*, double*, int64_t);
  void (*backward)(cpu&, const double*, const double*, double*, int64_t);
  void (*forward_f)(cpu&, const float*, float*, int64_t);
  void (*backward_f)(cpu&, const float*, const float*, float*, int64_t);
  double (*reference)(double);
};

template <kernels::activation_function F>
constexpr activation activation_of(double (*reference)(double)) {
  return {kernels::activation_forward<F, double>, kernels::activation_backward<F, double>,
          kernels::activation_forward<F, float>, kernels::activation_backward<F, float>, reference};
}

const activation activations[] = {
    activation_of<relu>([](double x) { return x > 0 ? x : 0; }),
    activation_of<silu>([](double x) { return x / (1 + std::exp(-x)); }),
    activation_of<gelu>([](double x) { return x * 0.5 * std::erfc(-x / std::sqrt(2.0)); }),
    activation_of<gelu_tanh>(
        [](double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); })};

}  // namespace

TEST_CASE("activations and their gradients") {
  cpu device;
  const int64_t n = 83;
  auto x = random_values<double>(n, 4, 3.0);
  x[0] = -40;
  x[1] = 40;
  const auto dy = random_values<double>(n, 5);
  const std::vector<float> xf(x.begin(), x.end()), dyf(dy.begin(), dy.end());
  for (const auto& a : activations) {
    std::vector<double> y(x.size()), dx(x.size()), expected(x.size()), derivative(x.size());
    std::vector<float> yf(x.size()), dxf(x.size());
    a.forward(device, x.data(), y.data(), n);
    a.backward(device, x.data(), dy.data(), dx.data(), n);
    a.forward_f(device, xf.data(), yf.data(), n);
    a.backward_f(device, xf.data(), dyf.data(), dxf.data(), n);
    for (std::size_t i = 0; i < x.size(); ++i) {
      expected[i] = a.reference(x[i]);
      derivative[i] = dy[i] * (a.reference(x[i] + 1e-5) - a.reference(x[i] - 1e-5)) / 2e-5;
    }
    CHECK(difference(y, expected) < 1e-15);
    CHECK(difference(dx, derivative) < 1e-9);
    CHECK(difference(yf, expected) < 1e-6);
    CHECK(difference(dxf, derivative) < 1e-6);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  const float far[] = {-1e4f, 1e4f, -infinity};
  float y[3];
  kernels::activation_forward<silu>(device, far, y, 2);
  CHECK(y[0] == 0.0f);
  CHECK(y[1] == 1e4f);
}

TEST_CASE("swiglu equals silu times up, and its gradient the differences") {
  cpu device;
  for (const int64_t ffn : {5, 16, 41}) {
    const int64_t rows = 3;
    const auto x = random_values<double>(rows * 2 * ffn, 6), dy = random_values<double>(rows * ffn, 7);
    const auto forward = [&](const std::vector<double>& in) {
      std::vector<double> y(static_cast<std::size_t>(rows * ffn));
      kernels::swiglu_forward(device, in.data(), y.data(), rows, ffn);
      return y;
    };
    const auto y = forward(x);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < ffn; ++c) {
        const double gate = x[static_cast<std::size_t>(r * 2 * ffn + c)],
                     up = x[static_cast<std::size_t>(r * 2 * ffn + ffn + c)];
        CHECK(y[static_cast<std::size_t>(r * ffn + c)] ==
              doctest::Approx(gate / (1 + std::exp(-gate)) * up).epsilon(1e-14));
      }
    }
    std::vector<double> dx(x.size());
    kernels::swiglu_backward(device, x.data(), dy.data(), dx.data(), rows, ffn);
    CHECK(difference(dx, numeric_gradient(x, [&](const auto& in) { return dot(forward(in), dy); })) < 1e-9);
    const std::vector<float> xf(x.begin(), x.end()), dyf(dy.begin(), dy.end());
    std::vector<float> yf(y.size()), dxf = xf;
    kernels::swiglu_forward(device, xf.data(), yf.data(), rows, ffn);
    kernels::swiglu_backward(device, dxf.data(), dyf.data(), dxf.data(), rows, ffn);  // in place
    CHECK(difference(yf, y) < 1e-6);
    CHECK(difference(dxf, dx) < 1e-6);
  }
}

TEST_CASE_TEMPLATE("adamw equals the formula over several steps", T, float, double) {
  cpu device;
  const int64_t n = 53;
  auto p = random_values<T>(n, 8);
  std::vector<T> m(p.size()), v(p.size());
  std::vector<double> pr(p.begin(), p.end()), mr(p.size()), vr(p.size());
  std::vector<plait::bf16> rounded(p.size());
  kernels::adamw_settings s;
  s.beta2 = 0.95;
  for (int64_t step = 1; step <= 5; ++step) {
    const auto g = random_values<T>(n, static_cast<unsigned>(step + 100));
    const auto scalars = kernels::adamw_scalars_of(s, 0.01, step, 0.5);
    const kernels::adamw_tensor<T, T, plait::bf16> parts[] = {
        {p.data(), g.data(), m.data(), v.data(), rounded.data(), 20, 0.1},
        {p.data() + 20, g.data() + 20, m.data() + 20, v.data() + 20, nullptr, n - 20, 0.1}};
    kernels::adamw_update(device, std::span<const kernels::adamw_tensor<T, T, plait::bf16>>(parts), s, &scalars);
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double gradient = static_cast<double>(g[i]) * 0.5;
      mr[i] = 0.9 * mr[i] + 0.1 * gradient;
      vr[i] = 0.95 * vr[i] + 0.05 * gradient * gradient;
      const double k = static_cast<double>(step);
      pr[i] *= 1 - 0.01 * 0.1;
      pr[i] -= 0.01 * (mr[i] / (1 - std::pow(0.9, k))) / (std::sqrt(vr[i] / (1 - std::pow(0.95, k))) + 1e-8);
    }
  }
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-14;
  CHECK(difference(p, pr) < tolerance);
  CHECK(difference(m, mr) < tolerance);
  CHECK(difference(v, vr) < tolerance);
  CHECK(rounded[19].bits == plait::to_bf16(static_cast<float>(p[19])).bits);
  CHECK(rounded[20].bits == 0);
  CHECK_THROWS_WITH_AS(kernels::adamw_scalars_of(s, 0.01, 0), "adamw: step = 0, must be at least 1", plait::error);
}

TEST_CASE("strided copies pack and unpack") {
  cpu device;
  std::vector<int> from(2 * 3 * 5), packed(2 * 3 * 2), back(from.size(), -1);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<int>(i);
  kernels::copy_3d(device, from.data() + 1, packed.data(), 2, 3, 8, 60, 20, 24, 8);
  CHECK(packed == std::vector<int>{1, 2, 6, 7, 11, 12, 16, 17, 21, 22, 26, 27});
  kernels::copy_3d(device, packed.data(), back.data() + 1, 2, 3, 8, 24, 8, 60, 20);
  CHECK(back[0] == -1);
  CHECK(back[27] == 27);
  CHECK(back[28] == -1);
  kernels::copy_2d(device, from.data(), back.data(), 6, 20, 20, 20);
  CHECK(back == from);
  kernels::copy_2d(device, nullptr, nullptr, 0, 4, 4, 4);
}

TEST_CASE("a part is copied from one box to another") {
  cpu device;
  const auto check = [&](const plait::box& from, const plait::box& to, const plait::box& part, int64_t bytes) {
    std::vector<unsigned char> in(static_cast<std::size_t>(from.local_size() * bytes));
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i * 7 + 1);
    std::vector<unsigned char> out(static_cast<std::size_t>(to.local_size() * bytes)), expected = out;
    for (int64_t i = 0; i < part.local_size(); ++i) {
      int64_t rest = i, source = 0, target = 0, source_size = 1, target_size = 1;
      for (auto d = static_cast<std::size_t>(part.dims); d-- > 0;) {
        const int64_t at = part.offset[d] + rest % part.local[d];
        rest /= part.local[d];
        source += (at - from.offset[d]) * source_size, target += (at - to.offset[d]) * target_size;
        source_size *= from.local[d], target_size *= to.local[d];
      }
      for (int64_t b = 0; b < bytes; ++b)
        expected[static_cast<std::size_t>(target * bytes + b)] = in[static_cast<std::size_t>(source * bytes + b)];
    }
    kernels::copy_box(device, in.data(), from, out.data(), to, part, bytes);
    CHECK(out == expected);
  };
  const plait::box whole{3, {4, 5, 6}, {0, 0, 0}, {4, 5, 6}}, rows{3, {4, 5, 6}, {1, 0, 0}, {2, 5, 6}};
  const plait::box inner{3, {4, 5, 6}, {1, 2, 3}, {2, 3, 2}}, column{3, {4, 5, 6}, {0, 0, 4}, {4, 5, 1}};
  const plait::box none{3, {4, 5, 6}, {0, 0, 0}, {4, 0, 6}}, scalar{};
  for (const int64_t bytes : {1, 2, 8}) {
    check(whole, whole, whole, bytes);
    check(whole, rows, rows, bytes);
    check(rows, whole, rows, bytes);
    check(whole, rows, inner, bytes);
    check(rows, inner, inner, bytes);
    check(whole, column, column, bytes);
    check(whole, whole, column, bytes);
    check(whole, whole, none, bytes);
    check(scalar, scalar, scalar, bytes);
  }
}
