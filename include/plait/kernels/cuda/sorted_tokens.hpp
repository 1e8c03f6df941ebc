// The tokens of a batch, sorted by the row of an embedding's table that they look up and by their own order, so that
// the gradient's sums have one order. Test: tests/cuda/kernel_embedding.cpp.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/faults.hpp"
#include "plait/kernels/cuda/sort_pairs.hpp"

namespace plait::kernels::detail {

/// The local row of a token, or -1 for one of another rank and for an illegal id, which is reported.
template <class Id>
__device__ inline std::int64_t row_of_token(const Id* ids, std::int64_t token, std::int64_t first,
                                            std::int64_t rows_local, std::int64_t vocab, device_fault* faults) {
  const auto id = static_cast<std::int64_t>(ids[token]);
  if (id < 0 || id >= vocab) {
    if (faults != nullptr) report_fault(faults, device_fault::embedding_id, token, id, vocab);
    return -1;
  }
  const std::int64_t row = id - first;
  return row >= 0 && row < rows_local ? row : -1;
}

/// The gradient's view of tokens and rows.
///
///   row[place]     the rows of all tokens, in their order; `rows` for tokens without a row, which come last
///   token[place]   the token that has it; tokens of one row come in their order
///   begin[row]     the first place of a row, and
///   end[row]       the one behind its last; neither is written for a row without tokens
struct sorted_tokens {
  const std::uint32_t* row;
  const int* token;
  int* begin;
  int* end;
  std::uint32_t rows;
};

inline constexpr int sorting_threads = 256;

template <class Id>
__global__ static void rows_of_tokens(const Id* ids, std::int64_t tokens, std::int64_t first, std::int64_t rows_local,
                                      std::int64_t vocab, std::uint32_t* rows, int* order, device_fault* faults) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens) return;
  const std::int64_t row = row_of_token(ids, token, first, rows_local, vocab, faults);
  rows[token] = static_cast<std::uint32_t>(row < 0 ? rows_local : row);
  order[token] = static_cast<int>(token);
}

/// Not CUB's `DeviceRunLengthEncode`, whose runs would have to be spread over the rows by another kernel.
static __global__ void bounds_of_rows(std::int64_t tokens, sorted_tokens s) {
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (place >= tokens || s.row[place] == s.rows) return;
  const std::uint32_t row = s.row[place];
  if (place == 0 || s.row[place - 1] != row) s.begin[row] = static_cast<int>(place);
  if (place + 1 == tokens || s.row[place + 1] != row) s.end[row] = static_cast<int>(place + 1);
}

/// Numbers of 4 bytes that `sort_tokens` needs.
inline std::size_t numbers_to_sort(std::int64_t tokens, std::int64_t rows) {
  return static_cast<std::size_t>(4 * tokens + 2 * rows);
}

/// The result lies in `memory`, which is on the device.
template <class Id>
sorted_tokens sort_tokens(cuda& device, const Id* ids, std::int64_t tokens, std::int64_t first, std::int64_t rows_local,
                          std::int64_t vocab, int* memory) {
  constexpr std::int64_t most = std::numeric_limits<int>::max();
  if (tokens > most || rows_local > most) {
    fail({"embedding: ", tokens, " tokens and ", rows_local, " rows, on a GPU at most 2^31 - 1 of each"});
  }
  auto* const rows = reinterpret_cast<std::uint32_t*>(memory + 2 * tokens);
  key_values pairs{{rows, rows + tokens}, {memory, memory + tokens}};
  const plait::detail::launch_shape shape{plait::detail::blocks_for(tokens, sorting_threads), sorting_threads};
  plait::detail::launch(device, shape, rows_of_tokens<Id>, ids, tokens, first, rows_local, vocab, pairs.keys[0],
                        pairs.values[0], device.faults());
  const auto none = static_cast<std::uint32_t>(rows_local);  // the largest key
  sort_pairs(device, pairs, static_cast<int>(tokens), none == 0 ? 1 : static_cast<int>(std::bit_width(none)));
  int* const bounds = memory + 4 * tokens;
  const sorted_tokens sorted{pairs.keys[pairs.now], pairs.values[pairs.now], bounds, bounds + rows_local, none};
  plait::detail::launch(device, shape, bounds_of_rows, tokens, sorted);
  return sorted;
}

}  // namespace plait::kernels::detail

#include "plait/core/macros_on.hpp"
