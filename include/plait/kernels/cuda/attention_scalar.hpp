// The kernels of attention and its gradients in float and double, without tensor cores: 256 threads as 16 x 16, of
// which (y, x) makes the elements (y + 16 r, x + 16 c) of every product. Callers use
// kernels/cuda/attention.hpp and kernels/cuda/attention.hpp.
#pragma once

#include "plait/kernels/cuda/attention_tiles.hpp"

namespace plait::kernels::detail {

inline constexpr int scalar_threads = 256;

/// Elements between the rows of a tile: an odd number, so that a column's elements lie in different banks.
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

/// Copies `Rows` rows of a head into a tile; what is outside of `available` rows and `head_dim` columns becomes 0.
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

/// Writes rows times `factor[row]`, or adds them to what is there.
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

/// The sum and the maximum over the 16 threads that share y, on each of them.
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

/// Writes, for `Rows` queries from q0 on, which key they may see first.
template <int Rows>
__device__ inline void load_first_keys(int* first_keys, int batch, int q0, const attention_sizes& s) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < Rows) first_keys[row] = s.first_key(batch, q0 + row);
}

/// Attention in float or double: as `attention_forward_mma`, but with one tile for keys and then values.
template <class T, int Width>
static __global__ void __launch_bounds__(scalar_threads, 1)
    attention_forward_scalar(const T* q, const T* k, const T* v, T* o, T* lse, attention_sizes s) {
  using tiles = scalar_forward_tiles<T, Width>;
  constexpr int queries = tiles::queries, keys = tiles::keys, rows = queries / 16, columns = keys / 16;
  constexpr T nothing = -infinite<T>;
  PLAIT_DYNAMIC_SHARED(T, query_tile);
  T* const key_tile = query_tile + queries * scalar_pitch<Width>;
  T* const weights = key_tile + keys * scalar_pitch<Width>;
  int* const first_keys = reinterpret_cast<int*>(weights + queries * scalar_pitch<keys>);
  const attention_work work(tiles_of(s.q_len, queries), s.heads, s.batch, true);
  const int q0 = work.tile * queries, kv_head = work.head / s.group, x = scalar_x(), y = scalar_y();
  const int last = (q0 + queries < s.q_len ? q0 + queries : s.q_len) - 1, visible = s.visible(last);
  const T* const key_rows = s.key_head(k, work.batch, kv_head, s.k_stride);
  const T* const value_rows = s.key_head(v, work.batch, kv_head, s.v_stride);
  load_scalar_tile<queries, Width>(query_tile, s.query_head(q, work.batch, work.head, s.q_stride) + q0 * s.q_stride,
                                   s.q_stride, s.q_len - q0, s.head_dim);
  T sums[rows][Width / 16] = {}, row_max[rows], row_sum[rows], factor[rows];
  for (int r = 0; r < rows; ++r) {
    row_max[r] = nothing;
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
      const int row = y + 16 * r, seen = s.visible(q0 + row) - k0;
      T largest = row_max[r];
      PLAIT_UNROLL
      for (int c = 0; c < columns; ++c) {
        scores[r][c] = x + 16 * c < seen ? scores[r][c] * scale_of<T>(s) : nothing;
      }
      if (k0 < first_keys[queries - 1]) {
        const int first = first_keys[row] - k0;
        PLAIT_UNROLL
        for (int c = 0; c < columns; ++c) scores[r][c] = x + 16 * c < first ? nothing : scores[r][c];
      }
      PLAIT_UNROLL
      for (int c = 0; c < columns; ++c) largest = scores[r][c] > largest ? scores[r][c] : largest;
      largest = max_over_x(largest);
      const T shrink = row_max[r] == nothing ? T(1) : precise_exp(row_max[r] - largest);
      const T shift = largest == nothing ? T(0) : largest;
      row_max[r] = largest;
      row_sum[r] *= shrink;
      PLAIT_UNROLL
      for (int c = 0; c < columns; ++c) {
        const T weight = precise_exp(scores[r][c] - shift);
        row_sum[r] += weight;
        weights[row * scalar_pitch<keys> + x + 16 * c] = weight;
      }
      PLAIT_UNROLL
      for (int c = 0; c < Width / 16; ++c) sums[r][c] *= shrink;
    }
    __syncthreads();
    multiply_scalar_weights<Width, queries, keys, false>(sums, weights, key_tile);
  }
  PLAIT_UNROLL
  for (int r = 0; r < rows; ++r) {
    const int query = q0 + y + 16 * r;
    row_sum[r] = sum_over_x(row_sum[r]);
    const bool saw = row_sum[r] != T(0);  // or is not a number, which must not be hidden
    factor[r] = saw ? T(1) / row_sum[r] : T(0);
    if (x == 0 && query < s.q_len) {
      s.statistics(lse, work.batch, work.head)[query] = saw ? row_max[r] + precise_log(row_sum[r]) : nothing;
    }
  }
  store_scalar_rows<Width, queries>(s.query_head(o, work.batch, work.head, s.o_stride) + q0 * s.o_stride, s.o_stride,
                                    s.q_len - q0, s.head_dim, sums, factor, false);
}

