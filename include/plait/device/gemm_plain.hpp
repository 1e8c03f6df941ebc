// Products by plain loops, for a machine without oneDNN and OpenBLAS: a program defines PLAIT_PLAIN_PRODUCTS in all of
// its files. They are right and slow. The CPU's products otherwise: device/gemm_onednn.hpp, device/gemm_openblas.hpp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/device/gemm_problem.hpp"

namespace plait {

/// C = alpha op(A) op(B) + beta C with sums in double. `problem` has been checked.
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

/// Takes the place of `onednn_gemm`.
class plain_gemm {
 public:
  explicit plain_gemm(int = 1) {}
  template <class In, class Out>
  void run(const gemm_problem& problem, float alpha, const In* a, const In* b, float beta, Out* c) {
    plain_product(problem, alpha, a, b, beta, c);
  }
  static bool supports_bf16() { return false; }
  static bool adds_in_order() { return false; }  // its sums are in double
};

}  // namespace plait
