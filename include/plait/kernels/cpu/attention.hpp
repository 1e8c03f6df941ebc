// Attention on the CPU, forward and backward, for all keys or for one piece of them. Which keys a rank meets is its
// engine's matter (nn/attention/engine.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/attention_shape.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels::detail {

// The shared part of attention's forward and backward pass on the CPU: blocks, packing, masked exponentials of a row of
// scores. In bf16, scores and sums are float, and what is multiplied is bf16.

/// Factors of the scale of the scores: of queries as they are packed, and of the products with them. In bf16 packed
/// queries would be rounded once more.
template <class T>
struct scale_factors {
  arithmetic<T> queries, products;
  explicit scale_factors(double scale)
      : queries(std::is_same_v<T, bf16> ? arithmetic<T>(1) : static_cast<arithmetic<T>>(scale)),
        products(std::is_same_v<T, bf16> ? static_cast<arithmetic<T>>(scale) : arithmetic<T>(1)) {}
};

/// Keys in a block: a row of scores is then 1 KiB of floats.
inline constexpr std::int64_t key_block = 256;

/// Query tokens are taken `outer` at a time, for which a block of keys and values is packed once, and of those `inner`
/// at a time, for which the scores exist at a time: few, so that little above the diagonal is computed in vain. The
/// heads of a group go together, so a product has inner * group rows. All blocks of one kind fit the L2 cache together.
struct query_blocks {
  std::int64_t inner;
  std::int64_t outer;
  query_blocks(const attention_shape& s, std::int64_t outer_rows)
      : inner(std::max<std::int64_t>(64 / s.group(), 1)),
        outer(std::min(inner * std::max<std::int64_t>(outer_rows / (inner * s.group()), 1), s.q_len)) {}
};

/// Keys to multiply with, of a block of `available`, where those from `low` on and before `high` are seen: a multiple
/// of 64 if possible, to keep the number of different products small whatever the offsets. Either bound may lie outside
/// of the block.
struct key_range {
  std::int64_t first, count;
  constexpr key_range(std::int64_t low, std::int64_t high, std::int64_t available)
      : first(std::max<std::int64_t>(low, 0) / 64 * 64),
        count(std::min(available - first, (high - first + 63) / 64 * 64)) {}
};

/// The keys that some of the query tokens [begin, end) of a batch see: from `low` on and before `high`.
struct seen_keys {
  std::int64_t low, high;
  seen_keys(const attention_shape& s, std::int64_t batch, std::int64_t begin, std::int64_t end)
      : low(s.first_key(batch, begin)), high(s.visible(end - 1)) {}
  bool none() const { return low >= high; }
  /// Whether some lie in the block of `count` keys from `k0` on.
  bool meet(std::int64_t k0, std::int64_t count) const { return std::max(low, k0) < std::min(high, k0 + count); }
  /// Where blocks begin that are to hold them all.
  std::int64_t first_block() const { return low / 64 * 64; }
};

/// A block of keys or values as a product reads it.
template <class T>
struct key_rows {
  const T* data;
  std::int64_t stride;
};

/// `count` tokens of one head, packed into `space` unless they lie side by side already: rows a power of two apart fall
/// on the same few cache lines.
template <class T>
key_rows<T> pack_keys(const T* from, std::int64_t stride, std::int64_t count, std::int64_t d, T* space) {
  if (stride == d) return {from, stride};
  for (std::int64_t i = 0; i < count; ++i) std::copy_n(from + i * stride, d, space + i * d);
  return {space, d};
}

/// to[r, :] += factor * from[r, :] for rows of `width` elements, packed in `from`; or = where it does not add.
template <class T, class To>
void add_rows(const T* from, std::int64_t width, std::int64_t rows, To* to, std::int64_t to_stride, bool adds = true,
              T factor = T(1)) {
  for (std::int64_t r = 0; r < rows; ++r) {
    To* const target = to + r * to_stride;
    if (adds) {
      simd::transform(
          width, target, [=](simd::pack<T> sum, simd::pack<T> v) { return sum + v * factor; }, target,
          from + r * width);
    } else {
      simd::transform(
          width, target, [=](simd::pack<T> v) { return v * factor; }, from + r * width);
    }
  }
}

