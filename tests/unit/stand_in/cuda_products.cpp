// The stand-in for cuBLASLt: products in every transposition, order and type, against loops.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "stand_in/cuda/cublasLt.h"
#include "stand_in/cuda/cuda_runtime.h"

namespace {

struct matrix {
  std::vector<float> values;
  std::uint64_t rows, cols;
  bool row_major;
  std::size_t ld() const { return (row_major ? cols : rows) + 3; }
  std::size_t at(std::uint64_t i, std::uint64_t j) const { return row_major ? i * ld() + j : j * ld() + i; }
  matrix(std::uint64_t r, std::uint64_t c, bool row) : rows(r), cols(c), row_major(row) {
    values.resize(ld() * (row ? r : c));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(static_cast<int>(i * 7 % 23) - 11);
  }
};

/// A matrix on the device in a type of cuBLASLt, with the layout that describes it.
struct device_matrix {
  cudaDataType_t type;
  std::size_t n;
  void* p = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;
  device_matrix(const matrix& m, cudaDataType_t t) : type(t), n(m.values.size()) {
    std::vector<char> bytes(n * stand_in::bytes_of(t));
    for (std::size_t i = 0; i < n; ++i) stand_in::store<float>(t, bytes.data(), i, m.values[i]);
    cudaMalloc(&p, bytes.size());
    cudaMemcpy(p, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    cublasLtMatrixLayoutCreate(&layout, t, m.rows, m.cols, static_cast<std::int64_t>(m.ld()));
    const std::int32_t order = m.row_major ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL;
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order);
  }
  ~device_matrix() {
    cudaFree(p);
    cublasLtMatrixLayoutDestroy(layout);
  }
  float value(std::size_t i) const {
    std::vector<char> bytes(n * stand_in::bytes_of(type));
    cudaMemcpy(bytes.data(), p, bytes.size(), cudaMemcpyDeviceToHost);
    return stand_in::load<float>(type, bytes.data(), i);
  }
};

}  // namespace

TEST_CASE("stand-in: products in every transposition, order and type") {
  cublasLtHandle_t handle = nullptr;
  REQUIRE(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
  struct types {
    cudaDataType_t in, out;
  };
  for (const types t : {types{CUDA_R_32F, CUDA_R_32F}, types{CUDA_R_64F, CUDA_R_64F}, types{CUDA_R_16BF, CUDA_R_16BF},
                        types{CUDA_R_16BF, CUDA_R_32F}}) {
    for (int variant = 0; variant < 16; ++variant) {
      const bool trans_a = variant & 1, trans_b = variant & 2, rows_in = variant & 4, rows_out = variant & 8;
      const std::uint64_t m = 5, n = 7, k = 9;
      const matrix a(trans_a ? k : m, trans_a ? m : k, rows_in), b(trans_b ? n : k, trans_b ? k : n, rows_in);
      const matrix c(m, n, rows_out), d(m, n, rows_out);
      device_matrix da(a, t.in), db(b, t.in), dc(c, t.out), dd(d, t.out);
      const bool wide = t.in == CUDA_R_64F;
      cublasLtMatmulDesc_t desc = nullptr;
      cublasLtMatmulDescCreate(&desc, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, wide ? CUDA_R_64F : CUDA_R_32F);
      const std::int32_t op_a = trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
      cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a);
      cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b);
      cublasLtMatmulHeuristicResult_t best{};
      int found = 0;
      CHECK(cublasLtMatmulAlgoGetHeuristic(handle, desc, da.layout, db.layout, dc.layout, dd.layout, nullptr, 1, &best,
                                           &found) == CUBLAS_STATUS_SUCCESS);
      CHECK(found == 1);
      const float alpha = 2, beta = 3;
      const double wide_alpha = 2, wide_beta = 3;
      CHECK(cublasLtMatmul(handle, desc, wide ? static_cast<const void*>(&wide_alpha) : &alpha, da.p, da.layout, db.p,
                           db.layout, wide ? static_cast<const void*>(&wide_beta) : &beta, dc.p, dc.layout, dd.p,
                           dd.layout, &best.algo, nullptr, 0, nullptr) == CUBLAS_STATUS_SUCCESS);
      int wrong = 0;
      for (std::uint64_t i = 0; i < m; ++i) {
        for (std::uint64_t j = 0; j < n; ++j) {
          float sum = 0;
          for (std::uint64_t p = 0; p < k; ++p) {
            sum += a.values[trans_a ? a.at(p, i) : a.at(i, p)] * b.values[trans_b ? b.at(j, p) : b.at(p, j)];
          }
          sum = 2 * sum + 3 * c.values[c.at(i, j)];
          if (t.out == CUDA_R_16BF) sum = stand_in::bf16_value(stand_in::bf16_bits(sum));
          wrong += dd.value(d.at(i, j)) != sum;
        }
      }
      CAPTURE(variant);
      CHECK(wrong == 0);
      cublasLtMatmulDescDestroy(desc);
    }
  }
  cublasLtDestroy(handle);
}
