#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/types.hpp"

/// The processor's kernels, in double unless the types say otherwise.
namespace plait::test {

/// The kernel of that name of two inputs and a factor, of which each takes those that it has.
std::vector<double> elementwise_on_cpu(std::string_view name, const std::vector<double>& a,
                                       const std::vector<double>& b, double factor);

void cast_on_cpu(const std::vector<float>& x, std::vector<bf16>& y);
void cast_on_cpu(const std::vector<bf16>& x, std::vector<float>& y);
void cast_on_cpu(const std::vector<double>& x, std::vector<bf16>& y);
void cast_on_cpu(const std::vector<bf16>& x, std::vector<double>& y);
void cast_on_cpu(const std::vector<double>& x, std::vector<float>& y);
void cast_on_cpu(const std::vector<float>& x, std::vector<double>& y);

std::vector<double> add_bias_on_cpu(const std::vector<double>& bias, std::vector<double> y, std::int64_t rows,
                                    std::int64_t stride);
std::vector<double> bias_gradient_on_cpu(const std::vector<double>& dy, std::int64_t rows, std::int64_t columns,
                                         std::int64_t stride);

/// y and dgate_up.
std::pair<std::vector<double>, std::vector<double>> swiglu_on_cpu(const std::vector<double>& gate_up,
                                                                  const std::vector<double>& dy, std::int64_t rows);

/// cosine and sine.
std::pair<std::vector<float>, std::vector<float>> rope_table_on_cpu(const std::vector<std::int64_t>& positions,
                                                                    std::span<const double> frequencies);
std::pair<std::vector<double>, std::vector<double>> rope_table_in_double_on_cpu(
    const std::vector<std::int64_t>& positions, std::span<const double> frequencies);
std::vector<double> rope_on_cpu(std::vector<double> x, const std::vector<double>& cosine,
                                const std::vector<double>& sine, std::int64_t rows, std::int64_t heads,
                                std::int64_t head_dim, std::int64_t row_stride, bool backward);

using bytes = std::vector<std::uint8_t>;
bytes copy_2d_on_cpu(const bytes& from, bytes to, std::int64_t rows, std::int64_t row_bytes, std::int64_t from_stride,
                     std::int64_t to_stride);
bytes copy_3d_on_cpu(const bytes& from, bytes to, std::int64_t planes, std::int64_t rows, std::int64_t row_bytes,
                     std::int64_t from_plane, std::int64_t from_row, std::int64_t to_plane, std::int64_t to_row);
bytes copy_box_on_cpu(const bytes& in, const box& from, bytes out, const box& to, const box& part,
                      std::int64_t element_bytes);

}  // namespace plait::test
