// Several matrix products on a GPU by one call of cuBLAS: of several sizes, or of one size at equal distances. Only
// this header includes <cublas_v2.h>. Callers use `gemm_groups` of device/device.hpp.
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
#include "plait/device/cuda_launch.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

/// Row-major products of several sizes by `cublasGemmGroupedBatchedEx` (CUDA 12.5), and of one size by
/// `cublasGemmStridedBatchedEx`. They compute the transposed products with exchanged factors, because cuBLAS is
/// column-major. The first product makes the handle. Only one thread may use it.
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
    use(count, first, workspace, workspace_bytes, stream);
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
    constexpr cudaDataType_t type = type_of<T>;
    void* const* const outputs = const_cast<void* const*>(addresses + 2 * count);
    check(cublasGemmGroupedBatchedEx_64(handle_, trans_b.data(), trans_a.data(), n, m, k, factors.data(), addresses,
                                        type, ldb, addresses + count, type, lda, kept.data(), outputs, type, ldc,
                                        static_cast<std::int64_t>(count), sizes.data(), compute_of<T>(tf32)),
          count, first, "starting the products");
  }

  /// Returns the number of groups from `first` on that have one size, and matrices at equal distances.
  template <class In, class Out>
  static std::size_t run_length(const std::vector<gemm_group<In, Out>>& groups, std::size_t first) {
    std::size_t i = first + 1;
    if (i == groups.size()) return 1;
    const distances step = between(groups[first], groups[i]);
    if (step.a < 0 || step.b < 0 || step.c <= 0) return 1;
    while (i < groups.size() && groups[i].problem == groups[first].problem && between(groups[i - 1], groups[i]) == step)
      ++i;
    return i - first;
  }
  /// `count` products from `groups` on, one run (`run_length`). No size is zero. `workspace` is as in `run`.
  template <class In, class Out>
  void run_strided(double alpha, const gemm_group<In, Out>* groups, std::size_t count, double beta, bool tf32,
                   void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
    const auto& [p, a, b, c] = groups[0];
    use(count, p, workspace, workspace_bytes, stream);
    using scalar = std::conditional_t<std::is_same_v<In, double>, double, float>;
    const scalar factor = static_cast<scalar>(alpha), kept = static_cast<scalar>(beta);
    const distances step = between(groups[0], groups[1]);
    check(cublasGemmStridedBatchedEx_64(
              handle_, p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, p.n, p.m, p.k,
              &factor, b, type_of<In>, p.ldb, step.b, a, type_of<In>, p.lda, step.a, &kept, c, type_of<Out>, p.ldc,
              step.c, static_cast<std::int64_t>(count), compute_of<In>(tf32), CUBLAS_GEMM_DEFAULT),
          count, p, "starting the products");
  }

 private:
  /// From the matrices of one product to those of another, in elements. Their arrays may differ.
  struct distances {
    std::int64_t a, b, c;
    bool operator==(const distances&) const = default;
  };
  template <class In, class Out>
  static distances between(const gemm_group<In, Out>& one, const gemm_group<In, Out>& other) {
    const auto elements = [](const auto* from, const auto* to) {
      const auto bytes = reinterpret_cast<std::intptr_t>(to) - reinterpret_cast<std::intptr_t>(from);
      constexpr auto size = static_cast<std::intptr_t>(sizeof *from);
      return static_cast<std::int64_t>(bytes % size == 0 ? bytes / size : -1);
    };
    return {elements(one.a, other.a), elements(one.b, other.b), elements(one.c, other.c)};
  }
  template <class T>
  static constexpr cudaDataType_t type_of = std::is_same_v<T, double>  ? CUDA_R_64F
                                            : std::is_same_v<T, float> ? CUDA_R_32F
                                                                       : CUDA_R_16BF;
  template <class T>
  static cublasComputeType_t compute_of(bool tf32) {
    if (std::is_same_v<T, double>) return CUBLAS_COMPUTE_64F;
    return std::is_same_v<T, float> && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  }
  void use(std::size_t count, const gemm_problem& first, void* workspace, std::size_t workspace_bytes,
           cudaStream_t stream) {
    if (handle_ == nullptr) {
      const detail::relaxed_capture relaxed;  // it allocates memory
      check(cublasCreate(&handle_), count, first, "creating a handle");
    }
    check(cublasSetStream(handle_, stream), count, first, "choosing the stream");  // this call resets the workspace
    check(cublasSetWorkspace(handle_, workspace, workspace_bytes), count, first, "setting the workspace");
  }
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
