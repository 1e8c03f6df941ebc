// Attention on the CPU, and the merge of two results over different keys. It works on one rank's arrays; which keys a
// rank meets is its engine's matter (nn/attention/engine.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"
#include "plait/kernels/cpu/attention_blocks.hpp"

namespace plait::kernels {

/// Attention in blocks (Dao et al. 2022): the scores of a block of queries against a block of keys exist at a time, and
/// running maxima and sums make the softmax exact. Writes o (0 for queries that see nothing) and lse [batch, heads,
/// q_len], the logarithm of the sum of the exponentials of the scaled scores. The work is in proportion to the pairs
/// that see each other. O is T or statistic_of<T>.
template <class T, class O>
void attention_forward(cpu& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape) {
  static_assert(std::is_same_v<O, T> || std::is_same_v<O, statistic_of<T>>);
  using A = arithmetic<T>;
  const attention_shape s = shape.checked();
  constexpr A nothing = -std::numeric_limits<A>::infinity();
  constexpr bool rounds = !std::is_same_v<T, A>;
  const detail::scale_factors<T> scale(s.scale);
  const std::int64_t group = s.group(), d = s.head_dim, group_width = group * d, k_block = detail::key_block;
  const detail::query_blocks blocks(s, 512);
  const auto outer_rows = static_cast<std::size_t>(blocks.outer * group);
  const auto inner_rows = static_cast<std::size_t>(blocks.inner * group), width = static_cast<std::size_t>(d);
  const auto key_count = static_cast<std::size_t>(k_block);
  auto factors =
      make_buffer<T>(device, (rounds ? inner_rows * key_count : 0) + outer_rows * width + 2 * key_count * width);
  auto scratch = make_buffer<A>(device, inner_rows * key_count + outer_rows * (width + 2));
  T* const queries = factors.template data<T>();
  T* const key_space = queries + outer_rows * width;
  T* const value_space = key_space + key_count * width;
  A* const scores = scratch.template data<A>();
  A* const sums = scores + inner_rows * key_count;
  A* const row_max = sums + outer_rows * width;
  A* const row_sum = row_max + outer_rows;
  T* probabilities = nullptr;
  if constexpr (rounds) {
    probabilities = value_space + key_count * width;
  } else {
    probabilities = scores;
  }

  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
      for (std::int64_t q0 = 0; q0 < s.q_len; q0 += blocks.outer) {
        const std::int64_t tokens = std::min(blocks.outer, s.q_len - q0), rows = tokens * group;
        detail::pack_queries(q + (b * s.q_batch + q0) * s.q_stride + kv_head * group_width, s.q_stride, tokens,
                             group_width, scale.queries, queries);
        std::fill_n(row_max, rows, nothing);
        std::fill_n(row_sum, rows, A(0));
        const detail::seen_keys seen_here(s, b, q0, q0 + tokens);
        for (std::int64_t k0 = seen_here.first_block(); k0 < seen_here.high; k0 += k_block) {
          const std::int64_t available = std::min(k_block, s.k_len - k0);
          const T* const head_keys = k + (b * s.k_batch + k0) * s.k_stride + kv_head * d;
          const T* const head_values = v + (b * s.k_batch + k0) * s.v_stride + kv_head * d;
          const auto keys = detail::pack_keys(head_keys, s.k_stride, available, d, key_space);
          const auto values = detail::pack_keys(head_values, s.v_stride, available, d, value_space);
          for (std::int64_t t0 = 0; t0 < tokens; t0 += blocks.inner) {
            const std::int64_t inner = std::min(blocks.inner, tokens - t0);
            const detail::seen_keys inner_seen(s, b, q0 + t0, q0 + t0 + inner);
            if (!inner_seen.meet(k0, available)) continue;
            const bool is_first = inner_seen.low >= k0;
            const detail::key_range range(inner_seen.low - k0, inner_seen.high - k0, available);
            const std::int64_t count = range.count, first_key = k0 + range.first, first_row = t0 * group;
            device.gemm(false, true, inner * group, count, d, scale.products, queries + first_row * d, d,
                        keys.data + range.first * keys.stride, keys.stride, A(0), scores, k_block);
            for (std::int64_t r = 0; r < inner * group; ++r) {
              const std::int64_t row = first_row + r;
              const std::int64_t query = q0 + row / group;
              const std::int64_t seen = std::clamp<std::int64_t>(s.visible(query) - first_key, 0, count);
              A* const line = scores + r * k_block;
              const std::int64_t unseen = std::min(s.first_key(b, query) - first_key, seen);
              if (unseen > 0) std::fill_n(line, unseen, nothing);
              const A before = row_max[row];
              const A now = std::max(before, detail::row_maximum(line, seen));
              const A sum =
                  detail::row_exponentials(line, probabilities + r * k_block, now == nothing ? A(0) : now, seen, count);
              const A shrink = before == now ? A(1) : std::exp(before - now);
              row_max[row] = now;
              row_sum[row] = row_sum[row] * shrink + sum;
              if (!is_first && shrink != A(1)) {
                A* const target = sums + row * d;
                PLAIT_IVDEP
                for (std::int64_t c = 0; c < d; ++c) target[c] *= shrink;
              }
            }
            device.gemm(false, false, inner * group, d, count, A(1), probabilities, k_block,
                        values.data + range.first * values.stride, values.stride, is_first ? A(0) : A(1),
                        sums + first_row * d, d);
          }
        }
        O* const out = o + (b * s.q_batch + q0) * s.o_stride + kv_head * group_width;
        A* const out_lse = lse + (b * s.heads + kv_head * group) * s.lse_stride + q0;
        for (std::int64_t i = 0; i < tokens; ++i) {
          for (std::int64_t h = 0; h < group; ++h) {
            const std::int64_t row = i * group + h;
            O* const target = out + i * s.o_stride + h * d;
            if (row_sum[row] == A(0)) {  // or is not a number, which must not be hidden
              std::fill_n(target, d, O{});
              out_lse[h * s.lse_stride + i] = nothing;
            } else {
              detail::add_rows(sums + row * d, d, 1, target, d, false, A(1) / row_sum[row]);
              out_lse[h * s.lse_stride + i] = row_max[row] + std::log(row_sum[row]);
            }
          }
        }
      }
    }
  }
}

