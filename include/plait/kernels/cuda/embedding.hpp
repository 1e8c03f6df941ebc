// CUDA kernels of embeddings. Test: tests/cuda/kernels/kernel_embedding.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/arrays.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

// The tokens of a batch, sorted by the table row that they look up, and then by their own order. This gives the
// gradient's sums one order. Test: tests/cuda/kernels/kernel_embedding.cpp.

/// Returns the local row of a token, or -1 for a row of another rank and for an invalid id, which is reported.
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

/// The sorted tokens and their rows, for the gradient.
///
///   row[place]     the rows of all tokens, in ascending order; `rows` for tokens without a row, which come last
///   token[place]   the token that has it; tokens of one row come in their order
///   begin[row]     the first place of a row, and
///   end[row]       the one after its last; neither is written for a row without tokens
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

/// CUB's `DeviceRunLengthEncode` would need another kernel, which assigns its runs to the rows.
static __global__ void bounds_of_rows(std::int64_t tokens, sorted_tokens s) {
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (place >= tokens || s.row[place] == s.rows) return;
  const std::uint32_t row = s.row[place];
  if (place == 0 || s.row[place - 1] != row) s.begin[row] = static_cast<int>(place);
  if (place + 1 == tokens || s.row[place + 1] != row) s.end[row] = static_cast<int>(place + 1);
}

/// Returns how many 4-byte numbers `sort_tokens` needs.
inline std::size_t numbers_to_sort(std::int64_t tokens, std::int64_t rows) {
  return static_cast<std::size_t>(4 * tokens + 2 * rows);
}

/// The result is in `memory`, on the device.
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

