// Matrix products of the stand-in cuBLASLt: plain loops over operands converted to the type of the sums.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../library_types.h"

namespace stand_in {

struct matrix_layout {
  cudaDataType_t type = CUDA_R_32F;
  std::uint64_t rows = 0, cols = 0;
  std::int64_t ld = 0;  // from column to column

  std::size_t at(std::uint64_t row, std::uint64_t col) const { return col * static_cast<std::size_t>(ld) + row; }
  bool legal() const { return rows > 0 && cols > 0 && ld >= static_cast<std::int64_t>(rows); }
};

struct gemm {
  matrix_layout a, b, c, d;
  bool trans_a = false, trans_b = false, tf32 = false, wide = false;  // wide: sums in double
  bool split_in_output = false;                                       // parts of a sum are added in the output's type
  std::int64_t terms_together = 0;  // number of terms summed before they are added to the others; 0: all
  bool adds_bias = false, sums_b = false;
  void* vector = nullptr;  // the added vector, or the output of the sums

  /// Flops of the product only.
  double flops() const {
    const double k = static_cast<double>(trans_a ? a.rows : a.cols);
    return 2 * k * static_cast<double>(d.rows) * static_cast<double>(d.cols);
  }
};

inline float bf16_value(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
inline std::uint16_t bf16_bits(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
/// Rounds to 10 bits of mantissa, to nearest, ties away from zero.
inline float tf32(float x) {
  return std::isfinite(x) ? std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) + 0x1000u) & ~0x1fffu) : x;
}

inline std::size_t bytes_of(cudaDataType_t type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
inline bool known(cudaDataType_t type) { return type == CUDA_R_32F || type == CUDA_R_64F || type == CUDA_R_16BF; }

template <class Sum>
Sum load(cudaDataType_t type, const void* p, std::size_t i) {
  switch (type) {
    case CUDA_R_64F:
      return static_cast<Sum>(static_cast<const double*>(p)[i]);
    case CUDA_R_16BF:
      return static_cast<Sum>(bf16_value(static_cast<const std::uint16_t*>(p)[i]));
    default:
      return static_cast<Sum>(static_cast<const float*>(p)[i]);
  }
}
template <class Sum>
void store(cudaDataType_t type, void* p, std::size_t i, Sum value) {
  switch (type) {
    case CUDA_R_64F:
      static_cast<double*>(p)[i] = static_cast<double>(value);
      break;
    case CUDA_R_16BF:
      static_cast<std::uint16_t*>(p)[i] = bf16_bits(static_cast<float>(value));
      break;
    default:
      static_cast<float*>(p)[i] = static_cast<float>(value);
      break;
  }
}

/// op(a) is m by k, op(b) is k by n.
template <class Sum>
void multiply(const gemm& g, Sum alpha, const void* a, const void* b, Sum beta, const void* c, void* d) {
  const std::size_t m = g.d.rows, n = g.d.cols, k = g.trans_a ? g.a.rows : g.a.cols;
  const auto rounded = [&](Sum x) {
    if constexpr (std::is_same_v<Sum, float>) {
      return g.tf32 ? tf32(x) : x;
    } else {
      return x;
    }
  };
  std::vector<Sum> left(m * k), right(k * n), row(n), together(g.terms_together > 0 ? n : 0);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t p = 0; p < k; ++p) {
      left[i * k + p] = rounded(load<Sum>(g.a.type, a, g.trans_a ? g.a.at(p, i) : g.a.at(i, p)));
    }
  }
  for (std::size_t p = 0; p < k; ++p) {
    for (std::size_t j = 0; j < n; ++j) {
      right[p * n + j] = rounded(load<Sum>(g.b.type, b, g.trans_b ? g.b.at(j, p) : g.b.at(p, j)));
    }
  }
  for (std::size_t i = 0; i < m; ++i) {
    for (Sum& x : row) x = 0;
    for (std::size_t p = 0; p < k; ++p) {
      const Sum x = left[i * k + p];
      const Sum* __restrict__ from = right.data() + p * n;
      Sum* __restrict__ to = g.terms_together > 0 ? together.data() : row.data();
      for (std::size_t j = 0; j < n; ++j) to[j] += x * from[j];
      if (g.terms_together > 0 && ((p + 1) % static_cast<std::size_t>(g.terms_together) == 0 || p + 1 == k)) {
        for (std::size_t j = 0; j < n; ++j) row[j] += together[j], together[j] = 0;
      }
      // A sum that is split over blocks adds its parts in the output, and each addition is rounded.
      if (g.split_in_output && g.d.type == CUDA_R_16BF && (p + 1) % std::max<std::size_t>(k / 4, 1) == 0) {
        for (std::size_t j = 0; j < n; ++j) to[j] = static_cast<Sum>(bf16_value(bf16_bits(static_cast<float>(to[j]))));
      }
    }
    for (std::size_t j = 0; j < n; ++j) {
      Sum x = alpha * row[j];
      if (beta != 0) x += beta * load<Sum>(g.c.type, c, g.c.at(i, j));  // with beta 0, c is not read
      if (g.adds_bias) x += load<Sum>(g.d.type, g.vector, i);
      store(g.d.type, d, g.d.at(i, j), x);
    }
  }
  for (std::size_t j = 0; g.sums_b && j < n; ++j) {
    Sum total = 0;
    for (std::size_t p = 0; p < k; ++p) total += right[p * n + j];
    store(g.d.type, g.vector, j, total);
  }
}

}  // namespace stand_in
