// The shared part of the kernels of attention on a GPU: sizes as the device sees them, which query sees which key,
// tiles. The shape that callers give is kernels/attention_shape.hpp, and products of tiles are in kernels/cuda/mma.hpp.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/attention_shape.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/cuda/mma.hpp"

namespace plait::kernels::detail {

/// An `attention_shape` for the device. Query i of batch b sees the keys from `first_key(b, i)` on and before
/// `visible(i)`: the offsets, and that there is no mask or window, are all in `shift` and `lower`.
struct attention_sizes {
  int batch, q_len, k_len, heads, kv_heads, group, head_dim, shift, lower, k_offset;
  float scale;
  double exact_scale;
  const std::int32_t* first_visible;
  std::int64_t q_batch, k_batch, lse_stride;
  std::int64_t q_stride, k_stride, v_stride, o_stride, dq_stride, dk_stride, dv_stride, do_stride;

  /// `s` must be checked.
  explicit attention_sizes(const attention_shape& s)
      : batch(narrow("batch", s.batch)),
        q_len(narrow("q_len", s.q_len)),
        k_len(narrow("k_len", s.k_len)),
        heads(narrow("heads", s.heads)),
        kv_heads(narrow("kv_heads", s.kv_heads)),
        group(heads / kv_heads),
        head_dim(narrow("head_dim", s.head_dim)),
        shift(static_cast<int>(s.causal ? std::clamp(s.q_offset - s.k_offset + 1, -s.q_len, s.k_len) : s.k_len)),
        lower(s.window > 0 ? static_cast<int>(std::clamp(s.q_offset - s.window + 1 - s.k_offset, no_bound, s.k_len))
                           : static_cast<int>(no_bound)),
        k_offset(s.first_visible != nullptr ? static_cast<int>(s.k_offset) : 0),
        scale(static_cast<float>(s.scale)),
        exact_scale(s.scale),
        first_visible(s.first_visible),
        q_batch(s.q_batch),
        k_batch(s.k_batch),
        lse_stride(s.lse_stride),
        q_stride(s.q_stride),
        k_stride(s.k_stride),
        v_stride(s.v_stride),
        o_stride(s.o_stride),
        dq_stride(s.dq_stride),
        dk_stride(s.dk_stride),
        dv_stride(s.dv_stride),
        do_stride(s.do_stride) {
    if (head_dim > 256) fail({"attention: head_dim = ", head_dim, ", on a GPU at most 256"});
  }

  /// How many keys, from the first on, query i sees.
  __host__ __device__ int visible(int i) const {
    const int seen = i + shift;
    return seen < 0 ? 0 : seen < k_len ? seen : k_len;
  }
  /// The first query that sees key j, if any does.
  __host__ __device__ int first_query(int j) const { return j < shift ? 0 : j - shift + 1; }

  /// The key that a global position, one of `first_visible`, stands for; 0 if it lies before them all.
  __device__ int key_at(std::int32_t position) const { return position > k_offset ? position - k_offset : 0; }
  /// The first key that query i may see; after the last query, that of the last one or a later one.
  __device__ int first_key(int b, int i) const {
    int first = i + lower > 0 ? i + lower : 0;
    if (first_visible != nullptr) {
      const int own = key_at(first_visible[b * q_batch + (i < q_len ? i : q_len - 1)]);
      first = own > first ? own : first;
    }
    return first < k_len ? first : k_len;
  }
  /// The number of queries, from the first on, that may see key j or an earlier one, if `first_key` is not regarded.
  __device__ int end_query(int b, int j) const {
    const std::int64_t in_window = static_cast<std::int64_t>(j) - lower + 1;
    int end = in_window < 0 ? 0 : in_window < q_len ? static_cast<int>(in_window) : q_len;
    if (first_visible != nullptr) {
      int begin = 0;
      while (begin < end) {
        const int middle = (begin + end) / 2;
        if (key_at(first_visible[b * q_batch + middle]) <= j) {
          begin = middle + 1;
        } else {
          end = middle;
        }
      }
    }
    return end;
  }

  /// Where a head of a batch begins, for the queries' kind of array and the keys' kind.
  template <class P>
  __device__ P query_head(P array, int b, int head, std::int64_t stride) const {
    return array + b * q_batch * stride + static_cast<std::int64_t>(head) * head_dim;
  }
  template <class P>
  __device__ P key_head(P array, int b, int kv_head, std::int64_t stride) const {
    return array + b * k_batch * stride + static_cast<std::int64_t>(kv_head) * head_dim;
  }
  /// Where a head's row of lse or delta [batch, heads, q_len] begins.
  template <class P>
  __device__ P statistics(P array, int b, int head) const {
    return array + (static_cast<std::int64_t>(b) * heads + head) * lse_stride;
  }

