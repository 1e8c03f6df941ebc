// Attention on the CPU, forward and backward, for all keys or for one piece of them. The engine chooses the keys of a
// call (nn/attention/engine.hpp).
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
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels::detail {

// The parts that attention's forward and backward pass share: blocks, packing, and masked exponentials of a row of
// scores. In bf16, scores and sums are float, and factors of products are bf16.

/// The scale of the scores as two factors: of queries when they are packed, and of the products. In bf16, scaling
/// packed queries would round them once more.
template <class T>
struct scale_factors {
  arithmetic<T> queries, products;
  explicit scale_factors(double scale)
      : queries(std::is_same_v<T, bf16> ? arithmetic<T>(1) : static_cast<arithmetic<T>>(scale)),
        products(std::is_same_v<T, bf16> ? static_cast<arithmetic<T>>(scale) : arithmetic<T>(1)) {}
};

/// Keys per block: a row of scores is then 1 KiB of floats.
inline constexpr std::int64_t key_block = 256;

/// Queries are processed in blocks of `outer` tokens; each block of keys and values is packed once per such block. Only
/// the scores of `inner` tokens exist at a time, so few scores above the diagonal are computed. All heads of a group
/// are processed together, so a product has inner * group rows. The blocks of all kinds fit the L2 cache together.
struct query_blocks {
  std::int64_t inner;
  std::int64_t outer;
  query_blocks(const attention_shape& s, std::int64_t outer_rows)
      : inner(std::max<std::int64_t>(64 / s.group(), 1)),
        outer(std::min(inner * std::max<std::int64_t>(outer_rows / (inner * s.group()), 1), s.q_len)) {}
};

/// The keys to multiply with, of a block of `available` keys, where keys from `low` on and before `high` are visible.
/// Their number is a multiple of 64 if possible, which keeps the number of different products small. Either bound may
/// lie outside of the block.
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
      : low(s.first_key(batch, begin)), high(s.visible(batch, end - 1)) {}
  bool none() const { return low >= high; }
  /// Whether some of them are among the `count` keys from `k0` on.
  bool meet(std::int64_t k0, std::int64_t count) const { return std::max(low, k0) < std::min(high, k0 + count); }
  /// Returns the key at which the blocks that contain them begin.
  std::int64_t first_block() const { return low / 64 * 64; }
};

/// Query tokens [first, first + tokens) of a batch, for the heads that share a kv head.
struct query_block {
  std::int64_t batch, kv_head, first, tokens;
};

/// The scores that exist at a time: `rows` rows of packed queries from `first_row` on, and keys from token `first_key`
/// of the batch on.
struct score_tile {
  std::int64_t first_row, rows, first_key;
  key_range keys;  ///< relative to the block of keys
  bool is_first;   ///< whether these queries see no key of an earlier block
};

/// The range [unseen, seen) of a tile's keys that a query token sees.
struct seen_scores {
  std::int64_t seen, unseen;
  seen_scores(const attention_shape& s, std::int64_t batch, std::int64_t query, const score_tile& tile)
      : seen(std::clamp<std::int64_t>(s.visible(batch, query) - tile.first_key, 0, tile.keys.count)),
        unseen(std::min(s.first_key(batch, query) - tile.first_key, seen)) {}
};

/// A block of keys or values as a product reads it.
template <class T>
struct key_rows {
  const T* data;
  std::int64_t stride;
};

/// Returns `count` tokens of one head as contiguous rows, packed into `space` if necessary. Unpacked rows whose stride
/// is a power of two would share a few cache lines.
template <class T>
key_rows<T> pack_keys(const T* from, std::int64_t stride, std::int64_t count, std::int64_t d, T* space) {
  if (stride == d) return {from, stride};
  for (std::int64_t i = 0; i < count; ++i) std::copy_n(from + i * stride, d, space + i * d);
  return {space, d};
}

