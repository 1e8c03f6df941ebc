// A stand-in for cuBLAS, for tests: the products of float matrices, as the stand-in cuBLASLt computes them.
#pragma once

#include "cublasLt.h"

struct cublasContext {
  cublasLtHandle_t products = nullptr;
  cudaStream_t stream = nullptr;
};
using cublasHandle_t = cublasContext*;

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
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t trans_a, cublasOperation_t trans_b, int m,
                                  int n, int k, const float* alpha, const float* a, int lda, const float* b, int ldb,
                                  const float* beta, float* c, int ldc) {
  const auto layout = [](int rows, int columns, int ld) {
    cublasLtMatrixLayoutOpaque_t out;
    out.layout.type = CUDA_R_32F;
    out.layout.rows = static_cast<std::uint64_t>(rows);
    out.layout.cols = static_cast<std::uint64_t>(columns);
    out.layout.ld = ld;
    return out;
  };
  const bool ta = trans_a != CUBLAS_OP_N, tb = trans_b != CUBLAS_OP_N;
  cublasLtMatrixLayoutOpaque_t la = layout(ta ? k : m, ta ? m : k, lda), lb = layout(tb ? n : k, tb ? k : n, ldb),
                               lc = layout(m, n, ldc);
  cublasLtMatmulDescOpaque_t what{CUBLAS_COMPUTE_32F, CUDA_R_32F};
  what.trans_a = trans_a;
  what.trans_b = trans_b;
  return cublasLtMatmul(handle->products, &what, alpha, a, &la, b, &lb, beta, c, &lc, c, &lc, nullptr, nullptr, 0,
                        handle->stream);
}
