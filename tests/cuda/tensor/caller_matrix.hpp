#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/device/device_array.hpp"

/// Matrices in a program's memory on a GPU, and their products in double.
namespace plait::test {

/// A part of a matrix [rows, columns], from `row` and `column` on, in the program's memory.
struct matrix {
  std::int64_t rows, columns;
  float* data = nullptr;

  matrix(std::int64_t rows_, std::int64_t columns_, cudaStream_t stream) : rows(rows_), columns(columns_) {
    if (cudaMalloc(reinterpret_cast<void**>(&data), bytes()) != cudaSuccess) throw error("no memory");
    if (cudaMemsetAsync(data, 0, bytes(), stream) != cudaSuccess) throw error("no zeros");
  }
  matrix(const matrix&) = delete;
  ~matrix() { cudaFree(data); }
  std::size_t bytes() const { return static_cast<std::size_t>(rows * columns) * sizeof(float); }
  void write(const values& whole, std::int64_t of, std::int64_t row, std::int64_t column, cudaStream_t stream) {
    std::vector<float> host;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        host.push_back(static_cast<float>(whole[static_cast<std::size_t>((row + r) * of + column + c)]));
    cudaMemcpyAsync(data, host.data(), bytes(), cudaMemcpyHostToDevice, stream);
    cudaStreamSynchronize(stream);  // the source is destroyed
    cudaStreamSynchronize(stream);
  }
  /// The norm of the difference from a part of `whole`, over the norm of that part.
  double off(const values& whole, std::int64_t of, std::int64_t row, std::int64_t column, cudaStream_t stream) const {
    std::vector<float> host(static_cast<std::size_t>(rows * columns));
    cudaMemcpyAsync(host.data(), data, bytes(), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    values part;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        part.push_back(whole[static_cast<std::size_t>((row + r) * of + column + c)]);
    return difference(values(host.begin(), host.end()), part);
  }
};

/// a [m, k] times b, or with `transposed` b', in double.
inline values product(const values& a, const values& b, std::int64_t m, std::int64_t n, std::int64_t k,
                      bool transposed) {
  values out(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t l = 0; l < k; ++l)
        out[static_cast<std::size_t>(i * n + j)] +=
            a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(transposed ? j * k + l : l * n + j)];
  return out;
}
inline values turned(const values& a, std::int64_t rows, std::int64_t columns) {
  values out(a.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c)
      out[static_cast<std::size_t>(c * rows + r)] = a[static_cast<std::size_t>(r * columns + c)];
  return out;
}

}  // namespace plait::test
