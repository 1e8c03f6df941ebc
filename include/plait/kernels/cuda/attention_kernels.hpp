// The kernels of attention and its gradients on a GPU: in float and double, and in bf16 on tensor cores.
// kernels/cuda/attention.hpp is the interface for callers.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels::detail {

/// An `attention_shape` for the device. Query i of batch b sees the keys from `first_key(b, i)` on and before
/// `visible(b, i)`. `shift`, `lower` and `prefix` include the offsets and the mask.
struct attention_sizes {
  static constexpr bool has_rule = false;
  int batch, q_len, k_len, heads, kv_heads, group, head_dim, shift, lower, prefix, k_offset;
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
        shift(static_cast<int>(
            std::clamp(attention_mask{s.mask.before, s.mask.after}.end(s.q_offset) - s.k_offset, -s.q_len, s.k_len))),
        lower(static_cast<int>(std::clamp(s.mask.first(s.q_offset) - s.k_offset, no_bound, s.k_len))),
        prefix(static_cast<int>(std::clamp<std::int64_t>(s.mask.prefix - s.k_offset, 0, s.k_len))),
        k_offset(s.first_visible != nullptr || s.end_visible != nullptr ? static_cast<int>(s.k_offset) : 0),
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
    if (s.mask.allows != nullptr && s.mask.gpu_kernels == nullptr)
      fail(
          "attention: this mask's rule is for the CPU alone; for a GPU write mask.where<rule>() in a file that nvcc "
          "compiles, with PLAIT_HOST_DEVICE before the function rule");
    if (head_dim > 256) fail({"attention: head_dim = ", head_dim, ", on a GPU at most 256"});
  }

  /// Returns how many keys, from the first on, query i of a batch sees.
  __device__ int visible(int /*b*/, int i) const {
    const int seen = i + shift > prefix ? i + shift : prefix;
    return seen < k_len ? seen : k_len;
  }
  /// Whether the mask's rule lets query i see key j. These sizes have no rule.
  __device__ static constexpr bool allows(int, int) { return true; }
  /// Returns the first query of a batch that sees key j, if any does.
  __device__ int first_query(int /*b*/, int j) const { return j < shift || j < prefix ? 0 : j - shift + 1; }

  /// Returns the key at a global position of `first_visible` or `end_visible`; 0 for a position before all keys.
  __device__ int key_at(std::int32_t position) const { return position > k_offset ? position - k_offset : 0; }
  /// Returns the first key that query i may see. After the last query, returns the last query's first key or a later
  /// one.
  __device__ int first_key(int b, int i) const {
    int first = i + lower > 0 ? i + lower : 0;
    if (first_visible != nullptr) {
      const int own = key_at(first_visible[b * q_batch + (i < q_len ? i : q_len - 1)]);
      first = own > first ? own : first;
    }
    return first < k_len ? first : k_len;
  }
  /// Returns the number of queries, from the first on, that may see key j or an earlier one, ignoring `first_key`.
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

  /// Returns the start of a head in a batch: one function for arrays of queries, one for arrays of keys.
  template <class P>
  __device__ P query_head(P array, int b, int head, std::int64_t stride) const {
    return array + b * q_batch * stride + static_cast<std::int64_t>(head) * head_dim;
  }
  template <class P>
  __device__ P key_head(P array, int b, int kv_head, std::int64_t stride) const {
    return array + b * k_batch * stride + static_cast<std::int64_t>(kv_head) * head_dim;
  }
  /// Returns the start of a head's row of lse or delta [batch, heads, q_len].
  template <class P>
  __device__ P statistics(P array, int b, int head) const {
    return array + (static_cast<std::int64_t>(b) * heads + head) * lse_stride;
  }

 protected:
  // It stays below 0 when the index of a query of any tile is added.
  static constexpr std::int64_t no_bound = -(std::int64_t{1} << 30) - 1024;
  static int narrow(const char* name, std::int64_t value) {
    constexpr std::int64_t most = 1 << 30;
    if (value > most) fail({"attention: ", name, " = ", value, ", at most 2^30"});
    return static_cast<int>(value);
  }
};

/// The sizes of an attention with an `attention_score` or with `end_visible`. They have separate kernels, so that
/// attention without these is not slower.
struct scored_attention_sizes : attention_sizes {
  const std::int32_t* end_visible;
  double cap;
  bool alibi;
  int power_of_heads, first_head, distance;

  explicit scored_attention_sizes(const attention_shape& s)
      : attention_sizes(s),
        end_visible(s.end_visible),
        cap(s.score.cap),
        alibi(s.score.alibi),
        power_of_heads(narrow("score.all_heads", s.score.power_of_heads())),
        first_head(narrow("score.first_head", s.score.first_head)),
        distance(alibi ? narrow("the distance of a query and a key", s.q_offset - s.k_offset) : 0) {}

  /// Returns the number of visible keys; after the last query, at least the last query's number.
  __device__ int visible(int b, int i) const {
    const int seen = attention_sizes::visible(b, i);
    if (end_visible == nullptr) return seen;
    const int end = key_at(end_visible[b * q_batch + (i < q_len ? i : q_len - 1)]);
    return end < seen ? end : seen;
  }
  __device__ int first_query(int b, int j) const {
    int begin = attention_sizes::first_query(b, j), end = end_visible != nullptr ? q_len : begin;
    while (begin < end) {
      const int middle = (begin + end) / 2;
      if (key_at(end_visible[b * q_batch + middle]) <= j)
        begin = middle + 1;
      else
        end = middle;
    }
    return begin;
  }
};
template <class Sizes>
inline constexpr bool scores_change = std::is_base_of_v<scored_attention_sizes, Sizes>;

/// The sizes of an attention with a rule, with or without an `attention_score`. Few programs have a rule, and each
/// compiles the kernels for its own rule.
template <attention_rule Rule>
struct ruled_attention_sizes : scored_attention_sizes {
  static constexpr bool has_rule = true;
  std::int64_t first_query_position, first_key_position;

  explicit ruled_attention_sizes(const attention_shape& s)
      : scored_attention_sizes(s), first_query_position(s.q_offset), first_key_position(s.k_offset) {}

  /// Calls the rule only for tokens that exist.
  __device__ bool allows(int i, int j) const {
    return i < q_len && j < k_len && Rule(first_query_position + i, first_key_position + j);
  }
};

__device__ inline float tanh_of(float x) { return ::tanhf(x); }
__device__ inline double tanh_of(double x) { return ::tanh(x); }
__device__ inline float power_of_2(float x) { return exp2f(x); }
__device__ inline double power_of_2(double x) { return exp2(x); }

/// The `attention_score` of one head.
template <class T>
struct head_score {
  T cap, slope;
  int distance;

  __device__ head_score(const scored_attention_sizes& s, int head)
      : cap(static_cast<T>(s.cap)), slope(T(0)), distance(s.distance) {
    if (!s.alibi) return;
    const T heads = static_cast<T>(s.power_of_heads), h = static_cast<T>(s.first_head + head);
    slope = power_of_2(h < heads ? T(-8) * (h + T(1)) / heads : T(-4) * (T(2) * (h - heads) + T(1)) / heads);
  }
  /// Changes the score of a query and a key. Returns the derivative of the new score by the old one.
  __device__ T change(T& score, int query, int key) const {
    T derivative = T(1);
    if (cap > T(0)) {
      const T t = tanh_of(score / cap);
      score = cap * t;
      derivative = T(1) - t * t;
    }
    const int before = query + distance - key;
    score -= slope * static_cast<T>(before < 0 ? -before : before);
    return derivative;
  }
};

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;

__host__ __device__ inline int tiles_of(int n, int tile) { return (n + tile - 1) / tile; }

/// Returns a grid of `tiles` x `heads` x `batch` blocks in one dimension, heads innermost.
inline unsigned attention_blocks(std::int64_t tiles, std::int64_t heads, std::int64_t batch) {
  const std::int64_t blocks = tiles * heads * batch;
  if (blocks > 0x7fffffff) fail({"attention: ", blocks, " tiles, at most 2^31 - 1 in one call"});
  return static_cast<unsigned>(blocks);
}

/// The work of one block. `from_end` reverses the order of tiles: if later tiles have more work (causal queries),
/// blocks that start first get the most.
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

/// Calls `call` with the width of the smallest kernel for `head_dim`. Shared memory pads a narrower head with zeros.
template <class Call>
void with_head_width(int head_dim, const Call& call) {
  if (head_dim <= 64) return call(std::integral_constant<int, 64>());
  if (head_dim <= 128) return call(std::integral_constant<int, 128>());
  return call(std::integral_constant<int, 256>());
}

/// Elements between the rows of a bf16 tile. The padding of 16 bytes puts the rows of an 8 x 8 matrix into different
/// banks.
template <int Width>
inline constexpr int tile_pitch = Width + 8;

/// Starts to copy `Rows` rows of a head into a tile of shared memory. Rows from `available` on and columns from
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

/// Turns a result's fragments for columns 16 i to 16 i + 15 into the fragment of factor A for the next product.
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

