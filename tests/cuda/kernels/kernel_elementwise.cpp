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

/// The processor's kernels, in double unless the types say otherwise.
namespace plait::test {
namespace {

using bytes = std::vector<std::uint8_t>;

/// The kernel of that name of two inputs and a factor, of which each takes those that it has.
std::vector<double> elementwise_on_cpu(std::string_view name, const std::vector<double>& a,
                                       const std::vector<double>& b, double factor) {
  cpu d;
  const auto n = static_cast<std::int64_t>(a.size());
  std::vector<double> y = a;
  if (name == "add") kernels::add(d, a.data(), b.data(), y.data(), n);
  if (name == "accumulate") kernels::accumulate(d, b.data(), y.data(), n);
  if (name == "scale") kernels::scale(d, y.data(), n, factor);
  if (name == "axpy") kernels::axpy(d, b.data(), y.data(), n, factor);
  if (name == "multiply") kernels::multiply(d, a.data(), b.data(), y.data(), n);
  if (name == "fill") kernels::fill(d, y.data(), n, factor);
  if (name == "relu") kernels::relu_forward(d, a.data(), y.data(), n);
  if (name == "silu") kernels::silu_forward(d, a.data(), y.data(), n);
  if (name == "gelu") kernels::gelu_forward(d, a.data(), y.data(), n);
  if (name == "gelu_tanh") kernels::gelu_tanh_forward(d, a.data(), y.data(), n);
  if (name == "relu_backward") kernels::relu_backward(d, a.data(), b.data(), y.data(), n);
  if (name == "silu_backward") kernels::silu_backward(d, a.data(), b.data(), y.data(), n);
  if (name == "gelu_backward") kernels::gelu_backward(d, a.data(), b.data(), y.data(), n);
  if (name == "gelu_tanh_backward") kernels::gelu_tanh_backward(d, a.data(), b.data(), y.data(), n);
  return y;
}

template <class From, class To>
void cast_on_cpu(const std::vector<From>& x, std::vector<To>& y) {
  cpu device;
  y.resize(x.size());
  kernels::cast(device, x.data(), y.data(), static_cast<std::int64_t>(x.size()));
}

std::vector<double> add_bias_on_cpu(const std::vector<double>& bias, std::vector<double> y, std::int64_t rows,
                                    std::int64_t stride) {
  cpu device;
  kernels::add_bias(device, bias.data(), y.data(), rows, static_cast<std::int64_t>(bias.size()), stride);
  return y;
}
std::vector<double> bias_gradient_on_cpu(const std::vector<double>& dy, std::int64_t rows, std::int64_t columns,
                                         std::int64_t stride) {
  cpu device;
  std::vector<double> dbias(static_cast<std::size_t>(columns));
  kernels::bias_gradient(device, dy.data(), dbias.data(), rows, columns, stride);
  return dbias;
}

/// y and dgate_up.
std::pair<std::vector<double>, std::vector<double>> swiglu_on_cpu(const std::vector<double>& gate_up,
                                                                  const std::vector<double>& dy, std::int64_t rows) {
  cpu device;
  const auto ffn = static_cast<std::int64_t>(dy.size()) / rows;
  std::vector<double> y(dy.size()), dgate_up(gate_up.size());
  kernels::swiglu_forward(device, gate_up.data(), y.data(), rows, ffn);
  kernels::swiglu_backward(device, gate_up.data(), dy.data(), dgate_up.data(), rows, ffn);
  return {y, dgate_up};
}

/// cosine and sine.
template <class T>
std::pair<std::vector<T>, std::vector<T>> rope_table_on_cpu(const std::vector<std::int64_t>& positions,
                                                            std::span<const double> frequencies) {
  cpu device;
  std::vector<T> cosine(positions.size() * frequencies.size()), sine(cosine.size());
  kernels::rope_table(device, positions.data(), static_cast<std::int64_t>(positions.size()), frequencies, cosine.data(),
                      sine.data());
  return {cosine, sine};
}
std::vector<double> rope_on_cpu(std::vector<double> x, const std::vector<double>& cosine,
                                const std::vector<double>& sine, std::int64_t rows, std::int64_t heads,
                                std::int64_t head_dim, std::int64_t row_stride, bool backward) {
  cpu device;
  const auto table_rows = static_cast<std::int64_t>(cosine.size()) / (head_dim / 2);
  if (backward) {
    kernels::rope_backward(device, x.data(), row_stride, x.data(), cosine.data(), sine.data(), rows, heads, head_dim,
                           row_stride, table_rows);
  } else {
    kernels::rope_forward(device, x.data(), row_stride, x.data(), cosine.data(), sine.data(), rows, heads, head_dim,
                          row_stride, table_rows);
  }
  return x;
}

bytes copy_2d_on_cpu(const bytes& from, bytes to, std::int64_t rows, std::int64_t row_bytes, std::int64_t from_stride,
                     std::int64_t to_stride) {
  cpu device;
  kernels::copy_2d(device, from.data(), to.data(), rows, row_bytes, from_stride, to_stride);
  return to;
}
bytes copy_3d_on_cpu(const bytes& from, bytes to, std::int64_t planes, std::int64_t rows, std::int64_t row_bytes,
                     std::int64_t from_plane, std::int64_t from_row, std::int64_t to_plane, std::int64_t to_row) {
  cpu device;
  kernels::copy_3d(device, from.data(), to.data(), planes, rows, row_bytes, from_plane, from_row, to_plane, to_row);
  return to;
}
bytes copy_box_on_cpu(const bytes& in, const box& from, bytes out, const box& to, const box& part,
                      std::int64_t element_bytes) {
  cpu device;
  kernels::copy_box(device, in.data(), from, out.data(), to, part, element_bytes);
  return out;
}

}  // namespace
}  // namespace plait::test

