// One launch for many tensors: a table of them travels in the kernel's parameters, so that nothing is allocated or
// copied for it, and every block takes one chunk of one tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

/// N elements of T that one instruction moves.
template <class T, int N>
struct alignas(N * sizeof(T)) element_pack {
  row_of<T, N> at;
};

/// Whether `pointer` may be read as packs of N elements.
template <int N, class T>
__device__ inline bool holds_packs(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % (N * sizeof(T)) == 0;
}

/// Kernel parameters are limited to 4 KiB where a program is to run on every driver of CUDA 12; some of it is left for
/// other parameters.
inline constexpr int table_bytes = 3900;

/// `Entry` has a member `size`. Entry i has the chunks first_chunk[i] ... first_chunk[i + 1] - 1 of the launch.
template <class Entry>
struct tensor_table {
  static constexpr int room = (table_bytes - 16) / static_cast<int>(sizeof(Entry) + sizeof(int));
  row_of<Entry, room> entries;
  row_of<int, room + 1> first_chunk;
  int count;

  /// The entry whose chunk this is.
  __device__ int entry_of(int chunk) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_chunk[middle] <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

/// Calls f(table, chunks) for as many full tables as the tensors need; tensors without elements are left out.
template <class Entry, class F>
void for_each_table(std::span<const Entry> entries, std::int64_t chunk, F f) {
  tensor_table<Entry> table{};
  int chunks = 0;
  const auto flush = [&] {
    if (table.count > 0) f(table, chunks);
    table.count = 0;
    chunks = 0;
  };
  for (const Entry& entry : entries) {
    if (entry.size <= 0) continue;
    if (table.count == tensor_table<Entry>::room) flush();
    table.entries[table.count] = entry;
    table.first_chunk[table.count] = chunks;
    chunks += static_cast<int>((entry.size + chunk - 1) / chunk);
    table.first_chunk[++table.count] = chunks;
  }
  flush();
}

}  // namespace plait::kernels::detail
