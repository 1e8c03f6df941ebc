#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "plait/core/types.hpp"

/// Calls of CUB for comparison with plait's kernels. Only library_calls.cu includes CUB, because its namespace ::cuda
/// conflicts with plait::cuda. With null scratch memory a call returns the bytes that it needs. Throws `plait::error`
/// if CUB refuses.
namespace bench::library {

/// *out = the sum of n elements.
void sum(const float* x, std::int64_t n, float* out, void* scratch, std::size_t& bytes, cudaStream_t stream);

/// *out = the sum of the squares of n elements.
void sum_squares(const float* x, std::int64_t n, double* out, void* scratch, std::size_t& bytes, cudaStream_t stream);

/// y = x, rounded to bf16.
void cast(const float* x, plait::bf16* y, std::int64_t n, cudaStream_t stream);

/// Sorts pairs by the lowest `bits` of the keys. The results may be in either of the two arrays.
void sort_pairs(std::uint32_t* const keys[2], int* const values[2], int count, int bits, void* scratch,
                std::size_t& bytes, cudaStream_t stream);

}  // namespace bench::library
