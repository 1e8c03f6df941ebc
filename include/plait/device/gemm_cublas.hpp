// Several matrix products on a GPU by one call of cuBLAS. Only this header includes <cublas_v2.h>. Callers use
// `gemm_groups` of device/device.hpp.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

/// Row-major products of several sizes by `cublasGemmGroupedBatchedEx` (CUDA 12.5). It computes the transposed products
/// with exchanged factors, because cuBLAS is column-major. The first product makes the handle. Only one thread may use
/// it.
class cublas_gemm_groups {
 public:
  cublas_gemm_groups() = default;
  cublas_gemm_groups(const cublas_gemm_groups&) = delete;
  cublas_gemm_groups& operator=(const cublas_gemm_groups&) = delete;
  ~cublas_gemm_groups() {
    if (handle_ != nullptr) cublasDestroy(handle_);
  }

  bool has_handle() const { return handle_ != nullptr; }

  /// Whether the matrices have the alignment that cuBLAS's manual requires. If the terms of a sum fill whole units of
  /// 16 bytes, or of 4, its kernels read such units. Products of float and double without tf32 need no alignment.
  template <class T>
  static bool takes(const std::vector<gemm_group<T, T>>& groups, bool tf32) {
    if (std::is_same_v<T, double> || (std::is_same_v<T, float> && !tf32)) return true;
    return std::all_of(groups.begin(), groups.end(), [](const gemm_group<T, T>& group) {
      const auto bytes = static_cast<std::uint64_t>(group.problem.k) * sizeof(T);
      const std::uintptr_t boundary = bytes % 16 == 0 ? 16 : bytes % 4 == 0 ? 4 : 1;
      const auto lies = [&](const T* matrix) { return reinterpret_cast<std::uintptr_t>(matrix) % boundary == 0; };
      return lies(group.a) && lies(group.b) && lies(group.c);
    });
  }

  /// `groups` must have been checked, and have no size of zero. `addresses` is device memory with all b, then all a,
  /// then all c, which the call reads in the order of the stream. `workspace` is as for `cublaslt_gemm::run`.
  template <class T>
  void run(double alpha, const std::vector<gemm_group<T, T>>& groups, double beta, const void* const* addresses,
           bool tf32, void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
    const gemm_problem& first = groups.front().problem;
    const std::size_t count = groups.size();
    if (handle_ == nullptr) check(cublasCreate(&handle_), count, first, "creating a handle");
    check(cublasSetStream(handle_, stream), count, first, "choosing the stream");  // this call resets the workspace
    check(cublasSetWorkspace(handle_, workspace, workspace_bytes), count, first, "setting the workspace");
    using scalar = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const std::vector<scalar> factors(count, static_cast<scalar>(alpha)), kept(count, static_cast<scalar>(beta));
    std::vector<cublasOperation_t> trans_a(count), trans_b(count);
    std::vector<std::int64_t> numbers(6 * count), sizes(count, 1);
    std::int64_t *const m = numbers.data(), *const n = m + count, *const k = n + count;
    std::int64_t *const lda = k + count, *const ldb = lda + count, *const ldc = ldb + count;
    for (std::size_t i = 0; i < count; ++i) {
      const gemm_problem& p = groups[i].problem;
      trans_a[i] = p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, trans_b[i] = p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
      m[i] = p.m, n[i] = p.n, k[i] = p.k, lda[i] = p.lda, ldb[i] = p.ldb, ldc[i] = p.ldc;
    }
    constexpr bool is_double = std::is_same_v<T, double>, is_float = std::is_same_v<T, float>;
    const cudaDataType_t type = is_double ? CUDA_R_64F : is_float ? CUDA_R_32F : CUDA_R_16BF;
    const cublasComputeType_t compute = is_double          ? CUBLAS_COMPUTE_64F
                                        : is_float && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                           : CUBLAS_COMPUTE_32F;
    void* const* const outputs = const_cast<void* const*>(addresses + 2 * count);
    check(cublasGemmGroupedBatchedEx_64(handle_, trans_b.data(), trans_a.data(), n, m, k, factors.data(), addresses,
                                        type, ldb, addresses + count, type, lda, kept.data(), outputs, type, ldc,
                                        static_cast<std::int64_t>(count), sizes.data(), compute),
          count, first, "starting the products");
  }

 private:
  static void check(cublasStatus_t status, std::size_t count, const gemm_problem& first, const char* doing) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    const char* const text = cublasGetStatusString(status);
    fail({first.text(), ", the first of ", count, " products in one call: cuBLAS: ", doing, ": ",
          text != nullptr ? text : std::to_string(status)});
  }

  cublasHandle_t handle_ = nullptr;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
