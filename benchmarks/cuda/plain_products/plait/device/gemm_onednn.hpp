#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/device/gemm_problem.hpp"

/// Takes the place of the header of the same name where oneDNN is missing: the processor's products by plain loops, for
/// the references of tests on a GPU.
namespace plait {

/// C = alpha op(A) op(B) + beta C with sums in double.
template <class T, class In, class Out>
void plain_product(const gemm_problem& p, T alpha, const In* a, const In* b, T beta, Out* c) {
  const auto value = [](In x) {
    if constexpr (std::is_same_v<In, bf16>) {
      const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
      float number;
      __builtin_memcpy(&number, &bits, sizeof number);
      return static_cast<double>(number);
    } else {
      return static_cast<double>(x);
    }
  };
  for (std::int64_t i = 0; i < p.m; ++i) {
    for (std::int64_t j = 0; j < p.n; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < p.k; ++k) {
        sum +=
            value(a[p.trans_a ? k * p.lda + i : i * p.lda + k]) * value(b[p.trans_b ? j * p.ldb + k : k * p.ldb + j]);
      }
      Out& out = c[i * p.ldc + j];
      out = static_cast<Out>(static_cast<double>(alpha) * sum +
                             (beta == T(0) ? 0.0 : static_cast<double>(beta) * static_cast<double>(out)));
    }
  }
}

class onednn_gemm {
 public:
  template <class In>
  void run(const gemm_problem& problem, float alpha, const In* a, const In* b, float beta, float* c) {
    plain_product(problem, alpha, a, b, beta, c);
  }
  static bool supports_bf16() { return false; }
  static void set_threads(int) {}
};

}  // namespace plait