/// Returns tanh u: 1 - 2 / (e^2u + 1), or a series near 0, where that formula loses digits.
template <class T>
PLAIT_ALWAYS_INLINE simd::pack<T> tanh_of_score(simd::pack<T> u) {
  const simd::pack<T> x = u * u;
  const simd::pack<T> near =
      u * (T(1) + x * (T(-1.0 / 3) + x * (T(2.0 / 15) + x * (T(-17.0 / 315) + x * T(62.0 / 2835)))));
  const simd::pack<T> far = T(1) - T(2) / (simd::exp<T>(T(2) * u) + T(1));
  return x < simd::splat(sizeof(T) == 4 ? T(0.06) : T(4e-4)) ? near : far;
}

/// A row of scores of one head's query, with the positions of its keys from `first_key` on: for `attention_score` and
/// `attention_mask::allows`.
template <class T>
struct scored_row {
  T cap, slope;
  std::int64_t query, first_key;
  bool (*allows)(std::int64_t, std::int64_t);

  /// Changes the first `count` scores; those of keys that are not allowed become -infinity. With gradients of
  /// probabilities, each becomes (gradient - delta) times the derivative of the changed score by the score.
  PLAIT_ALWAYS_INLINE void change(std::int64_t count, T* scores, T* gradients, T delta) const {
    constexpr std::int64_t w = simd::lanes<T>;
    simd::pack<T> lane;
    for (std::int64_t i = 0; i < w; ++i) lane[i] = static_cast<T>(i);
    for (std::int64_t c = 0; c < count; c += w) {
      simd::pack<T> score = simd::load(scores + c), derivative = simd::splat(T(1));
      if (cap > T(0)) {
        const simd::pack<T> t = tanh_of_score<T>(score * (T(1) / cap));
        derivative = T(1) - t * t;
        score = cap * t;
      }
      const simd::pack<T> before = static_cast<T>(query - first_key - c) - lane;
      simd::store<T>(score - slope * simd::max<T>(before, -before), scores + c);
      if (gradients) simd::store<T>((simd::load(gradients + c) - delta) * derivative, gradients + c);
    }
    for (std::int64_t c = 0; c < count && allows != nullptr; ++c)
      if (!allows(query, first_key + c)) scores[c] = -std::numeric_limits<T>::infinity();
  }
};

/// The data of both passes: the shape, the scale of the scores, and the block sizes.
template <class T>
struct attention_pass {
  using A = arithmetic<T>;
  static constexpr bool rounds = !std::is_same_v<T, A>;

  attention_pass(cpu& on, const attention_shape& shape, std::int64_t most_rows)
      : device(on), s(shape.checked()), scale(s.scale), blocks(s, most_rows) {}

  std::size_t outer_rows() const { return static_cast<std::size_t>(blocks.outer * group); }
  /// The number of elements of a packed block of queries, of a tile of scores, and of a packed block of keys.
  std::size_t packed_queries() const { return outer_rows() * static_cast<std::size_t>(d); }
  std::size_t tile_size() const { return static_cast<std::size_t>(blocks.inner * group * key_block); }
  std::size_t packed_keys() const { return static_cast<std::size_t>(key_block * d); }

  /// Returns a block of `count` keys or values of one head, from token k0 of the batch on.
  key_rows<T> keys_of(const query_block& at, const T* all, std::int64_t stride, std::int64_t k0, std::int64_t count,
                      T* space) const {
    return pack_keys(all + (at.batch * s.k_batch + k0) * stride + at.kv_head * d, stride, count, d, space);
  }
  /// Calls f(tile) for the tiles of a query block that see some of the `count` keys from k0 on.
  template <class F>
  void each_tile(const query_block& at, std::int64_t k0, std::int64_t count, F f) const {
    for (std::int64_t t0 = 0; t0 < at.tokens; t0 += blocks.inner) {
      const std::int64_t inner = std::min(blocks.inner, at.tokens - t0);
      const seen_keys seen(s, at.batch, at.first + t0, at.first + t0 + inner);
      if (!seen.meet(k0, count)) continue;
      const key_range keys(seen.low - k0, seen.high - k0, count);
      const bool is_first = seen.low >= k0;  // begins the sums, even if the rule allows none of its keys
      if (!is_first && !allows_any(at.first + t0, inner, k0 + keys.first, keys.count)) continue;
      f(score_tile{t0 * group, inner * group, k0 + keys.first, keys, is_first});
    }
  }