/// sums[:, :] += P B for 16 rows of P. P is given as fragments of a result with `Depth` columns. B has `Depth` rows and
/// `Columns` columns in `b_tile`.
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

/// Writes two neighbouring elements times `factor`, or adds them to the memory's contents.
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

/// Writes a warp's 16 rows of a result: rows group times `upper_factor`, and rows group + 8 times `lower_factor`. Only
/// rows before `available` and columns before `columns` are written.
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

/// An array of results on the device: bf16 or, if `wide`, float. The type is not a template parameter, because only the
/// end of a kernel depends on it.
struct result_array {
  void* data;
  bool wide;
  result_array(bf16* array) : data(array), wide(false) {}
  result_array(float* array) : data(array), wide(true) {}

  /// Calls `use` with the array as a pointer of its type.
  template <class Use>
  __device__ void as_typed(const Use& use) const {
    if (wide) {
      use(static_cast<float*>(data));
    } else {
      use(static_cast<bf16*>(data));
    }
  }
};

/// Refuses heads that are not aligned for 16-byte copies.
template <class... Pointers>
void require_vectors(const attention_shape& s, Pointers... pointers) {
  if (s.head_dim % 8 != 0) fail({"attention: head_dim = ", s.head_dim, ", for bf16 a multiple of 8"});
  for (const std::int64_t stride :
       {s.q_stride, s.k_stride, s.v_stride, s.o_stride, s.dq_stride, s.dk_stride, s.dv_stride, s.do_stride}) {
    if (stride % 8 != 0) fail({"attention: a stride of ", stride, ", for bf16 a multiple of 8"});
  }
  if (!aligned16(pointers...)) fail("attention: bf16 arrays must begin on a 16-byte boundary");
}

// ---- in float and double, without tensor cores -------------------------------------------------------------------
//
// 256 threads form a 16 x 16 grid: thread (y, x) computes the elements (y + 16 r, x + 16 c) of every product.

inline constexpr int scalar_threads = 256;

/// Elements between the rows of a tile: an odd number, so that a column's elements are in different banks.
template <int Width>
inline constexpr int scalar_pitch = Width + 1;

template <class T, int Width>
struct scalar_forward_tiles {
  static constexpr int queries = sizeof(T) == 4 ? 64 : 32, keys = 32;
  static constexpr std::size_t shared_bytes =
      ((queries + keys) * scalar_pitch<Width> + queries * scalar_pitch<keys>)*sizeof(T) + queries * sizeof(int);
};

template <class T, int Width>
struct scalar_backward_tiles {
  static constexpr int rows = sizeof(T) == 4 ? 32 : 16;
  static constexpr std::size_t shared_bytes =
      (4 * rows * scalar_pitch<Width> + 2 * rows * scalar_pitch<rows> + 2 * rows) * sizeof(T) + rows * sizeof(int);
};

__device__ inline float precise_exp(float x) { return expf(x); }
__device__ inline double precise_exp(double x) { return exp(x); }
__device__ inline float precise_log(float x) { return logf(x); }
__device__ inline double precise_log(double x) { return log(x); }

template <class T>
__device__ inline T scale_of(const attention_sizes& s) {
  return static_cast<T>(s.exact_scale);
}

__device__ inline int scalar_x() { return static_cast<int>(threadIdx.x) % 16; }
__device__ inline int scalar_y() { return static_cast<int>(threadIdx.x) / 16; }

/// Copies `Rows` rows of a head into a tile. Rows from `available` on and columns from `head_dim` on become 0.
template <int Rows, int Width, class T>
__device__ inline void load_scalar_tile(T* tile, const T* from, std::int64_t stride, int available, int head_dim) {
  for (int index = static_cast<int>(threadIdx.x); index < Rows * Width; index += scalar_threads) {
    const int row = index / Width, column = index % Width;
    const bool valid = row < available && column < head_dim;
    tile[row * scalar_pitch<Width> + column] = valid ? from[row * stride + column] : T(0);
  }
}

/// products = A B^T over the first `depth` columns of both tiles.
template <int Width, int Rows, int Columns, class T>
__device__ inline void multiply_scalar_rows(row_of<row_of<T, Columns / 16>, Rows / 16>& products, const T* a,
                                            const T* b, int depth) {
  constexpr int pitch = scalar_pitch<Width>;
  const T *const a_row = a + scalar_y() * pitch, *const b_row = b + scalar_x() * pitch;
  PLAIT_UNROLL_BY(4)
  for (int i = 0; i < depth; ++i) {
    T left[Rows / 16], right[Columns / 16];
    PLAIT_UNROLL
    for (int r = 0; r < Rows / 16; ++r) left[r] = a_row[16 * r * pitch + i];
    PLAIT_UNROLL
    for (int c = 0; c < Columns / 16; ++c) right[c] = b_row[16 * c * pitch + i];
    PLAIT_UNROLL
    for (int r = 0; r < Rows / 16; ++r) {
      PLAIT_UNROLL
      for (int c = 0; c < Columns / 16; ++c) products[r][c] += left[r] * right[c];
    }
  }
}

/// sums += P B, for P[Rows, Depth] (or, with `Transposed`, stored as [Depth, Rows]) and B[Depth, Width].
template <int Width, int Rows, int Depth, bool Transposed, class T>
__device__ inline void multiply_scalar_weights(row_of<row_of<T, Width / 16>, Rows / 16>& sums, const T* p, const T* b) {
  constexpr int p_pitch = scalar_pitch<(Transposed ? Rows : Depth)>;
  const int x = scalar_x(), y = scalar_y();
  PLAIT_UNROLL_BY(2)
  for (int i = 0; i < Depth; ++i) {
    T weight[Rows / 16];
    PLAIT_UNROLL
    for (int r = 0; r < Rows / 16; ++r)
      weight[r] = Transposed ? p[i * p_pitch + y + 16 * r] : p[(y + 16 * r) * p_pitch + i];
    PLAIT_UNROLL
    for (int c = 0; c < Width / 16; ++c) {
      const T value = b[i * scalar_pitch<Width> + x + 16 * c];
      PLAIT_UNROLL
      for (int r = 0; r < Rows / 16; ++r) sums[r][c] += weight[r] * value;
    }
  }
}

/// Writes rows times `factor[row]`, or adds them to the memory's contents.
template <int Width, int Rows, class T>
__device__ inline void store_scalar_rows(T* to, std::int64_t stride, int available, int head_dim,
                                         const row_of<row_of<T, Width / 16>, Rows / 16>& sums,
                                         const row_of<T, Rows / 16>& factor, bool add) {
  PLAIT_UNROLL
  for (int r = 0; r < Rows / 16; ++r) {
    const int row = scalar_y() + 16 * r;
    if (row >= available) continue;
    PLAIT_UNROLL
    for (int c = 0; c < Width / 16; ++c) {
      const int column = scalar_x() + 16 * c;
      if (column >= head_dim) continue;
      T* const target = to + row * stride + column;
      *target = sums[r][c] * factor[r] + (add ? *target : T(0));
    }
  }
}

