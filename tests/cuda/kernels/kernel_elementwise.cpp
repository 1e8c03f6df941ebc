// program: kernels
// races: bias*<float>
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/core/box.hpp"
#include "plait/core/types.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "plait/kernels/settings.hpp"

namespace kernel_elementwise {  // files of one program may have helpers of the same name

using namespace plait::test;
using plait::bf16;
using plait::box;
using plait::cuda;
using plait::gradient_of;
using plait::statistic_of;
using std::int64_t;
namespace kernels = plait::kernels;
using enum plait::kernels::activation_function;
using bytes = std::vector<std::uint8_t>;

template <class T>
void check_elementwise(int64_t n, std::size_t lead) {
  CAPTURE(sizeof(T));
  CAPTURE(n);
  CAPTURE(lead);
  const values a = random_values<T>(n, 1, 2.0), b = random_values<T>(n, 2);
  constexpr double factor = -0.75;
  plait::cpu host;
  cuda device;
  number_array<T> first(device, a, lead), second(device, b, lead);
  // kernel(device, a, b, y), where y initially equals a, on the GPU and in double on the cpu.
  const auto check = [&](std::string_view name, auto kernel) {
    CAPTURE(name);
    number_array<T> y(device, a, lead);
    values expected = a;
    kernel(device, first.view(), second.view(), y.data());
    kernel(host, a.data(), b.data(), expected.data());
    CHECK(difference(y.read(), expected) < tolerance<T>);
  };
  check("add", [&](auto& on, auto* x, auto* d, auto* y) { kernels::add(on, x, d, y, n); });
  check("accumulate", [&](auto& on, auto*, auto* d, auto* y) { kernels::accumulate(on, d, y, n); });
  check("scale", [&](auto& on, auto*, auto*, auto* y) { kernels::scale(on, y, n, factor); });
  check("axpy", [&](auto& on, auto*, auto* d, auto* y) { kernels::axpy(on, d, y, n, factor); });
  check("multiply", [&](auto& on, auto* x, auto* d, auto* y) { kernels::multiply(on, x, d, y, n); });
  check("fill", [&](auto& on, auto*, auto*, auto* y) { kernels::fill(on, y, n, factor); });
  check("fill with a T", [&]<class Y>(auto& on, auto*, auto*, Y* y) { kernels::fill(on, y, n, typed<Y>(factor)); });
  check("relu", [&](auto& on, auto* x, auto*, auto* y) { kernels::activation_forward<relu>(on, x, y, n); });
  check("silu", [&](auto& on, auto* x, auto*, auto* y) { kernels::activation_forward<silu>(on, x, y, n); });
  check("gelu", [&](auto& on, auto* x, auto*, auto* y) { kernels::activation_forward<gelu>(on, x, y, n); });
  check("gelu_tanh", [&](auto& on, auto* x, auto*, auto* y) { kernels::activation_forward<gelu_tanh>(on, x, y, n); });
  check("relu_backward",
        [&](auto& on, auto* x, auto* d, auto* y) { kernels::activation_backward<relu>(on, x, d, y, n); });
  check("silu_backward",
        [&](auto& on, auto* x, auto* d, auto* y) { kernels::activation_backward<silu>(on, x, d, y, n); });
  check("gelu_backward",
        [&](auto& on, auto* x, auto* d, auto* y) { kernels::activation_backward<gelu>(on, x, d, y, n); });
  check("gelu_tanh_backward",  // in place of x
        [&]<class Y>(auto& on, auto*, auto* d, Y* y) {
          kernels::activation_backward<gelu_tanh>(on, static_cast<const Y*>(y), d, y, n);
        });
}

/// Numbers, ties, subnormal, infinite and large ones in the type `From`.
template <class From>
std::vector<From> special(int64_t n) {
  const values base = {1.00390625, 1.01171875, -1.00390625, 0.0, -0.0, 1e-40, 3.4e38, HUGE_VAL, -HUGE_VAL, 0.1};
  std::vector<From> x;
  for (int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    x.push_back(typed<From>(base[at % base.size()] * (at < base.size() ? 1.0 : static_cast<double>(at))));
  }
  return x;
}

template <class From, class To>
void check_cast(int64_t n, std::size_t lead) {
  CAPTURE(n);
  const std::vector<From> x = special<From>(n);
  std::vector<To> expected(x.size());
  plait::cpu host;
  kernels::cast(host, x.data(), expected.data(), n);
  cuda device;
  device_array<From> in(device, x, lead);
  device_array<To> out(device, std::vector<To>(x.size()), lead);
  kernels::cast(device, static_cast<const From*>(in.data()), out.data(), n);
  CHECK(same_bits(out.read(), expected));
}

template <class T>
void check_bias(int64_t rows, int64_t columns, int64_t stride, std::size_t lead) {
  using G = gradient_of<T>;
  CAPTURE(sizeof(T));
  CAPTURE(rows);
  CAPTURE(columns);
  const int64_t step = stride == 0 ? columns : stride;
  const values bias = random_values<T>(columns, 1), matrix = random_values<T>(rows * step, 2);
  values expected = matrix, expected_gradient(bias.size(), 2.0);
  plait::cpu host;
  kernels::bias_gradient(host, matrix.data(), expected_gradient.data(), rows, columns, stride);
  kernels::add_bias(host, bias.data(), expected.data(), rows, columns, stride);
  cuda device;
  number_array<T> b(device, bias, lead), y(device, matrix, lead);
  number_array<G> db(device, values(bias.size(), 2.0)), again(device, values(bias.size(), 2.0));
  kernels::bias_gradient(device, y.view(), db.data(), rows, columns, stride);
  CHECK(difference(db.read(), expected_gradient) < tolerance<G>);
  kernels::bias_gradient(device, y.view(), again.data(), rows, columns, stride);
  CHECK(same_bits(db.raw(), again.raw()));
  kernels::add_bias(device, b.view(), y.data(), rows, columns, stride);
  CHECK(difference(y.read(), expected) < tolerance<T>);
}

template <class T>
void check_swiglu(int64_t rows, int64_t ffn, std::size_t lead) {
  CAPTURE(sizeof(T));
  CAPTURE(ffn);
  const values in = random_values<T>(rows * 2 * ffn, 1, 3.0), gradient = random_values<T>(rows * ffn, 2);
  values expected(gradient.size()), expected_gradient(in.size());
  plait::cpu host;
  kernels::swiglu_forward(host, in.data(), expected.data(), rows, ffn);
  kernels::swiglu_backward(host, in.data(), gradient.data(), expected_gradient.data(), rows, ffn);
  cuda device;
  number_array<T> gate_up(device, in, lead), dy(device, gradient, lead), y(device, gradient, lead);
  kernels::swiglu_forward(device, gate_up.view(), y.data(), rows, ffn);
  CHECK(difference(y.read(), expected) < tolerance<T>);
  kernels::swiglu_backward(device, gate_up.view(), dy.view(), gate_up.data(), rows, ffn);  // in place of the input
  CHECK(difference(gate_up.read(), expected_gradient) < tolerance<T>);
}

template <class T>
void check_rope(int64_t rows, int64_t heads, int64_t head_dim, int64_t row_stride, int64_t table_rows,
                std::size_t lead) {
  using S = statistic_of<T>;
  CAPTURE(sizeof(T));
  CAPTURE(head_dim);
  CAPTURE(lead);
  std::vector<int64_t> positions;
  for (int64_t p = 0; p < table_rows; ++p) positions.push_back(3 + 7 * p);
  const values frequencies = kernels::rope_inverse_frequencies(head_dim, 10000.0);
  const values x = random_values<T>(rows * row_stride, 1);
  cuda device;
  const int64_t n = table_rows * head_dim / 2;
  number_array<S> cosine(device, n), sine(device, n);
  kernels::rope_table(device, positions.data(), table_rows, frequencies, cosine.data(), sine.data());
  plait::cpu host;
  std::vector<S> c(static_cast<std::size_t>(n)), s(c);
  kernels::rope_table(host, positions.data(), table_rows, frequencies, c.data(), s.data());
  CHECK(same_bits(cosine.raw(), c));
  CHECK(same_bits(sine.raw(), s));
  const auto rotate = [&](auto& on, auto* from, int64_t from_stride, auto* to, int64_t to_stride, auto* cosines,
                          auto* sines, bool backward) {
    if (backward)
      kernels::rope_backward(on, from, from_stride, to, cosines, sines, rows, heads, head_dim, to_stride, table_rows);
    else
      kernels::rope_forward(on, from, from_stride, to, cosines, sines, rows, heads, head_dim, to_stride, table_rows);
  };
  const auto on_gpu = [&](auto& from, int64_t from_stride, auto& to, int64_t to_stride, bool backward) {
    rotate(device, from.data(), from_stride, to.data(), to_stride, cosine.view(), sine.view(), backward);
  };
  const values cosines = cosine.read(), sines = sine.read();
  for (const bool backward : {false, true}) {
    number_array<T> y(device, x, lead);
    values expected = x;
    on_gpu(y, row_stride, y, row_stride, backward);
    rotate(host, expected.data(), row_stride, expected.data(), row_stride, cosines.data(), sines.data(), backward);
    CHECK(difference(y.read(), expected) < tolerance<T>);
    // Into rows without gaps and back: elements between the heads' rows do not change.
    const int64_t width = heads * head_dim;
    number_array<T> from(device, x, lead), packed(device, values(static_cast<std::size_t>(rows * width)), lead);
    number_array<T> back(device, x, lead);
    on_gpu(from, row_stride, packed, width, backward);
    on_gpu(packed, width, back, row_stride, !backward);
    on_gpu(y, row_stride, y, row_stride, !backward);
    CHECK(same_bits(back.raw(), y.raw()));
  }
}

bytes counted(int64_t n) {
  bytes x;
  for (int64_t i = 0; i < n; ++i) x.push_back(static_cast<std::uint8_t>(i * 7 + i / 251));
  return x;
}

/// Compares kernel(device, from, to) on the GPU with the cpu, where `to` initially has `size` zeros.
template <class F>
void check_copy(const bytes& from, std::size_t size, std::size_t lead, F kernel) {
  plait::cpu host;
  cuda device;
  device_array<std::uint8_t> in(device, from, lead), out(device, bytes(size), lead);
  bytes expected(size);
  kernel(device, in.data(), out.data());
  kernel(host, from.data(), expected.data());
  CHECK(out.read() == expected);
}

void check_box(const box& from, const box& to, const box& part, int64_t element, std::size_t lead) {
  check_copy(counted(from.local_size() * element), static_cast<std::size_t>(to.local_size() * element), lead,
             [&](auto& on, const void* a, void* b) { kernels::copy_box(on, a, from, b, to, part, element); });
}

TEST_CASE_TEMPLATE("arithmetic and activations on CUDA equal the processor's", T, float, double, bf16) {
  for (const int64_t n : {0, 1, 7, 64, 1000, 4097})
    for (const std::size_t lead : {0, 1}) check_elementwise<T>(n, lead);
}

TEST_CASE("casts on CUDA equal the processor's in every bit") {
  for (const int64_t n : {0, 1, 13, 1024, 1031}) {
    for (const std::size_t lead : {0, 1}) {
      check_cast<float, bf16>(n, lead);
      check_cast<bf16, float>(n, lead);
      check_cast<double, bf16>(n, lead);
      check_cast<bf16, double>(n, lead);
      check_cast<double, float>(n, lead);
      check_cast<float, double>(n, lead);
    }
  }
}

TEST_CASE_TEMPLATE("bias and its gradient on CUDA equal the processor's", T, float, double, bf16) {
  for (const std::size_t lead : {0, 1}) {
    check_bias<T>(1, 1, 0, lead);
    check_bias<T>(5, 7, 9, lead);
    check_bias<T>(37, 64, 0, lead);
    check_bias<T>(300, 576, 600, lead);
    check_bias<T>(9, 2048, 2056, lead);
  }
  check_bias<T>(2, 8200, 0, 0);
}

TEST_CASE_TEMPLATE("swiglu on CUDA equals the processor's", T, float, double, bf16) {
  for (const int64_t ffn : {1, 7, 64, 1536, 8200})
    for (const std::size_t lead : {0, 1}) check_swiglu<T>(3, ffn, lead);
  check_swiglu<T>(130, 16, 0);
}

TEST_CASE_TEMPLATE("rotary embeddings on CUDA equal the processor's", T, float, double, bf16) {
  for (const std::size_t lead : {0, 1}) {
    check_rope<T>(6, 3, 16, 48, 3, lead);
    check_rope<T>(6, 3, 64, 320, 6, lead);  // in a fused projection
    check_rope<T>(5, 2, 6, 13, 5, lead);
    check_rope<T>(2, 33, 128, 33 * 128, 1, lead);
    check_rope<T>(70, 1, 2, 2, 7, lead);
  }
}

TEST_CASE("strided copies on CUDA equal the processor's") {
  const bytes from = counted(40000);
  for (const std::size_t lead : {0, 1, 2, 4, 8, 16}) {
    for (const int64_t unit : {1, 2, 4, 8, 16}) {
      CAPTURE(lead);
      CAPTURE(unit);
      const auto size = static_cast<std::size_t>(600 * unit);
      check_copy(from, size, lead, [&](auto& on, const void* a, void* b) {
        kernels::copy_2d(on, a, b, 12, 5 * unit, 7 * unit, 50 * unit);
      });
      check_copy(from, size, lead, [&](auto& on, const void* a, void* b) {
        kernels::copy_3d(on, a, b, 3, 4, 5 * unit, 90 * unit, 11 * unit, 200 * unit, 6 * unit);
      });
    }
  }
  const auto check = [&](int64_t rows, int64_t row_bytes, int64_t stride) {
    check_copy(from, 36000, 0,
               [&](auto& on, const void* a, void* b) { kernels::copy_2d(on, a, b, rows, row_bytes, stride, stride); });
  };
  check(2, 17000, 18000);  // long rows
  check(9, 4000, 4000);    // no gaps
  check(0, 4, 4);
}

TEST_CASE("boxes are copied on CUDA as on the processor") {
  const box whole{4, {3, 4, 5, 6}, {0, 0, 0, 0}, {3, 4, 5, 6}}, rows{4, {3, 4, 5, 6}, {1, 0, 0, 0}, {2, 4, 5, 6}};
  const box inner{4, {3, 4, 5, 6}, {1, 1, 2, 3}, {2, 2, 3, 2}}, column{4, {3, 4, 5, 6}, {0, 0, 0, 4}, {3, 4, 5, 1}};
  const box middle{4, {3, 4, 5, 6}, {0, 2, 0, 0}, {3, 2, 5, 6}}, none{4, {3, 4, 5, 6}, {0, 0, 0, 0}, {3, 0, 5, 6}};
  for (const int64_t element : {1, 2, 4, 8}) {
    for (const std::size_t lead : {0, 2}) {
      check_box(whole, whole, whole, element, lead);
      check_box(whole, rows, rows, element, lead);
      check_box(whole, rows, inner, element, lead);
      check_box(rows, inner, inner, element, lead);
      check_box(middle, whole, middle, element, lead);
      check_box(whole, column, column, element, lead);
      check_box(whole, whole, none, element, lead);
      check_box({}, {}, {}, element, lead);
    }
  }
  const box six{6, {2, 3, 2, 3, 2, 4}, {0, 0, 0, 0, 0, 0}, {2, 3, 2, 3, 2, 4}};
  const box corner{6, {2, 3, 2, 3, 2, 4}, {1, 1, 0, 1, 1, 1}, {1, 2, 1, 2, 1, 2}};
  check_box(six, corner, corner, 8, 0);
  check_box(corner, six, corner, 2, 0);
}

}  // namespace kernel_elementwise
