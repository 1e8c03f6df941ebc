#include "kernel_elementwise_reference.hpp"

#include "plait/kernels/cpu/elementwise.hpp"

namespace plait::test {

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

namespace {

template <class From, class To>
void cast_vector(const std::vector<From>& x, std::vector<To>& y) {
  cpu device;
  y.resize(x.size());
  kernels::cast(device, x.data(), y.data(), static_cast<std::int64_t>(x.size()));
}

template <class T>
std::pair<std::vector<T>, std::vector<T>> table(const std::vector<std::int64_t>& positions,
                                                std::span<const double> frequencies) {
  cpu device;
  std::vector<T> cosine(positions.size() * frequencies.size()), sine(cosine.size());
  kernels::rope_table(device, positions.data(), static_cast<std::int64_t>(positions.size()), frequencies, cosine.data(),
                      sine.data());
  return {cosine, sine};
}

}  // namespace

void cast_on_cpu(const std::vector<float>& x, std::vector<bf16>& y) { cast_vector(x, y); }
void cast_on_cpu(const std::vector<bf16>& x, std::vector<float>& y) { cast_vector(x, y); }
void cast_on_cpu(const std::vector<double>& x, std::vector<bf16>& y) { cast_vector(x, y); }
void cast_on_cpu(const std::vector<bf16>& x, std::vector<double>& y) { cast_vector(x, y); }
void cast_on_cpu(const std::vector<double>& x, std::vector<float>& y) { cast_vector(x, y); }
void cast_on_cpu(const std::vector<float>& x, std::vector<double>& y) { cast_vector(x, y); }

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

std::pair<std::vector<double>, std::vector<double>> swiglu_on_cpu(const std::vector<double>& gate_up,
                                                                  const std::vector<double>& dy, std::int64_t rows) {
  cpu device;
  const auto ffn = static_cast<std::int64_t>(dy.size()) / rows;
  std::vector<double> y(dy.size()), dgate_up(gate_up.size());
  kernels::swiglu_forward(device, gate_up.data(), y.data(), rows, ffn);
  kernels::swiglu_backward(device, gate_up.data(), dy.data(), dgate_up.data(), rows, ffn);
  return {y, dgate_up};
}

std::pair<std::vector<float>, std::vector<float>> rope_table_on_cpu(const std::vector<std::int64_t>& positions,
                                                                    std::span<const double> frequencies) {
  return table<float>(positions, frequencies);
}
std::pair<std::vector<double>, std::vector<double>> rope_table_in_double_on_cpu(
    const std::vector<std::int64_t>& positions, std::span<const double> frequencies) {
  return table<double>(positions, frequencies);
}
std::vector<double> rope_on_cpu(std::vector<double> x, const std::vector<double>& cosine,
                                const std::vector<double>& sine, std::int64_t rows, std::int64_t heads,
                                std::int64_t head_dim, std::int64_t row_stride, bool backward) {
  cpu device;
  const auto table_rows = static_cast<std::int64_t>(cosine.size()) / (head_dim / 2);
  if (backward) {
    kernels::rope_backward(device, x.data(), cosine.data(), sine.data(), rows, heads, head_dim, row_stride, table_rows);
  } else {
    kernels::rope_forward(device, x.data(), cosine.data(), sine.data(), rows, heads, head_dim, row_stride, table_rows);
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

}  // namespace plait::test
