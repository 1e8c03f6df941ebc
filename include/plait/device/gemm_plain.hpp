// Products by plain loops, for a machine without oneDNN and OpenBLAS: a program defines PLAIT_PLAIN_PRODUCTS in all of
// its files. They are right and slow. The CPU's products otherwise: device/gemm_onednn.hpp, device/gemm_openblas.hpp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/core/dtype.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

/// C = alpha op(A) op(B) + beta C with sums in double. `problem` has been checked.
template <class In, class Out>
void plain_product(const gemm_problem& problem, Out alpha, const In* a, const In* b, Out beta, Out* c) {
  const auto number = [](In x) {
    if constexpr (std::is_same_v<In, bf16>)
      return static_cast<double>(to_float(x));
    else
      return static_cast<double>(x);
  };
  const gemm_problem& p = problem;
  for (std::int64_t i = 0; i < p.m; ++i)
    for (std::int64_t j = 0; j < p.n; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < p.k; ++k)
        sum +=
            number(a[p.trans_a ? k * p.lda + i : i * p.lda + k]) * number(b[p.trans_b ? j * p.ldb + k : k * p.ldb + j]);
      Out& out = c[i * p.ldc + j];
      out = static_cast<Out>(static_cast<double>(alpha) * sum +
                             (beta == Out(0) ? 0.0 : static_cast<double>(beta) * static_cast<double>(out)));
    }
}

/// Takes the place of `onednn_gemm`.
class plain_gemm {
 public:
  void run(const gemm_problem& problem, float alpha, const float* a, const float* b, float beta, float* c) {
    plain_product(problem, alpha, a, b, beta, c);
  }
  void run(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, float* c) {
    plain_product(problem, alpha, a, b, beta, c);
  }
  static bool supports_bf16() { return false; }
  static void set_threads(int) {}
};

}  // namespace plait
