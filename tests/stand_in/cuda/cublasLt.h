// A stand-in for cuBLASLt, for tests: products of float, double and bf16 matrices, queued on a stream of the stand-in
// runtime. It refuses everything else with CUBLAS_STATUS_NOT_SUPPORTED.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda_runtime.h"
#include "library_types.h"
#include "stand_in/gemm.hpp"

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
  CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_64F = 70, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4, CUBLASLT_EPILOGUE_BGRADB = 512 };
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8
};
enum cublasLtReductionScheme_t {
  CUBLASLT_REDUCTION_SCHEME_NONE = 0,
  CUBLASLT_REDUCTION_SCHEME_INPLACE = 1,
  CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
  CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4,
  CUBLASLT_REDUCTION_SCHEME_MASK = 7
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};

inline const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS            ? "CUBLAS_STATUS_SUCCESS"
         : status == CUBLAS_STATUS_NOT_INITIALIZED  ? "CUBLAS_STATUS_NOT_INITIALIZED"
         : status == CUBLAS_STATUS_INVALID_VALUE    ? "CUBLAS_STATUS_INVALID_VALUE"
         : status == CUBLAS_STATUS_EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED"
                                                    : "CUBLAS_STATUS_NOT_SUPPORTED";
}

struct cublasLtContext {};
struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  std::int32_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
};
using cublasLtMatrixLayoutOpaque_t = stand_in::matrix_layout;
struct cublasLtMatmulPreferenceOpaque_t {
  std::uint64_t workspace = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK, alignment[4] = {256, 256, 256, 256};
};
using cublasLtHandle_t = cublasLtContext*;
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;
struct cublasLtMatmulAlgo_t {
  std::uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  std::size_t workspaceSize;
  cublasStatus_t state;
};

inline std::size_t cublasLtGetVersion() { return 130000; }

