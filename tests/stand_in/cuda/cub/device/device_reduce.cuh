// A stand-in for CUB's reductions: one operation of a stream, whose first call returns the bytes of scratch memory. It
// adds elements in their order.
#pragma once

#include <cstddef>
#include <cstring>

#include "../../cuda_runtime.h"

namespace cub {

struct DeviceReduce {
  template <class In, class Out, class Count, class Reduce, class Map, class T>
  static cudaError_t TransformReduce(void* scratch, std::size_t& scratch_bytes, const In* in, Out* out, Count count,
                                     Reduce reduce, Map map, T initial, cudaStream_t stream = nullptr) {
    if (count < 0) return stand_in::fail(cudaErrorInvalidValue);
    const auto needed = 256 + static_cast<std::size_t>(count) / 1024 * sizeof(T);
    if (scratch == nullptr) {
      scratch_bytes = needed;
      return cudaSuccess;
    }
    if (scratch_bytes < needed) return stand_in::fail(cudaErrorInvalidValue);
    return stand_in::enqueue_for("cub::DeviceReduce", stream, {in, out, scratch}, [=] {
      std::memset(scratch, 0xff, needed);
      T total = initial;
      for (Count i = 0; i < count; ++i) total = reduce(total, map(in[i]));
      *out = total;
    });
  }
  template <class In, class Out, class Count>
  static cudaError_t Sum(void* scratch, std::size_t& scratch_bytes, const In* in, Out* out, Count count,
                         cudaStream_t stream = nullptr) {
    return TransformReduce(
        scratch, scratch_bytes, in, out, count, [](Out a, Out b) { return a + b; },
        [](In x) { return static_cast<Out>(x); }, Out{}, stream);
  }
};

}  // namespace cub
