// Matrix products of float and bf16 on the CPU by oneDNN, whose headers only device/gemm_onednn.ipp includes. Callers
// use `gemm` of device/cpu.hpp, which checks the problem first; products of double are in device/gemm_openblas.hpp.
#pragma once

#include <memory>

#include "plait/core/dtype.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

/// Float products, and bf16 products with results in float or, rounded once, in bf16, by oneDNN's matmul. Compiled
/// primitives are kept by problem: a new shape costs 0.1 to 0.3 ms, a known one a hash lookup. Whether splitting m or n
/// changes bits depends on the processor; device/canonical_product.hpp has products where it does not. A processor
/// without instructions for bf16 multiplies copies of the factors in float. Used by one thread at a time.
class onednn_gemm {
 public:
  /// A product uses `threads` threads, whatever OpenMP's number is for the thread that starts it, which stays as it is.
  explicit onednn_gemm(int threads = 1);
  ~onednn_gemm();
  onednn_gemm(const onednn_gemm&) = delete;
  onednn_gemm& operator=(const onednn_gemm&) = delete;

  /// `problem` has been checked and has no size of zero.
  void run(const gemm_problem& problem, float alpha, const float* a, const float* b, float beta, float* c);
  void run(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, float* c);
  void run(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, bf16* c);

  /// Whether this processor multiplies bf16 in hardware.
  static bool supports_bf16();
  /// Whether this processor has the instructions with which the terms of products of 16 rows and columns or more are
  /// added one after the other, up to 256 of them (AVX-512).
  static bool adds_in_order();

 private:
  class primitives;
  template <class Out>
  void run_bf16(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, Out* c);

  std::unique_ptr<primitives> primitives_;
  int threads_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/device/gemm_onednn.ipp"  // IWYU pragma: keep
#endif