 private:
  static constexpr std::int64_t no_bound = -(std::int64_t{1} << 30) - 1024;  // a query of any tile, added, is below 0
  static int narrow(const char* name, std::int64_t value) {
    constexpr std::int64_t most = 1 << 30;
    if (value > most) fail({"attention: ", name, " = ", value, ", at most 2^30"});
    return static_cast<int>(value);
  }
};

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;

__host__ __device__ inline int tiles_of(int n, int tile) { return (n + tile - 1) / tile; }

/// A grid of `tiles` x `heads` x `batch` blocks in one dimension, heads innermost.
inline unsigned attention_blocks(std::int64_t tiles, std::int64_t heads, std::int64_t batch) {
  const std::int64_t blocks = tiles * heads * batch;
  if (blocks > 0x7fffffff) fail({"attention: ", blocks, " tiles, at most 2^31 - 1 in one call"});
  return static_cast<unsigned>(blocks);
}

/// The work of one block. `from_end` counts the tiles down: where later tiles have more to do (causal queries), blocks
/// that start first get the most.
struct attention_work {
  int tile, head, batch;
  __device__ attention_work(int tiles, int heads, int batches, bool from_end) {
    const int block = static_cast<int>(blockIdx.x);
    head = block % heads;
    batch = block / heads % batches;
    tile = block / heads / batches;
    if (from_end) tile = tiles - 1 - tile;
  }
};

/// Widths of a head that kernels are made for; a narrower head is padded with zeros in shared memory.
template <class Call>
void with_head_width(int head_dim, const Call& call) {
  if (head_dim <= 64) return call(std::integral_constant<int, 64>());
  if (head_dim <= 128) return call(std::integral_constant<int, 128>());
  return call(std::integral_constant<int, 256>());
}

/// Elements between the rows of a tile of bf16: the 16 bytes more than a row put the rows of an 8 x 8 matrix into
/// different banks.
template <int Width>
inline constexpr int tile_pitch = Width + 8;

/// Starts to copy `Rows` rows of a head into a tile of shared memory; rows from `available` on and columns from
/// `head_dim` (a multiple of 8) on become 0.
template <int Rows, int Width, int Threads>
__device__ inline void load_tile(bf16* tile, const bf16* from, std::int64_t stride, int available, int head_dim) {
  constexpr int chunks = Width / 8, rows_at_once = Threads / chunks;
  static_assert(Threads % chunks == 0 && Rows % rows_at_once == 0);
  const int thread = static_cast<int>(threadIdx.x), row = thread / chunks, column = thread % chunks * 8;
  tile += row * tile_pitch<Width> + column;
  const bf16* source = from + row * stride + column;
  PLAIT_UNROLL
  for (int i = 0; i < Rows / rows_at_once; ++i) {
    const bool valid = row + i * rows_at_once < available && column < head_dim;
    copy_async(tile + i * rows_at_once * tile_pitch<Width>, valid ? source : from, valid);
    source += rows_at_once * stride;
  }
}

/// Turns a result's fragments of columns 16 i to 16 i + 15 into that of the factor A of a next product.
__device__ inline void result_to_a(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = bf16_pair(left[0], left[1]);
  a[1] = bf16_pair(left[2], left[3]);
  a[2] = bf16_pair(right[0], right[1]);
  a[3] = bf16_pair(right[2], right[3]);
}

/// scores[:, :] += A B^T over Width, for 16 rows of `a_tile` and `Columns` rows of `b_tile`.
template <int Width, int Columns>
__device__ inline void multiply_by_rows(row_of<float[4], Columns / 8>& scores, const bf16* a_tile, const bf16* b_tile) {
  constexpr int pitch = tile_pitch<Width>;
  PLAIT_UNROLL
  for (int k = 0; k < Width; k += 16) {
    unsigned a[4];
    load_a(a, a_tile + k, pitch);
    PLAIT_UNROLL
    for (int n = 0; n < Columns; n += 16) {
      unsigned b[4];
      load_b_columns(b, b_tile + n * pitch + k, pitch);
      mma_16x8x16(scores[n / 8], a, b[0], b[1]);
      mma_16x8x16(scores[n / 8 + 1], a, b[2], b[3]);
    }
  }
}

/// sums[:, :] += A B for 16 rows and 16 columns of A, given as a fragment, and `Columns` columns of `b_tile`.
template <int Width, int Columns>
__device__ inline void multiply_fragment(row_of<float[4], Columns / 8>& sums, const unsigned (&a)[4],
                                         const bf16* b_tile) {
  PLAIT_UNROLL
  for (int n = 0; n < Columns; n += 16) {
    unsigned b[4];
    load_b_rows(b, b_tile + n, tile_pitch<Width>);
    mma_16x8x16(sums[n / 8], a, b[0], b[1]);
    mma_16x8x16(sums[n / 8 + 1], a, b[2], b[3]);
  }
}

/// sums[:, :] += P B for 16 rows of P, given as fragments of a result with `Depth` columns, and `Columns` columns of
/// `b_tile` with `Depth` rows.
template <int Width, int Depth, int Columns>
__device__ inline void multiply_weights(row_of<float[4], Columns / 8>& sums, const row_of<float[4], Depth / 8>& weights,
                                        const bf16* b_tile) {
  PLAIT_UNROLL
  for (int k = 0; k < Depth; k += 16) {
    unsigned a[4];
    result_to_a(a, weights[k / 8], weights[k / 8 + 1]);
    multiply_fragment<Width, Columns>(sums, a, b_tile + k * tile_pitch<Width>);
  }
}

/// Writes two neighbouring elements times `factor`, or adds them to what is there.
__device__ inline void store_pair(bf16* to, float first, float second, bool add) {
  unsigned* const word = reinterpret_cast<unsigned*>(to);
  if (add) {
    const unsigned before = *word;
    first += device_float(bf16{static_cast<std::uint16_t>(before & 0xffffu)});
    second += device_float(bf16{static_cast<std::uint16_t>(before >> 16)});
  }
  *word = bf16_pair(first, second);
}
__device__ inline void store_pair(float* to, float first, float second, bool add) {
  to[0] = add ? to[0] + first : first;
  to[1] = add ? to[1] + second : second;
}

/// Writes a warp's 16 rows: `upper_factor` times rows group and `lower_factor` times rows group + 8 of a result, for
/// rows before `available` and columns before `columns`.
template <int Columns, class O>
__device__ inline void store_rows(O* to, std::int64_t stride, int available, int columns,
                                  const row_of<float[4], Columns / 8>& result, float upper_factor, float lower_factor,
                                  bool add) {
  const int row = warp_lane() / 4, pair = warp_lane() % 4;
  PLAIT_UNROLL
  for (int n = 0; n < Columns / 8; ++n) {
    const int column = 8 * n + 2 * pair;
    if (column < columns) {
      if (row < available) {
        store_pair(to + row * stride + column, result[n][0] * upper_factor, result[n][1] * upper_factor, add);
      }
      if (row + 8 < available) {
        store_pair(to + (row + 8) * stride + column, result[n][2] * lower_factor, result[n][3] * lower_factor, add);
      }
    }
  }
}

/// An array of results on the device: bf16 or, if `wide`, float. That is no template's matter, as only the end of a
/// kernel depends on it.
struct result_array {
  void* data;
  bool wide;
  explicit result_array(bf16* array) : data(array), wide(false) {}
  explicit result_array(float* array) : data(array), wide(true) {}

  /// Calls `use` with the array as what it is.
  template <class Use>
  __device__ void as_typed(const Use& use) const {
    if (wide) {
      use(static_cast<float*>(data));
    } else {
      use(static_cast<bf16*>(data));
    }
  }
};

/// Refuses heads that 16-byte copies cannot read.
template <class... Pointers>
void require_vectors(const attention_shape& s, Pointers... pointers) {
  if (s.head_dim % 8 != 0) fail({"attention: head_dim = ", s.head_dim, ", for bf16 a multiple of 8"});
  for (const std::int64_t stride :
       {s.q_stride, s.k_stride, s.v_stride, s.o_stride, s.dq_stride, s.dk_stride, s.dv_stride, s.do_stride}) {
    if (stride % 8 != 0) fail({"attention: a stride of ", stride, ", for bf16 a multiple of 8"});
  }
  if (!aligned16(pointers...)) fail("attention: bf16 arrays must begin on a 16-byte boundary");
}

}  // namespace plait::kernels::detail

#include "plait/core/macros_on.hpp"
