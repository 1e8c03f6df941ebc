// A stand-in for CUB's radix sort: a stable sort, one operation of a stream, whose first call returns the bytes of
// scratch memory. The number of bits decides which of the two buffers holds the result; the other one has no valid
// content.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../../cuda_runtime.h"

namespace cub {

template <class T>
struct DoubleBuffer {
  T* d_buffers[2];
  int selector = 0;
  DoubleBuffer(T* current, T* alternate) : d_buffers{current, alternate} {}
  T* Current() { return d_buffers[selector]; }
  T* Alternate() { return d_buffers[selector ^ 1]; }
};

struct DeviceRadixSort {
  template <class Key, class Value>
  static cudaError_t SortPairs(void* scratch, std::size_t& scratch_bytes, DoubleBuffer<Key>& keys,
                               DoubleBuffer<Value>& values, int count, int begin_bit, int end_bit,
                               cudaStream_t stream = nullptr) {
    static_assert(std::is_unsigned_v<Key>);
    if (count < 0 || begin_bit < 0 || end_bit > static_cast<int>(8 * sizeof(Key)) || begin_bit > end_bit)
      return stand_in::fail(cudaErrorInvalidValue);
    const std::size_t needed = 1 + 8 * static_cast<std::size_t>(count) + 1024 * static_cast<std::size_t>(end_bit);
    if (scratch == nullptr) {
      scratch_bytes = needed;
      return cudaSuccess;
    }
    if (scratch_bytes < needed) return stand_in::fail(cudaErrorInvalidValue);
    const int flips = (end_bit - begin_bit + 7) / 8 % 2;  // one pass for each digit
    Key *const from = keys.Current(), *const to = keys.d_buffers[keys.selector ^ flips];
    Value *const values_from = values.Current(), *const values_to = values.d_buffers[values.selector ^ flips];
    Key* const other = to == from ? keys.Alternate() : from;
    Value* const values_other = values_to == values_from ? values.Alternate() : values_from;
    const std::vector<const void*> memory{to, other, values_to, values_other, scratch};
    const cudaError_t status = stand_in::enqueue_for("cub::DeviceRadixSort", stream, memory, [=] {
      std::memset(scratch, 0xff, needed);  // shows a size that is too small, or scratch memory shared between streams
      const auto n = static_cast<std::size_t>(count);
      const auto digits = [&](Key key) {
        const int width = end_bit - begin_bit;
        const Key shifted = begin_bit == static_cast<int>(8 * sizeof(Key)) ? Key{0} : key >> begin_bit;
        return width == static_cast<int>(8 * sizeof(Key)) ? shifted : shifted & ((Key{1} << width) - 1);
      };
      const std::vector<Key> k(from, from + n);
      const std::vector<Value> v(values_from, values_from + n);
      std::vector<std::size_t> order(n);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::stable_sort(order.begin(), order.end(),
                       [&](std::size_t a, std::size_t b) { return digits(k[a]) < digits(k[b]); });
      for (std::size_t i = 0; i < n; ++i) {
        to[i] = k[order[i]];
        values_to[i] = v[order[i]];
      }
      std::memset(other, 0xff, n * sizeof(Key));
      std::memset(values_other, 0xff, n * sizeof(Value));
    });
    if (status != cudaSuccess) return status;
    keys.selector ^= flips;
    values.selector ^= flips;
    return cudaSuccess;
  }
};

}  // namespace cub
