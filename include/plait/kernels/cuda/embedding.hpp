#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/faults.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/cuda/tensor_table.hpp"

/// Table lookup for a range of the vocabulary: `table` [rows_local, width] holds the rows first ... first + rows_local
/// - 1. An id outside [0, vocab) is reported by the next `synchronize`, and until then has zeros for a row; an id in
/// another rank's range contributes zeros.
namespace plait::kernels {

namespace detail {

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

/// A block for each token.
template <class T, class Id>
__global__ static void look_up(const Id* ids, const T* table, T* y, std::int64_t tokens, std::int64_t width,
                               std::int64_t first, std::int64_t rows_local, std::int64_t vocab, bool vectors,
                               device_fault* faults) {
  constexpr int n = vector16<T>::size;
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    const std::int64_t row = row_of_token(ids, token, first, rows_local, vocab, threadIdx.x == 0 ? faults : nullptr);
    const T* const from = row < 0 ? nullptr : table + row * width;
    T* const to = y + token * width;
    if (vectors) {
      for (std::int64_t c = threadIdx.x * n; c < width; c += blockDim.x * n) {
        store_vector(to + c, from == nullptr ? vector16<T>{} : load_vector(from + c));
      }
    } else {
      for (std::int64_t c = threadIdx.x; c < width; c += blockDim.x) to[c] = from == nullptr ? T{} : from[c];
    }
  }
}

/// What the gradient needs to know of tokens and rows. Tokens of one row form a bucket.
///
///   count[row]      tokens of the row
///   start[row]      where its bucket begins; the order of the buckets does not matter
///   ticket[token]   a place in its bucket as the tokens happened to come; -1 for a token without a row
///   arrived[]       the buckets, each in the order of the tickets
///   place[token]    its place in the bucket in the order of the tokens
///   ordered[]       the buckets in that order
///
/// Counting with integer atomics hands out tickets in an order that changes from run to run; a token's place, the
/// number of smaller tokens in its bucket, does not.
struct token_buckets {
  int* count;
  int* used;  ///< one number: entries of all buckets so far
  int* start;
  int* ticket;
  int* arrived;
  int* place;
  int* ordered;

  static std::size_t numbers(std::int64_t tokens, std::int64_t rows) {
    return static_cast<std::size_t>(2 * rows + 1 + 4 * tokens);
  }
  static token_buckets in(int* memory, std::int64_t tokens, std::int64_t rows) {
    int* const start = memory + rows + 1;
    int* const ticket = start + rows;
    return {memory, memory + rows, start, ticket, ticket + tokens, ticket + 2 * tokens, ticket + 3 * tokens};
  }
};

template <class Id>
__global__ static void take_tickets(const Id* ids, std::int64_t tokens, std::int64_t first, std::int64_t rows_local,
                                    std::int64_t vocab, int* count, int* ticket, device_fault* faults) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens) return;
  const std::int64_t row = row_of_token(ids, token, first, rows_local, vocab, faults);
  ticket[token] = row < 0 ? -1 : atomicAdd(count + row, 1);
}

template <class Id>
__global__ static void open_buckets(const Id* ids, std::int64_t tokens, std::int64_t first, const int* count,
                                    const int* ticket, int* used, int* start) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens || ticket[token] != 0) return;
  const std::int64_t row = static_cast<std::int64_t>(ids[token]) - first;
  start[row] = atomicAdd(used, count[row]);
}

template <class Id>
__global__ static void fill_buckets(const Id* ids, std::int64_t tokens, std::int64_t first, const int* start,
                                    const int* ticket, int* arrived) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens || ticket[token] < 0) return;
  arrived[start[static_cast<std::int64_t>(ids[token]) - first] + ticket[token]] = static_cast<int>(token);
}

template <class Id>
__global__ static void order_buckets(const Id* ids, std::int64_t tokens, std::int64_t first, const int* count,
                                     const int* start, const int* ticket, const int* arrived, int* place,
                                     int* ordered) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens) return;
  int smaller = -1;
  if (ticket[token] >= 0) {
    const std::int64_t row = static_cast<std::int64_t>(ids[token]) - first;
    const int* const bucket = arrived + start[row];
    const int size = count[row];
    smaller = 0;
    for (int i = 0; i < size; ++i) smaller += bucket[i] < token ? 1 : 0;
    ordered[start[row] + smaller] = static_cast<int>(token);
  }
  place[token] = smaller;
}