namespace stand_in {

template <class T>
cublasStatus_t set(T& to, const void* value, std::size_t bytes) {
  if (!value || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace stand_in

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
  if (stand_in::device_count() == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
  *desc = new cublasLtMatmulDescOpaque_t{compute, scale};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which,
                                                     const void* value, std::size_t bytes) {
  switch (which) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return stand_in::set(desc->trans_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return stand_in::set(desc->trans_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return stand_in::set(desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return stand_in::set(desc->bias, value, bytes);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type,
                                                 std::uint64_t rows, std::uint64_t cols, std::int64_t ld) {
  if (!stand_in::known(type)) return CUBLAS_STATUS_NOT_SUPPORTED;
  *layout = new cublasLtMatrixLayoutOpaque_t{type, rows, cols, ld};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t which,
                                                           const void* value, std::size_t bytes) {
  switch (which) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return stand_in::set(preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return stand_in::set(preference->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return stand_in::set(preference->alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return stand_in::set(preference->alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return stand_in::set(preference->alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return stand_in::set(preference->alignment[3], value, bytes);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

namespace stand_in {

/// Set by tests: whether no algorithm can sum a factor during the product.
inline std::atomic<bool> no_sums = false;

/// The product of the descriptors, or what is wrong with them.
inline cublasStatus_t make_gemm(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, gemm& g) {
  if (!desc || !a || !b || !c || !d) return CUBLAS_STATUS_INVALID_VALUE;
  g.a = *a, g.b = *b, g.c = *c, g.d = *d;
  g.trans_a = desc->trans_a != CUBLAS_OP_N;
  g.trans_b = desc->trans_b != CUBLAS_OP_N;
  g.wide = desc->compute == CUBLAS_COMPUTE_64F;
  g.tf32 = desc->compute == CUBLAS_COMPUTE_32F_FAST_TF32 && g.a.type == CUDA_R_32F;
  if (!g.a.legal() || !g.b.legal() || !g.c.legal() || !g.d.legal()) return CUBLAS_STATUS_INVALID_VALUE;
  const auto m = g.trans_a ? g.a.cols : g.a.rows, k = g.trans_a ? g.a.rows : g.a.cols;
  const auto k_of_b = g.trans_b ? g.b.cols : g.b.rows, n = g.trans_b ? g.b.rows : g.b.cols;
  if (k != k_of_b || g.d.rows != m || g.d.cols != n || g.c.rows != m || g.c.cols != n)
    return CUBLAS_STATUS_INVALID_VALUE;
  // The combinations of types that cuBLASLt supports, of the types of this stand-in.
  const bool doubles = g.a.type == CUDA_R_64F;
  if (g.b.type != g.a.type || g.c.type != g.d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (doubles != g.wide || doubles != (g.d.type == CUDA_R_64F)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (g.a.type == CUDA_R_32F && g.d.type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (desc->scale != (g.wide ? CUDA_R_64F : CUDA_R_32F)) return CUBLAS_STATUS_NOT_SUPPORTED;
  g.adds_bias = desc->epilogue == CUBLASLT_EPILOGUE_BIAS;
  g.sums_b = desc->epilogue == CUBLASLT_EPILOGUE_BGRADB;
  if (g.sums_b && no_sums) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!g.adds_bias && !g.sums_b && desc->epilogue != CUBLASLT_EPILOGUE_DEFAULT) return CUBLAS_STATUS_NOT_SUPPORTED;
  g.vector = desc->bias;
  return CUBLAS_STATUS_SUCCESS;
}

/// Set by tests: extra time of each algorithm's products, in microseconds. And the number of products of each
/// algorithm.
inline std::atomic<int> product_delay[3], products_done[3];
/// Set by tests: the index, from 1, of this thread's product that fails; 0: none.
inline thread_local int failing_product = 0;
/// Set by tests: the algorithm that the heuristic proposes but that fails for every product; -1: none.
inline thread_local int unable_algorithm = -1;
/// Set by tests: whether each algorithm adds the terms of a sum in a different order, and the heuristic's proposals
/// depend on a product's size. The first proposal for large products then cannot compute narrow ones.
inline std::atomic<bool> orders_differ = false;
/// Set by tests: whether the heuristic finds no algorithm for any product.
inline std::atomic<bool> no_algorithms = false;

}  // namespace stand_in

/// Every algorithm can compute every product, unless `orders_differ` is set.
inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t* algorithm,
                                              cublasLtMatmulHeuristicResult_t* result) {
  stand_in::gemm g;
  if (!handle || !algorithm || algorithm->data[0] != 0x51a7d) return CUBLAS_STATUS_INVALID_VALUE;
  if (const auto status = stand_in::make_gemm(desc, a, b, c, d, g)) return status;
  if (stand_in::orders_differ && algorithm->data[1] == 1 && (g.d.rows < 64 || g.d.cols < 64))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  *result = {*algorithm, algorithm->data[2], CUBLAS_STATUS_SUCCESS};
  return CUBLAS_STATUS_SUCCESS;
}

/// The first algorithm needs a workspace of 1 MiB if the limit allows it, the others need none.
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t preference, int asked,
                                                     cublasLtMatmulHeuristicResult_t* results, int* returned) {
  stand_in::gemm g;
  *returned = 0;
  if (!handle || asked < 1) return CUBLAS_STATUS_INVALID_VALUE;
  if (stand_in::no_algorithms) return CUBLAS_STATUS_SUCCESS;
  if (const auto status = stand_in::make_gemm(desc, a, b, c, d, g)) return status;
  const std::uint64_t turn = stand_in::orders_differ ? (g.d.rows * 3 + g.d.cols) / 8 % 3 : 0;
  for (std::uint64_t n = 0; n < 3 && *returned < asked; ++n) {
    const std::uint64_t i = (n + turn) % 3;
    const std::size_t workspace = i == 0 ? 1 << 20 : 0;
    if (workspace > (preference ? preference->workspace : 0)) continue;
    // The first algorithm splits the sum, and adds its parts in the output if the preference allows it.
    const std::uint32_t allowed = preference ? preference->reductions : 7;
    const std::uint64_t in_output =
        i == 0 && (allowed & (CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE)) != 0;
    std::uint64_t aligned = 0;  // assumed alignment of the matrices, in bytes
    for (int matrix = 0; preference && matrix < 4; ++matrix)
      aligned |= std::uint64_t{preference->alignment[matrix]} << 16 * matrix;
    results[(*returned)++] = {{{0x51a7d, i, workspace, in_output, aligned}}, workspace, CUBLAS_STATUS_SUCCESS};
    // The second result is marked as unusable.
    if (n == 0 && *returned < asked) results[(*returned)++] = {{{0xbad}}, 0, CUBLAS_STATUS_NOT_SUPPORTED};
  }
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                                     const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                                     cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                                     cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                                     const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                                     std::size_t workspace_bytes, cudaStream_t stream) {
  stand_in::gemm g;
  if (!handle || !alpha || !beta || !a || !b || !d) return CUBLAS_STATUS_INVALID_VALUE;
  if (stand_in::failing_product > 0 && --stand_in::failing_product == 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (const auto status = stand_in::make_gemm(desc, a_layout, b_layout, c_layout, d_layout, g)) return status;
  const std::size_t needed = algorithm ? algorithm->data[2] : 0;
  if (algorithm && algorithm->data[0] != 0x51a7d) return CUBLAS_STATUS_INVALID_VALUE;
  if (needed > workspace_bytes || (needed && !workspace)) return CUBLAS_STATUS_INVALID_VALUE;
  const void* const matrices[4] = {a, b, c, d};
  for (int matrix = 0; algorithm && matrix < 4; ++matrix) {  // a kernel with wider loads would fault
    const std::uint64_t aligned = algorithm->data[4] >> 16 * matrix & 0xffff;
    if (aligned > 1 && reinterpret_cast<std::uintptr_t>(matrices[matrix]) % aligned != 0)
      return CUBLAS_STATUS_INVALID_VALUE;
  }
  // Kernels with a vector read 16 bytes at a time.
  if ((g.adds_bias || g.sums_b) && reinterpret_cast<std::uintptr_t>(g.vector) % 16 != 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (algorithm && static_cast<std::int64_t>(algorithm->data[1]) == stand_in::unable_algorithm)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  g.split_in_output = algorithm && algorithm->data[3] != 0;
  if (stand_in::orders_differ && algorithm) g.terms_together = 3 + static_cast<std::int64_t>(algorithm->data[1]) * 2;
  const auto read = [wide = g.wide](const void* p) {
    return wide ? *static_cast<const double*>(p) : static_cast<double>(*static_cast<const float*>(p));
  };
  const double x = read(alpha), y = read(beta);
  if (y != 0 && !c) return CUBLAS_STATUS_INVALID_VALUE;
  const std::size_t which = algorithm ? algorithm->data[1] : 0;
  const auto run = [=] {
    ++stand_in::products_done[which];
    if (const int delay = stand_in::product_delay[which]; delay > 0) usleep(static_cast<useconds_t>(delay));
    if (needed) {  // shows a workspace that is too small or shared between streams
      std::memset(workspace, 0xff, 256);
      std::memset(static_cast<char*>(workspace) + workspace_bytes - 256, 0xff, 256);
    }
    if (g.wide) {
      stand_in::multiply<double>(g, x, a, b, y, c, d);
    } else {
      stand_in::multiply<float>(g, static_cast<float>(x), a, b, static_cast<float>(y), c, d);
    }
  };
  const auto error = stand_in::enqueue_for("cublasLtMatmul", stream, {a, b, c, d, g.vector, workspace}, run,
                                           {stand_in::work::product, g.flops()});
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
