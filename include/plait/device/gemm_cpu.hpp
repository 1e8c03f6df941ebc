// Matrix products on the CPU: of float and bf16 by oneDNN, whose headers only device/gemm_cpu.ipp includes, and of
// double by OpenBLAS. Callers use `gemm` of device/cpu.hpp, which checks the problem first.
#pragma once

#include <cblas.h>

#include <limits>
#include <memory>
#include <mutex>

#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

/// Float products, and bf16 products with results in float or, rounded once, in bf16, by oneDNN's matmul. Compiled
/// primitives are kept by problem: a new shape costs 0.1 to 0.3 ms, a known one a hash lookup. Whether splitting m or n
/// changes bits depends on the processor; device/deterministic_products.hpp has products where it does not. A processor
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
  /// Whether up to 256 terms of products of 16 rows and columns or more are added one after the other: with AVX-512,
  /// but for bf16 with AMX, whose tiles add in another order.
  static bool adds_in_order(dtype numbers);

 private:
  class primitives;
  template <class Out>
  void run_bf16(const gemm_problem& problem, float alpha, const bf16* a, const bf16* b, float beta, Out* c);

  std::unique_ptr<primitives> primitives_;
  int threads_;
};

namespace detail {

/// OpenBLAS' number of threads, which is one for the process, while a product runs. Where products of several threads
/// run at once, the first one's number holds for all; after the last one, the program's own number returns.
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

#ifndef PLAIT_COMPILED
#include "plait/device/gemm_cpu.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
