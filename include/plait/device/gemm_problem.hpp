// The sizes and strides of one matrix product, with their check.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"

namespace plait {

/// One matrix product, C[m,n] = alpha * op(A)[m,k] * op(B)[k,n] + beta * C, all row-major; lda, ldb, ldc are the
/// elements between consecutive rows of A, B, C as they are stored (before op).
struct gemm_problem {
  bool trans_a = false;
  bool trans_b = false;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t lda = 0;
  std::int64_t ldb = 0;
  std::int64_t ldc = 0;

  bool operator==(const gemm_problem&) const = default;

  std::string text() const;

  /// Throws `plait::error` for negative sizes or rows that overlap.
  void check() const;
};

/// C = beta * C, what a product over k = 0 leaves.
template <class T>
void scale_matrix(std::int64_t m, std::int64_t n, std::type_identity_t<arithmetic<T>> beta, T* c, std::int64_t ldc) {
  for (std::int64_t row = 0; row < m; ++row) {
    T* const c_row = c + row * ldc;
    if (beta == 0) {
      std::fill(c_row, c_row + n, T{});
    } else {
      for (std::int64_t column = 0; column < n; ++column) c_row[column] = converted<T>(beta * widened(c_row[column]));
    }
  }
}

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/device/gemm_problem.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