  /// Whether `attention_mask::allows` allows one of these keys for one of these queries.
  bool allows_any(std::int64_t query, std::int64_t queries, std::int64_t key, std::int64_t keys) const {
    if (s.mask.allows == nullptr) return true;
    for (std::int64_t i = query; i < query + queries; ++i)
      for (std::int64_t j = key; j < key + keys; ++j)
        if (s.mask.allows(s.q_offset + i, s.k_offset + j)) return true;
    return false;
  }
  bool changes_scores() const { return s.score.changes() || s.mask.allows != nullptr; }
  /// Returns row `row` of a block of queries, for the keys of a tile.
  scored_row<A> scored(const query_block& at, const score_tile& tile, std::int64_t row) const {
    return {static_cast<A>(s.score.cap), static_cast<A>(s.score.slope(at.kv_head * group + row % group)),
            s.q_offset + at.first + row / group, s.k_offset + tile.first_key, s.mask.allows};
  }

  cpu& device;
  const attention_shape s;
  const scale_factors<T> scale;
  const query_blocks blocks;
  const std::int64_t group = s.group(), d = s.head_dim, group_width = group * d;
};

/// to[r, :] += factor * from[r, :] for rows of `width` elements, packed in `from`. Without `add`, it overwrites `to`.
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

/// Replaces the lanes from `count` on by -infinity.
template <class T>
PLAIT_ALWAYS_INLINE simd::pack<T> masked(simd::pack<T> scores, std::int64_t count) {
  simd::pack<T> lane;
  for (std::int64_t i = 0; i < simd::lanes<T>; ++i) lane[i] = static_cast<T>(i);
  const T limit = static_cast<T>(std::min(count, simd::lanes<T>));
  return lane < simd::splat(limit) ? scores : simd::splat(-std::numeric_limits<T>::infinity());
}

/// Returns the largest of the first `count` scores of a row, whose memory is a whole number of packs.
template <class T>
PLAIT_ALWAYS_INLINE T row_maximum(const T* scores, std::int64_t count) {
  constexpr std::int64_t w = simd::lanes<T>;
  simd::pack<T> m = simd::splat(-std::numeric_limits<T>::infinity());
  std::int64_t c = 0;
  for (; c + w <= count; c += w) m = simd::max<T>(m, simd::load(scores + c));
  if (c < count) m = simd::max<T>(m, masked<T>(simd::load(scores + c), count - c));
  return simd::lane_max<T>(m);
}

/// to = exp(scores - shift) for the first `count` elements of a row, 0 for the rest up to `width`. Returns their sum
/// before rounding. `to` may be `scores`.
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

/// Computes probabilities from a row of scores, and the scores' gradients from a row of the probabilities' gradients. p
/// = exp(s - lse) and ds = p (dp - delta) from `first` on and before `count`, 0 for the rest up to `width`. p may be s,
/// and ds may be dp.
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

/// The forward pass of `attention_forward`: processes, for each block of queries, each block of visible keys in order.
template <class T, class O>
class attention_forward_pass : attention_pass<T> {
  using base = attention_pass<T>;
  using A = arithmetic<T>;
  using base::blocks, base::d, base::device, base::group, base::group_width, base::rounds, base::s, base::scale;
  using base::outer_rows, base::packed_keys, base::packed_queries, base::tile_size;
  static constexpr A nothing = -std::numeric_limits<A>::infinity();

