// Products on the CPU whose terms are added one after the other, whatever is cut: tiles of sums in registers, as in
// BLIS, of which no sum is ever split.
#pragma once

#include <cstdint>
#include <vector>

#include "plait/core/precision.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

/// Multiplies by fused multiply-adds, in registers of AVX2 where the processor has them, whatever the program is
/// compiled for. Keeps memory for packed copies of the factors. Used by one thread at a time.
class ordered_products {
 public:
  /// C = op(A) op(B), or, where it `adds`, C + op(A) op(B): each element's terms are added in the order of k, from
  /// zero, and their sum is added to C last. Factors in bf16 are widened, which is exact. Made for sums of up to 256
  /// terms: 16 columns of B, packed, are to stay in the first cache. `problem` has been checked.
  void run(const gemm_problem& problem, const float* a, const float* b, bool adds, float* c);
  void run(const gemm_problem& problem, const bf16* a, const bf16* b, bool adds, float* c);
  void run(const gemm_problem& problem, const double* a, const double* b, bool adds, double* c);

 private:
  std::vector<float> float_a_, float_b_;
  std::vector<double> double_a_, double_b_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/device/ordered_product.ipp"  // IWYU pragma: keep
#endif
