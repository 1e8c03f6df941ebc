// Matrix products of double on the CPU by OpenBLAS. It is the one header that includes <cblas.h>. Callers use `gemm`
// of device/cpu.hpp, which checks the problem first; products of float and bf16 are in device/gemm_onednn.hpp.
#pragma once

#include <cblas.h>

#include <limits>
#include <mutex>

#include "plait/device/gemm_problem.hpp"

namespace plait {

/// Double products, by OpenBLAS. `problem` has been checked and has no size of zero.
inline void openblas_gemm(const gemm_problem& problem, double alpha, const double* a, const double* b, double beta,
                          double* c) {
  const auto narrow = [&](std::int64_t value) {
    if (value > std::numeric_limits<blasint>::max())
      fail({problem.text(), ": a size exceeds what this OpenBLAS takes"});
    return static_cast<blasint>(value);
  };
  cblas_dgemm(CblasRowMajor, problem.trans_a ? CblasTrans : CblasNoTrans, problem.trans_b ? CblasTrans : CblasNoTrans,
              narrow(problem.m), narrow(problem.n), narrow(problem.k), alpha, a, narrow(problem.lda), b,
              narrow(problem.ldb), beta, c, narrow(problem.ldc));
}

/// Threads that one product may use. OpenBLAS keeps a single number for the whole process, so every device of a process
/// should ask for the same.
inline void set_openblas_threads(int threads) {
  static std::mutex mutex;
  static int current = 0;
  const std::lock_guard lock(mutex);
  if (current == threads) return;
  openblas_set_num_threads(threads);
  current = threads;
}

}  // namespace plait