 public:
  attention_forward_pass(cpu& on, const attention_shape& shape)
      : base(on, shape, 512),
        factors_(make_buffer<T>(on, (rounds ? tile_size() : 0) + packed_queries() + 2 * packed_keys())),
        scratch_(make_buffer<A>(on, tile_size() + packed_queries() + 2 * outer_rows())),
        queries_(factors_.template data<T>()),
        key_space_(queries_ + packed_queries()),
        value_space_(key_space_ + packed_keys()),
        scores_(scratch_.template data<A>()),
        sums_(scores_ + tile_size()),
        row_max_(sums_ + packed_queries()),
        row_sum_(row_max_ + outer_rows()) {
    if constexpr (rounds)
      probabilities_ = value_space_ + packed_keys();
    else
      probabilities_ = scores_;
  }

  void run(const T* q, const T* k, const T* v, O* o, A* lse) {
    for (std::int64_t b = 0; b < s.batch; ++b)
      for (std::int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head)
        for (std::int64_t q0 = 0; q0 < s.q_len; q0 += blocks.outer) {
          const query_block at{b, kv_head, q0, std::min(blocks.outer, s.q_len - q0)};
          add_keys(at, q, k, v);
          write(at, o, lse);
        }
  }

 private:
  void add_keys(const query_block& at, const T* q, const T* k, const T* v) {
    pack_queries(q + (at.batch * s.q_batch + at.first) * s.q_stride + at.kv_head * group_width, s.q_stride, at.tokens,
                 group_width, scale.queries, queries_);
    std::fill_n(row_max_, at.tokens * group, nothing);
    std::fill_n(row_sum_, at.tokens * group, A(0));
    const seen_keys seen(s, at.batch, at.first, at.first + at.tokens);
    for (std::int64_t k0 = seen.first_block(); k0 < seen.high; k0 += key_block) {
      const std::int64_t count = std::min(key_block, s.k_len - k0);
      const key_rows<T> keys = this->keys_of(at, k, s.k_stride, k0, count, key_space_);
      const key_rows<T> values = this->keys_of(at, v, s.v_stride, k0, count, value_space_);
      this->each_tile(at, k0, count, [&](const score_tile& tile) { add_tile(at, tile, keys, values); });
    }
  }
  /// s = score(q k'), then o = o exp(max before - max now) + exp(s - max now) v.
  void add_tile(const query_block& at, const score_tile& tile, const key_rows<T>& keys, const key_rows<T>& values) {
    A* const sums = sums_ + tile.first_row * d;
    const std::int64_t count = tile.keys.count;
    device.gemm(false, true, tile.rows, count, d, scale.products, queries_ + tile.first_row * d, d,
                keys.data + tile.keys.first * keys.stride, keys.stride, A(0), scores_, key_block);
    for (std::int64_t r = 0; r < tile.rows; ++r) add_row(at, tile, r);
    device.gemm(false, false, tile.rows, d, count, A(1), probabilities_, key_block,
                values.data + tile.keys.first * values.stride, values.stride, tile.is_first ? A(0) : A(1), sums, d);
  }
  PLAIT_ALWAYS_INLINE void add_row(const query_block& at, const score_tile& tile, std::int64_t r) {
    const std::int64_t row = tile.first_row + r;
    const seen_scores range(s, at.batch, at.first + row / group, tile);
    A* const line = scores_ + r * key_block;
    if (this->changes_scores()) this->scored(at, tile, row).change(range.seen, line, nullptr, A(0));
    if (range.unseen > 0) std::fill_n(line, range.unseen, nothing);
    const A before = row_max_[row];
    const A now = std::max(before, row_maximum(line, range.seen));
    const A sum = row_exponentials(line, probabilities_ + r * key_block, now == nothing ? A(0) : now, range.seen,
                                   tile.keys.count);
    const A shrink = before == now ? A(1) : std::exp(before - now);
    row_max_[row] = now;
    row_sum_[row] = row_sum_[row] * shrink + sum;
    if (tile.is_first || shrink == A(1)) return;
    A* const target = sums_ + row * d;
    PLAIT_IVDEP
    for (std::int64_t c = 0; c < d; ++c) target[c] *= shrink;
  }

