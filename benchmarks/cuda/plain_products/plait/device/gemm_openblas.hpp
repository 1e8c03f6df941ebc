#pragma once

#include "plait/device/gemm_onednn.hpp"

/// Takes the place of the header of the same name where OpenBLAS is missing.
namespace plait {

inline void openblas_gemm(const gemm_problem& problem, double alpha, const double* a, const double* b, double beta,
                          double* c) {
  plain_product(problem, alpha, a, b, beta, c);
}

inline void set_openblas_threads(int) {}

}  // namespace plait
