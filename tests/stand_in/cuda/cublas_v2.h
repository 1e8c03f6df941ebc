// A stand-in for cuBLAS, for tests: products of float matrices, computed by the stand-in cuBLASLt, and products of
// several sizes in one call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cublasLt.h"

struct cublasContext {
  cublasLtHandle_t products = nullptr;
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};
using cublasHandle_t = cublasContext*;
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return cublasLtCreate(&(*handle)->products);
}
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  const cublasStatus_t status = cublasLtDestroy(handle->products);
  delete handle;
  return status;
}
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  handle->workspace = nullptr;  // back to the handle's own
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, std::size_t bytes) {
  if (!handle || reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
  handle->workspace = workspace;
  handle->workspace_bytes = bytes;
  return CUBLAS_STATUS_SUCCESS;
}
inline const char* cublasGetStatusString(cublasStatus_t status) { return cublasLtGetStatusString(status); }

namespace stand_in {

inline matrix_layout layout_of(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t ld) {
  return {type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns), ld};
}

}  // namespace stand_in

inline cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t trans_a, cublasOperation_t trans_b, int m,
                                  int n, int k, const float* alpha, const float* a, int lda, const float* b, int ldb,
                                  const float* beta, float* c, int ldc) {
  const bool ta = trans_a != CUBLAS_OP_N, tb = trans_b != CUBLAS_OP_N;
  stand_in::matrix_layout la = stand_in::layout_of(CUDA_R_32F, ta ? k : m, ta ? m : k, lda),
                          lb = stand_in::layout_of(CUDA_R_32F, tb ? n : k, tb ? k : n, ldb),
                          lc = stand_in::layout_of(CUDA_R_32F, m, n, ldc);
  cublasLtMatmulDescOpaque_t what{CUBLAS_COMPUTE_32F, CUDA_R_32F};
  what.trans_a = trans_a;
  what.trans_b = trans_b;
  return cublasLtMatmul(handle->products, &what, alpha, a, &la, b, &lb, beta, c, &lc, c, &lc, nullptr, nullptr, 0,
                        handle->stream);
}

namespace stand_in {

/// The number of calls for products of several sizes that streams have executed.
inline std::atomic<int> grouped_products = 0;

/// The number of calls for products of one size at equal distances.
inline std::atomic<int> strided_products = 0;

/// One of those products, without the addresses of its matrices, which are in device memory.
struct grouped_gemm {
  gemm product;
  double alpha = 0, beta = 0;
  std::int64_t boundary = 1;  // alignment of its matrices, in bytes
};

inline bool has_grouped(cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, cublasComputeType_t compute) {
  if (a != b || a != c) return false;
  if (a == CUDA_R_16BF) return compute == CUBLAS_COMPUTE_32F;
  if (a == CUDA_R_64F) return compute == CUBLAS_COMPUTE_64F;
  return a == CUDA_R_32F && (compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_FAST_TF32);
}

/// Describes one product of such a call; `alpha` and `beta` have its index `at`. Returns false if a size is illegal.
inline bool describe(grouped_gemm& one, cublasOperation_t trans_a, cublasOperation_t trans_b, std::int64_t m,
                     std::int64_t n, std::int64_t k, cudaDataType_t type, cudaDataType_t c_type, std::int64_t lda,
                     std::int64_t ldb, std::int64_t ldc, const void* alpha, const void* beta, std::int64_t at,
                     cublasComputeType_t compute) {
  const bool ta = trans_a != CUBLAS_OP_N, tb = trans_b != CUBLAS_OP_N;
  const auto at_least = [](std::int64_t ld, std::int64_t rows) { return ld >= (rows > 1 ? rows : 1); };
  if (m < 0 || n < 0 || k < 0) return false;
  if (!at_least(lda, ta ? k : m) || !at_least(ldb, tb ? n : k) || !at_least(ldc, m)) return false;
  one.product.a = layout_of(type, ta ? k : m, ta ? m : k, lda);
  one.product.b = layout_of(type, tb ? n : k, tb ? k : n, ldb);
  one.product.c = one.product.d = layout_of(c_type, m, n, ldc);
  one.product.trans_a = ta, one.product.trans_b = tb;
  one.product.wide = type == CUDA_R_64F;
  one.product.tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  if (orders_differ) one.product.terms_together = 3 + (m + n) % 5;
  const auto scalar = [&](const void* all) {
    return one.product.wide ? static_cast<const double*>(all)[at]
                            : static_cast<double>(static_cast<const float*>(all)[at]);
  };
  one.alpha = scalar(alpha), one.beta = scalar(beta);
  return true;
}

/// Computes one product in the order of its stream. Matrices that are not aligned end the process, as kernels would
/// fault.
inline void multiply_grouped(const grouped_gemm& one, const void* a, const void* b, void* c) {
  for (const void* p : {a, b, static_cast<const void*>(c)}) {
    if (!arena::instance().contains(p)) die("cublasGemmGroupedBatchedEx reads an address that is not the device's");
    if (reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(one.boundary) != 0)
      die("cublasGemmGroupedBatchedEx reads a matrix off the boundary that its manual asks for");
  }
  if (one.product.wide) {
    multiply<double>(one.product, one.alpha, a, b, one.beta, c, c);
  } else {
    multiply<float>(one.product, static_cast<float>(one.alpha), a, b, static_cast<float>(one.beta), c, c);
  }
}

}  // namespace stand_in

