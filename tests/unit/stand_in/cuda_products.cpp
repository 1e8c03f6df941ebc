// The stand-ins for cuBLASLt and CUB: products in every transposition and type, compared with loops.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "stand_in/cuda/cub/device/device_radix_sort.cuh"
#include "stand_in/cuda/cub/device/device_reduce.cuh"
#include "stand_in/cuda/cub/device/device_transform.cuh"
#include "stand_in/cuda/cublasLt.h"
#include "stand_in/cuda/cuda_runtime.h"
#include "support/death_message.hpp"
#include "unit/stand_in/on_device.hpp"

namespace {

using plait::test::on_device;
using plait::test::on_host;

/// A matrix in columns, with gaps between them.
struct matrix {
  std::vector<float> values;
  std::uint64_t rows, cols;
  std::size_t ld() const { return rows + 3; }
  std::size_t at(std::uint64_t i, std::uint64_t j) const { return j * ld() + i; }
  matrix(std::uint64_t r, std::uint64_t c) : rows(r), cols(c) {
    values.resize(ld() * c);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(static_cast<int>(i * 7 % 23) - 11);
  }
};

/// A matrix on the device in a type of cuBLASLt, with the layout that describes it.
struct device_matrix {
  cudaDataType_t type;
  std::size_t n;
  char* p = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;
  device_matrix(const matrix& m, cudaDataType_t t) : type(t), n(m.values.size()) {
    std::vector<char> bytes(n * stand_in::bytes_of(t));
    for (std::size_t i = 0; i < n; ++i) stand_in::store<float>(t, bytes.data(), i, m.values[i]);
    p = on_device(bytes);
    cublasLtMatrixLayoutCreate(&layout, t, m.rows, m.cols, static_cast<std::int64_t>(m.ld()));
  }
  ~device_matrix() {
    cudaFree(p);
    cublasLtMatrixLayoutDestroy(layout);
  }
  float value(std::size_t i) const {
    return stand_in::load<float>(type, on_host(p, n * stand_in::bytes_of(type)).data(), i);
  }
};

}  // namespace

TEST_CASE("stand-in: products in every transposition and type") {
  cublasLtHandle_t handle = nullptr;
  REQUIRE(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
  struct types {
    cudaDataType_t in, out;
  };
  for (const types t : {types{CUDA_R_32F, CUDA_R_32F}, types{CUDA_R_64F, CUDA_R_64F}, types{CUDA_R_16BF, CUDA_R_16BF},
                        types{CUDA_R_16BF, CUDA_R_32F}}) {
    for (int variant = 0; variant < 4; ++variant) {
      const bool trans_a = variant & 1, trans_b = variant & 2;
      const std::uint64_t m = 5, n = 7, k = 9;
      const matrix a(trans_a ? k : m, trans_a ? m : k), b(trans_b ? n : k, trans_b ? k : n), c(m, n), d(m, n);
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

TEST_CASE("the stand-in's radix sort is stable, uses the given bits only, and needs scratch memory") {
  const std::vector<std::uint32_t> keys{0x105, 0x001, 0x305, 0x201, 0x000};
  const std::vector<int> order{0, 1, 2, 3, 4};
  for (const int bits : {8, 10}) {
    CAPTURE(bits);
    cub::DoubleBuffer<std::uint32_t> k(on_device(keys), on_device(keys));
    cub::DoubleBuffer<int> v(on_device(order), on_device(order));
    const auto sort = [&](void* scratch, std::size_t& bytes) {
      return cub::DeviceRadixSort::SortPairs(scratch, bytes, k, v, 5, 0, bits);
    };
    std::size_t bytes = 0;
    REQUIRE(sort(nullptr, bytes) == cudaSuccess);
    CHECK(k.selector == 0);
    void* scratch = nullptr;
    REQUIRE(cudaMalloc(&scratch, bytes) == cudaSuccess);
    std::size_t less = bytes - 1;
    CHECK(sort(scratch, less) == cudaErrorInvalidValue);
    REQUIRE(sort(scratch, bytes) == cudaSuccess);
    CHECK(k.selector == (bits == 8 ? 1 : 0));
    CHECK(v.selector == k.selector);
    if (bits == 8) {
      CHECK(on_host(k.Current(), 5) == std::vector<std::uint32_t>{0x000, 0x001, 0x201, 0x105, 0x305});
      CHECK(on_host(v.Current(), 5) == std::vector<int>{4, 1, 3, 0, 2});
    } else {
      CHECK(on_host(v.Current(), 5) == std::vector<int>{4, 1, 0, 3, 2});
    }
    CHECK(on_host(v.Alternate(), 5) == std::vector<int>(5, -1));
    for (void* p : {static_cast<void*>(k.Current()), static_cast<void*>(k.Alternate()), static_cast<void*>(v.Current()),
                    static_cast<void*>(v.Alternate()), scratch}) {
      CHECK(cudaFree(p) == cudaSuccess);
    }
  }
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("the stand-in's sums need scratch memory, and its maps none") {
  const std::vector<float> numbers{1, 2, 3.5f, -4};
  float* const x = on_device(numbers);
  float* const total = on_device(std::vector<float>(1));
  int* const rounded = on_device(std::vector<int>(4));
  std::size_t bytes = 0;
  REQUIRE(cub::DeviceReduce::Sum(nullptr, bytes, x, total, 4) == cudaSuccess);
  CHECK(on_host(total, 1)[0] == 0);
  void* scratch = nullptr;
  REQUIRE(cudaMalloc(&scratch, bytes) == cudaSuccess);
  std::size_t less = bytes - 1;
  CHECK(cub::DeviceReduce::Sum(scratch, less, x, total, 4) == cudaErrorInvalidValue);
  REQUIRE(cub::DeviceReduce::Sum(scratch, bytes, x, total, 4) == cudaSuccess);
  CHECK(on_host(total, 1)[0] == 2.5f);
  const auto larger = [](float a, float b) { return a < b ? b : a; };
  const auto squared = [](float v) { return v * v; };
  REQUIRE(cub::DeviceReduce::TransformReduce(scratch, bytes, x, total, 4, larger, squared, 0.0f) == cudaSuccess);
  CHECK(on_host(total, 1)[0] == 16);
  REQUIRE(cub::DeviceTransform::Transform(x, rounded, 4, [](float v) { return static_cast<int>(v); }) == cudaSuccess);
  CHECK(on_host(rounded, 4) == std::vector<int>{1, 2, 3, -4});
  const std::string words = plait::test::death_message([&] {
    float here = 0;
    cub::DeviceReduce::Sum(scratch, bytes, x, &here, 4);
  });
  CHECK(words.find("is handed a pointer to host memory: cub::DeviceReduce") != std::string::npos);
  for (void* p : {static_cast<void*>(x), static_cast<void*>(total), static_cast<void*>(rounded), scratch})
    CHECK(cudaFree(p) == cudaSuccess);
  static_cast<void>(cudaGetLastError());
}