  void write(const query_block& at, O* o, A* lse) const {
    O* const out = o + (at.batch * s.q_batch + at.first) * s.o_stride + at.kv_head * group_width;
    A* const out_lse = lse + (at.batch * s.heads + at.kv_head * group) * s.lse_stride + at.first;
    for (std::int64_t i = 0; i < at.tokens; ++i) {
      for (std::int64_t h = 0; h < group; ++h) {
        const std::int64_t row = i * group + h;
        O* const target = out + i * s.o_stride + h * d;
        if (row_sum_[row] == A(0)) {  // or NaN, which must stay visible
          std::fill_n(target, d, O{});
          out_lse[h * s.lse_stride + i] = nothing;
        } else {
          add_rows(sums_ + row * d, d, 1, target, d, false, A(1) / row_sum_[row]);
          out_lse[h * s.lse_stride + i] = row_max_[row] + std::log(row_sum_[row]);
        }
      }
    }
  }

  buffer<cpu> factors_, scratch_;
  T *queries_, *key_space_, *value_space_, *probabilities_ = nullptr;
  A *scores_, *sums_, *row_max_, *row_sum_;
};

}  // namespace plait::kernels::detail

namespace plait::kernels {

/// Attention in blocks (Dao et al. 2022): only the scores of one block of queries and one block of keys exist at a
/// time. Running maxima and sums make the softmax exact. Writes o (0 for queries that see nothing) and lse [batch,
/// heads, q_len], the logarithm of the sum of the exponentials of the scaled scores. The work is proportional to the
/// number of visible pairs. O is T or statistic_of<T>.
template <class T, class O>
void attention_forward(cpu& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape) {
  static_assert(std::is_same_v<O, T> || std::is_same_v<O, statistic_of<T>>);
  detail::attention_forward_pass<T, O>(device, shape).run(q, k, v, o, lse);
}

/// Combines attention of the same queries over two disjoint sets of keys. Input is o, lse for one set and o_other,
/// lse_other for the other; o and lse become the result of attention over both sets. Uses batch, q_len, heads,
/// head_dim, q_batch, lse_stride and o_stride (of o) of the shape. `other_stride` is the stride of o_other, whose
/// batches and lse have the layout of o. T is the type of statistics, because rounded results are not merged.
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

/// ends [batch, q_len]: for the query tokens from `first` to `first + count - 1` of a text, the position after the last
/// token of each one's document, for `attention_shape::end_visible`. starts [batch, length] has the start of each
/// token's document, and must not decrease along the text. Batches of ends are `stride` apart.
inline void document_ends(cpu&, const std::int32_t* starts, std::int64_t length, std::int32_t* ends, std::int64_t batch,
                          std::int64_t first, std::int64_t count, std::int64_t stride) {
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t* const text = starts + b * length;
      ends[b * stride + i] = static_cast<std::int32_t>(std::upper_bound(text, text + length, first + i) - text);
    }
}

/// Adds one term to each query's softmax: the exponential of its head's sink, with value 0 (Xiao et al. 2023). o and
/// lse of attention without sinks become those with sinks. sinks: [heads]. Uses batch, q_len, heads, head_dim, q_batch,
/// o_stride and lse_stride of the shape. With the new o and lse, `attention_backward` gives the gradients.
template <class T, class O>
void join_sinks(cpu&, const T* sinks, O* o, statistic_of<T>* lse, const attention_shape& shape) {
  using A = arithmetic<T>;
  const attention_shape s = shape.checked();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t i = 0; i < s.q_len; ++i) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        A& sum = lse[(b * s.heads + h) * s.lse_stride + i];
        const A before = sum, sink = converted<A>(sinks[h]), larger = std::max(before, sink);
        if (larger == -std::numeric_limits<A>::infinity()) continue;
        sum = larger + std::log(std::exp(before - larger) + std::exp(sink - larger));
        O* const row = o + (b * s.q_batch + i) * s.o_stride + h * s.head_dim;
        const A keep = std::exp(before - sum);
        simd::transform(
            s.head_dim, row, [=](simd::pack<A> v) { return v * keep; }, row);
      }
    }
  }
}

