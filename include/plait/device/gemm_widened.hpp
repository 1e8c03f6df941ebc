// Products of bf16 on a processor that has no instructions for them: by a product of float, of copies of the factors.
// device/gemm_onednn.hpp calls it; elsewhere bf16 is multiplied as it is. Test: tests/unit/device/gemm.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "plait/core/precision.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

namespace detail {
/// to [rows, columns] = from, whose rows are `stride` elements apart.
inline void widen_matrix(const bf16* from, std::int64_t rows, std::int64_t columns, std::int64_t stride, float* to) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) to[r * columns + c] = to_float(from[r * stride + c]);
}
}  // namespace detail

/// C = alpha op(A) op(B) + beta C by `gemm.run` of floats; a result in bf16 is rounded once. `scratch` grows to the
/// size of the factors, and of C where that is bf16. `problem` has been checked.
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

}  // namespace plait
