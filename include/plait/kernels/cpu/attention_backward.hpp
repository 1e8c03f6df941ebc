// The gradients of attention on the CPU, for all keys or for one piece of them. It works on one rank's arrays; which
// keys a rank meets is its engine's matter (nn/attention/engine.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"
#include "plait/kernels/cpu/attention_blocks.hpp"

namespace plait::kernels {

/// delta [batch, heads, q_len] as lse lies: the sum of o * d_o over a head's elements, of which `attention_backward`
/// needs nothing else about o. Where that is called for one piece of the keys after another, this is made once.
template <class T, class O>
void attention_delta(cpu&, const O* o, const T* d_o, statistic_of<T>* delta, const attention_shape& shape) {
  using S = statistic_of<T>;
  const attention_shape s = shape.checked();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t i = 0; i < s.q_len; ++i) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t token = b * s.q_batch + i, first = h * s.head_dim;
        delta[(b * s.heads + h) * s.lse_stride + i] = static_cast<S>(simd::sum_of<T>(
            s.head_dim, [](simd::pack<T> x, simd::pack<T> y) { return x * y; }, o + token * s.o_stride + first,
            d_o + token * s.do_stride + first));
      }
    }
  }
}

/// Gradients of attention from its inputs, its output o, its lse and the gradient of o; the probabilities are made anew
/// block by block from lse. o and lse may come from attention over more keys than these (ring attention): then the
/// results are these keys' share of dq and the dk, dv of these keys. `delta` is what `attention_delta` makes of o and
/// d_o; where it is given o is not read, null has it made here. O, the type of o, and G, that of the gradients, are T
/// or statistic_of<T>; gradients in bf16 are rounded once from their sums.
template <class T, class O, class G>
void attention_backward(cpu& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate = {}, const statistic_of<T>* delta = nullptr) {
  static_assert(std::is_same_v<O, T> || std::is_same_v<O, statistic_of<T>>);
  static_assert(std::is_same_v<G, T> || std::is_same_v<G, statistic_of<T>>);
  using A = arithmetic<T>;
  constexpr bool rounds = !std::is_same_v<T, A>, rounds_gradients = !std::is_same_v<G, A>;
  const attention_shape s = shape.checked();
  const detail::scale_factors<T> scale(s.scale);
  const std::int64_t group = s.group(), d = s.head_dim, group_width = group * d, k_block = detail::key_block;
  const detail::query_blocks blocks(s, 256);
  const auto outer_rows = static_cast<std::size_t>(blocks.outer * group);
  const auto inner_rows = static_cast<std::size_t>(blocks.inner * group), width = static_cast<std::size_t>(d);
  const auto key_count = static_cast<std::size_t>(k_block);
  // The sums of a head's dk and dv: in blocks that are added to dk and dv, or of all keys where those are rounded.
  const auto summed_keys = static_cast<std::size_t>(rounds_gradients ? s.k_len : k_block);
  auto factors = make_buffer<T>(
      device, (rounds ? 2 * inner_rows * key_count : 0) + 2 * outer_rows * width + 2 * key_count * width);
  auto scratch =
      make_buffer<A>(device, 2 * inner_rows * key_count + outer_rows * (width + 2) + 2 * summed_keys * width);
  T* const queries = factors.template data<T>();
  T* const douts = queries + outer_rows * width;
  T* const key_space = douts + outer_rows * width;
  T* const value_space = key_space + key_count * width;
  A* const scores = scratch.template data<A>();
  A* const dprobabilities = scores + inner_rows * key_count;
  A* const dqueries = dprobabilities + inner_rows * key_count;
  A* const dkey_sums = dqueries + outer_rows * width;
  A* const dvalue_sums = dkey_sums + summed_keys * width;
  A* const row_lse = dvalue_sums + summed_keys * width;
  A* const row_delta = row_lse + outer_rows;
  T *probabilities = nullptr, *dscores = nullptr;
  if constexpr (rounds) {
    probabilities = value_space + key_count * width;
    dscores = probabilities + inner_rows * key_count;
  } else {
    probabilities = scores;
    dscores = dprobabilities;
  }

  if (!rounds_gradients && !accumulate.keys_and_values) {
    for (std::int64_t i = 0; i < s.batch * s.k_len; ++i) {
      const std::int64_t token = i / s.k_len * s.k_batch + i % s.k_len;
      std::fill_n(dk + token * s.dk_stride, s.kv_heads * d, G{});
      std::fill_n(dv + token * s.dv_stride, s.kv_heads * d, G{});
    }
  }
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
      if (rounds_gradients) std::fill_n(dkey_sums, 2 * s.k_len * d, A(0));
      for (std::int64_t q0 = 0; q0 < s.q_len; q0 += blocks.outer) {
        const std::int64_t tokens = std::min(blocks.outer, s.q_len - q0), first = b * s.q_batch + q0;
        const detail::seen_keys seen_here(s, b, q0, q0 + tokens);
        G* const out = dq + first * s.dq_stride + kv_head * group_width;
        if (seen_here.none()) {
          if (!accumulate.queries) {
            for (std::int64_t i = 0; i < tokens; ++i) std::fill_n(out + i * s.dq_stride, group_width, G{});
          }
          continue;
        }
        detail::pack_queries(q + first * s.q_stride + kv_head * group_width, s.q_stride, tokens, group_width,
                             scale.queries, queries);
        detail::pack_queries(d_o + first * s.do_stride + kv_head * group_width, s.do_stride, tokens, group_width, A(1),
                             douts);
        for (std::int64_t i = 0; i < tokens; ++i) {
          for (std::int64_t h = 0; h < group; ++h) {
            const std::int64_t row = i * group + h, at = (b * s.heads + kv_head * group + h) * s.lse_stride + q0 + i;
            row_lse[row] = lse[at];
            if (delta != nullptr) {
              row_delta[row] = delta[at];
            } else {
              const O* const output = o + (first + i) * s.o_stride + kv_head * group_width + h * d;
              row_delta[row] = static_cast<A>(simd::sum_of<T>(
                  d, [](simd::pack<T> x, simd::pack<T> y) { return x * y; }, output, douts + row * d));
            }
          }
        }
        for (std::int64_t t0 = 0; t0 < tokens; t0 += blocks.inner) {
          const std::int64_t inner = std::min(blocks.inner, tokens - t0);
          if (detail::seen_keys(s, b, q0 + t0, q0 + t0 + inner).none()) {
            std::fill_n(dqueries + t0 * group_width, inner * group_width, A(0));
          }
        }
        for (std::int64_t k0 = seen_here.first_block(); k0 < seen_here.high; k0 += k_block) {
          const std::int64_t available = std::min(k_block, s.k_len - k0);
          const std::int64_t taken = detail::key_range(0, seen_here.high - k0, available).count;
          const T* const head_keys = k + (b * s.k_batch + k0) * s.k_stride + kv_head * d;
          const T* const head_values = v + (b * s.k_batch + k0) * s.v_stride + kv_head * d;
          const auto keys = detail::pack_keys(head_keys, s.k_stride, available, d, key_space);
          const auto values = detail::pack_keys(head_values, s.v_stride, available, d, value_space);
          A* const dkeys = dkey_sums + (rounds_gradients ? k0 * d : 0);
          A* const dvalues = dvalue_sums + (rounds_gradients ? k0 * d : 0);
          if (!rounds_gradients) {
            std::fill_n(dkeys, taken * d, A(0));
            std::fill_n(dvalues, taken * d, A(0));
          }
          for (std::int64_t t0 = 0; t0 < tokens; t0 += blocks.inner) {
            const std::int64_t inner = std::min(blocks.inner, tokens - t0), rows = inner * group;
            const detail::seen_keys inner_seen(s, b, q0 + t0, q0 + t0 + inner);
            if (!inner_seen.meet(k0, available)) continue;
            const bool is_first = inner_seen.low >= k0;
            const detail::key_range range(inner_seen.low - k0, inner_seen.high - k0, available);
            const std::int64_t count = range.count, first_key = k0 + range.first;
            const T* const block_keys = keys.data + range.first * keys.stride;
            A* const dq_rows = dqueries + t0 * group_width;
            const T* const q_rows = queries + t0 * group_width;
            const T* const do_rows = douts + t0 * group_width;
            device.gemm(false, true, rows, count, d, scale.products, q_rows, d, block_keys, keys.stride, A(0), scores,
                        k_block);
            device.gemm(false, true, rows, count, d, A(1), do_rows, d, values.data + range.first * values.stride,
                        values.stride, A(0), dprobabilities, k_block);
            for (std::int64_t r = 0; r < rows; ++r) {
              const std::int64_t row = t0 * group + r, query = q0 + row / group;
              const std::int64_t seen = std::clamp<std::int64_t>(s.visible(query) - first_key, 0, count);
              const std::int64_t unseen = std::min(s.first_key(b, query) - first_key, seen);
              const std::int64_t at = r * k_block;
              detail::row_gradients(scores + at, dprobabilities + at, probabilities + at, dscores + at, row_lse[row],
                                    row_delta[row], unseen, seen, count);
            }
            device.gemm(true, false, count, d, rows, A(1), probabilities, k_block, do_rows, d, A(1),
                        dvalues + range.first * d, d);
            device.gemm(true, false, count, d, rows, scale.products, dscores, k_block, q_rows, d, A(1),
                        dkeys + range.first * d, d);
            device.gemm(false, false, rows, d, count, A(1), dscores, k_block, block_keys, keys.stride,
                        is_first ? A(0) : A(1), dq_rows, d);
          }
          if (!rounds_gradients) {
            const std::int64_t key = b * s.k_batch + k0;
            detail::add_rows(dkeys, d, taken, dk + key * s.dk_stride + kv_head * d, s.dk_stride);
            detail::add_rows(dvalues, d, taken, dv + key * s.dv_stride + kv_head * d, s.dv_stride);
          }
        }
        detail::add_rows(dqueries, group_width, tokens, out, s.dq_stride, accumulate.queries, static_cast<A>(s.scale));
      }
      if (rounds_gradients) {
        const std::int64_t key = b * s.k_batch;
        const bool adds = accumulate.keys_and_values;
        detail::add_rows(dkey_sums, d, s.k_len, dk + key * s.dk_stride + kv_head * d, s.dk_stride, adds);
        detail::add_rows(dvalue_sums, d, s.k_len, dv + key * s.dv_stride + kv_head * d, s.dv_stride, adds);
      }
    }
  }
}

PLAIT_COMPILED_TEMPLATE(void attention_backward(cpu&, const float*, const float*, const float*, const float*,
                                                const float*, const float*, float*, float*, float*,
                                                const attention_shape&, attention_accumulate, const float*))
PLAIT_COMPILED_TEMPLATE(void attention_backward(cpu&, const bf16*, const bf16*, const bf16*, const bf16*, const float*,
                                                const bf16*, bf16*, bf16*, bf16*, const attention_shape&,
                                                attention_accumulate, const float*))
PLAIT_COMPILED_TEMPLATE(void attention_backward(cpu&, const bf16*, const bf16*, const bf16*, const bf16*, const float*,
                                                const bf16*, float*, float*, float*, const attention_shape&,
                                                attention_accumulate, const float*))
PLAIT_COMPILED_TEMPLATE(void attention_backward(cpu&, const double*, const double*, const double*, const double*,
                                                const double*, const double*, double*, double*, double*,
                                                const attention_shape&, attention_accumulate, const double*))

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
