// The kernels of attention and its gradients in bf16 on tensor cores; float and double run in
// kernels/cuda/attention_scalar.hpp.
#pragma once

#include "plait/kernels/cuda/attention_tiles.hpp"

namespace plait::kernels::detail {

// ---- forward -----------------------------------------------------------------------------------------------------

/// A block owns `queries` queries of one head, 16 to a warp, and goes through their keys `keys` at a time.
template <int Width>
struct forward_tiles {
  static constexpr int warps = 8, threads = 32 * warps, queries = 16 * warps, keys = Width <= 128 ? 64 : 32;
  static constexpr int pitch = tile_pitch<Width>;
  static constexpr std::size_t shared_bytes = (queries + 2 * keys) * pitch * sizeof(bf16);
  /// Blocks that are to share a multiprocessor, whose registers are the limit.
  static constexpr int blocks = Width <= 64 ? 2 : 1;
  /// Whether the queries stay in registers.
  static constexpr bool keep_queries = Width == 128;
};

/// Attention of bf16 on tensor cores after FlashAttention-2 (Dao 2023): scores, running maxima, sums and outputs of 16
/// queries live in the registers of one warp, in float; powers of 2 in place of e. While the scores are made the values
/// arrive, while those are weighted the next keys do.
template <int Width>
static __global__ void __launch_bounds__(forward_tiles<Width>::threads, forward_tiles<Width>::blocks)
    attention_forward_mma(const bf16* q, const bf16* k, const bf16* v, result_array o, float* lse, attention_sizes s) {
  using tiles = forward_tiles<Width>;
  constexpr int keys = tiles::keys, pitch = tiles::pitch;
  constexpr float nothing = -infinite<float>;
  PLAIT_DYNAMIC_SHARED(bf16, query_tile);
  bf16* const key_tile = query_tile + tiles::queries * pitch;
  bf16* const value_tile = key_tile + keys * pitch;

  const attention_work work(tiles_of(s.q_len, tiles::queries), s.heads, s.batch, true);
  const int q0 = work.tile * tiles::queries, kv_head = work.head / s.group;
  const bf16* const key_rows = s.key_head(k, work.batch, kv_head, s.k_stride);
  const bf16* const value_rows = s.key_head(v, work.batch, kv_head, s.v_stride);
  const int last = (q0 + tiles::queries < s.q_len ? q0 + tiles::queries : s.q_len) - 1;
  const int first_tile = s.first_key(work.batch, q0) / keys, key_tiles = tiles_of(s.visible(last), keys);

  const int warp = static_cast<int>(threadIdx.x) / warp_lanes, pair = warp_lane() % 4;
  const int first_row = q0 + 16 * warp, row = first_row + warp_lane() / 4;
  const int seen_by_all = s.visible(first_row), seen_by_any = first_row < s.q_len ? s.visible(first_row + 15) : 0;
  const int hidden_from_all = s.first_key(work.batch, first_row);
  const int hidden_from_any = s.first_key(work.batch, first_row + 15);
  const float scale = s.scale * log2_e;
  const bf16* const own_queries = query_tile + 16 * warp * pitch;

  load_tile<tiles::queries, Width, tiles::threads>(query_tile,
                                                   s.query_head(q, work.batch, work.head, s.q_stride) + q0 * s.q_stride,
                                                   s.q_stride, s.q_len - q0, s.head_dim);
  load_tile<keys, Width, tiles::threads>(key_tile, key_rows + first_tile * keys * s.k_stride, s.k_stride,
                                         s.k_len - first_tile * keys, s.head_dim);
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
  unsigned query_fragments[tiles::keep_queries ? Width / 16 : 1][4];
  if constexpr (tiles::keep_queries) {
    PLAIT_UNROLL
    for (int i = 0; i < Width / 16; ++i) load_a(query_fragments[i], own_queries + 16 * i, pitch);
  }

  float sums[Width / 8][4] = {};
  float row_max[2] = {nothing, nothing}, row_sum[2] = {0.0f, 0.0f};
  for (int tile = first_tile; tile < key_tiles; ++tile) {
    const int k0 = tile * keys;
    const bool busy = k0 < seen_by_any && k0 + keys > hidden_from_all;
    load_tile<keys, Width, tiles::threads>(value_tile, value_rows + k0 * s.v_stride, s.v_stride, s.k_len - k0,
                                           s.head_dim);
    commit_copies();
    unsigned weights[keys / 16][4];  // half of the registers of the scores, for as long as keys are on their way
    if (busy) {
      float scores[keys / 8][4] = {};
      if constexpr (tiles::keep_queries) {
        PLAIT_UNROLL
        for (int i = 0; i < Width / 16; ++i) {
          PLAIT_UNROLL
          for (int n = 0; n < keys; n += 16) {
            unsigned b[4];
            load_b_columns(b, key_tile + n * pitch + 16 * i, pitch);
            mma_16x8x16(scores[n / 8], query_fragments[i], b[0], b[1]);
            mma_16x8x16(scores[n / 8 + 1], query_fragments[i], b[2], b[3]);
          }
        }
      } else {
        multiply_by_rows<Width, keys>(scores, own_queries, key_tile);
      }
      PLAIT_UNROLL
      for (int n = 0; n < keys / 8; ++n) {
        PLAIT_UNROLL
        for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
      }
      if (k0 + keys > seen_by_all) {
        PLAIT_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int seen = s.visible(row + 8 * r) - k0 - 2 * pair;
          PLAIT_UNROLL
          for (int n = 0; n < keys / 8; ++n) {
            if (8 * n >= seen) scores[n][2 * r] = nothing;
            if (8 * n + 1 >= seen) scores[n][2 * r + 1] = nothing;
          }
        }
      }
      if (k0 < hidden_from_any) {
        PLAIT_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int first = s.first_key(work.batch, row + 8 * r) - k0 - 2 * pair;
          PLAIT_UNROLL
          for (int n = 0; n < keys / 8; ++n) {
            if (8 * n < first) scores[n][2 * r] = nothing;
            if (8 * n + 1 < first) scores[n][2 * r + 1] = nothing;
          }
        }
      }
      float largest[2] = {row_max[0], row_max[1]};
      PLAIT_UNROLL
      for (int n = 0; n < keys / 8; ++n) {
        PLAIT_UNROLL
        for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], scores[n][e]);
      }
      float shrink[2];
      PLAIT_UNROLL
      for (int r = 0; r < 2; ++r) {
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(whole_warp, largest[r], 1));
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(whole_warp, largest[r], 2));
        // Before anything was seen there is nothing to shrink, and -inf - -inf would not be a number.
        shrink[r] = row_max[r] == nothing ? 1.0f : fast_exp2(row_max[r] - largest[r]);
        row_max[r] = largest[r];
        if (largest[r] == nothing) largest[r] = 0.0f;
        row_sum[r] *= shrink[r];
      }
      PLAIT_UNROLL
      for (int n = 0; n < keys / 8; ++n) {
        PLAIT_UNROLL
        for (int e = 0; e < 4; ++e) {
          scores[n][e] = fast_exp2(scores[n][e] - largest[e / 2]);
          row_sum[e / 2] += scores[n][e];
        }
      }
      PLAIT_UNROLL
      for (int n = 0; n < Width / 8; ++n) {
        PLAIT_UNROLL
        for (int e = 0; e < 4; ++e) sums[n][e] *= shrink[e / 2];
      }
      PLAIT_UNROLL
      for (int i = 0; i < keys / 16; ++i) result_to_a(weights[i], scores[2 * i], scores[2 * i + 1]);
    }
    wait_for_copies<0>();
    __syncthreads();
    if (tile + 1 < key_tiles) {
      const int next = k0 + keys;
      load_tile<keys, Width, tiles::threads>(key_tile, key_rows + next * s.k_stride, s.k_stride, s.k_len - next,
                                             s.head_dim);
      commit_copies();
    }
    if (busy) {
      PLAIT_UNROLL
      for (int i = 0; i < keys / 16; ++i)
        multiply_fragment<Width, Width>(sums, weights[i], value_tile + 16 * i * pitch);
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  float factor[2];
  PLAIT_UNROLL
  for (int r = 0; r < 2; ++r) {
    row_sum[r] += __shfl_xor_sync(whole_warp, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(whole_warp, row_sum[r], 2);
    const bool saw = row_sum[r] != 0.0f;  // or is not a number, which must not be hidden
    factor[r] = saw ? 1.0f / row_sum[r] : 0.0f;
    if (pair == 0 && row + 8 * r < s.q_len) {
      s.statistics(lse, work.batch, work.head)[row + 8 * r] = saw ? row_max[r] * ln_2 + logf(row_sum[r]) : nothing;
    }
  }
  o.as_typed([&](auto* array) {
    store_rows<Width>(s.query_head(array, work.batch, work.head, s.o_stride) + first_row * s.o_stride, s.o_stride,
                      s.q_len - first_row, s.head_dim, sums, factor[0], factor[1], false);
  });
}

template <int Width, class O>
void launch_attention_forward(cuda& device, const bf16* q, const bf16* k, const bf16* v, O* o, float* lse,
                              const attention_sizes& sizes) {
  using tiles = forward_tiles<Width>;
  plait::detail::allow_shared(attention_forward_mma<Width>, tiles::shared_bytes);
  plait::detail::launch(device,
                        {attention_blocks(tiles_of(sizes.q_len, tiles::queries), sizes.heads, sizes.batch),
                         tiles::threads, tiles::shared_bytes},
                        attention_forward_mma<Width>, q, k, v, result_array(o), lse, sizes);
}

// ---- backward: one kernel makes dK and dV, one dQ, and neither adds atomically -----------------------------------

/// A block owns 64 rows of two matrices, 16 to a warp, and goes through rows of two others, `step` at a time; the
/// next ones arrive while it works on these.
template <int Width>
struct backward_tiles {
  static constexpr int warps = 4, threads = 32 * warps, own = 16 * warps, step = Width <= 64 ? 64 : 32;
  static constexpr int pitch = tile_pitch<Width>;
  /// Columns of dK and dV that a block makes: both must fit the registers.
  static constexpr int columns = Width <= 128 ? Width : 128, parts = Width / columns;
  static constexpr std::size_t tile_bytes = (2 * own + 4 * step) * pitch * sizeof(bf16);
  static constexpr std::size_t key_shared_bytes = tile_bytes + 6 * step * sizeof(float);
  static constexpr std::size_t query_shared_bytes = tile_bytes;
};

/// dK and dV of bf16 attention. All is transposed, rows being keys and columns queries, so that probabilities and their
/// gradients are at once the factors of the next products: P^T = exp(K Q^T - lse), dV = P^T dO,
/// dS^T = P^T (V dO^T - delta), dK = dS^T Q. One block sums over all queries and heads of the group, in order.
template <int Width>
static __global__ void __launch_bounds__(backward_tiles<Width>::threads)
    attention_key_gradients_mma(const bf16* q, const bf16* k, const bf16* v, const float* lse, const bf16* d_o,
                                const float* delta, result_array dk, result_array dv, attention_sizes s, bool add) {
  using tiles = backward_tiles<Width>;
  constexpr int step = tiles::step, pitch = tiles::pitch, columns = tiles::columns;
  PLAIT_DYNAMIC_SHARED(bf16, key_tile);
  bf16* const value_tile = key_tile + tiles::own * pitch;
  bf16* const query_tiles = value_tile + tiles::own * pitch;
  bf16* const dout_tiles = query_tiles + 2 * step * pitch;
  float* const lse_rows = reinterpret_cast<float*>(dout_tiles + 2 * step * pitch);
  float* const delta_rows = lse_rows + 2 * step;
  std::int32_t* const first_rows = reinterpret_cast<std::int32_t*>(delta_rows + 2 * step);  // of first_visible, if any

  const attention_work work(tiles_of(s.k_len, tiles::own), s.kv_heads * tiles::parts, s.batch, false);
  const int kv_head = work.head / tiles::parts, first_column = work.head % tiles::parts * columns;
  const int k0 = work.tile * tiles::own;
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes, pair = warp_lane() % 4;
  const int own_key = k0 + 16 * warp, key = own_key + warp_lane() / 4;
  const bf16* const own_keys = key_tile + 16 * warp * pitch;
  const bf16* const own_values = value_tile + 16 * warp * pitch;
  const float scale = s.scale * log2_e;

  const int end = tiles_of(s.end_query(work.batch, k0 + tiles::own - 1), step), first_tile = s.first_query(k0) / step;
  const int tiles_per_head = end > first_tile ? end - first_tile : 0;
  const int rounds = tiles_per_head * s.group;
  const auto fetch = [&](int round) {
    const int head = kv_head * s.group + round / tiles_per_head, buffer = round % 2;
    const int q0 = (first_tile + round % tiles_per_head) * step;
    load_tile<step, Width, tiles::threads>(query_tiles + buffer * step * pitch,
                                           s.query_head(q, work.batch, head, s.q_stride) + q0 * s.q_stride, s.q_stride,
                                           s.q_len - q0, s.head_dim);
    load_tile<step, Width, tiles::threads>(dout_tiles + buffer * step * pitch,
                                           s.query_head(d_o, work.batch, head, s.do_stride) + q0 * s.do_stride,
                                           s.do_stride, s.q_len - q0, s.head_dim);
    const int row = static_cast<int>(threadIdx.x);
    if (row < step) {
      const bool valid = q0 + row < s.q_len;
      const std::int64_t at = valid ? q0 + row : 0;
      copy_async(lse_rows + buffer * step + row, s.statistics(lse, work.batch, head) + at, valid);
      copy_async(delta_rows + buffer * step + row, s.statistics(delta, work.batch, head) + at, valid);
      if (s.first_visible != nullptr) {
        copy_async(first_rows + buffer * step + row, s.first_visible + work.batch * s.q_batch + at, true);
      }
    }
    commit_copies();
  };

  load_tile<tiles::own, Width, tiles::threads>(
      key_tile, s.key_head(k, work.batch, kv_head, s.k_stride) + k0 * s.k_stride, s.k_stride, s.k_len - k0, s.head_dim);
  load_tile<tiles::own, Width, tiles::threads>(value_tile,
                                               s.key_head(v, work.batch, kv_head, s.v_stride) + k0 * s.v_stride,
                                               s.v_stride, s.k_len - k0, s.head_dim);
  if (rounds > 0) fetch(0);

  float dkeys[columns / 8][4] = {}, dvalues[columns / 8][4] = {};
  for (int round = 0; round < rounds; ++round) {
    if (round + 1 < rounds) {
      fetch(round + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const int q0 = (first_tile + round % tiles_per_head) * step, buffer = round % 2;
    const bf16* const query_tile = query_tiles + buffer * step * pitch;
    const bf16* const dout_tile = dout_tiles + buffer * step * pitch;
    const auto first_key = [&](int column) {  // of query q0 + column
      const int in_window = q0 + column + s.lower;
      const int in_document = s.first_visible != nullptr ? s.key_at(first_rows[buffer * step + column]) : 0;
      return in_document > in_window ? in_document : in_window;
    };
    if (own_key < s.visible(q0 + step - 1) && own_key + 16 > first_key(0)) {
      float p[step / 8][4] = {}, ds[step / 8][4] = {};
      multiply_by_rows<Width, step>(p, own_keys, query_tile);
      multiply_by_rows<Width, step>(ds, own_values, dout_tile);
      const bool masked = q0 + step > s.q_len || own_key + 16 > s.visible(q0);
      PLAIT_UNROLL
      for (int n = 0; n < step / 8; ++n) {
        PLAIT_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int column = 8 * n + 2 * pair + e % 2, query = q0 + column;
          const bool unseen = masked && (query >= s.q_len || key + e / 2 * 8 >= s.visible(query));
          const float probability = fast_exp2(p[n][e] * scale - lse_rows[buffer * step + column] * log2_e);
          p[n][e] = unseen ? 0.0f : probability;
          ds[n][e] = unseen ? 0.0f : probability * (ds[n][e] - delta_rows[buffer * step + column]);
        }
      }
      if (own_key < first_key(q0 + step <= s.q_len ? step - 1 : s.q_len - 1 - q0)) {
        PLAIT_UNROLL
        for (int n = 0; n < step / 8; ++n) {
          PLAIT_UNROLL
          for (int e = 0; e < 4; ++e) {
            if (key + e / 2 * 8 >= first_key(8 * n + 2 * pair + e % 2)) continue;
            p[n][e] = 0.0f;
            ds[n][e] = 0.0f;
          }
        }
      }
      multiply_weights<Width, step, columns>(dvalues, p, dout_tile + first_column);
      multiply_weights<Width, step, columns>(dkeys, ds, query_tile + first_column);
    }
    __syncthreads();
  }
  commit_copies();
  wait_for_copies<0>();  // without a round nothing has waited

  const int available = s.k_len - own_key, rest = s.head_dim - first_column;
  dk.as_typed([&](auto* array) {
    store_rows<columns>(s.key_head(array, work.batch, kv_head, s.dk_stride) + own_key * s.dk_stride + first_column,
                        s.dk_stride, available, rest, dkeys, s.scale, s.scale, add);
  });
  dv.as_typed([&](auto* array) {
    store_rows<columns>(s.key_head(array, work.batch, kv_head, s.dv_stride) + own_key * s.dv_stride + first_column,
                        s.dv_stride, available, rest, dvalues, 1.0f, 1.0f, add);
  });
}

/// dQ of bf16 attention: P = exp(Q K^T - lse), dS = P (dO V^T - delta), dQ = dS K.
template <int Width>
static __global__ void __launch_bounds__(backward_tiles<Width>::threads)
    attention_query_gradients_mma(const bf16* q, const bf16* k, const bf16* v, const float* lse, const bf16* d_o,
                                  const float* delta, result_array dq, attention_sizes s, bool add) {
  using tiles = backward_tiles<Width>;
  constexpr int step = tiles::step, pitch = tiles::pitch;
  PLAIT_DYNAMIC_SHARED(bf16, query_tile);
  bf16* const dout_tile = query_tile + tiles::own * pitch;
  bf16* const key_tiles = dout_tile + tiles::own * pitch;
  bf16* const value_tiles = key_tiles + 2 * step * pitch;

  const attention_work work(tiles_of(s.q_len, tiles::own), s.heads, s.batch, true);
  const int q0 = work.tile * tiles::own, kv_head = work.head / s.group;
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes, pair = warp_lane() % 4;
  const int first_row = q0 + 16 * warp, row = first_row + warp_lane() / 4;
  const int last = (q0 + tiles::own < s.q_len ? q0 + tiles::own : s.q_len) - 1;
  const int first_round = s.first_key(work.batch, q0) / step, rounds = tiles_of(s.visible(last), step);
  const int seen_by_all = s.visible(first_row), seen_by_any = first_row < s.q_len ? s.visible(first_row + 15) : 0;
  const int seen[2] = {s.visible(row), s.visible(row + 8)};
  const int hidden_from_all = s.first_key(work.batch, first_row);
  const int hidden_from_any = s.first_key(work.batch, first_row + 15);
  const float scale = s.scale * log2_e;
  float row_lse[2], row_delta[2];
  PLAIT_UNROLL
  for (int r = 0; r < 2; ++r) {
    const bool valid = row + 8 * r < s.q_len;
    row_lse[r] = valid ? s.statistics(lse, work.batch, work.head)[row + 8 * r] * log2_e : 0.0f;
    row_delta[r] = valid ? s.statistics(delta, work.batch, work.head)[row + 8 * r] : 0.0f;
  }
  const bf16* const key_rows = s.key_head(k, work.batch, kv_head, s.k_stride);
  const bf16* const value_rows = s.key_head(v, work.batch, kv_head, s.v_stride);
  const auto fetch = [&](int round) {
    const int k0 = round * step, buffer = round % 2;
    load_tile<step, Width, tiles::threads>(key_tiles + buffer * step * pitch, key_rows + k0 * s.k_stride, s.k_stride,
                                           s.k_len - k0, s.head_dim);
    load_tile<step, Width, tiles::threads>(value_tiles + buffer * step * pitch, value_rows + k0 * s.v_stride,
                                           s.v_stride, s.k_len - k0, s.head_dim);
    commit_copies();
  };
  load_tile<tiles::own, Width, tiles::threads>(query_tile,
                                               s.query_head(q, work.batch, work.head, s.q_stride) + q0 * s.q_stride,
                                               s.q_stride, s.q_len - q0, s.head_dim);
  load_tile<tiles::own, Width, tiles::threads>(dout_tile,
                                               s.query_head(d_o, work.batch, work.head, s.do_stride) + q0 * s.do_stride,
                                               s.do_stride, s.q_len - q0, s.head_dim);
  if (first_round < rounds) fetch(first_round);

  float dqueries[Width / 8][4] = {};
  for (int round = first_round; round < rounds; ++round) {
    if (round + 1 < rounds) {
      fetch(round + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const int k0 = round * step;
    const bf16* const key_tile = key_tiles + round % 2 * step * pitch;
    const bf16* const value_tile = value_tiles + round % 2 * step * pitch;
    if (k0 < seen_by_any && k0 + step > hidden_from_all) {
      float p[step / 8][4] = {}, ds[step / 8][4] = {};
      multiply_by_rows<Width, step>(p, query_tile + 16 * warp * pitch, key_tile);
      multiply_by_rows<Width, step>(ds, dout_tile + 16 * warp * pitch, value_tile);
      const bool masked = k0 + step > seen_by_all;
      PLAIT_UNROLL
      for (int n = 0; n < step / 8; ++n) {
        PLAIT_UNROLL
        for (int e = 0; e < 4; ++e) {
          const bool unseen = masked && k0 + 8 * n + 2 * pair + e % 2 >= seen[e / 2];
          const float probability = fast_exp2(p[n][e] * scale - row_lse[e / 2]);
          ds[n][e] = unseen ? 0.0f : probability * (ds[n][e] - row_delta[e / 2]);
        }
      }
      if (k0 < hidden_from_any) {
        PLAIT_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int first = s.first_key(work.batch, row + 8 * r) - k0 - 2 * pair;
          PLAIT_UNROLL
          for (int n = 0; n < step / 8; ++n) {
            if (8 * n < first) ds[n][2 * r] = 0.0f;
            if (8 * n + 1 < first) ds[n][2 * r + 1] = 0.0f;
          }
        }
      }
      multiply_weights<Width, step, Width>(dqueries, ds, key_tile);
    }
    __syncthreads();
  }
  commit_copies();
  wait_for_copies<0>();
  dq.as_typed([&](auto* array) {
    store_rows<Width>(s.query_head(array, work.batch, work.head, s.dq_stride) + first_row * s.dq_stride, s.dq_stride,
                      s.q_len - first_row, s.head_dim, dqueries, s.scale, s.scale, add);
  });
}

template <int Width, class G>
void launch_attention_backward(cuda& device, const bf16* q, const bf16* k, const bf16* v, const float* lse,
                               const bf16* d_o, const float* delta, G* dq, G* dk, G* dv, const attention_sizes& sizes,
                               attention_accumulate accumulate) {
  using tiles = backward_tiles<Width>;
  if (sizes.k_len > 0) {
    plait::detail::allow_shared(attention_key_gradients_mma<Width>, tiles::key_shared_bytes);
    plait::detail::launch(
        device,
        {attention_blocks(tiles_of(sizes.k_len, tiles::own), sizes.kv_heads * tiles::parts, sizes.batch),
         tiles::threads, tiles::key_shared_bytes},
        attention_key_gradients_mma<Width>, q, k, v, lse, d_o, delta, result_array(dk), result_array(dv), sizes,
        accumulate.keys_and_values);
  }
  if (sizes.q_len > 0) {
    plait::detail::allow_shared(attention_query_gradients_mma<Width>, tiles::query_shared_bytes);
    plait::detail::launch(device,
                          {attention_blocks(tiles_of(sizes.q_len, tiles::own), sizes.heads, sizes.batch),
                           tiles::threads, tiles::query_shared_bytes},
                          attention_query_gradients_mma<Width>, q, k, v, lse, d_o, delta, result_array(dq), sizes,
                          accumulate.queries);
  }
}

}  // namespace plait::kernels::detail