/// dsinks [heads]: the gradients of the sinks, from delta and the lse that includes the sinks.
template <class T>
void sink_gradients(cpu&, const T* sinks, const statistic_of<T>* lse, const statistic_of<T>* delta,
                    statistic_of<T>* dsinks, const attention_shape& shape) {
  using A = arithmetic<T>;
  const attention_shape s = shape.checked();
  std::fill_n(dsinks, s.heads, A(0));
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t row = (b * s.heads + h) * s.lse_stride;
      for (std::int64_t i = 0; i < s.q_len; ++i)
        dsinks[h] -= delta[row + i] == A(0) ? A(0) : std::exp(converted<A>(sinks[h]) - lse[row + i]) * delta[row + i];
    }
  }
}

/// delta [batch, heads, q_len], in the layout of lse: the sum of o * d_o over a head's elements. `attention_backward`
/// needs nothing else of o. Calls for several pieces of the keys share it.
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

}  // namespace plait::kernels

namespace plait::kernels::detail {

/// The arrays of `attention_backward`.
template <class T, class O, class G>
struct attention_gradients {
  const T *q, *k, *v, *d_o;
  const O* o;
  const statistic_of<T>*lse, *delta;
  G *dq, *dk, *dv;
};

/// The backward pass of `attention_backward`. It computes the probabilities of each tile of scores again from lse.
template <class T, class O, class G>
class attention_backward_pass : attention_pass<T> {
  using base = attention_pass<T>;
  using A = arithmetic<T>;
  using base::blocks, base::d, base::device, base::group, base::group_width, base::rounds, base::s, base::scale;
  using base::outer_rows, base::packed_keys, base::packed_queries, base::tile_size;
  static constexpr bool rounds_gradients = !std::is_same_v<G, A>;

 public:
  attention_backward_pass(cpu& on, const attention_shape& shape, const attention_gradients<T, O, G>& arrays,
                          attention_accumulate accumulate)
      : base(on, shape, 256),
        arrays_(arrays),
        accumulate_(accumulate),
        factors_(make_buffer<T>(on, (rounds ? 2 * tile_size() : 0) + 2 * packed_queries() + 2 * packed_keys())),
        scratch_(make_buffer<A>(on, 2 * tile_size() + packed_queries() + 2 * outer_rows() + 2 * summed_keys())),
        queries_(factors_.template data<T>()),
        douts_(queries_ + packed_queries()),
        key_space_(douts_ + packed_queries()),
        value_space_(key_space_ + packed_keys()),
        scores_(scratch_.template data<A>()),
        dprobabilities_(scores_ + tile_size()),
        dqueries_(dprobabilities_ + tile_size()),
        dkey_sums_(dqueries_ + packed_queries()),
        dvalue_sums_(dkey_sums_ + summed_keys()),
        row_lse_(dvalue_sums_ + summed_keys()),
        row_delta_(row_lse_ + outer_rows()) {
    if constexpr (rounds) {
      probabilities_ = value_space_ + packed_keys();
      dscores_ = probabilities_ + tile_size();
    } else {
      probabilities_ = scores_;
      dscores_ = dprobabilities_;
    }
  }