/// Return the sum and the maximum over the 16 threads that share y, to each of them.
template <class T>
__device__ inline T sum_over_x(T value) {
  for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(whole_warp, value, offset);
  return value;
}
template <class T>
__device__ inline T max_over_x(T value) {
  for (int offset = 8; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(whole_warp, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

/// Writes the first visible key of `Rows` queries from q0 on.
template <int Rows>
__device__ inline void load_first_keys(int* first_keys, int batch, int q0, const attention_sizes& s) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < Rows) first_keys[row] = s.first_key(batch, q0 + row);
}

/// Scales a thread's scores of a query, and sets those of keys that the query does not see to -inf. `k0` is the tile's
/// first key, and `first_keys` has the first visible keys of the block's queries.
template <int Queries, class T, std::size_t Columns, class Sizes>
__device__ inline void mask_scalar_scores(T (&scores)[Columns], const int* first_keys, int x, int row, int q0, int k0,
                                          int batch, int head, const Sizes& s) {
  constexpr int columns = static_cast<int>(Columns);
  constexpr T nothing = -infinite<T>;
  const int seen = s.visible(batch, q0 + row) - k0;
  PLAIT_UNROLL
  for (int c = 0; c < columns; ++c) scores[c] *= scale_of<T>(s);
  if constexpr (scores_change<Sizes>) {
    const head_score<T> score(s, head);
    PLAIT_UNROLL
    for (int c = 0; c < columns; ++c) score.change(scores[c], q0 + row, k0 + x + 16 * c);
  }
  PLAIT_UNROLL
  for (int c = 0; c < columns; ++c) {
    const bool sees = x + 16 * c < seen && s.allows(q0 + row, k0 + x + 16 * c);
    scores[c] = sees ? scores[c] : nothing;
  }
  if (k0 < first_keys[Queries - 1]) {
    const int first = first_keys[row] - k0;
    PLAIT_UNROLL
    for (int c = 0; c < columns; ++c) scores[c] = x + 16 * c < first ? nothing : scores[c];
  }
}

/// Writes the weights of a thread's scores, exp(score - maximum), to a row of a tile. Updates the running maximum and
/// sum. Returns the factor that rescales earlier sums to the new maximum.
template <class T, std::size_t Columns>
__device__ inline T weigh_scalar_scores(T* weights, const T (&scores)[Columns], int x, T& row_max, T& row_sum) {
  constexpr int columns = static_cast<int>(Columns);
  constexpr T nothing = -infinite<T>;
  T largest = row_max;
  PLAIT_UNROLL
  for (int c = 0; c < columns; ++c) largest = scores[c] > largest ? scores[c] : largest;
  largest = max_over_x(largest);
  const T shrink = row_max == nothing ? T(1) : precise_exp(row_max - largest);
  const T shift = largest == nothing ? T(0) : largest;
  row_max = largest;
  row_sum *= shrink;
  PLAIT_UNROLL
  for (int c = 0; c < columns; ++c) {
    const T weight = precise_exp(scores[c] - shift);
    row_sum += weight;
    weights[x + 16 * c] = weight;
  }
  return shrink;
}

/// Adds the sums of the threads that share a query, and returns 1 / sum; 0 if the query saw no key. The thread that
/// `writes` writes the query's lse.
template <class T>
__device__ inline T finish_scalar_row(T row_max, T row_sum, T* lse, bool writes, int query, const attention_work& work,
                                      const attention_sizes& s) {
  row_sum = sum_over_x(row_sum);
  const bool saw = row_sum != T(0);  // NaN counts, because it must stay visible
  const T factor = saw ? T(1) / row_sum : T(0);
  if (writes && query < s.q_len) {
    s.statistics(lse, work.batch, work.head)[query] = saw ? row_max + precise_log(row_sum) : -infinite<T>;
  }
  return factor;
}

/// Attention in float or double: as `attention_forward_mma`, but keys and then values use one tile.
template <class T, int Width, class Sizes>
static __global__ void __launch_bounds__(scalar_threads, 1)
    attention_forward_scalar(const T* q, const T* k, const T* v, T* o, T* lse, Sizes s) {
  using tiles = scalar_forward_tiles<T, Width>;
  constexpr int queries = tiles::queries, keys = tiles::keys, rows = queries / 16, columns = keys / 16;
  PLAIT_DYNAMIC_SHARED(T, query_tile);
  T* const key_tile = query_tile + queries * scalar_pitch<Width>;
  T* const weights = key_tile + keys * scalar_pitch<Width>;
  int* const first_keys = reinterpret_cast<int*>(weights + queries * scalar_pitch<keys>);
  const attention_work work(tiles_of(s.q_len, queries), s.heads, s.batch, true);
  const int q0 = work.tile * queries, kv_head = work.head / s.group, x = scalar_x(), y = scalar_y();
  const int last = (q0 + queries < s.q_len ? q0 + queries : s.q_len) - 1, visible = s.visible(work.batch, last);
  const T* const key_rows = s.key_head(k, work.batch, kv_head, s.k_stride);
  const T* const value_rows = s.key_head(v, work.batch, kv_head, s.v_stride);
  load_scalar_tile<queries, Width>(query_tile, s.query_head(q, work.batch, work.head, s.q_stride) + q0 * s.q_stride,
                                   s.q_stride, s.q_len - q0, s.head_dim);
  T sums[rows][Width / 16] = {}, row_max[rows], row_sum[rows], factor[rows];
  for (int r = 0; r < rows; ++r) {
    row_max[r] = -infinite<T>;
    row_sum[r] = T(0);
  }
  load_first_keys<queries>(first_keys, work.batch, q0, s);
  for (int k0 = s.first_key(work.batch, q0) / keys * keys; k0 < visible; k0 += keys) {
    __syncthreads();
    load_scalar_tile<keys, Width>(key_tile, key_rows + k0 * s.k_stride, s.k_stride, s.k_len - k0, s.head_dim);
    __syncthreads();
    T scores[rows][columns] = {};
    multiply_scalar_rows<Width, queries, keys>(scores, query_tile, key_tile, s.head_dim);
    __syncthreads();
    load_scalar_tile<keys, Width>(key_tile, value_rows + k0 * s.v_stride, s.v_stride, s.k_len - k0, s.head_dim);
    PLAIT_UNROLL
    for (int r = 0; r < rows; ++r) {
      const int row = y + 16 * r;
      mask_scalar_scores<queries>(scores[r], first_keys, x, row, q0, k0, work.batch, work.head, s);
      const T shrink = weigh_scalar_scores(weights + row * scalar_pitch<keys>, scores[r], x, row_max[r], row_sum[r]);
      PLAIT_UNROLL
      for (int c = 0; c < Width / 16; ++c) sums[r][c] *= shrink;
    }
    __syncthreads();
    multiply_scalar_weights<Width, queries, keys, false>(sums, weights, key_tile);
  }
  PLAIT_UNROLL
  for (int r = 0; r < rows; ++r) {
    factor[r] = finish_scalar_row(row_max[r], row_sum[r], lse, x == 0, q0 + y + 16 * r, work, s);
  }
  store_scalar_rows<Width, queries>(s.query_head(o, work.batch, work.head, s.o_stride) + q0 * s.o_stride, s.o_stride,
                                    s.q_len - q0, s.head_dim, sums, factor, false);
}

/// Probabilities of one tile of a head, p = exp(score(scale Q K^T) - lse). Gradients of the scores, ds = p (dO V^T -
/// delta) times the derivative of `score`. Both are 0 where a query does not see a key.
template <int Width, int Rows, class T, class Sizes>
__device__ inline void scalar_score_gradients(row_of<row_of<T, Rows / 16>, Rows / 16>& p,
                                              row_of<row_of<T, Rows / 16>, Rows / 16>& ds, const T* query_tile,
                                              const T* key_tile, const T* dout_tile, const T* value_tile,
                                              const T* lse_rows, const T* delta_rows, const int* first_keys, int q0,
                                              int k0, int batch, int head, const Sizes& s) {
  multiply_scalar_rows<Width, Rows, Rows>(p, query_tile, key_tile, s.head_dim);
  multiply_scalar_rows<Width, Rows, Rows>(ds, dout_tile, value_tile, s.head_dim);
  T scale = scale_of<T>(s);
  if constexpr (scores_change<Sizes>) {
    const head_score<T> score(s, head);
    PLAIT_UNROLL
    for (int r = 0; r < Rows / 16; ++r) {
      const int row = scalar_y() + 16 * r;
      PLAIT_UNROLL
      for (int c = 0; c < Rows / 16; ++c) {
        p[r][c] *= scale;
        const T derivative = score.change(p[r][c], q0 + row, k0 + scalar_x() + 16 * c);
        ds[r][c] = (ds[r][c] - delta_rows[row]) * derivative + delta_rows[row];
      }
    }
    scale = T(1);
  }
  PLAIT_UNROLL
  for (int r = 0; r < Rows / 16; ++r) {
    const int row = scalar_y() + 16 * r, query = q0 + row;
    PLAIT_UNROLL
    for (int c = 0; c < Rows / 16; ++c) {
      const int key = k0 + scalar_x() + 16 * c;
      const bool seen = query < s.q_len && key < s.visible(batch, query) && s.allows(query, key);
      p[r][c] = seen ? precise_exp(p[r][c] * scale - lse_rows[row]) : T(0);
      ds[r][c] = seen ? p[r][c] * (ds[r][c] - delta_rows[row]) : T(0);
    }
  }
  if (k0 < first_keys[Rows - 1]) {
    PLAIT_UNROLL
    for (int r = 0; r < Rows / 16; ++r) {
      const int first = first_keys[scalar_y() + 16 * r] - k0;
      PLAIT_UNROLL
      for (int c = 0; c < Rows / 16; ++c) {
        if (scalar_x() + 16 * c >= first) continue;
        p[r][c] = T(0);
        ds[r][c] = T(0);
      }
    }
  }
}

/// Copies the rows of lse and delta for a tile of queries.
template <int Rows, class T>
__device__ inline void load_row_statistics(T* lse_rows, T* delta_rows, const T* lse, const T* delta, int available) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < Rows) {
    lse_rows[row] = row < available ? lse[row] : T(0);
    delta_rows[row] = row < available ? delta[row] : T(0);
  }
}