/// Packs `tokens` query tokens of one group of heads into rows [tokens * group, head_dim], times `factor`.
template <class T>
void pack_queries(const T* from, std::int64_t stride, std::int64_t tokens, std::int64_t width, arithmetic<T> factor,
                  T* to) {
  for (std::int64_t i = 0; i < tokens; ++i) {
    simd::transform(
        width, to + i * width, [=](simd::pack<T> v) { return v * factor; }, from + i * stride);
  }
}

/// The pack with the lanes from `count` on replaced by -infinity.
template <class T>
PLAIT_ALWAYS_INLINE simd::pack<T> masked(simd::pack<T> scores, std::int64_t count) {
  simd::pack<T> lane;
  for (std::int64_t i = 0; i < simd::lanes<T>; ++i) lane[i] = static_cast<T>(i);
  const T limit = static_cast<T>(std::min(count, simd::lanes<T>));
  return lane < simd::splat(limit) ? scores : simd::splat(-std::numeric_limits<T>::infinity());
}

/// The largest of the first `count` scores of a row whose storage is a whole number of packs.
template <class T>
PLAIT_ALWAYS_INLINE T row_maximum(const T* scores, std::int64_t count) {
  constexpr std::int64_t w = simd::lanes<T>;
  simd::pack<T> m = simd::splat(-std::numeric_limits<T>::infinity());
  std::int64_t c = 0;
  for (; c + w <= count; c += w) m = simd::max<T>(m, simd::load(scores + c));
  if (c < count) m = simd::max<T>(m, masked<T>(simd::load(scores + c), count - c));
  return simd::lane_max<T>(m);
}

/// to = exp(scores - shift) for the first `count` of a row, 0 for the rest up to `width`; returns their sum before
/// rounding. `to` may be scores.
template <class T, class To>
PLAIT_ALWAYS_INLINE T row_exponentials(const T* scores, To* to, T shift, std::int64_t count, std::int64_t width) {
  constexpr std::int64_t w = simd::lanes<T>;
  simd::pack<T> sum{};
  std::int64_t c = 0;
  for (; c + w <= count; c += w) {
    const simd::pack<T> p = simd::exp<T>(simd::load(scores + c) - shift);
    sum += p;
    simd::store<To>(p, to + c);
  }
  if (c < count) {
    const simd::pack<T> p = simd::exp<T>(masked<T>(simd::load(scores + c) - shift, count - c));
    sum += p;
    simd::store<To>(p, to + c);
    c += w;
  }
  for (; c < width; c += w) simd::store<To>(simd::pack<T>{}, to + c);
  return simd::lane_sum<T>(sum);
}

/// Makes probabilities of a row of scores, and gradients of the scores of a row of theirs: p = exp(s - lse),
/// ds = p (dp - delta) for those from `first` on and before `count`, 0 for the rest up to `width`. p may be s, and ds
/// dp.
template <class T, class To>
PLAIT_ALWAYS_INLINE void row_gradients(const T* scores, const T* dprobabilities, To* probabilities, To* dscores, T lse,
                                       T delta, std::int64_t first, std::int64_t count, std::int64_t width) {
  constexpr std::int64_t w = simd::lanes<T>;
  std::int64_t c = 0;
  for (; c + w <= count; c += w) {
    const simd::pack<T> p = simd::exp<T>(simd::load(scores + c) - lse);
    const simd::pack<T> d = p * (simd::load(dprobabilities + c) - delta);
    simd::store<To>(p, probabilities + c);
    simd::store<To>(d, dscores + c);
  }
  if (c < count) {
    const simd::pack<T> p = simd::exp<T>(masked<T>(simd::load(scores + c) - lse, count - c));
    const simd::pack<T> d = p * (simd::load(dprobabilities + c) - delta);
    simd::store<To>(p, probabilities + c);
    simd::store<To>(p > simd::pack<T>{} ? d : simd::pack<T>{}, dscores + c);  // 0 times NaN is NaN
    c += w;
  }
  for (; c < width; c += w) {
    simd::store<To>(simd::pack<T>{}, probabilities + c);
    simd::store<To>(simd::pack<T>{}, dscores + c);
  }
  if (first > 0) {
    std::fill_n(probabilities, first, To{});
    std::fill_n(dscores, first, To{});
  }
}

}  // namespace plait::kernels::detail

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
/// lse lie as for o. T is the type of statistics, because rounded results are not merged.
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

/// delta [batch, heads, q_len], in the layout of lse: the sum of o * d_o over a head's elements, all that
/// `attention_backward` needs to know of o. Calls for several pieces of the keys share it.
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
