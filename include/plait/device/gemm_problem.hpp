// The sizes and strides of one matrix product with their check, and products without a library: by plain loops, and of
// bf16 by a float product. Test: tests/unit/device/gemm.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"

namespace plait {

namespace detail {
/// Mixes a word into a hash, by an odd constant from the golden ratio.
constexpr std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ hash >> 29;
}
}  // namespace detail

/// One matrix product, C[m,n] = alpha * op(A)[m,k] * op(B)[k,n] + beta * C, all row-major. lda, ldb, ldc are the
/// elements between consecutive stored rows of A, B, C (before op).
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
  constexpr std::uint64_t hash() const {
    std::uint64_t h = (trans_a ? 2u : 0u) + (trans_b ? 1u : 0u);
    for (const std::int64_t word : {m, n, k, lda, ldb, ldc}) h = detail::mixed(h, static_cast<std::uint64_t>(word));
    return h;
  }

  std::string text() const {
    return cat({"gemm(trans_a=", int{trans_a}, ", trans_b=", int{trans_b}, ", m=", m, ", n=", n, ", k=", k,
                ", lda=", lda, ", ldb=", ldb, ", ldc=", ldc, ")"});
  }

  /// Throws `plait::error` for negative sizes or rows that overlap.
  void check() const {
    const auto at_least = [&](const char* name, std::int64_t value, std::int64_t least) {
      if (value < least) {
        fail({text(), ": ", name, " must be at least ", least, ", the length of a stored row"});
      }
    };
    if (m < 0 || n < 0 || k < 0) fail({text(), ": m, n and k must not be negative"});
    at_least("lda", lda, trans_a ? m : k);
    at_least("ldb", ldb, trans_b ? k : n);
    at_least("ldc", ldc, n);
  }
};

/// One product of `gemm_groups`, with its matrices.
template <class In, class Out>
struct gemm_group {
  gemm_problem problem;
  const In* a;
  const In* b;
  Out* c;
};

/// C = beta * C, the result of a product over k = 0.
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

namespace detail {
/// to [rows, columns] = from [rows, columns], whose rows are `stride` elements apart.
inline void widen_matrix(const bf16* from, std::int64_t rows, std::int64_t columns, std::int64_t stride, float* to) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) to[r * columns + c] = to_float(from[r * stride + c]);
}
}  // namespace detail

/// C = alpha op(A) op(B) + beta C for bf16 without hardware support, by `gemm.run` of floats; a result in bf16 is
/// rounded once. `scratch` grows to the size of the factors, and of C if that is bf16. `problem` must have been
/// checked.
template <class Gemm, class Out>
void widened_product(Gemm& gemm, std::vector<float>& scratch, const gemm_problem& problem, float alpha, const bf16* a,
                     const bf16* b, float beta, Out* c) {
  constexpr bool rounds = std::is_same_v<Out, bf16>;
  gemm_problem p = problem;
  const std::int64_t a_rows = p.trans_a ? p.k : p.m, b_rows = p.trans_b ? p.n : p.k;
  const std::int64_t a_size = p.m * p.k, b_size = p.k * p.n, c_size = rounds ? p.m * p.n : 0;
  const auto needed = static_cast<std::size_t>(a_size + b_size + c_size);
  if (scratch.size() < needed) scratch.resize(needed);
  float* const wide_a = scratch.data();
  float* const wide_b = wide_a + a_size;
  p.lda = p.trans_a ? p.m : p.k, p.ldb = p.trans_b ? p.k : p.n;
  detail::widen_matrix(a, a_rows, p.lda, problem.lda, wide_a);
  detail::widen_matrix(b, b_rows, p.ldb, problem.ldb, wide_b);
  if constexpr (!rounds) {
    gemm.run(p, alpha, wide_a, wide_b, beta, c);
  } else {
    float* const sums = wide_b + b_size;
    p.ldc = p.n;
    gemm.run(p, alpha, wide_a, wide_b, 0.0f, sums);
    for (std::int64_t i = 0; i < p.m; ++i)
      for (std::int64_t j = 0; j < p.n; ++j) {
        bf16& out = c[i * problem.ldc + j];
        out = to_bf16(sums[i * p.n + j] + (beta == 0 ? 0.0f : beta * to_float(out)));
      }
  }
}

/// C = alpha op(A) op(B) + beta C by plain, slow loops with sums in double. It is for machines without oneDNN and
/// OpenBLAS: the program defines PLAIT_PLAIN_PRODUCTS in all of its files. `problem` must have been checked.
template <class In, class Out>
void plain_product(const gemm_problem& problem, std::type_identity_t<arithmetic<Out>> alpha, const In* a, const In* b,
                   std::type_identity_t<arithmetic<Out>> beta, Out* c) {
  const gemm_problem& p = problem;
  for (std::int64_t i = 0; i < p.m; ++i)
    for (std::int64_t j = 0; j < p.n; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < p.k; ++k)
        sum += converted<double>(a[p.trans_a ? k * p.lda + i : i * p.lda + k]) *
               converted<double>(b[p.trans_b ? j * p.ldb + k : k * p.ldb + j]);
      Out& out = c[i * p.ldc + j];
      out = converted<Out>(static_cast<double>(alpha) * sum +
                           (beta == 0 ? 0.0 : static_cast<double>(beta) * converted<double>(out)));
    }
}

/// Replaces `onednn_gemm` in programs with PLAIT_PLAIN_PRODUCTS.
class plain_gemm {
 public:
  explicit plain_gemm(int = 1) {}
  template <class In, class Out>
  void run(const gemm_problem& problem, float alpha, const In* a, const In* b, float beta, Out* c) {
    plain_product(problem, alpha, a, b, beta, c);
  }
  static bool supports_bf16() { return false; }
  static bool adds_in_order(dtype) { return false; }  // it sums in double
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