/// dK and dV in float or double. A block has a tile of keys of one head, and loops over all queries that see it.
template <class T, int Width, class Sizes>
static __global__ void __launch_bounds__(scalar_threads, 1)
    attention_key_gradients_scalar(const T* q, const T* k, const T* v, const T* lse, const T* d_o, const T* delta,
                                   T* dk, T* dv, Sizes s, bool add) {
  constexpr int rows = scalar_backward_tiles<T, Width>::rows, pitch = scalar_pitch<Width>, per_thread = rows / 16;
  PLAIT_DYNAMIC_SHARED(T, key_tile);
  T *const value_tile = key_tile + rows * pitch, *const query_tile = value_tile + rows * pitch;
  T *const dout_tile = query_tile + rows * pitch, *const p_tile = dout_tile + rows * pitch;
  T *const ds_tile = p_tile + rows * scalar_pitch<rows>, *const lse_rows = ds_tile + rows * scalar_pitch<rows>;
  T* const delta_rows = lse_rows + rows;
  int* const first_keys = reinterpret_cast<int*>(delta_rows + rows);
  const attention_work work(tiles_of(s.k_len, rows), s.kv_heads, s.batch, false);
  const int k0 = work.tile * rows;
  load_scalar_tile<rows, Width>(key_tile, s.key_head(k, work.batch, work.head, s.k_stride) + k0 * s.k_stride,
                                s.k_stride, s.k_len - k0, s.head_dim);
  load_scalar_tile<rows, Width>(value_tile, s.key_head(v, work.batch, work.head, s.v_stride) + k0 * s.v_stride,
                                s.v_stride, s.k_len - k0, s.head_dim);
  const int end = s.end_query(work.batch, k0 + rows - 1);
  T dkeys[per_thread][Width / 16] = {}, dvalues[per_thread][Width / 16] = {};
  for (int head = work.head * s.group; head < (work.head + 1) * s.group; ++head) {
    for (int q0 = s.first_query(work.batch, k0) / rows * rows; q0 < end; q0 += rows) {
      __syncthreads();
      load_scalar_tile<rows, Width>(query_tile, s.query_head(q, work.batch, head, s.q_stride) + q0 * s.q_stride,
                                    s.q_stride, s.q_len - q0, s.head_dim);
      load_scalar_tile<rows, Width>(dout_tile, s.query_head(d_o, work.batch, head, s.do_stride) + q0 * s.do_stride,
                                    s.do_stride, s.q_len - q0, s.head_dim);
      load_row_statistics<rows>(lse_rows, delta_rows, s.statistics(lse, work.batch, head) + q0,
                                s.statistics(delta, work.batch, head) + q0, s.q_len - q0);
      load_first_keys<rows>(first_keys, work.batch, q0, s);
      __syncthreads();
      T p[per_thread][per_thread] = {}, ds[per_thread][per_thread] = {};
      scalar_score_gradients<Width, rows>(p, ds, query_tile, key_tile, dout_tile, value_tile, lse_rows, delta_rows,
                                          first_keys, q0, k0, work.batch, head, s);
      for (int r = 0; r < per_thread; ++r) {
        for (int c = 0; c < per_thread; ++c) {
          const int at = (scalar_y() + 16 * r) * scalar_pitch<rows> + scalar_x() + 16 * c;
          p_tile[at] = p[r][c];
          ds_tile[at] = ds[r][c];
        }
      }
      __syncthreads();
      multiply_scalar_weights<Width, rows, rows, true>(dvalues, p_tile, dout_tile);
      multiply_scalar_weights<Width, rows, rows, true>(dkeys, ds_tile, query_tile);
    }
  }
  T key_factor[per_thread], value_factor[per_thread];
  for (int r = 0; r < per_thread; ++r) {
    key_factor[r] = scale_of<T>(s);
    value_factor[r] = T(1);
  }
  store_scalar_rows<Width, rows>(s.key_head(dk, work.batch, work.head, s.dk_stride) + k0 * s.dk_stride, s.dk_stride,
                                 s.k_len - k0, s.head_dim, dkeys, key_factor, add);
  store_scalar_rows<Width, rows>(s.key_head(dv, work.batch, work.head, s.dv_stride) + k0 * s.dv_stride, s.dv_stride,
                                 s.k_len - k0, s.head_dim, dvalues, value_factor, add);
}

/// dQ in float or double. A block has a tile of queries of one head, and loops over the keys that it sees.
template <class T, int Width, class Sizes>
static __global__ void __launch_bounds__(scalar_threads, 1)
    attention_query_gradients_scalar(const T* q, const T* k, const T* v, const T* lse, const T* d_o, const T* delta,
                                     T* dq, Sizes s, bool add) {
  constexpr int rows = scalar_backward_tiles<T, Width>::rows, pitch = scalar_pitch<Width>, per_thread = rows / 16;
  PLAIT_DYNAMIC_SHARED(T, key_tile);
  T *const value_tile = key_tile + rows * pitch, *const query_tile = value_tile + rows * pitch;
  T *const dout_tile = query_tile + rows * pitch, *const ds_tile = dout_tile + rows * pitch;
  T *const lse_rows = ds_tile + rows * scalar_pitch<rows>, *const delta_rows = lse_rows + rows;
  int* const first_keys = reinterpret_cast<int*>(delta_rows + rows);
  const attention_work work(tiles_of(s.q_len, rows), s.heads, s.batch, true);
  const int q0 = work.tile * rows, kv_head = work.head / s.group;
  const int last = (q0 + rows < s.q_len ? q0 + rows : s.q_len) - 1, visible = s.visible(work.batch, last);
  load_scalar_tile<rows, Width>(query_tile, s.query_head(q, work.batch, work.head, s.q_stride) + q0 * s.q_stride,
                                s.q_stride, s.q_len - q0, s.head_dim);
  load_scalar_tile<rows, Width>(dout_tile, s.query_head(d_o, work.batch, work.head, s.do_stride) + q0 * s.do_stride,
                                s.do_stride, s.q_len - q0, s.head_dim);
  load_row_statistics<rows>(lse_rows, delta_rows, s.statistics(lse, work.batch, work.head) + q0,
                            s.statistics(delta, work.batch, work.head) + q0, s.q_len - q0);
  load_first_keys<rows>(first_keys, work.batch, q0, s);
  T dqueries[per_thread][Width / 16] = {};
  for (int k0 = s.first_key(work.batch, q0) / rows * rows; k0 < visible; k0 += rows) {
    __syncthreads();
    load_scalar_tile<rows, Width>(key_tile, s.key_head(k, work.batch, kv_head, s.k_stride) + k0 * s.k_stride,
                                  s.k_stride, s.k_len - k0, s.head_dim);
    load_scalar_tile<rows, Width>(value_tile, s.key_head(v, work.batch, kv_head, s.v_stride) + k0 * s.v_stride,
                                  s.v_stride, s.k_len - k0, s.head_dim);
    __syncthreads();
    T p[per_thread][per_thread] = {}, ds[per_thread][per_thread] = {};
    scalar_score_gradients<Width, rows>(p, ds, query_tile, key_tile, dout_tile, value_tile, lse_rows, delta_rows,
                                        first_keys, q0, k0, work.batch, work.head, s);
    for (int r = 0; r < per_thread; ++r) {
      for (int c = 0; c < per_thread; ++c) {
        ds_tile[(scalar_y() + 16 * r) * scalar_pitch<rows> + scalar_x() + 16 * c] = ds[r][c];
      }
    }
    __syncthreads();
    multiply_scalar_weights<Width, rows, rows, false>(dqueries, ds_tile, key_tile);
  }
  T factor[per_thread];
  for (int r = 0; r < per_thread; ++r) factor[r] = scale_of<T>(s);
  store_scalar_rows<Width, rows>(s.query_head(dq, work.batch, work.head, s.dq_stride) + q0 * s.dq_stride, s.dq_stride,
                                 s.q_len - q0, s.head_dim, dqueries, factor, add);
}

template <int Width, class T, class Sizes>
void launch_attention_forward(cuda& device, const T* q, const T* k, const T* v, T* o, T* lse, const Sizes& sizes) {
  using tiles = scalar_forward_tiles<T, Width>;
  plait::detail::allow_shared(attention_forward_scalar<T, Width, Sizes>, tiles::shared_bytes);
  plait::detail::launch(device,
                        {attention_blocks(tiles_of(sizes.q_len, tiles::queries), sizes.heads, sizes.batch),
                         scalar_threads, tiles::shared_bytes},
                        attention_forward_scalar<T, Width, Sizes>, q, k, v, o, lse, sizes);
}

template <int Width, class T, class Sizes>
void launch_attention_backward(cuda& device, const T* q, const T* k, const T* v, const T* lse, const T* d_o,
                               const T* delta, T* dq, T* dk, T* dv, const Sizes& sizes,
                               attention_accumulate accumulate) {
  using tiles = scalar_backward_tiles<T, Width>;
  if (sizes.k_len > 0) {
    plait::detail::allow_shared(attention_key_gradients_scalar<T, Width, Sizes>, tiles::shared_bytes);
    plait::detail::launch(device,
                          {attention_blocks(tiles_of(sizes.k_len, tiles::rows), sizes.kv_heads, sizes.batch),
                           scalar_threads, tiles::shared_bytes},
                          attention_key_gradients_scalar<T, Width, Sizes>, q, k, v, lse, d_o, delta, dk, dv, sizes,
                          accumulate.keys_and_values);
  }
  if (sizes.q_len > 0) {
    plait::detail::allow_shared(attention_query_gradients_scalar<T, Width, Sizes>, tiles::shared_bytes);
    plait::detail::launch(device,
                          {attention_blocks(tiles_of(sizes.q_len, tiles::rows), sizes.heads, sizes.batch),
                           scalar_threads, tiles::shared_bytes},
                          attention_query_gradients_scalar<T, Width, Sizes>, q, k, v, lse, d_o, delta, dq, sizes,
                          accumulate.queries);
  }
}

// ---- in bf16 on tensor cores: the rows of a warp -----------------------------------------------------------------

