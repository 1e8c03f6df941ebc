// Table lookup on a GPU for a range of the vocabulary: `table` [rows_local, width] holds the rows first ... first +
// rows_local - 1. An id outside [0, vocab) is reported by the next `synchronize`, and until then has zeros for a row;
// an id in another rank's range contributes zeros.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"

namespace plait::kernels {

/// y[t] = table[ids[t] - first], or zeros; y is [tokens, width].
template <class T, class Id>
void embedding_forward(cuda& device, const Id* ids, const T* table, T* y, std::int64_t tokens, std::int64_t width,
                       std::int64_t first, std::int64_t rows_local, std::int64_t vocab);

/// dtable[ids[t] - first] += dy[t] for the ids in range; dtable is [rows_local, width] of `gradient_of<T>`. The first
/// 128 tokens of a row are added to it in their order; every further 128 are summed first, and these sums added in
/// their order. At most 2^31 - 1 tokens and rows; more throw `plait::error`. Links with compiled_cuda_sort.cu.
template <class T, class Id>
void embedding_backward(cuda& device, const Id* ids, const T* dy, gradient_of<T>* dtable, std::int64_t tokens,
                        std::int64_t width, std::int64_t first, std::int64_t rows_local, std::int64_t vocab);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/embedding.ipp"
#endif