/// Probabilities and gradients of scores of one tile: p = exp(scale Q K^T - lse), ds = p (dO V^T - delta), both 0 where
/// a query does not see a key.
template <int Width, int Rows, class T>
__device__ inline void scalar_score_gradients(row_of<row_of<T, Rows / 16>, Rows / 16>& p,
                                              row_of<row_of<T, Rows / 16>, Rows / 16>& ds, const T* query_tile,
                                              const T* key_tile, const T* dout_tile, const T* value_tile,
                                              const T* lse_rows, const T* delta_rows, const int* first_keys, int q0,
                                              int k0, const attention_sizes& s) {
  multiply_scalar_rows<Width, Rows, Rows>(p, query_tile, key_tile, s.head_dim);
  multiply_scalar_rows<Width, Rows, Rows>(ds, dout_tile, value_tile, s.head_dim);
  PLAIT_UNROLL
  for (int r = 0; r < Rows / 16; ++r) {
    const int row = scalar_y() + 16 * r, query = q0 + row;
    PLAIT_UNROLL
    for (int c = 0; c < Rows / 16; ++c) {
      const bool seen = query < s.q_len && k0 + scalar_x() + 16 * c < s.visible(query);
      p[r][c] = seen ? precise_exp(p[r][c] * scale_of<T>(s) - lse_rows[row]) : T(0);
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

/// Copies the rows of lse and delta that belong to a tile of queries.
template <int Rows, class T>
__device__ inline void load_row_statistics(T* lse_rows, T* delta_rows, const T* lse, const T* delta, int available) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < Rows) {
    lse_rows[row] = row < available ? lse[row] : T(0);
    delta_rows[row] = row < available ? delta[row] : T(0);
  }
}

/// dK and dV in float or double. A block owns a tile of keys of one head and goes through all queries that see it.
template <class T, int Width>
static __global__ void __launch_bounds__(scalar_threads, 1)
    attention_key_gradients_scalar(const T* q, const T* k, const T* v, const T* lse, const T* d_o, const T* delta,
                                   T* dk, T* dv, attention_sizes s, bool add) {
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
    for (int q0 = s.first_query(k0) / rows * rows; q0 < end; q0 += rows) {
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
                                          first_keys, q0, k0, s);
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

/// dQ in float or double. A block owns a tile of queries of one head and goes through the keys that it sees.
template <class T, int Width>
static __global__ void __launch_bounds__(scalar_threads, 1)
    attention_query_gradients_scalar(const T* q, const T* k, const T* v, const T* lse, const T* d_o, const T* delta,
                                     T* dq, attention_sizes s, bool add) {
  constexpr int rows = scalar_backward_tiles<T, Width>::rows, pitch = scalar_pitch<Width>, per_thread = rows / 16;
  PLAIT_DYNAMIC_SHARED(T, key_tile);
  T *const value_tile = key_tile + rows * pitch, *const query_tile = value_tile + rows * pitch;
  T *const dout_tile = query_tile + rows * pitch, *const ds_tile = dout_tile + rows * pitch;
  T *const lse_rows = ds_tile + rows * scalar_pitch<rows>, *const delta_rows = lse_rows + rows;
  int* const first_keys = reinterpret_cast<int*>(delta_rows + rows);
  const attention_work work(tiles_of(s.q_len, rows), s.heads, s.batch, true);
  const int q0 = work.tile * rows, kv_head = work.head / s.group;
  const int last = (q0 + rows < s.q_len ? q0 + rows : s.q_len) - 1, visible = s.visible(last);
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
                                        first_keys, q0, k0, s);
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

template <int Width, class T>
void launch_attention_forward(cuda& device, const T* q, const T* k, const T* v, T* o, T* lse,
                              const attention_sizes& sizes) {
  using tiles = scalar_forward_tiles<T, Width>;
  plait::detail::allow_shared(attention_forward_scalar<T, Width>, tiles::shared_bytes);
  plait::detail::launch(device,
                        {attention_blocks(tiles_of(sizes.q_len, tiles::queries), sizes.heads, sizes.batch),
                         scalar_threads, tiles::shared_bytes},
                        attention_forward_scalar<T, Width>, q, k, v, o, lse, sizes);
}

template <int Width, class T>
void launch_attention_backward(cuda& device, const T* q, const T* k, const T* v, const T* lse, const T* d_o,
                               const T* delta, T* dq, T* dk, T* dv, const attention_sizes& sizes,
                               attention_accumulate accumulate) {
  using tiles = scalar_backward_tiles<T, Width>;
  if (sizes.k_len > 0) {
    plait::detail::allow_shared(attention_key_gradients_scalar<T, Width>, tiles::shared_bytes);
    plait::detail::launch(device,
                          {attention_blocks(tiles_of(sizes.k_len, tiles::rows), sizes.kv_heads, sizes.batch),
                           scalar_threads, tiles::shared_bytes},
                          attention_key_gradients_scalar<T, Width>, q, k, v, lse, d_o, delta, dk, dv, sizes,
                          accumulate.keys_and_values);
  }
  if (sizes.q_len > 0) {
    plait::detail::allow_shared(attention_query_gradients_scalar<T, Width>, tiles::shared_bytes);
    plait::detail::launch(device,
                          {attention_blocks(tiles_of(sizes.q_len, tiles::rows), sizes.heads, sizes.batch),
                           scalar_threads, tiles::shared_bytes},
                          attention_query_gradients_scalar<T, Width>, q, k, v, lse, d_o, delta, dq, sizes,
                          accumulate.queries);
  }
}

}  // namespace plait::kernels::detail