/// The 16 rows of a warp; the thread has `row` and `row + 8`. Of every 8 columns of a result it has 2 `pair` and 2
/// `pair` + 1.
struct warp_rows {
  int warp, pair, first_row, row;
  /// `first` is the block's first row.
  explicit __device__ warp_rows(int first)
      : warp(static_cast<int>(threadIdx.x) / warp_lanes),
        pair(warp_lane() % 4),
        first_row(first + 16 * warp),
        row(first_row + warp_lane() / 4) {}
};

/// The queries of a warp. The causal mask lets a query see the first `seen` keys. Windows and documents hide the first
/// `hidden` keys.
struct warp_queries : warp_rows {
  int batch, seen_by_all, seen_by_any, hidden_from_all, hidden_from_any;

  /// `q0` is the block's first query.
  template <class Sizes>
  __device__ warp_queries(const Sizes& s, int of_batch, int q0)
      : warp_rows(q0),
        batch(of_batch),
        seen_by_all(s.visible(batch, first_row)),
        seen_by_any(first_row < s.q_len ? s.visible(batch, first_row + 15) : 0),
        hidden_from_all(s.first_key(batch, first_row)),
        hidden_from_any(s.first_key(batch, first_row + 15)) {}

  /// Whether any query may see one of the keys k0 to k0 + keys - 1.
  __device__ bool see_any(int k0, int keys) const { return k0 < seen_by_any && k0 + keys > hidden_from_all; }
};

/// Replaces the elements of keys before a query's first visible key. A result has a column for each key from k0 on.
template <int Keys>
__device__ inline void hide_early_keys(row_of<float[4], Keys / 8>& result, float replacement, const warp_queries& own,
                                       int k0, const attention_sizes& s) {
  if (k0 >= own.hidden_from_any) return;
  PLAIT_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int first = s.first_key(own.batch, own.row + 8 * r) - k0 - 2 * own.pair;
    PLAIT_UNROLL
    for (int n = 0; n < Keys / 8; ++n) {
      if (8 * n < first) result[n][2 * r] = replacement;
      if (8 * n + 1 < first) result[n][2 * r + 1] = replacement;
    }
  }
}

// ---- forward -----------------------------------------------------------------------------------------------------

/// A block has `queries` queries of one head, 16 per warp, and loops over their keys, `keys` at a time.
template <int Width>
struct forward_tiles {
  static constexpr int warps = 8, threads = 32 * warps, queries = 16 * warps, keys = Width <= 128 ? 64 : 32;
  static constexpr int pitch = tile_pitch<Width>;
  static constexpr std::size_t shared_bytes = (queries + 2 * keys) * pitch * sizeof(bf16);
  /// Number of blocks that should share a multiprocessor; registers limit it. A rule needs more registers.
  static constexpr int blocks = Width <= 64 ? 2 : 1, blocks_with_rule = 1;
  /// Whether the queries stay in registers.
  static constexpr bool keep_queries = Width == 128;
};

/// The queries of a warp as factor A of the scores: fragments in registers if `forward_tiles` keeps them there, else
/// rows in shared memory.
template <int Width>
struct warp_query_factor {
  static constexpr bool kept = forward_tiles<Width>::keep_queries;
  static constexpr int pitch = tile_pitch<Width>;
  const bf16* rows;
  row_of<unsigned[4], (kept ? Width / 16 : 1)> fragments;

  explicit __device__ warp_query_factor(const bf16* own_rows) : rows(own_rows) {
    if constexpr (kept) {
      PLAIT_UNROLL
      for (int i = 0; i < Width / 16; ++i) load_a(fragments[i], rows + 16 * i, pitch);
    }
  }

  /// scores[:, :] += Q K^T for `Keys` rows of `key_tile`.
  template <int Keys>
  __device__ void multiply(row_of<float[4], Keys / 8>& scores, const bf16* key_tile) const {
    if constexpr (kept) {
      PLAIT_UNROLL
      for (int i = 0; i < Width / 16; ++i) {
        PLAIT_UNROLL
        for (int n = 0; n < Keys; n += 16) {
          unsigned b[4];
          load_b_columns(b, key_tile + n * pitch + 16 * i, pitch);
          mma_16x8x16(scores[n / 8], fragments[i], b[0], b[1]);
          mma_16x8x16(scores[n / 8 + 1], fragments[i], b[2], b[3]);
        }
      }
    } else {
      multiply_by_rows<Width, Keys>(scores, rows, key_tile);
    }
  }
};

/// Scales scores so that 2^score is their weight, and sets those of keys that a query does not see to -inf.
template <int Keys, class Sizes>
__device__ inline void mask_scores(row_of<float[4], Keys / 8>& scores, const warp_queries& own, int k0, float scale,
                                   int head, const Sizes& s) {
  constexpr float nothing = -infinite<float>;
  if constexpr (scores_change<Sizes>) {
    const head_score<float> score(s, head);
    PLAIT_UNROLL
    for (int n = 0; n < Keys / 8; ++n) {
      PLAIT_UNROLL
      for (int e = 0; e < 4; ++e) {
        scores[n][e] *= s.scale;
        score.change(scores[n][e], own.row + e / 2 * 8, k0 + 8 * n + 2 * own.pair + e % 2);
      }
    }
    scale = log2_e;
  }
  PLAIT_UNROLL
  for (int n = 0; n < Keys / 8; ++n) {
    PLAIT_UNROLL
    for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
  }
  if (k0 + Keys > own.seen_by_all) {
    PLAIT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int seen = s.visible(own.batch, own.row + 8 * r) - k0 - 2 * own.pair;
      PLAIT_UNROLL
      for (int n = 0; n < Keys / 8; ++n) {
        if (8 * n >= seen) scores[n][2 * r] = nothing;
        if (8 * n + 1 >= seen) scores[n][2 * r + 1] = nothing;
      }
    }
  }
  hide_early_keys<Keys>(scores, nothing, own, k0, s);
  PLAIT_UNROLL
  for (int n = 0; n < Keys / 8; ++n) {
    PLAIT_UNROLL
    for (int e = 0; e < 4; ++e)
      if (!s.allows(own.row + e / 2 * 8, k0 + 8 * n + 2 * own.pair + e % 2)) scores[n][e] = nothing;
  }
}

/// The softmax of a thread's two queries over the tiles so far: their maxima, equal on the four threads of a query, and
/// the sums of the thread's own weights.
struct running_softmax {
  float row_max[2] = {-infinite<float>, -infinite<float>}, row_sum[2] = {0.0f, 0.0f};

  /// Turns the scores of a tile into weights, 2^(score - maximum). Sets `shrink` to the factors that rescale earlier
  /// sums to the new maxima.
  template <int Keys>
  __device__ void weigh(row_of<float[4], Keys / 8>& scores, float (&shrink)[2]) {
    constexpr float nothing = -infinite<float>;
    float largest[2] = {row_max[0], row_max[1]};
    PLAIT_UNROLL
    for (int n = 0; n < Keys / 8; ++n) {
      PLAIT_UNROLL
      for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], scores[n][e]);
    }
    PLAIT_UNROLL
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(whole_warp, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(whole_warp, largest[r], 2));
      // If nothing was visible so far, nothing needs rescaling, and -inf - -inf would be NaN.
      shrink[r] = row_max[r] == nothing ? 1.0f : fast_exp2(row_max[r] - largest[r]);
      row_max[r] = largest[r];
      if (largest[r] == nothing) largest[r] = 0.0f;
      row_sum[r] *= shrink[r];
    }
    PLAIT_UNROLL
    for (int n = 0; n < Keys / 8; ++n) {
      PLAIT_UNROLL
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = fast_exp2(scores[n][e] - largest[e / 2]);
        row_sum[e / 2] += scores[n][e];
      }
    }
  }

  /// Adds the sums of the four threads of a query, writes each lse, and sets `factor` to 1 / sum; 0 if a query saw no
  /// key.
  __device__ void finish(float (&factor)[2], float* lse, const warp_queries& own, const attention_work& work,
                         const attention_sizes& s) {
    PLAIT_UNROLL
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(whole_warp, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(whole_warp, row_sum[r], 2);
      const bool saw = row_sum[r] != 0.0f;  // NaN counts, because it must stay visible
      factor[r] = saw ? 1.0f / row_sum[r] : 0.0f;
      if (own.pair == 0 && own.row + 8 * r < s.q_len) {
        s.statistics(lse, work.batch, work.head)[own.row + 8 * r] =
            saw ? row_max[r] * ln_2 + logf(row_sum[r]) : -infinite<float>;
      }
    }
  }
};

/// Turns a tile's scores into fragments of weights, and rescales the sums of earlier tiles.
template <int Width, int Keys>
__device__ inline void weigh_scores(row_of<unsigned[4], Keys / 16>& weights, row_of<float[4], Width / 8>& sums,
                                    row_of<float[4], Keys / 8>& scores, running_softmax& softmax) {
  float shrink[2];
  softmax.weigh<Keys>(scores, shrink);
  PLAIT_UNROLL
  for (int n = 0; n < Width / 8; ++n) {
    PLAIT_UNROLL
    for (int e = 0; e < 4; ++e) sums[n][e] *= shrink[e / 2];
  }
  PLAIT_UNROLL
  for (int i = 0; i < Keys / 16; ++i) result_to_a(weights[i], scores[2 * i], scores[2 * i + 1]);
}