namespace {

using namespace plait::test;
using plait::bf16;
using plait::box;
using plait::cuda;
using plait::gradient_of;
using plait::statistic_of;
using std::int64_t;
namespace kernels = plait::kernels;

template <class T>
void check_elementwise(int64_t n, std::size_t lead) {
  CAPTURE(sizeof(T));
  CAPTURE(n);
  CAPTURE(lead);
  const values a = random_values<T>(n, 1, 2.0), b = random_values<T>(n, 2);
  constexpr double factor = -0.75;
  cuda device;
  number_array<T> first(device, a, lead), second(device, b, lead);
  const auto check = [&](std::string_view name, auto kernel) {
    CAPTURE(name);
    number_array<T> y(device, a, lead);
    kernel(y.data());
    CHECK(difference(y.read(), elementwise_on_cpu(name, a, b, factor)) < tolerance<T>);
  };
  const T* const x = first.view();
  const T* const d = second.view();
  check("add", [&](T* y) { kernels::add(device, x, d, y, n); });
  check("accumulate", [&](T* y) { kernels::accumulate(device, d, y, n); });
  check("scale", [&](T* y) { kernels::scale(device, y, n, factor); });
  check("axpy", [&](T* y) { kernels::axpy(device, d, y, n, factor); });
  check("multiply", [&](T* y) { kernels::multiply(device, x, d, y, n); });
  check("fill", [&](T* y) { kernels::fill(device, y, n, factor); });
  check("fill", [&](T* y) { kernels::fill(device, y, n, typed<T>(factor)); });
  check("relu", [&](T* y) { kernels::relu_forward(device, x, y, n); });
  check("silu", [&](T* y) { kernels::silu_forward(device, x, y, n); });
  check("gelu", [&](T* y) { kernels::gelu_forward(device, x, y, n); });
  check("gelu_tanh", [&](T* y) { kernels::gelu_tanh_forward(device, x, y, n); });
  check("relu_backward", [&](T* y) { kernels::relu_backward(device, x, d, y, n); });
  check("silu_backward", [&](T* y) { kernels::silu_backward(device, x, d, y, n); });
  check("gelu_backward", [&](T* y) { kernels::gelu_backward(device, x, d, y, n); });
  check("gelu_tanh_backward", [&](T* y) { kernels::gelu_tanh_backward(device, y, d, y, n); });  // over x
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
  std::vector<To> expected;
  cast_on_cpu(x, expected);
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
  cuda device;
  number_array<T> b(device, bias, lead), y(device, matrix, lead);
  number_array<G> db(device, values(bias.size(), 2.0)), again(device, values(bias.size(), 2.0));
  kernels::bias_gradient(device, y.view(), db.data(), rows, columns, stride);
  values expected = bias_gradient_on_cpu(matrix, rows, columns, stride);
  for (double& v : expected) v += 2.0;
  CHECK(difference(db.read(), expected) < tolerance<G>);
  kernels::bias_gradient(device, y.view(), again.data(), rows, columns, stride);
  CHECK(same_bits(db.raw(), again.raw()));
  kernels::add_bias(device, b.view(), y.data(), rows, columns, stride);
  CHECK(difference(y.read(), add_bias_on_cpu(bias, matrix, rows, stride)) < tolerance<T>);
}

template <class T>
void check_swiglu(int64_t rows, int64_t ffn, std::size_t lead) {
  CAPTURE(sizeof(T));
  CAPTURE(ffn);
  const values in = random_values<T>(rows * 2 * ffn, 1, 3.0), gradient = random_values<T>(rows * ffn, 2);
  const auto [expected, expected_gradient] = swiglu_on_cpu(in, gradient, rows);
  cuda device;
  number_array<T> gate_up(device, in, lead), dy(device, gradient, lead), y(device, gradient, lead);
  kernels::swiglu_forward(device, gate_up.view(), y.data(), rows, ffn);
  CHECK(difference(y.read(), expected) < tolerance<T>);
  kernels::swiglu_backward(device, gate_up.view(), dy.view(), gate_up.data(), rows, ffn);  // over the input
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
  if constexpr (sizeof(S) == 4) {
    const auto [c, s] = rope_table_on_cpu<float>(positions, frequencies);
    CHECK(same_bits(cosine.raw(), c));
    CHECK(same_bits(sine.raw(), s));
  } else {
    const auto [c, s] = rope_table_on_cpu<double>(positions, frequencies);
    CHECK(same_bits(cosine.raw(), c));
    CHECK(same_bits(sine.raw(), s));
  }
  for (const bool backward : {false, true}) {
    number_array<T> y(device, x, lead);
    if (backward) {
      kernels::rope_backward(device, y.data(), row_stride, y.data(), cosine.view(), sine.view(), rows, heads, head_dim,
                             row_stride, table_rows);
    } else {
      kernels::rope_forward(device, y.data(), row_stride, y.data(), cosine.view(), sine.view(), rows, heads, head_dim,
                            row_stride, table_rows);
    }
    CHECK(difference(y.read(), rope_on_cpu(x, cosine.read(), sine.read(), rows, heads, head_dim, row_stride,
                                           backward)) < tolerance<T>);
    // Into rows without gaps and back: what is between the heads' rows is left alone.
    const int64_t width = heads * head_dim;
    number_array<T> from(device, x, lead), packed(device, values(static_cast<std::size_t>(rows * width)), lead);
    number_array<T> back(device, x, lead);
    if (backward) {
      kernels::rope_backward(device, from.view(), row_stride, packed.data(), cosine.view(), sine.view(), rows, heads,
                             head_dim, width, table_rows);
      kernels::rope_forward(device, packed.view(), width, back.data(), cosine.view(), sine.view(), rows, heads,
                            head_dim, row_stride, table_rows);
      kernels::rope_forward(device, y.data(), row_stride, y.data(), cosine.view(), sine.view(), rows, heads, head_dim,
                            row_stride, table_rows);
    } else {
      kernels::rope_forward(device, from.view(), row_stride, packed.data(), cosine.view(), sine.view(), rows, heads,
                            head_dim, width, table_rows);
      kernels::rope_backward(device, packed.view(), width, back.data(), cosine.view(), sine.view(), rows, heads,
                             head_dim, row_stride, table_rows);
      kernels::rope_backward(device, y.data(), row_stride, y.data(), cosine.view(), sine.view(), rows, heads, head_dim,
                             row_stride, table_rows);
    }
    CHECK(same_bits(back.raw(), y.raw()));
  }
}

bytes counted(int64_t n) {
  bytes x;
  for (int64_t i = 0; i < n; ++i) x.push_back(static_cast<std::uint8_t>(i * 7 + i / 251));
  return x;
}

/// kernel(from, to) against what the processor's made of `to`.
template <class F>
void check_copy(const bytes& from, std::size_t size, std::size_t lead, const bytes& expected, F kernel) {
  cuda device;
  device_array<std::uint8_t> in(device, from, lead), out(device, bytes(size), lead);
  kernel(device, in.data(), out.data());
  CHECK(out.read() == expected);
}

void check_box(const box& from, const box& to, const box& part, int64_t element, std::size_t lead) {
  const bytes in = counted(from.local_size() * element);
  const bytes out(static_cast<std::size_t>(to.local_size() * element));
  check_copy(in, out.size(), lead, copy_box_on_cpu(in, from, out, to, part, element),
             [&](cuda& device, const void* a, void* b) { kernels::copy_box(device, a, from, b, to, part, element); });
}

}  // namespace

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
    check_rope<T>(6, 3, 64, 320, 6, lead);  // inside a fused projection
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
      const bytes to(static_cast<std::size_t>(600 * unit));
      check_copy(from, to.size(), lead, copy_2d_on_cpu(from, to, 12, 5 * unit, 7 * unit, 50 * unit),
                 [&](cuda& device, const void* a, void* b) {
                   kernels::copy_2d(device, a, b, 12, 5 * unit, 7 * unit, 50 * unit);
                 });
      check_copy(from, to.size(), lead,
                 copy_3d_on_cpu(from, to, 3, 4, 5 * unit, 90 * unit, 11 * unit, 200 * unit, 6 * unit),
                 [&](cuda& device, const void* a, void* b) {
                   kernels::copy_3d(device, a, b, 3, 4, 5 * unit, 90 * unit, 11 * unit, 200 * unit, 6 * unit);
                 });
    }
  }
  const bytes to(36000);
  check_copy(from, to.size(), 0, copy_2d_on_cpu(from, to, 2, 17000, 18000, 18000),  // long rows
             [&](cuda& device, const void* a, void* b) { kernels::copy_2d(device, a, b, 2, 17000, 18000, 18000); });
  check_copy(from, to.size(), 0, copy_2d_on_cpu(from, to, 9, 4000, 4000, 4000),  // no gaps
             [&](cuda& device, const void* a, void* b) { kernels::copy_2d(device, a, b, 9, 4000, 4000, 4000); });
  check_copy(from, to.size(), 0, to,
             [&](cuda& device, const void* a, void* b) { kernels::copy_2d(device, a, b, 0, 4, 4, 4); });
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