namespace plait::kernels {

namespace detail {

/// Loads in flight per thread.
inline constexpr int loads_in_flight = 4;

/// Each token has a block.
template <class T, class Id>
__global__ static void look_up(const Id* ids, const T* table, T* y, std::int64_t tokens, std::int64_t width,
                               std::int64_t first, std::int64_t rows_local, std::int64_t vocab, bool vectors,
                               device_fault* faults) {
  constexpr int n = vector16<T>::size;
  const std::int64_t step = blockDim.x * n;
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    const std::int64_t row = row_of_token(ids, token, first, rows_local, vocab, threadIdx.x == 0 ? faults : nullptr);
    const T* const from = row < 0 ? nullptr : table + row * width;
    T* const to = y + token * width;
    if (vectors) {
      for (std::int64_t c = threadIdx.x * n; c < width; c += loads_in_flight * step) {
        vector16<T> some[loads_in_flight]{};
        PLAIT_UNROLL
        for (int k = 0; k < loads_in_flight; ++k)
          if (from != nullptr && c + k * step < width) some[k] = load_vector(from + c + k * step);
        PLAIT_UNROLL
        for (int k = 0; k < loads_in_flight; ++k)
          if (c + k * step < width) store_vector(to + c + k * step, some[k]);
      }
    } else {
      for (std::int64_t c = threadIdx.x; c < width; c += blockDim.x) to[c] = from == nullptr ? T{} : from[c];
    }
  }
}

/// The number of a row's tokens that one block adds, for each part of the columns.
inline constexpr int piece_tokens = 128;

/// The grid is (place, part of the columns). The block at the first place of a piece adds the piece's tokens in order.
/// It adds the first piece of a row to the row, and others to row place / piece_tokens of `partial`, which is unique.
/// Every thread has N columns.
template <class T, int N>
__global__ static void add_pieces(const T* dy, gradient_of<T>* dtable, gradient_of<T>* partial, std::int64_t tokens,
                                  std::int64_t width, sorted_tokens s) {
  using G = gradient_of<T>;
  constexpr int at_once = 8;  // loads in flight
  for (std::int64_t place = blockIdx.x; place < tokens; place += gridDim.x) {
    const std::uint32_t row = s.row[place];
    if (row == s.rows) return;  // all later places have no row either
    const int at = static_cast<int>(place), begin = s.begin[row], left = s.end[row] - at;
    if ((at - begin) % piece_tokens != 0) continue;
    const int* const piece = s.token + at;
    const int size = left < piece_tokens ? left : piece_tokens;
    G* const out = at == begin ? dtable + row * width : partial + place / piece_tokens * width;
    const std::int64_t part = static_cast<std::int64_t>(gridDim.y) * blockDim.x * N;
    for (std::int64_t c = (static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N; c < width;
         c += part) {
      auto* const target = reinterpret_cast<element_pack<G, N>*>(out + c);
      element_pack<G, N> total{};
      if (at == begin) total = *target;
      for (int i = 0; i < size; i += at_once) {
        element_pack<T, N> some[at_once];
        PLAIT_UNROLL
        for (int k = 0; k < at_once; ++k) {
          if (i + k < size) some[k] = *reinterpret_cast<const element_pack<T, N>*>(dy + piece[i + k] * width + c);
        }
        PLAIT_UNROLL
        for (int k = 0; k < at_once; ++k) {
          if (i + k >= size) continue;
          PLAIT_UNROLL
          for (int j = 0; j < N; ++j) total.at[j] += number<G>(some[k].at[j]);
        }
      }
      *target = total;
    }
  }
}

/// Adds the pieces of a row after its first one to it, in order. The grid is (some places, part of the columns). A
/// block handles rows of several pieces that begin among its places.
template <class G>
__global__ static void add_partials(G* dtable, const G* partial, std::int64_t tokens, std::int64_t width,
                                    sorted_tokens s) {
  __shared__ std::uint32_t found[sorting_threads];
  __shared__ int count;
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  const std::uint32_t own = place < tokens ? s.row[place] : s.rows;
  if (own != s.rows && s.begin[own] == place && s.end[own] - place > piece_tokens) found[atomicAdd(&count, 1)] = own;
  __syncthreads();
  const int here = count;
  for (int i = 0; i < here; ++i) {
    const std::uint32_t row = found[i];
    const int begin = s.begin[row] / piece_tokens, pieces = (s.end[row] - s.begin[row] - 1) / piece_tokens + 1;
    const std::int64_t part = static_cast<std::int64_t>(gridDim.y) * blockDim.x;
    for (std::int64_t c = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; c < width; c += part) {
      G total = dtable[row * width + c];
      PLAIT_UNROLL_BY(8)  // loads in flight
      for (int p = 1; p < pieces; ++p) total += partial[static_cast<std::int64_t>(begin + p) * width + c];
      dtable[row * width + c] = total;
    }
  }
}

}  // namespace detail

template <class T, class Id>
void embedding_forward(cuda& device, const Id* ids, const T* table, T* y, std::int64_t tokens, std::int64_t width,
                       std::int64_t first, std::int64_t rows_local, std::int64_t vocab) {
  if (tokens <= 0 || width <= 0) return;
  const bool vectors = width % vector16<T>::size == 0 && aligned16(table, y);
  const std::int64_t accesses = vectors ? width / vector16<T>::size / detail::loads_in_flight : width;
  const auto threads = static_cast<unsigned>(std::clamp<std::int64_t>((accesses + 31) / 32 * 32, 32, 256));
  plait::detail::launch(device, {plait::detail::blocks_for(tokens, 1), threads}, detail::look_up<T, Id>, ids, table, y,
                        tokens, width, first, rows_local, vocab, vectors, device.faults());
}

template <class T, class Id>
void embedding_backward(cuda& device, const Id* ids, const T* dy, gradient_of<T>* dtable, std::int64_t tokens,
                        std::int64_t width, std::int64_t first, std::int64_t rows_local, std::int64_t vocab) {
  using G = gradient_of<T>;
  if (tokens <= 0 || width <= 0) return;
  auto memory = make_buffer<int>(device, detail::numbers_to_sort(tokens, rows_local));
  const detail::sorted_tokens sorted =
      detail::sort_tokens(device, ids, tokens, first, rows_local, vocab, memory.template data<int>());
  const bool several = tokens > detail::piece_tokens;
  auto sums =
      make_buffer<G>(device, several ? static_cast<std::size_t>((tokens / detail::piece_tokens + 1) * width) : 0);
  G* const partial = sums.template data<G>();
  constexpr int n = vector16<T>::size;
  const auto add = [&](auto kernel, std::int64_t threads) {
    const auto block = static_cast<unsigned>(std::clamp<std::int64_t>((threads + 31) / 32 * 32, 32, 128));
    const auto parts = static_cast<unsigned>(std::clamp<std::int64_t>((threads + block - 1) / block, 1, 64));
    plait::detail::launch(device, {dim3(plait::detail::blocks_for(tokens, 1), parts), block}, kernel, dy, dtable,
                          partial, tokens, width, sorted);
  };
  const bool vectors =
      width % n == 0 && aligned16(dy) && reinterpret_cast<std::uintptr_t>(dtable) % (n * sizeof(G)) == 0;
  if (vectors) {
    add(detail::add_pieces<T, n>, width / n);
  } else {
    add(detail::add_pieces<T, 1>, width);
  }
  if (!several) return;
  constexpr int threads = detail::sorting_threads;
  const auto parts = static_cast<unsigned>(std::clamp<std::int64_t>((width + threads - 1) / threads, 1, 64));
  plait::detail::launch(device, {dim3(plait::detail::blocks_for(tokens, threads), parts), threads},
                        detail::add_partials<G>, dtable, static_cast<const G*>(partial), tokens, width, sorted);
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