/// Attention of bf16 on tensor cores after FlashAttention-2 (Dao 2023). The scores, running maxima, sums and outputs of
/// 16 queries are in the registers of one warp, in float, with powers of 2 instead of e. Values are loaded while scores
/// are computed. The next keys are loaded while values are weighted.
template <int Width, class Sizes>
static __global__ void __launch_bounds__(forward_tiles<Width>::threads, Sizes::has_rule
                                                                            ? forward_tiles<Width>::blocks_with_rule
                                                                            : forward_tiles<Width>::blocks)
    attention_forward_mma(const bf16* q, const bf16* k, const bf16* v, result_array o, float* lse, Sizes s) {
  using tiles = forward_tiles<Width>;
  constexpr int keys = tiles::keys, pitch = tiles::pitch;
  PLAIT_DYNAMIC_SHARED(bf16, query_tile);
  bf16* const key_tile = query_tile + tiles::queries * pitch;
  bf16* const value_tile = key_tile + keys * pitch;

  const attention_work work(tiles_of(s.q_len, tiles::queries), s.heads, s.batch, true);
  const int q0 = work.tile * tiles::queries, kv_head = work.head / s.group;
  const bf16* const key_rows = s.key_head(k, work.batch, kv_head, s.k_stride);
  const bf16* const value_rows = s.key_head(v, work.batch, kv_head, s.v_stride);
  const int last = (q0 + tiles::queries < s.q_len ? q0 + tiles::queries : s.q_len) - 1;
  const int first_tile = s.first_key(work.batch, q0) / keys, key_tiles = tiles_of(s.visible(work.batch, last), keys);
  const warp_queries own(s, work.batch, q0);
  const float scale = s.scale * log2_e;
  const auto load_rows = [&](bf16* tile, const bf16* rows, std::int64_t stride, int k0) {
    load_tile<keys, Width, tiles::threads>(tile, rows + k0 * stride, stride, s.k_len - k0, s.head_dim);
    commit_copies();
  };

  load_tile<tiles::queries, Width, tiles::threads>(query_tile,
                                                   s.query_head(q, work.batch, work.head, s.q_stride) + q0 * s.q_stride,
                                                   s.q_stride, s.q_len - q0, s.head_dim);
  load_rows(key_tile, key_rows, s.k_stride, first_tile * keys);
  wait_for_copies<0>();
  __syncthreads();
  const warp_query_factor<Width> own_queries(query_tile + 16 * own.warp * pitch);

  float sums[Width / 8][4] = {};
  running_softmax softmax;
  for (int tile = first_tile; tile < key_tiles; ++tile) {
    const int k0 = tile * keys;
    const bool busy = own.see_any(k0, keys);
    load_rows(value_tile, value_rows, s.v_stride, k0);
    unsigned weights[keys / 16][4];  // copied, because the scores would need twice the registers during the next loads
    if (busy) {
      float scores[keys / 8][4] = {};
      own_queries.template multiply<keys>(scores, key_tile);
      mask_scores<keys>(scores, own, k0, scale, work.head, s);
      weigh_scores<Width, keys>(weights, sums, scores, softmax);
    }
    wait_for_copies<0>();
    __syncthreads();
    if (tile + 1 < key_tiles) load_rows(key_tile, key_rows, s.k_stride, k0 + keys);
    if (busy) {
      PLAIT_UNROLL
      for (int i = 0; i < keys / 16; ++i)
        multiply_fragment<Width, Width>(sums, weights[i], value_tile + 16 * i * pitch);
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  float factor[2];
  softmax.finish(factor, lse, own, work, s);
  o.as_typed([&](auto* array) {
    store_rows<Width>(s.query_head(array, work.batch, work.head, s.o_stride) + own.first_row * s.o_stride, s.o_stride,
                      s.q_len - own.first_row, s.head_dim, sums, factor[0], factor[1], false);
  });
}

template <int Width, class Sizes>
void launch_attention_forward(cuda& device, const bf16* q, const bf16* k, const bf16* v, result_array o, float* lse,
                              const Sizes& sizes) {
  using tiles = forward_tiles<Width>;
  plait::detail::allow_shared(attention_forward_mma<Width, Sizes>, tiles::shared_bytes);
  plait::detail::launch(device,
                        {attention_blocks(tiles_of(sizes.q_len, tiles::queries), sizes.heads, sizes.batch),
                         tiles::threads, tiles::shared_bytes},
                        attention_forward_mma<Width, Sizes>, q, k, v, o, lse, sizes);
}

// ---- backward: one kernel makes dK and dV, one dQ, and neither adds atomically -----------------------------------

/// A block has 64 rows of two matrices, 16 per warp, and loops over the rows of two others, `step` at a time. The next
/// rows are loaded meanwhile.
template <int Width>
struct backward_tiles {
  static constexpr int warps = 4, threads = 32 * warps, own = 16 * warps, step = Width <= 64 ? 64 : 32;
  static constexpr int pitch = tile_pitch<Width>;
  /// Columns of dK and dV that a block computes: both must fit into the registers.
  static constexpr int columns = Width <= 128 ? Width : 128, parts = Width / columns;
  static constexpr std::size_t tile_bytes = (2 * own + 4 * step) * pitch * sizeof(bf16);
  static constexpr std::size_t key_shared_bytes = tile_bytes + 6 * step * sizeof(float);
  static constexpr std::size_t query_shared_bytes = tile_bytes;
};

/// Starts the copies of the next round, if there is one, and waits for the copies of this round.
template <class Fetch>
__device__ inline void start_round(int round, int rounds, const Fetch& fetch) {
  if (round + 1 < rounds) {
    fetch(round + 1);
    wait_for_copies<1>();
  } else {
    wait_for_copies<0>();
  }
  __syncthreads();
}

/// One tile of queries in the shared memory of a block that computes dK and dV.
template <int Width>
struct query_buffer {
  static constexpr int step = backward_tiles<Width>::step;
  bf16 *queries, *douts;
  float *lse, *delta;
  std::int32_t* first_visible;  // used if the sizes have it

  /// Starts to copy the queries of one head from q0 on.
  __device__ void load(const bf16* q, const bf16* d_o, const float* from_lse, const float* from_delta, int batch,
                       int head, int q0, const attention_sizes& s) const {
    constexpr int threads = backward_tiles<Width>::threads;
    load_tile<step, Width, threads>(queries, s.query_head(q, batch, head, s.q_stride) + q0 * s.q_stride, s.q_stride,
                                    s.q_len - q0, s.head_dim);
    load_tile<step, Width, threads>(douts, s.query_head(d_o, batch, head, s.do_stride) + q0 * s.do_stride, s.do_stride,
                                    s.q_len - q0, s.head_dim);
    const int row = static_cast<int>(threadIdx.x);
    if (row < step) {
      const bool valid = q0 + row < s.q_len;
      const std::int64_t at = valid ? q0 + row : 0;
      copy_async(lse + row, s.statistics(from_lse, batch, head) + at, valid);
      copy_async(delta + row, s.statistics(from_delta, batch, head) + at, valid);
      if (s.first_visible != nullptr) copy_async(first_visible + row, s.first_visible + batch * s.q_batch + at, true);
    }
    commit_copies();
  }

  /// Returns the first key that query q0 + column may see.
  __device__ int first_key(int q0, int column, const attention_sizes& s) const {
    const int in_window = q0 + column + s.lower;
    const int in_document = s.first_visible != nullptr ? s.key_at(first_visible[column]) : 0;
    return in_document > in_window ? in_document : in_window;
  }
};

/// The shared memory of a block that computes dK and dV: its keys and values, and two tiles of queries.
template <int Width>
struct key_gradient_memory {
  static constexpr int own = backward_tiles<Width>::own, step = backward_tiles<Width>::step, pitch = tile_pitch<Width>;
  bf16 *keys, *values, *queries, *douts;
  float *lse, *delta;
  std::int32_t* first_visible;

  explicit __device__ key_gradient_memory(bf16* memory)
      : keys(memory),
        values(keys + own * pitch),
        queries(values + own * pitch),
        douts(queries + 2 * step * pitch),
        lse(reinterpret_cast<float*>(douts + 2 * step * pitch)),
        delta(lse + 2 * step),
        first_visible(reinterpret_cast<std::int32_t*>(delta + 2 * step)) {}

  /// Starts to copy the keys and values of one head from k0 on.
  __device__ void load_own(const bf16* k, const bf16* v, int batch, int kv_head, int k0,
                           const attention_sizes& s) const {
    constexpr int threads = backward_tiles<Width>::threads;
    load_tile<own, Width, threads>(keys, s.key_head(k, batch, kv_head, s.k_stride) + k0 * s.k_stride, s.k_stride,
                                   s.k_len - k0, s.head_dim);
    load_tile<own, Width, threads>(values, s.key_head(v, batch, kv_head, s.v_stride) + k0 * s.v_stride, s.v_stride,
                                   s.k_len - k0, s.head_dim);
  }

  /// `i` is 0 or 1.
  __device__ query_buffer<Width> buffer(int i) const {
    return {queries + i * step * pitch, douts + i * step * pitch, lse + i * step, delta + i * step,
            first_visible + i * step};
  }
};

/// The tiles of `Step` queries that may see a block's keys, for each head of their group in order.
template <int Step>
struct query_rounds {
  int first_tile, tiles_per_head, count;

  /// The block has the keys k0 to k0 + keys - 1.
  template <class Sizes>
  __device__ query_rounds(const Sizes& s, int batch, int k0, int keys) {
    const int end = tiles_of(s.end_query(batch, k0 + keys - 1), Step);
    first_tile = s.first_query(batch, k0) / Step;
    tiles_per_head = end > first_tile ? end - first_tile : 0;
    count = tiles_per_head * s.group;
  }
  __device__ int head_in_group(int round) const { return round / tiles_per_head; }
  __device__ int first_query(int round) const { return (first_tile + round % tiles_per_head) * Step; }
};

/// P^T and dS^T of a warp's 16 keys and a tile of queries of a head, from q0 on; 0 where a query does not see a key. It
/// replaces K Q^T in `p` and V dO^T in `ds`. `scale` is for powers of 2.
template <int Width, class Sizes>
__device__ inline void transposed_score_gradients(row_of<float[4], backward_tiles<Width>::step / 8>& p,
                                                  row_of<float[4], backward_tiles<Width>::step / 8>& ds,
                                                  const query_buffer<Width>& buffer, const warp_rows& own, int q0,
                                                  float scale, int batch, int head, const Sizes& s) {
  constexpr int step = backward_tiles<Width>::step;
  if constexpr (scores_change<Sizes>) {
    const head_score<float> score(s, head);
    PLAIT_UNROLL
    for (int n = 0; n < step / 8; ++n) {
      PLAIT_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * n + 2 * own.pair + e % 2;
        p[n][e] *= s.scale;
        const float derivative = score.change(p[n][e], q0 + column, own.row + e / 2 * 8);
        ds[n][e] = (ds[n][e] - buffer.delta[column]) * derivative + buffer.delta[column];
      }
    }
    scale = log2_e;
  }
  const bool masked = q0 + step > s.q_len || own.first_row + 16 > s.visible(batch, q0);
  PLAIT_UNROLL
  for (int n = 0; n < step / 8; ++n) {
    PLAIT_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * n + 2 * own.pair + e % 2, query = q0 + column;
      const bool unseen = masked && (query >= s.q_len || own.row + e / 2 * 8 >= s.visible(batch, query));
      const float probability = fast_exp2(p[n][e] * scale - buffer.lse[column] * log2_e);
      p[n][e] = unseen ? 0.0f : probability;
      ds[n][e] = unseen ? 0.0f : probability * (ds[n][e] - buffer.delta[column]);
    }
  }
  if (own.first_row < buffer.first_key(q0, q0 + step <= s.q_len ? step - 1 : s.q_len - 1 - q0, s)) {
    PLAIT_UNROLL
    for (int n = 0; n < step / 8; ++n) {
      PLAIT_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (own.row + e / 2 * 8 >= buffer.first_key(q0, 8 * n + 2 * own.pair + e % 2, s)) continue;
        p[n][e] = 0.0f;
        ds[n][e] = 0.0f;
      }
    }
  }
  PLAIT_UNROLL
  for (int n = 0; n < step / 8; ++n) {
    PLAIT_UNROLL
    for (int e = 0; e < 4; ++e) {
      if (s.allows(q0 + 8 * n + 2 * own.pair + e % 2, own.row + e / 2 * 8)) continue;
      p[n][e] = 0.0f;
      ds[n][e] = 0.0f;
    }
  }
}

