// The gradients of attention on the CPU, for all keys or for one piece of them. It works on one rank's arrays; which
// keys a rank meets is its engine's matter (nn/attention/engine.hpp). Next: kernels/attention_shape.hpp for the
// arrays, kernels/cpu/attention_blocks.hpp for the blocks, tests/unit/kernels/attention.cpp.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/kernels/cpu/attention_blocks.hpp"

namespace plait::kernels {

/// delta [batch, heads, q_len] as lse lies: the sum of o * d_o over a head's elements, of which `attention_backward`
/// needs nothing else about o. Where that is called for one piece of the keys after another, this is made once.
template <class T, std::same_as<T> O>
void attention_delta(cpu&, const O* o, const T* d_o, statistic_of<T>* delta, const attention_shape& shape) {
  const attention_shape s = shape.checked();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t i = 0; i < s.q_len; ++i) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t token = b * s.q_batch + i, first = h * s.head_dim;
        delta[(b * s.heads + h) * s.lse_stride + i] = static_cast<T>(simd::sum_of<T>(
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
/// or statistic_of<T>, here the same.
template <class T, std::same_as<T> O, std::same_as<T> G>
void attention_backward(cpu& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate = {}, const statistic_of<T>* delta = nullptr) {
  const attention_shape s = shape.checked();
  const std::int64_t group = s.group(), d = s.head_dim, group_width = group * d, k_block = detail::key_block;
  const detail::query_blocks blocks(s, 256);
  const auto outer_rows = static_cast<std::size_t>(blocks.outer * group);
  const auto inner_rows = static_cast<std::size_t>(blocks.inner * group), width = static_cast<std::size_t>(d);
  const auto key_count = static_cast<std::size_t>(k_block);
  auto scratch =
      make_buffer<T>(device, 2 * inner_rows * key_count + outer_rows * (3 * width + 2) + 4 * key_count * width);
  T* const scores = scratch.template data<T>();
  T* const dscores = scores + inner_rows * key_count;
  T* const queries = dscores + inner_rows * key_count;
  T* const douts = queries + outer_rows * width;
  T* const dqueries = douts + outer_rows * width;
  T* const key_space = dqueries + outer_rows * width;
  T* const value_space = key_space + key_count * width;
  T* const dkey_space = value_space + key_count * width;
  T* const dvalue_space = dkey_space + key_count * width;
  T* const row_lse = dvalue_space + key_count * width;
  T* const row_delta = row_lse + outer_rows;

  if (!accumulate.keys_and_values) {
    for (std::int64_t i = 0; i < s.batch * s.k_len; ++i) {
      const std::int64_t token = i / s.k_len * s.k_batch + i % s.k_len;
      std::fill_n(dk + token * s.dk_stride, s.kv_heads * d, T(0));
      std::fill_n(dv + token * s.dv_stride, s.kv_heads * d, T(0));
    }
  }
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
      for (std::int64_t q0 = 0; q0 < s.q_len; q0 += blocks.outer) {
        const std::int64_t tokens = std::min(blocks.outer, s.q_len - q0), first = b * s.q_batch + q0;
        const detail::seen_keys seen_here(s, b, q0, q0 + tokens);
        T* const out = dq + first * s.dq_stride + kv_head * group_width;
        if (seen_here.none()) {
          if (!accumulate.queries) {
            for (std::int64_t i = 0; i < tokens; ++i) std::fill_n(out + i * s.dq_stride, group_width, T(0));
          }
          continue;
        }
        detail::pack_queries(q + first * s.q_stride + kv_head * group_width, s.q_stride, tokens, group_width,
                             static_cast<T>(s.scale), queries);
        detail::pack_queries(d_o + first * s.do_stride + kv_head * group_width, s.do_stride, tokens, group_width, T(1),
                             douts);
        for (std::int64_t i = 0; i < tokens; ++i) {
          for (std::int64_t h = 0; h < group; ++h) {
            const std::int64_t row = i * group + h, at = (b * s.heads + kv_head * group + h) * s.lse_stride + q0 + i;
            row_lse[row] = lse[at];
            if (delta != nullptr) {
              row_delta[row] = delta[at];
            } else {
              const T* const output = o + (first + i) * s.o_stride + kv_head * group_width + h * d;
              row_delta[row] = static_cast<T>(simd::sum_of<T>(
                  d, [](simd::pack<T> x, simd::pack<T> y) { return x * y; }, output, douts + row * d));
            }
          }
        }
        for (std::int64_t t0 = 0; t0 < tokens; t0 += blocks.inner) {
          const std::int64_t inner = std::min(blocks.inner, tokens - t0);
          if (detail::seen_keys(s, b, q0 + t0, q0 + t0 + inner).none()) {
            std::fill_n(dqueries + t0 * group_width, inner * group_width, T(0));
          }
        }
        for (std::int64_t k0 = seen_here.first_block(); k0 < seen_here.high; k0 += k_block) {
          const std::int64_t available = std::min(k_block, s.k_len - k0);
          const std::int64_t taken = detail::key_range(0, seen_here.high - k0, available).count;
          const T* const head_keys = k + (b * s.k_batch + k0) * s.k_stride + kv_head * d;
          const T* const head_values = v + (b * s.k_batch + k0) * s.v_stride + kv_head * d;
          const auto keys = detail::pack_keys(head_keys, s.k_stride, available, d, key_space);
          const auto values = detail::pack_keys(head_values, s.v_stride, available, d, value_space);
          std::fill_n(dkey_space, taken * d, T(0));
          std::fill_n(dvalue_space, taken * d, T(0));
          for (std::int64_t t0 = 0; t0 < tokens; t0 += blocks.inner) {
            const std::int64_t inner = std::min(blocks.inner, tokens - t0), rows = inner * group;
            const detail::seen_keys inner_seen(s, b, q0 + t0, q0 + t0 + inner);
            if (!inner_seen.meet(k0, available)) continue;
            const bool is_first = inner_seen.low >= k0;
            const detail::key_range range(inner_seen.low - k0, inner_seen.high - k0, available);
            const std::int64_t count = range.count, first_key = k0 + range.first;
            const T* const block_keys = keys.data + range.first * keys.stride;
            T* const dq_rows = dqueries + t0 * group_width;
            const T* const q_rows = queries + t0 * group_width;
            const T* const do_rows = douts + t0 * group_width;
            device.gemm(false, true, rows, count, d, T(1), q_rows, d, block_keys, keys.stride, T(0), scores, k_block);
            device.gemm(false, true, rows, count, d, T(1), do_rows, d, values.data + range.first * values.stride,
                        values.stride, T(0), dscores, k_block);
            for (std::int64_t r = 0; r < rows; ++r) {
              const std::int64_t row = t0 * group + r, query = q0 + row / group;
              const std::int64_t seen = std::clamp<std::int64_t>(s.visible(query) - first_key, 0, count);
              const std::int64_t unseen = std::min(s.first_key(b, query) - first_key, seen);
              detail::row_gradients(scores + r * k_block, dscores + r * k_block, row_lse[row], row_delta[row], unseen,
                                    seen, count);
            }
            device.gemm(true, false, count, d, rows, T(1), scores, k_block, do_rows, d, T(1),
                        dvalue_space + range.first * d, d);
            device.gemm(true, false, count, d, rows, T(1), dscores, k_block, q_rows, d, T(1),
                        dkey_space + range.first * d, d);
            device.gemm(false, false, rows, d, count, T(1), dscores, k_block, block_keys, keys.stride,
                        is_first ? T(0) : T(1), dq_rows, d);
          }
          T* const head_dkeys = dk + (b * s.k_batch + k0) * s.dk_stride + kv_head * d;
          T* const head_dvalues = dv + (b * s.k_batch + k0) * s.dv_stride + kv_head * d;
          detail::add_rows(dkey_space, d, taken, head_dkeys, s.dk_stride);
          detail::add_rows(dvalue_space, d, taken, head_dvalues, s.dv_stride);
        }
        const T scale = static_cast<T>(s.scale);
        for (std::int64_t i = 0; i < tokens; ++i) {
          T* const target = out + i * s.dq_stride;
          const T* const source = dqueries + i * group_width;
          if (!accumulate.queries) std::fill_n(target, group_width, T(0));
          PLAIT_IVDEP
          for (std::int64_t c = 0; c < group_width; ++c) target[c] += source[c] * scale;
        }
      }
    }
  }
}

PLAIT_COMPILED_TEMPLATE(void attention_backward(cpu&, const float*, const float*, const float*, const float*,
                                                const float*, const float*, float*, float*, float*,
                                                const attention_shape&, attention_accumulate, const float*))
PLAIT_COMPILED_TEMPLATE(void attention_backward(cpu&, const double*, const double*, const double*, const double*,
                                                const double*, const double*, double*, double*, double*,
                                                const attention_shape&, attention_accumulate, const double*))

}  // namespace plait::kernels
