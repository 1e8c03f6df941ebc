// The merge of attention over two disjoint sets of keys on a GPU. It reads results and no keys, and knows no ranks:
// nn/attention/engine.hpp calls it for one piece of the keys after another. Test: tests/cuda/kernel_merge_lse.cpp.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/attention_shape.hpp"

namespace plait::kernels {

/// Combines the attention of the same queries over two disjoint sets of keys: o and lse become what attention over both
/// would have given, from o, lse of one set and o_other, lse_other of the other. Uses batch, q_len, heads, head_dim,
/// q_batch, lse_stride and o_stride (of o) of the shape; `other_stride` is the stride of o_other, whose batches and
/// whose lse lie as those of o. Where many sets are merged, a float o collects the parts without rounding each time.
template <class T, class Other>
void merge_lse(cuda& device, T* o, statistic_of<T>* lse, const Other* o_other, const statistic_of<T>* lse_other,
               std::int64_t other_stride, const attention_shape& shape);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/merge_lse.ipp"
#endif
