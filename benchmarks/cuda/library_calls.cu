#include <cuda_bf16.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_transform.cuh>

#include "library_calls.hpp"
#include "plait/device/cuda_launch.hpp"

namespace bench::library {
namespace {

void check(cudaError_t status, const char* doing) { plait::detail::cuda_check(status, doing); }

struct squared {
  __host__ __device__ double operator()(float x) const { return static_cast<double>(x) * static_cast<double>(x); }
};
struct rounded {
  __host__ __device__ __nv_bfloat16 operator()(float x) const { return __float2bfloat16(x); }
};
struct added {
  __host__ __device__ double operator()(double a, double b) const { return a + b; }
};

}  // namespace

void sum(const float* x, std::int64_t n, float* out, void* scratch, std::size_t& bytes, cudaStream_t stream) {
  check(cub::DeviceReduce::Sum(scratch, bytes, x, out, n, stream), "CUB's sum");
}

void sum_squares(const float* x, std::int64_t n, double* out, void* scratch, std::size_t& bytes, cudaStream_t stream) {
  check(cub::DeviceReduce::TransformReduce(scratch, bytes, x, out, n, added{}, squared{}, 0.0, stream),
        "CUB's sum of squares");
}

void cast(const float* x, plait::bf16* y, std::int64_t n, cudaStream_t stream) {
  check(cub::DeviceTransform::Transform(x, reinterpret_cast<__nv_bfloat16*>(y), n, rounded{}, stream), "CUB's map");
}

void sort_pairs(std::uint32_t* const keys[2], int* const values[2], int count, int bits, void* scratch,
                std::size_t& bytes, cudaStream_t stream) {
  cub::DoubleBuffer<std::uint32_t> k(keys[0], keys[1]);
  cub::DoubleBuffer<int> v(values[0], values[1]);
  check(cub::DeviceRadixSort::SortPairs(scratch, bytes, k, v, count, 0, bits, stream), "CUB's sort");
}

}  // namespace bench::library
