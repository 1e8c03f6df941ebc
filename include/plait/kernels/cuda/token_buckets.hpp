// The tokens of a batch, sorted by the row of an embedding's table that they look up and by their own order, so that
// the gradient's sums have one order. It adds nothing itself: kernels/cuda/embedding.hpp does. Test:
// tests/cuda/kernel_embedding.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "plait/device/buffer.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/faults.hpp"

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

/// The gradient's view of tokens and rows. Tokens of one row form a bucket.
///
///   count[row]      tokens of the row
///   start[row]      where its bucket begins; the order of the buckets does not matter
///   ticket[token]   a place in its bucket as the tokens happened to come; -1 for a token without a row
///   arrived[]       the buckets, each in the order of the tickets
///   place[token]    its place in the bucket in the order of the tokens; -1 for a token without a row
///   ordered[]       the buckets in that order
///
/// Counting with integer atomics hands out tickets in an order that changes from run to run; a token's place, the
/// number of smaller tokens in its bucket, does not. In short buckets every token counts the smaller ones; a long one
/// is sorted by a block, which marks its tokens in a bitmap and reads that in order.
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

inline constexpr int short_bucket = 64;  ///< most tokens of a bucket that is sorted by counting
inline constexpr int bucket_threads = 256;
inline constexpr int bitmap_words = 2048;  ///< of a block; more tokens than bits take several rounds

template <class Id>
__global__ static void take_tickets(const Id* ids, std::int64_t tokens, std::int64_t first, std::int64_t rows_local,
                                    std::int64_t vocab, token_buckets b, device_fault* faults) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens) return;
  const std::int64_t row = row_of_token(ids, token, first, rows_local, vocab, faults);
  b.ticket[token] = row < 0 ? -1 : atomicAdd(b.count + row, 1);
}

template <class Id>
__global__ static void open_buckets(const Id* ids, std::int64_t tokens, std::int64_t first, token_buckets b) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens || b.ticket[token] != 0) return;
  const std::int64_t row = static_cast<std::int64_t>(ids[token]) - first;
  b.start[row] = atomicAdd(b.used, b.count[row]);
}

template <class Id>
__global__ static void fill_buckets(const Id* ids, std::int64_t tokens, std::int64_t first, token_buckets b) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens || b.ticket[token] < 0) return;
  b.arrived[b.start[static_cast<std::int64_t>(ids[token]) - first] + b.ticket[token]] = static_cast<int>(token);
}

template <class Id>
__global__ static void order_short_buckets(const Id* ids, std::int64_t tokens, std::int64_t first, token_buckets b) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens) return;
  if (b.ticket[token] < 0) {
    b.place[token] = -1;
    return;
  }
  const std::int64_t row = static_cast<std::int64_t>(ids[token]) - first;
  const int size = b.count[row];
  if (size > short_bucket) return;
  const int* const bucket = b.arrived + b.start[row];
  int smaller = 0;
  for (int i = 0; i < size; ++i) smaller += bucket[i] < token ? 1 : 0;
  b.place[token] = smaller;
  b.ordered[b.start[row] + smaller] = static_cast<int>(token);
}

/// The tokens of one bucket from `base` on, as far as the bitmap goes, in order. `done` are those before them; returns
/// how many there are up to here.
__device__ inline int order_window(const token_buckets& b, int start, int size, std::int64_t base, int words, int done,
                                   unsigned* bits, int* sums) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int w = thread; w < words; w += bucket_threads) bits[w] = 0;
  __syncthreads();
  for (int i = thread; i < size; i += bucket_threads) {
    const std::int64_t at = b.arrived[start + i] - base;
    if (at >= 0 && at < 32 * static_cast<std::int64_t>(words)) atomicOr(bits + at / 32, 1u << (at % 32));
  }
  __syncthreads();
  const int each = (words + bucket_threads - 1) / bucket_threads;
  const int begin = thread * each, end = begin + each < words ? begin + each : words;
  int mine = 0;
  for (int w = begin; w < end; ++w) mine += __popc(bits[w]);
  sums[thread] = mine;
  for (int offset = 1; offset < bucket_threads; offset *= 2) {
    __syncthreads();
    const int before = thread >= offset ? sums[thread - offset] : 0;
    __syncthreads();
    sums[thread] += before;
  }
  __syncthreads();
  int rank = done + sums[thread] - mine;
  for (int w = begin; w < end; ++w) {
    for (unsigned left = bits[w]; left != 0; left &= left - 1) {
      const std::int64_t token = base + 32 * w + __ffs(static_cast<int>(left)) - 1;
      b.place[token] = rank;
      b.ordered[start + rank++] = static_cast<int>(token);
    }
  }
  done += sums[bucket_threads - 1];
  __syncthreads();  // bits and sums are free
  return done;
}

/// A block sorts the long buckets whose first tickets went to its tokens.
template <class Id>
__global__ static void order_long_buckets(const Id* ids, std::int64_t tokens, std::int64_t first, token_buckets b) {
  __shared__ unsigned bits[bitmap_words];
  __shared__ int sums[bucket_threads];
  __shared__ int found[bucket_threads];
  __shared__ int count;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * bucket_threads, token = begin + threadIdx.x;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (token < tokens && b.ticket[token] == 0 && b.count[static_cast<std::int64_t>(ids[token]) - first] > short_bucket)
    found[atomicAdd(&count, 1)] = static_cast<int>(threadIdx.x);
  __syncthreads();
  const int here = count;
  for (int i = 0; i < here; ++i) {
    const std::int64_t row = static_cast<std::int64_t>(ids[begin + found[i]]) - first;
    int done = 0;
    for (std::int64_t base = 0; base < tokens; base += 32 * bitmap_words) {
      const std::int64_t words = (tokens - base + 31) / 32;
      done = order_window(b, b.start[row], b.count[row], base,
                          static_cast<int>(words < bitmap_words ? words : bitmap_words), done, bits, sums);
    }
  }
}

/// Fills `b`, whose memory is on the device.
template <class Id>
void sort_tokens(cuda& device, const Id* ids, std::int64_t tokens, std::int64_t first, std::int64_t rows_local,
                 std::int64_t vocab, const token_buckets& b) {
  device.zero(b.count, static_cast<std::size_t>(rows_local + 1) * sizeof(int), device.main_stream());  // and `used`
  const plait::detail::launch_shape shape{plait::detail::blocks_for(tokens, bucket_threads), bucket_threads};
  plait::detail::launch(device, shape, take_tickets<Id>, ids, tokens, first, rows_local, vocab, b, device.faults());
  plait::detail::launch(device, shape, open_buckets<Id>, ids, tokens, first, b);
  plait::detail::launch(device, shape, fill_buckets<Id>, ids, tokens, first, b);
  plait::detail::launch(device, shape, order_short_buckets<Id>, ids, tokens, first, b);
  if (tokens > short_bucket) plait::detail::launch(device, shape, order_long_buckets<Id>, ids, tokens, first, b);
}

}  // namespace plait::kernels::detail
