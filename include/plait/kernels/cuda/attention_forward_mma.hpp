// The kernel of attention in bf16 on tensor cores. Callers use kernels/cuda/attention_forward.hpp; float and double run
// in kernels/cuda/attention_scalar.hpp.
#pragma once

#include "plait/kernels/cuda/attention_tiles.hpp"

namespace plait::kernels::detail {

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

}  // namespace plait::kernels::detail