  void run() {
    if (!rounds_gradients && !accumulate_.keys_and_values) zero_keys_and_values();
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
        if (rounds_gradients) std::fill_n(dkey_sums_, 2 * s.k_len * d, A(0));
        for (std::int64_t q0 = 0; q0 < s.q_len; q0 += blocks.outer)
          add_queries({b, kv_head, q0, std::min(blocks.outer, s.q_len - q0)});
        if (rounds_gradients)
          write_keys_and_values(b, kv_head, 0, s.k_len, dkey_sums_, dvalue_sums_, accumulate_.keys_and_values);
      }
    }
  }

 private:
  /// The number of elements of the sums for a head's dk: one block that is added to dk, or all keys if dk is rounded.
  std::size_t summed_keys() const { return static_cast<std::size_t>((rounds_gradients ? s.k_len : key_block) * d); }

  void zero_keys_and_values() {
    for (std::int64_t i = 0; i < s.batch * s.k_len; ++i) {
      const std::int64_t token = i / s.k_len * s.k_batch + i % s.k_len;
      std::fill_n(arrays_.dk + token * s.dk_stride, s.kv_heads * d, G{});
      std::fill_n(arrays_.dv + token * s.dv_stride, s.kv_heads * d, G{});
    }
  }
  void write_keys_and_values(std::int64_t batch, std::int64_t kv_head, std::int64_t k0, std::int64_t count,
                             const A* dkeys, const A* dvalues, bool adds) {
    const std::int64_t key = batch * s.k_batch + k0;
    add_rows(dkeys, d, count, arrays_.dk + key * s.dk_stride + kv_head * d, s.dk_stride, adds);
    add_rows(dvalues, d, count, arrays_.dv + key * s.dv_stride + kv_head * d, s.dv_stride, adds);
  }

  void add_queries(const query_block& at) {
    const seen_keys seen(s, at.batch, at.first, at.first + at.tokens);
    G* const out = arrays_.dq + (at.batch * s.q_batch + at.first) * s.dq_stride + at.kv_head * group_width;
    if (seen.none()) {
      for (std::int64_t i = 0; i < at.tokens && !accumulate_.queries; ++i)
        std::fill_n(out + i * s.dq_stride, group_width, G{});
      return;
    }
    prepare(at);
    for (std::int64_t k0 = seen.first_block(); k0 < seen.high; k0 += key_block) add_keys(at, seen, k0);
    add_rows(dqueries_, group_width, at.tokens, out, s.dq_stride, accumulate_.queries, static_cast<A>(s.scale));
  }
  /// Packs queries and gradients of outputs, and collects lse and delta of each row.
  void prepare(const query_block& at) {
    const std::int64_t first = at.batch * s.q_batch + at.first;
    pack_queries(arrays_.q + first * s.q_stride + at.kv_head * group_width, s.q_stride, at.tokens, group_width,
                 scale.queries, queries_);
    pack_queries(arrays_.d_o + first * s.do_stride + at.kv_head * group_width, s.do_stride, at.tokens, group_width,
                 A(1), douts_);
    for (std::int64_t i = 0; i < at.tokens; ++i) {
      for (std::int64_t h = 0; h < group; ++h) {
        const std::int64_t row = i * group + h;
        const std::int64_t there = (at.batch * s.heads + at.kv_head * group + h) * s.lse_stride + at.first + i;
        row_lse_[row] = arrays_.lse[there];
        if (row_lse_[row] == -std::numeric_limits<A>::infinity()) row_lse_[row] = A(0);  // no key is visible
        if (arrays_.delta != nullptr) {
          row_delta_[row] = arrays_.delta[there];
        } else {
          const O* const output = arrays_.o + (first + i) * s.o_stride + at.kv_head * group_width + h * d;
          row_delta_[row] = static_cast<A>(simd::sum_of<T>(
              d, [](simd::pack<T> x, simd::pack<T> y) { return x * y; }, output, douts_ + row * d));
        }
      }
    }
    for (std::int64_t t0 = 0; t0 < at.tokens; t0 += blocks.inner) {
      const std::int64_t inner = std::min(blocks.inner, at.tokens - t0);
      if (seen_keys(s, at.batch, at.first + t0, at.first + t0 + inner).none())
        std::fill_n(dqueries_ + t0 * group_width, inner * group_width, A(0));
    }
  }

  void add_keys(const query_block& at, const seen_keys& seen, std::int64_t k0) {
    const std::int64_t available = std::min(key_block, s.k_len - k0);
    const std::int64_t taken = key_range(0, seen.high - k0, available).count;
    const key_rows<T> keys = this->keys_of(at, arrays_.k, s.k_stride, k0, available, key_space_);
    const key_rows<T> values = this->keys_of(at, arrays_.v, s.v_stride, k0, available, value_space_);
    A* const dkeys = dkey_sums_ + (rounds_gradients ? k0 * d : 0);
    A* const dvalues = dvalue_sums_ + (rounds_gradients ? k0 * d : 0);
    if (!rounds_gradients) {
      std::fill_n(dkeys, taken * d, A(0));
      std::fill_n(dvalues, taken * d, A(0));
    }
    this->each_tile(at, k0, available, [&](const score_tile& tile) {
      const std::int64_t first = tile.keys.first;
      add_tile(at, tile, {keys.data + first * keys.stride, keys.stride},
               {values.data + first * values.stride, values.stride}, dkeys + first * d, dvalues + first * d);
    });
    if (!rounds_gradients) write_keys_and_values(at.batch, at.kv_head, k0, taken, dkeys, dvalues, true);
  }
  /// p = exp(score(q k') - lse), ds = p (do v' - delta) score'(q k'); dv += p' do, dk += ds' q, dq += ds k.
  void add_tile(const query_block& at, const score_tile& tile, const key_rows<T>& keys, const key_rows<T>& values,
                A* dkeys, A* dvalues) {
    const std::int64_t rows = tile.rows, count = tile.keys.count;
    const T* const queries = queries_ + tile.first_row * d;
    const T* const douts = douts_ + tile.first_row * d;
    device.gemm(false, true, rows, count, d, scale.products, queries, d, keys.data, keys.stride, A(0), scores_,
                key_block);
    device.gemm(false, true, rows, count, d, A(1), douts, d, values.data, values.stride, A(0), dprobabilities_,
                key_block);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t row = tile.first_row + r, line = r * key_block;
      const seen_scores range(s, at.batch, at.first + row / group, tile);
      const bool changes = this->changes_scores();
      if (changes)
        this->scored(at, tile, row).change(range.seen, scores_ + line, dprobabilities_ + line, row_delta_[row]);
      row_gradients(scores_ + line, dprobabilities_ + line, probabilities_ + line, dscores_ + line, row_lse_[row],
                    changes ? A(0) : row_delta_[row], range.unseen, range.seen, count);
    }
    device.gemm(true, false, count, d, rows, A(1), probabilities_, key_block, douts, d, A(1), dvalues, d);
    device.gemm(true, false, count, d, rows, scale.products, dscores_, key_block, queries, d, A(1), dkeys, d);
    device.gemm(false, false, rows, d, count, A(1), dscores_, key_block, keys.data, keys.stride,
                tile.is_first ? A(0) : A(1), dqueries_ + tile.first_row * d, d);
  }

  const attention_gradients<T, O, G> arrays_;
  const attention_accumulate accumulate_;
  buffer<cpu> factors_, scratch_;
  T *queries_, *douts_, *key_space_, *value_space_, *probabilities_ = nullptr, *dscores_ = nullptr;
  A *scores_, *dprobabilities_, *dqueries_, *dkey_sums_, *dvalue_sums_, *row_lse_, *row_delta_;
};

}  // namespace plait::kernels::detail

namespace plait::kernels {

/// Computes gradients of attention from its inputs, its output o, its lse and the gradient of o. It computes the
/// probabilities again from lse, block by block. o and lse may come from attention over more keys than these (ring
/// attention). The results are then these keys' share of dq, and dk, dv of these keys. `delta` is the result of
/// `attention_delta` for o and d_o, and o is then not read. Null: it is computed here. O, the type of o, and G, the
/// type of the gradients, are T or statistic_of<T>. Gradients in bf16 are rounded once from their sums.
template <class T, class O, class G>
void attention_backward(cpu& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate = {}, const statistic_of<T>* delta = nullptr) {
  static_assert(std::is_same_v<O, T> || std::is_same_v<O, statistic_of<T>>);
  static_assert(std::is_same_v<G, T> || std::is_same_v<G, statistic_of<T>>);
  detail::attention_backward_pass<T, O, G>(device, shape, {q, k, v, d_o, o, lse, delta, dq, dk, dv}, accumulate).run();
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
