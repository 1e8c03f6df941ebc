// Matrix products of double on the CPU by OpenBLAS. It is the one header that includes <cblas.h>. Callers use `gemm`
// of device/cpu.hpp, which checks the problem first; products of float and bf16 are in device/gemm_onednn.hpp.
#pragma once

#include <cblas.h>

#include <limits>
#include <mutex>

#include "plait/core/macros_off.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

namespace detail {

/// OpenBLAS' number of threads, of which a process has one, while a product runs. Where products of several threads run
/// side by side, the first one's number holds for all; after the last one, the program's own number returns.
class openblas_threads {
 public:
  explicit openblas_threads(int threads) {
    const std::lock_guard lock(mutex_);
    if (running_++ != 0) return;
    before_ = openblas_get_num_threads();
    inside_ = threads;
    if (inside_ != before_) openblas_set_num_threads(inside_);
  }
  ~openblas_threads() {
    const std::lock_guard lock(mutex_);
    if (--running_ == 0 && inside_ != before_) openblas_set_num_threads(before_);
  }
  openblas_threads(const openblas_threads&) = delete;
  openblas_threads& operator=(const openblas_threads&) = delete;

 private:
  static inline std::mutex mutex_;
  static inline int running_ = 0, before_ = 0, inside_ = 0;
};

}  // namespace detail

/// Double products, by OpenBLAS, each of at most `threads` threads. `problem` has been checked and has no size of zero.
inline void openblas_gemm(int threads, const gemm_problem& problem, double alpha, const double* a, const double* b,
                          double beta, double* c) {
  const auto narrow = [&](std::int64_t value) {
    if (value > std::numeric_limits<blasint>::max())
      fail({problem.text(), ": a size exceeds what this OpenBLAS takes"});
    return static_cast<blasint>(value);
  };
  const detail::openblas_threads inside(threads);
  cblas_dgemm(CblasRowMajor, problem.trans_a ? CblasTrans : CblasNoTrans, problem.trans_b ? CblasTrans : CblasNoTrans,
              narrow(problem.m), narrow(problem.n), narrow(problem.k), alpha, a, narrow(problem.lda), b,
              narrow(problem.ldb), beta, c, narrow(problem.ldc));
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