/// The call reads sizes, transpositions and factors; the stream reads the addresses when it executes the product. All
/// products of a group have one size.
inline cublasStatus_t cublasGemmGroupedBatchedEx_64(
    cublasHandle_t handle, const cublasOperation_t* trans_a, const cublasOperation_t* trans_b, const std::int64_t* m,
    const std::int64_t* n, const std::int64_t* k, const void* alpha, const void* const* a, cudaDataType_t a_type,
    const std::int64_t* lda, const void* const* b, cudaDataType_t b_type, const std::int64_t* ldb, const void* beta,
    void* const* c, cudaDataType_t c_type, const std::int64_t* ldc, std::int64_t groups, const std::int64_t* group_size,
    cublasComputeType_t compute) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  for (const void* p :
       {static_cast<const void*>(trans_a), static_cast<const void*>(trans_b), alpha, beta, static_cast<const void*>(m),
        static_cast<const void*>(n), static_cast<const void*>(k), static_cast<const void*>(lda),
        static_cast<const void*>(ldb), static_cast<const void*>(ldc), static_cast<const void*>(group_size)})
    if (!p) return CUBLAS_STATUS_INVALID_VALUE;
  if (groups < 0) return CUBLAS_STATUS_INVALID_VALUE;
  if (!stand_in::has_grouped(a_type, b_type, c_type, compute)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (stand_in::failing_product > 0 && --stand_in::failing_product == 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  std::vector<stand_in::grouped_gemm> all;
  double flops = 0;
  for (std::int64_t i = 0; i < groups; ++i) {
    stand_in::grouped_gemm one;
    if (group_size[i] < 0 || !stand_in::describe(one, trans_a[i], trans_b[i], m[i], n[i], k[i], a_type, c_type, lda[i],
                                                 ldb[i], ldc[i], alpha, beta, i, compute))
      return CUBLAS_STATUS_INVALID_VALUE;
    const std::int64_t bytes = k[i] * static_cast<std::int64_t>(stand_in::bytes_of(a_type));
    if (a_type == CUDA_R_16BF || one.product.tf32) one.boundary = bytes % 16 == 0 ? 16 : bytes % 4 == 0 ? 4 : 1;
    flops += one.product.flops() * static_cast<double>(group_size[i]);
    all.insert(all.end(), static_cast<std::size_t>(group_size[i]), one);
  }
  for (const void* p : {static_cast<const void*>(a), static_cast<const void*>(b), static_cast<const void*>(c)})
    if (!stand_in::arena::instance().contains(p))
      stand_in::die("cublasGemmGroupedBatchedEx takes addresses from device memory, and these are the host's");
  const auto run = [=, workspace = handle->workspace, workspace_bytes = handle->workspace_bytes] {
    ++stand_in::grouped_products;
    if (workspace) std::memset(workspace, 0xff, workspace_bytes);
    for (std::size_t i = 0; i < all.size(); ++i) stand_in::multiply_grouped(all[i], a[i], b[i], c[i]);
  };
  const auto error = stand_in::enqueue_for("cublasGemmGroupedBatchedEx", handle->stream, {a, b, c, handle->workspace},
                                           run, {stand_in::work::product, flops});
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

/// Products of one size. The call reads everything but the matrices, which are at equal distances.
inline cublasStatus_t cublasGemmStridedBatchedEx_64(cublasHandle_t handle, cublasOperation_t trans_a,
                                                    cublasOperation_t trans_b, std::int64_t m, std::int64_t n,
                                                    std::int64_t k, const void* alpha, const void* a,
                                                    cudaDataType_t a_type, std::int64_t lda, long long stride_a,
                                                    const void* b, cudaDataType_t b_type, std::int64_t ldb,
                                                    long long stride_b, const void* beta, void* c,
                                                    cudaDataType_t c_type, std::int64_t ldc, long long stride_c,
                                                    std::int64_t count, cublasComputeType_t compute, cublasGemmAlgo_t) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  const bool wide_result = a_type == CUDA_R_16BF && b_type == a_type && c_type == CUDA_R_32F;
  if (!stand_in::has_grouped(a_type, b_type, wide_result ? a_type : c_type, compute))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  stand_in::grouped_gemm one;
  if (!alpha || !beta || count < 0 ||
      !stand_in::describe(one, trans_a, trans_b, m, n, k, a_type, c_type, lda, ldb, ldc, alpha, beta, 0, compute))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (stand_in::failing_product > 0 && --stand_in::failing_product == 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  const auto run = [=, workspace = handle->workspace, workspace_bytes = handle->workspace_bytes] {
    ++stand_in::strided_products;
    if (workspace) std::memset(workspace, 0xff, workspace_bytes);
    const auto at = [](auto* first, cudaDataType_t type, std::int64_t elements) {
      return first + elements * static_cast<std::int64_t>(stand_in::bytes_of(type));
    };
    for (std::int64_t i = 0; i < count; ++i)
      stand_in::multiply_grouped(one, at(static_cast<const std::byte*>(a), a_type, i * stride_a),
                                 at(static_cast<const std::byte*>(b), b_type, i * stride_b),
                                 at(static_cast<std::byte*>(c), c_type, i * stride_c));
  };
  const auto error =
      stand_in::enqueue_for("cublasGemmStridedBatchedEx", handle->stream, {a, b, c, handle->workspace}, run,
                            {stand_in::work::product, one.product.flops() * static_cast<double>(count)});
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