/// Blocks (token, part of the columns); the block of the first token of a row adds all of the row's tokens in order.
/// Every thread has N columns.
template <class T, class Id, int N>
__global__ static void add_buckets(const Id* ids, const T* dy, gradient_of<T>* dtable, std::int64_t tokens,
                                   std::int64_t width, std::int64_t first, const int* count, const int* start,
                                   const int* place, const int* ordered) {
  using G = gradient_of<T>;
  constexpr int at_once = 4;  // loads in flight
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    if (place[token] != 0) continue;
    const std::int64_t row = static_cast<std::int64_t>(ids[token]) - first;
    const int* const bucket = ordered + start[row];
    const int size = count[row];
    const std::int64_t part = static_cast<std::int64_t>(gridDim.y) * blockDim.x * N;
    for (std::int64_t c = (static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N; c < width;
         c += part) {
      auto* const target = reinterpret_cast<element_pack<G, N>*>(dtable + row * width + c);
      element_pack<G, N> total = *target;
      int i = 0;
      for (; i + at_once <= size; i += at_once) {
        element_pack<T, N> some[at_once];
        for (int k = 0; k < at_once; ++k) {
          some[k] = *reinterpret_cast<const element_pack<T, N>*>(dy + bucket[i + k] * width + c);
        }
        for (int k = 0; k < at_once; ++k) {
          for (int j = 0; j < N; ++j) total.at[j] += number<G>(some[k].at[j]);
        }
      }
      for (; i < size; ++i) {
        const auto one = *reinterpret_cast<const element_pack<T, N>*>(dy + bucket[i] * width + c);
        for (int j = 0; j < N; ++j) total.at[j] += number<G>(one.at[j]);
      }
      *target = total;
    }
  }
}

}  // namespace detail

/// y[t] = table[ids[t] - first], or zeros; y is [tokens, width].
template <class T, class Id>
void embedding_forward(cuda& device, const Id* ids, const T* table, T* y, std::int64_t tokens, std::int64_t width,
                       std::int64_t first, std::int64_t rows_local, std::int64_t vocab) {
  if (tokens <= 0 || width <= 0) return;
  const bool vectors = width % vector16<T>::size == 0 && aligned16(table, y);
  const std::int64_t accesses = vectors ? width / vector16<T>::size : width;
  const auto threads = static_cast<unsigned>(std::clamp<std::int64_t>((accesses + 31) / 32 * 32, 32, 256));
  plait::detail::launch(device, {plait::detail::blocks_for(tokens, 1), threads}, detail::look_up<T, Id>, ids, table, y,
                        tokens, width, first, rows_local, vocab, vectors, device.faults());
}

/// dtable[ids[t] - first] += dy[t] for the ids in range, in the order of the tokens; dtable is [rows_local, width] of
/// `gradient_of<T>`. At most 2^31 - 1 tokens.
template <class T, class Id>
void embedding_backward(cuda& device, const Id* ids, const T* dy, gradient_of<T>* dtable, std::int64_t tokens,
                        std::int64_t width, std::int64_t first, std::int64_t rows_local, std::int64_t vocab) {
  using detail::token_buckets;
  if (tokens <= 0 || width <= 0) return;
  auto memory = make_buffer<int>(device, token_buckets::numbers(tokens, rows_local));
  const token_buckets b = token_buckets::in(memory.template data<int>(), tokens, rows_local);
  device.zero(b.count, static_cast<std::size_t>(rows_local + 1) * sizeof(int), device.main_stream());  // and `used`
  const plait::detail::launch_shape shape{plait::detail::blocks_for(tokens, 256), 256};
  plait::detail::launch(device, shape, detail::take_tickets<Id>, ids, tokens, first, rows_local, vocab, b.count,
                        b.ticket, device.faults());
  plait::detail::launch(device, shape, detail::open_buckets<Id>, ids, tokens, first, b.count, b.ticket, b.used,
                        b.start);
  plait::detail::launch(device, shape, detail::fill_buckets<Id>, ids, tokens, first, b.start, b.ticket, b.arrived);
  plait::detail::launch(device, shape, detail::order_buckets<Id>, ids, tokens, first, b.count, b.start, b.ticket,
                        b.arrived, b.place, b.ordered);
  constexpr int n = vector16<T>::size;
  const auto add = [&](auto kernel, std::int64_t threads) {
    const auto block = static_cast<unsigned>(std::clamp<std::int64_t>((threads + 31) / 32 * 32, 32, 128));
    const auto parts = static_cast<unsigned>(std::clamp<std::int64_t>((threads + block - 1) / block, 1, 64));
    plait::detail::launch(device, {dim3(plait::detail::blocks_for(tokens, 1), parts), block}, kernel, ids, dy, dtable,
                          tokens, width, first, b.count, b.start, b.place, b.ordered);
  };
  const bool vectors =
      width % n == 0 && aligned16(dy) && reinterpret_cast<std::uintptr_t>(dtable) % (n * sizeof(gradient_of<T>)) == 0;
  if (vectors) {
    add(detail::add_buckets<T, Id, n>, width / n);
  } else {
    add(detail::add_buckets<T, Id, 1>, width);
  }
}

}  // namespace plait::kernels
