#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "plait/kernels/cpu/attention_blocks.hpp"

namespace plait::kernels {

/// Attention in blocks (Dao et al. 2022): the scores of a block of queries against a block of keys exist at a time, and
/// running maxima and sums make the softmax exact. Writes o (0 for queries that see nothing) and lse [batch, heads,
/// q_len], the logarithm of the sum of the exponentials of the scaled scores.
template <class T>
void attention_forward(cpu& device, const T* q, const T* k, const T* v, T* o, T* lse, const attention_shape& shape) {
  const attention_shape s = shape.checked();
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  const std::int64_t group = s.group(), d = s.head_dim, group_width = group * d;
  const std::int64_t q_block = std::min(detail::query_block(group, 64), s.q_len), k_block = detail::key_block;
  const auto max_rows = static_cast<std::size_t>(q_block * group);
  auto scratch = make_buffer<T>(device, max_rows * static_cast<std::size_t>(2 * d + k_block + 2));
  T* const scores = scratch.template data<T>();
  T* const queries = scores + max_rows * static_cast<std::size_t>(k_block);
  T* const sums = queries + max_rows * static_cast<std::size_t>(d);
  T* const row_max = sums + max_rows * static_cast<std::size_t>(d);
  T* const row_sum = row_max + max_rows;

  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
      const T* const keys = k + b * s.k_len * s.k_stride + kv_head * d;
      const T* const values = v + b * s.k_len * s.v_stride + kv_head * d;
      for (std::int64_t q0 = 0; q0 < s.q_len; q0 += q_block) {
        const std::int64_t tokens = std::min(q_block, s.q_len - q0), rows = tokens * group;
        detail::pack_queries(q + (b * s.q_len + q0) * s.q_stride + kv_head * group_width, s.q_stride, tokens,
                             group_width, static_cast<T>(s.scale), queries);
        std::fill_n(row_max, rows, nothing);
        std::fill_n(row_sum, rows, T(0));
        const std::int64_t visible = s.visible(q0 + tokens - 1);
        for (std::int64_t k0 = 0; k0 < visible; k0 += k_block) {
          const std::int64_t count = std::min(k_block, visible - k0);
          device.gemm(false, true, rows, count, d, T(1), queries, d, keys + k0 * s.k_stride, s.k_stride, T(0), scores,
                      k_block);
          for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t seen = std::clamp<std::int64_t>(s.visible(q0 + row / group) - k0, 0, count);
            T* const line = scores + row * k_block;
            const T before = row_max[row];
            const T now = std::max(before, detail::row_maximum(line, seen));
            const T sum = detail::row_exponentials(line, now == nothing ? T(0) : now, seen, count);
            const T shrink = before == now ? T(1) : std::exp(before - now);
            row_max[row] = now;
            row_sum[row] = row_sum[row] * shrink + sum;
            if (k0 > 0 && shrink != T(1)) {
              T* const target = sums + row * d;
              PLAIT_IVDEP
              for (std::int64_t c = 0; c < d; ++c) target[c] *= shrink;
            }
          }
          device.gemm(false, false, rows, d, count, T(1), scores, k_block, values + k0 * s.v_stride, s.v_stride,
                      k0 > 0 ? T(1) : T(0), sums, d);
        }
        T* const out = o + (b * s.q_len + q0) * s.o_stride + kv_head * group_width;
        T* const out_lse = lse + (b * s.heads + kv_head * group) * s.q_len + q0;
        for (std::int64_t i = 0; i < tokens; ++i) {
          for (std::int64_t h = 0; h < group; ++h) {
            const std::int64_t row = i * group + h;
            T* const target = out + i * s.o_stride + h * d;
            if (row_max[row] == nothing) {
              std::fill_n(target, d, T(0));
              out_lse[h * s.q_len + i] = nothing;
            } else {
              const T inverse = T(1) / row_sum[row];
              const T* const source = sums + row * d;
              PLAIT_IVDEP
              for (std::int64_t c = 0; c < d; ++c) target[c] = source[c] * inverse;
              out_lse[h * s.q_len + i] = row_max[row] + std::log(row_sum[row]);
            }
          }
        }
      }
    }
  }
}

/// Combines the attention of the same queries over two disjoint sets of keys: o and lse become what attention over both
/// would have given, from o, lse of one set and o_other, lse_other of the other. Uses batch, q_len, heads, head_dim and
/// o_stride (of o) of the shape; `other_stride` is the stride of o_other.
template <class T>
void merge_lse(cpu&, T* o, T* lse, const T* o_other, const T* lse_other, std::int64_t other_stride,
               const attention_shape& shape) {
  const attention_shape s = shape.checked();
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t i = 0; i < s.q_len; ++i) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t at = (b * s.heads + h) * s.q_len + i;
        const T larger = std::max(lse[at], lse_other[at]);
        if (larger == nothing) continue;
        const T mine = std::exp(lse[at] - larger), others = std::exp(lse_other[at] - larger);
        const T keep = mine / (mine + others), take = others / (mine + others);
        T* const target = o + (b * s.q_len + i) * s.o_stride + h * s.head_dim;
        const T* const source = o_other + (b * s.q_len + i) * other_stride + h * s.head_dim;
        PLAIT_IVDEP
        for (std::int64_t c = 0; c < s.head_dim; ++c) target[c] = target[c] * keep + source[c] * take;
        lse[at] = larger + std::log(mine + others);
      }
    }
  }
}

}  // namespace plait::kernels