/// dK and dV of bf16 attention. Everything is transposed: rows are keys and columns are queries. Probabilities and
/// their gradients are then directly the factors of the next products: P^T = exp(K Q^T - lse), dV = P^T dO, dS^T = P^T
/// (V dO^T - delta), dK = dS^T Q. One block sums over all queries and heads of the group, in order.
template <int Width, class Sizes>
static __global__ void __launch_bounds__(backward_tiles<Width>::threads)
    attention_key_gradients_mma(const bf16* q, const bf16* k, const bf16* v, const float* lse, const bf16* d_o,
                                const float* delta, result_array dk, result_array dv, Sizes s, bool add) {
  using tiles = backward_tiles<Width>;
  constexpr int step = tiles::step, pitch = tiles::pitch, columns = tiles::columns;
  PLAIT_DYNAMIC_SHARED(bf16, shared);
  const key_gradient_memory<Width> memory(shared);
  const attention_work work(tiles_of(s.k_len, tiles::own), s.kv_heads * tiles::parts, s.batch, false);
  const int kv_head = work.head / tiles::parts, first_column = work.head % tiles::parts * columns;
  const int k0 = work.tile * tiles::own;
  const warp_rows own(k0);
  const bf16* const own_keys = memory.keys + 16 * own.warp * pitch;
  const bf16* const own_values = memory.values + 16 * own.warp * pitch;
  const float scale = s.scale * log2_e;
  const query_rounds<step> rounds(s, work.batch, k0, tiles::own);
  const auto fetch = [&](int round) {
    const int head = kv_head * s.group + rounds.head_in_group(round);
    memory.buffer(round % 2).load(q, d_o, lse, delta, work.batch, head, rounds.first_query(round), s);
  };

  memory.load_own(k, v, work.batch, kv_head, k0, s);
  if (rounds.count > 0) fetch(0);

  float dkeys[columns / 8][4] = {}, dvalues[columns / 8][4] = {};
  for (int round = 0; round < rounds.count; ++round) {
    start_round(round, rounds.count, fetch);
    const int q0 = rounds.first_query(round);
    const query_buffer<Width> buffer = memory.buffer(round % 2);
    if (own.first_row < s.visible(work.batch, q0 + step - 1) && own.first_row + 16 > buffer.first_key(q0, 0, s)) {
      float p[step / 8][4] = {}, ds[step / 8][4] = {};
      multiply_by_rows<Width, step>(p, own_keys, buffer.queries);
      multiply_by_rows<Width, step>(ds, own_values, buffer.douts);
      transposed_score_gradients<Width>(p, ds, buffer, own, q0, scale, work.batch,
                                        kv_head * s.group + rounds.head_in_group(round), s);
      multiply_weights<Width, step, columns>(dvalues, p, buffer.douts + first_column);
      multiply_weights<Width, step, columns>(dkeys, ds, buffer.queries + first_column);
    }
    __syncthreads();
  }
  commit_copies();
  wait_for_copies<0>();  // needed if there was no round

  const int available = s.k_len - own.first_row, rest = s.head_dim - first_column;
  dk.as_typed([&](auto* array) {
    store_rows<columns>(
        s.key_head(array, work.batch, kv_head, s.dk_stride) + own.first_row * s.dk_stride + first_column, s.dk_stride,
        available, rest, dkeys, s.scale, s.scale, add);
  });
  dv.as_typed([&](auto* array) {
    store_rows<columns>(
        s.key_head(array, work.batch, kv_head, s.dv_stride) + own.first_row * s.dv_stride + first_column, s.dv_stride,
        available, rest, dvalues, 1.0f, 1.0f, add);
  });
}

/// For a thread's two queries: the number of visible keys, their lse for powers of 2, and their delta.
struct query_statistics {
  int seen[2];
  float lse[2], delta[2];

  template <class Sizes>
  __device__ query_statistics(const float* of_lse, const float* of_delta, int row, const attention_work& work,
                              const Sizes& s)
      : seen{s.visible(work.batch, row), s.visible(work.batch, row + 8)} {
    PLAIT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const bool valid = row + 8 * r < s.q_len;
      lse[r] = valid ? s.statistics(of_lse, work.batch, work.head)[row + 8 * r] * log2_e : 0.0f;
      delta[r] = valid ? s.statistics(of_delta, work.batch, work.head)[row + 8 * r] : 0.0f;
    }
  }
};

/// dS of a warp's queries of a head and a tile of keys, from k0 on; 0 where a query does not see a key. `scores` has Q
/// K^T. `ds` has dO V^T, which is replaced.
template <int Keys, class Sizes>
__device__ inline void score_gradients(row_of<float[4], Keys / 8>& ds, row_of<float[4], Keys / 8>& scores,
                                       const query_statistics& statistics, const warp_queries& own, int k0, float scale,
                                       int head, const Sizes& s) {
  if constexpr (scores_change<Sizes>) {
    const head_score<float> score(s, head);
    PLAIT_UNROLL
    for (int n = 0; n < Keys / 8; ++n) {
      PLAIT_UNROLL
      for (int e = 0; e < 4; ++e) {
        scores[n][e] *= s.scale;
        const float derivative = score.change(scores[n][e], own.row + e / 2 * 8, k0 + 8 * n + 2 * own.pair + e % 2);
        ds[n][e] = (ds[n][e] - statistics.delta[e / 2]) * derivative + statistics.delta[e / 2];
      }
    }
    scale = log2_e;
  }
  const bool masked = k0 + Keys > own.seen_by_all;
  PLAIT_UNROLL
  for (int n = 0; n < Keys / 8; ++n) {
    PLAIT_UNROLL
    for (int e = 0; e < 4; ++e) {
      const bool unseen = masked && k0 + 8 * n + 2 * own.pair + e % 2 >= statistics.seen[e / 2];
      const float probability = fast_exp2(scores[n][e] * scale - statistics.lse[e / 2]);
      ds[n][e] = unseen ? 0.0f : probability * (ds[n][e] - statistics.delta[e / 2]);
    }
  }
  hide_early_keys<Keys>(ds, 0.0f, own, k0, s);
  PLAIT_UNROLL
  for (int n = 0; n < Keys / 8; ++n) {
    PLAIT_UNROLL
    for (int e = 0; e < 4; ++e)
      if (!s.allows(own.row + e / 2 * 8, k0 + 8 * n + 2 * own.pair + e % 2)) ds[n][e] = 0.0f;
  }
}