/// Combines the attention of the same queries over two disjoint sets of keys: o and lse become what attention over both
/// would have given, from o, lse of one set and o_other, lse_other of the other. Uses batch, q_len, heads, head_dim,
/// q_batch, lse_stride and o_stride (of o) of the shape; `other_stride` is the stride of o_other, whose batches and
/// whose lse lie as those of o. (T is the type of statistics: engines merge nothing that is rounded.)
template <class T, std::same_as<T> Other>
void merge_lse(cpu&, T* o, statistic_of<T>* lse, const Other* o_other, const statistic_of<T>* lse_other,
               std::int64_t other_stride, const attention_shape& shape) {
  const attention_shape s = shape.checked();
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t i = 0; i < s.q_len; ++i) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t at = (b * s.heads + h) * s.lse_stride + i;
        if (lse[at] == nothing && lse_other[at] == nothing) continue;
        const T larger = std::max(lse[at], lse_other[at]);
        const T mine = std::exp(lse[at] - larger), others = std::exp(lse_other[at] - larger);
        const T keep = mine / (mine + others), take = others / (mine + others);
        T* const target = o + (b * s.q_batch + i) * s.o_stride + h * s.head_dim;
        const T* const source = o_other + (b * s.q_batch + i) * other_stride + h * s.head_dim;
        PLAIT_IVDEP
        for (std::int64_t c = 0; c < s.head_dim; ++c) target[c] = target[c] * keep + source[c] * take;
        lse[at] = larger + std::log(mine + others);
      }
    }
  }
}

PLAIT_COMPILED_TEMPLATE(void attention_forward(cpu&, const float*, const float*, const float*, float*, float*,
                                               const attention_shape&))
PLAIT_COMPILED_TEMPLATE(void attention_forward(cpu&, const bf16*, const bf16*, const bf16*, bf16*, float*,
                                               const attention_shape&))
PLAIT_COMPILED_TEMPLATE(void attention_forward(cpu&, const bf16*, const bf16*, const bf16*, float*, float*,
                                               const attention_shape&))
PLAIT_COMPILED_TEMPLATE(void attention_forward(cpu&, const double*, const double*, const double*, double*, double*,
                                               const attention_shape&))

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
