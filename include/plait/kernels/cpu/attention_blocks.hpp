// The shared part of attention's forward and backward pass on the CPU: blocks, packing, masked exponentials of a row of
// scores. In bf16, scores and sums are float, and what is multiplied is bf16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "plait/core/macros_off.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/attention_shape.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels::detail {

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
    simd::store<To>(p > simd::pack<T>{} ? d : simd::pack<T>{}, dscores + c);  // 0 times what is not a number is not 0
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

#include "plait/core/macros_on.hpp"