/// dQ of bf16 attention: P = exp(Q K^T - lse), dS = P (dO V^T - delta), dQ = dS K.
template <int Width, class Sizes>
static __global__ void __launch_bounds__(backward_tiles<Width>::threads)
    attention_query_gradients_mma(const bf16* q, const bf16* k, const bf16* v, const float* lse, const bf16* d_o,
                                  const float* delta, result_array dq, Sizes s, bool add) {
  using tiles = backward_tiles<Width>;
  constexpr int step = tiles::step, pitch = tiles::pitch;
  PLAIT_DYNAMIC_SHARED(bf16, query_tile);
  bf16* const dout_tile = query_tile + tiles::own * pitch;
  bf16* const key_tiles = dout_tile + tiles::own * pitch;
  bf16* const value_tiles = key_tiles + 2 * step * pitch;

  const attention_work work(tiles_of(s.q_len, tiles::own), s.heads, s.batch, true);
  const int q0 = work.tile * tiles::own, kv_head = work.head / s.group;
  const int last = (q0 + tiles::own < s.q_len ? q0 + tiles::own : s.q_len) - 1;
  const int first_round = s.first_key(work.batch, q0) / step, rounds = tiles_of(s.visible(work.batch, last), step);
  const warp_queries own(s, work.batch, q0);
  const float scale = s.scale * log2_e;
  const query_statistics statistics(lse, delta, own.row, work, s);
  const bf16* const key_rows = s.key_head(k, work.batch, kv_head, s.k_stride);
  const bf16* const value_rows = s.key_head(v, work.batch, kv_head, s.v_stride);
  const auto fetch = [&](int round) {
    const int k0 = round * step, offset = round % 2 * step * pitch;
    load_tile<step, Width, tiles::threads>(key_tiles + offset, key_rows + k0 * s.k_stride, s.k_stride, s.k_len - k0,
                                           s.head_dim);
    load_tile<step, Width, tiles::threads>(value_tiles + offset, value_rows + k0 * s.v_stride, s.v_stride, s.k_len - k0,
                                           s.head_dim);
    commit_copies();
  };
  const auto load_queries = [&](bf16* tile, const bf16* array, std::int64_t stride) {
    load_tile<tiles::own, Width, tiles::threads>(tile, s.query_head(array, work.batch, work.head, stride) + q0 * stride,
                                                 stride, s.q_len - q0, s.head_dim);
  };
  load_queries(query_tile, q, s.q_stride);
  load_queries(dout_tile, d_o, s.do_stride);
  if (first_round < rounds) fetch(first_round);

  float dqueries[Width / 8][4] = {};
  for (int round = first_round; round < rounds; ++round) {
    start_round(round, rounds, fetch);
    const int k0 = round * step;
    const bf16* const key_tile = key_tiles + round % 2 * step * pitch;
    const bf16* const value_tile = value_tiles + round % 2 * step * pitch;
    if (own.see_any(k0, step)) {
      float scores[step / 8][4] = {}, ds[step / 8][4] = {};
      multiply_by_rows<Width, step>(scores, query_tile + 16 * own.warp * pitch, key_tile);
      multiply_by_rows<Width, step>(ds, dout_tile + 16 * own.warp * pitch, value_tile);
      score_gradients<step>(ds, scores, statistics, own, k0, scale, work.head, s);
      multiply_weights<Width, step, Width>(dqueries, ds, key_tile);
    }
    __syncthreads();
  }
  commit_copies();
  wait_for_copies<0>();
  dq.as_typed([&](auto* array) {
    store_rows<Width>(s.query_head(array, work.batch, work.head, s.dq_stride) + own.first_row * s.dq_stride,
                      s.dq_stride, s.q_len - own.first_row, s.head_dim, dqueries, s.scale, s.scale, add);
  });
}

template <int Width, class Sizes>
void launch_attention_backward(cuda& device, const bf16* q, const bf16* k, const bf16* v, const float* lse,
                               const bf16* d_o, const float* delta, result_array dq, result_array dk, result_array dv,
                               const Sizes& sizes, attention_accumulate accumulate) {
  using tiles = backward_tiles<Width>;
  if (sizes.k_len > 0) {
    plait::detail::allow_shared(attention_key_gradients_mma<Width, Sizes>, tiles::key_shared_bytes);
    plait::detail::launch(
        device,
        {attention_blocks(tiles_of(sizes.k_len, tiles::own), sizes.kv_heads * tiles::parts, sizes.batch),
         tiles::threads, tiles::key_shared_bytes},
        attention_key_gradients_mma<Width, Sizes>, q, k, v, lse, d_o, delta, dk, dv, sizes, accumulate.keys_and_values);
  }
  if (sizes.q_len > 0) {
    plait::detail::allow_shared(attention_query_gradients_mma<Width, Sizes>, tiles::query_shared_bytes);
    plait::detail::launch(device,
                          {attention_blocks(tiles_of(sizes.q_len, tiles::own), sizes.heads, sizes.batch),
                           tiles::threads, tiles::query_shared_bytes},
                          attention_query_gradients_mma<Width, Sizes>, q, k, v, lse, d_o, delta, dq, sizes,
                          accumulate.queries);
  }
}

// ---- the kernels that a shape needs ------------------------------------------------------------------------------

/// The results of attention of T, as arguments of launchers.
template <class T>
using attention_results = std::conditional_t<std::is_same_v<T, bf16>, result_array, T*>;

/// Launches the kernels of one kind of sizes, for inputs of T and a checked shape.
template <class T>
struct attention_launchers {
  using statistics = statistic_of<T>*;
  using const_statistics = const statistic_of<T>*;
  using results = attention_results<T>;
  void (*forward)(cuda&, const T* q, const T* k, const T* v, results o, statistics lse, const attention_shape&);
  void (*backward)(cuda&, const T* q, const T* k, const T* v, const_statistics lse, const T* d_o,
                   const_statistics delta, results dq, results dk, results dv, const attention_shape&,
                   attention_accumulate);
};

template <class T, class Sizes>
void launch_attention_forward(cuda& device, const T* q, const T* k, const T* v, attention_results<T> o,
                              statistic_of<T>* lse, const attention_shape& s) {
  const Sizes sizes(s);
  with_head_width(sizes.head_dim, [&](auto width) {
    launch_attention_forward<decltype(width)::value>(device, q, k, v, o, lse, sizes);
  });
}

template <class T, class Sizes>
void launch_attention_backward(cuda& device, const T* q, const T* k, const T* v, const statistic_of<T>* lse,
                               const T* d_o, const statistic_of<T>* delta, attention_results<T> dq,
                               attention_results<T> dk, attention_results<T> dv, const attention_shape& s,
                               attention_accumulate accumulate) {
  const Sizes sizes(s);
  with_head_width(sizes.head_dim, [&](auto width) {
    launch_attention_backward<decltype(width)::value>(device, q, k, v, lse, d_o, delta, dq, dk, dv, sizes, accumulate);
  });
}

template <class T, class Sizes>
inline constexpr attention_launchers<T> attention_launchers_of{launch_attention_forward<T, Sizes>,
                                                               launch_attention_backward<T, Sizes>};

/// The kernels that call one rule.
struct attention_rule_kernels : attention_launchers<float>, attention_launchers<double>, attention_launchers<bf16> {};

template <attention_rule Rule>
struct kernels_of_rule {
  using sizes = ruled_attention_sizes<Rule>;
  static constexpr attention_rule_kernels all{
      attention_launchers_of<float, sizes>, attention_launchers_of<double, sizes>, attention_launchers_of<bf16, sizes>};
};

/// Returns the launchers for the shape from which `attention_sizes` were made. They refuse a rule without kernels.
template <class T>
const attention_launchers<T>& attention_launchers_for(const attention_shape& s) {
  if (s.mask.allows != nullptr) return *s.mask.gpu_kernels;
  const bool scored = s.score.changes() || s.end_visible != nullptr;
  if (scored) return attention_launchers_of<T, scored_attention_sizes>;
  return attention_launchers_of<T, attention_sizes>;
}

}  // namespace plait::kernels::detail

#include "plait/core/macros_on.hpp"
