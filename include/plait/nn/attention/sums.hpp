// The sums that attention engines are made of: of local queries over blocks of keys, forward and backward, as they come
// or, under canonical numerics, chunk by chunk in one order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/nn/attention/engine.hpp"
#include "plait/tensor/canonical_sum.hpp"

namespace plait {

/// Attention of local queries over blocks of keys that come one after the other: partial outputs in the type of
/// statistics, merged by their log-sum-exp (online softmax, Milakov and Gimelshein 2018), so that no number of blocks
/// costs accuracy. o and lse are complete after `finish`.
template <class Precision, compute_device Device>
class attention_sum {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  /// `o` [batch, q_len, heads, head_dim] and `lse` [batch, heads, q_len] are the results. With a `chunk`, keys are met
  /// chunk by chunk, and merged from the queries' own chunk to the first one, whenever they come.
  attention_sum(Device& device, const kernels::attention_shape& shape, const attention_inputs<T>& in,
                const std::vector<token_run>& queries, T* o, S* lse, std::int64_t chunk = 0)
      : device_(device),
        shape_(shape.checked()),
        in_(in),
        chunk_(chunk),
        queries_(detail::in_chunks(queries, chunk)),
        begun_(queries_.size()),
        o_(o),
        lse_(lse) {
    if constexpr (std::is_same_v<T, S>) {
      total_ = o;
    } else {
      total_memory_ = make_buffer<S>(device, elements());
      total_ = total_memory_.template data<S>();
    }
    if (chunk == 0) return;
    waiting_.resize(queries_.size());
    for (const token_run& q : queries_) next_.push_back(shape_.causal ? q.position / chunk : -1);
  }

  void add(const key_block<T>& keys) {
    if (chunk_ > 0) return add_chunks(keys);
    const bool exact = shape_.window > 0 || in_.first_visible != nullptr;
    for (const auto& [q, k, first_run, runs] : visible_pieces(queries_, *keys.runs, shape_.window, exact)) {
      const bool first = begin(first_run, runs);
      if (!first && part_.empty()) {
        part_ = make_buffer<S>(device_, elements());
        part_lse_ = make_buffer<S>(device_, rows());
      }
      S* const o = first ? total_ : part_.template data<S>();
      S* const lse = first ? lse_ : part_lse_.template data<S>();
      const std::int64_t o_at = q.at * shape_.heads * shape_.head_dim;
      const kernels::attention_shape piece = forward(keys, q, k, o + o_at, lse + q.at);
      if (!first)
        kernels::merge_lse(device_, total_ + o_at, lse_ + q.at, o + o_at, lse + q.at, shape_.heads * shape_.head_dim,
                           piece);
    }
  }

  void finish() {
    for (std::size_t i = 0; i < queries_.size(); ++i)
      if (!begun_[i]) see_nothing(queries_[i]);
    if constexpr (!std::is_same_v<T, S>) kernels::cast(device_, total_, o_, static_cast<std::int64_t>(elements()));
  }

 private:
  /// The result for queries of one chunk and keys of one, which waits for those before it.
  struct partial {
    std::int64_t chunk;
    buffer<Device> o, lse;
  };

  std::size_t rows() const { return static_cast<std::size_t>(shape_.batch * shape_.q_len * shape_.heads); }
  std::size_t elements() const { return rows() * static_cast<std::size_t>(shape_.head_dim); }

  /// Queries of one run over keys of one run; o and lse are those of the first query.
  kernels::attention_shape forward(const key_block<T>& keys, const token_run& q, const token_run& k, S* o, S* lse) {
    kernels::attention_shape piece = detail::piece_of(shape_, q, k, in_.first_visible);
    piece.k_stride = keys.stride, piece.v_stride = keys.stride_of_values();
    piece.k_batch = keys.tokens;
    kernels::attention_forward(device_, in_.q + q.at * shape_.q_stride, keys.k + k.at * keys.stride,
                               keys.v + k.at * keys.stride_of_values(), o, lse, piece);
    return piece;
  }
  void add_chunks(const key_block<T>& keys) {
    std::vector<token_run> all = detail::in_chunks(*keys.runs, chunk_);
    if (shape_.causal) std::reverse(all.begin(), all.end());  // the order in which they are merged
    for (std::size_t i = 0; i < queries_.size(); ++i)
      for (const token_run& k : all)
        if (!shape_.causal || sees(queries_[i], k, shape_.window)) add_chunk(keys, i, k);
  }
  void add_chunk(const key_block<T>& keys, std::size_t i, const token_run& k) {
    const token_run& q = queries_[i];
    const std::int64_t chunk = k.position / chunk_, o_at = q.at * shape_.heads * shape_.head_dim;
    if (!begun_[i] && (next_[i] < 0 || chunk == next_[i])) {
      begun_[i] = true;
      next_[i] = next_[i] < 0 ? chunk + 1 : chunk - 1;
      forward(keys, q, k, total_ + o_at, lse_ + q.at);
      return merge_waiting(i);
    }
    partial p{chunk, make_buffer<S>(device_, elements()), make_buffer<S>(device_, rows())};
    forward(keys, q, k, p.o.template data<S>() + o_at, p.lse.template data<S>() + q.at);
    waiting_[i].push_back(std::move(p));
    merge_waiting(i);
  }
  /// Merges what has come, as far as nothing before it is missing.
  void merge_waiting(std::size_t i) {
    if (!begun_[i]) return;
    const token_run& q = queries_[i];
    const std::int64_t o_at = q.at * shape_.heads * shape_.head_dim;
    const kernels::attention_shape piece = detail::piece_of(shape_, q, q, nullptr);
    for (auto at = waiting_[i].begin(); at != waiting_[i].end();) {
      if (at->chunk != next_[i]) {
        ++at;
        continue;
      }
      kernels::merge_lse(device_, total_ + o_at, lse_ + q.at, at->o.template data<S>() + o_at,
                         at->lse.template data<S>() + q.at, shape_.heads * shape_.head_dim, piece);
      next_[i] += shape_.causal ? -1 : 1;
      waiting_[i].erase(at);
      at = waiting_[i].begin();
    }
  }

  /// Whether the queries of these runs have no result yet; from now on they have. Where only some have, the others are
  /// given the result of seeing nothing.
  bool begin(std::size_t first_run, std::size_t runs) {
    bool some = false;
    for (std::size_t i = first_run; i < first_run + runs; ++i) some = some || begun_[i];
    for (std::size_t i = first_run; i < first_run + runs; ++i) {
      if (some && !begun_[i]) see_nothing(queries_[i]);
      begun_[i] = true;
    }
    return !some;
  }
  void see_nothing(const token_run& q) {
    const kernels::attention_shape nothing = detail::piece_of(shape_, q, {0, q.position, 0}, nullptr);
    kernels::attention_forward(device_, in_.q + q.at * shape_.q_stride, in_.k, in_.v,
                               total_ + q.at * shape_.heads * shape_.head_dim, lse_ + q.at, nothing);
  }

  Device& device_;
  kernels::attention_shape shape_;
  attention_inputs<T> in_;
  std::int64_t chunk_;
  std::vector<token_run> queries_;
  std::vector<bool> begun_;                    ///< whether a run of queries has a first partial result
  std::vector<std::int64_t> next_;             ///< the chunk of keys that is merged next with each chunk of queries
  std::vector<std::vector<partial>> waiting_;  ///< for chunks before theirs
  T* o_;
  S* lse_;
  S* total_ = nullptr;
  buffer<Device> total_memory_, part_, part_lse_;
};

/// The backward pass of the same: dq of the local queries, summed over blocks of keys, and each block's own dk and dv,
/// all in the type of statistics.
template <class Precision, compute_device Device>
class attention_gradient_sum {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  attention_gradient_sum(Device& device, const kernels::attention_shape& shape, const attention_inputs<T>& in,
                         const std::vector<token_run>& queries, const T* o, const S* lse, const T* d_o,
                         std::int64_t chunk = 0)
      : device_(device),
        shape_(shape.checked()),
        in_(in),
        chunk_(chunk),
        queries_(detail::in_chunks(queries, chunk)),
        o_(o),
        lse_(lse),
        d_o_(d_o),
        delta_(make_buffer<S>(device, static_cast<std::size_t>(shape.batch * shape.q_len * shape.heads))),
        dq_(make_buffer<S>(device, static_cast<std::size_t>(rows() * width()))) {
    kernels::attention_delta(device, o, d_o, delta_.template data<S>(), shape_);
    detail::clear(device, dq_.template data<S>(), rows() * width());
  }

  /// Adds to dk and dv, which lie as the block's keys do, `stride` apart.
  void add(const key_block<T>& keys, S* dk, S* dv, std::int64_t stride) {
    const bool exact = shape_.window > 0 || in_.first_visible != nullptr;
    for (const auto& [q, k, first_run, runs] : visible_pieces(queries_, *keys.runs, shape_.window, exact))
      backward(keys, q, k, dq_.template data<S>(), dk, dv, stride);
  }

  // With chunks of tokens, and all keys at hand, what each chunk of queries adds is asked for by itself.

  std::size_t chunks() const { return queries_.size(); }
  std::int64_t chunk(std::size_t i) const { return queries_[i].position / chunk_; }
  /// Adds the dq of the i-th chunk of queries, summed over chunks of keys in their order, and to dk and dv, which are
  /// zero, what these queries add.
  void add_chunk(std::size_t i, const key_block<T>& keys, S* dk, S* dv, std::int64_t stride) {
    const token_run& q = queries_[i];
    if (part_.empty()) part_ = make_buffer<S>(device_, static_cast<std::size_t>(rows() * width()));
    const auto each_batch = [&](auto&& f) {
      for (std::int64_t b = 0; b < shape_.batch; ++b) f((b * shape_.q_len + q.at) * width());
    };
    for (const token_run& k : detail::in_chunks(*keys.runs, chunk_)) {
      if (shape_.causal && !sees(q, k, shape_.window)) continue;
      each_batch([&](std::int64_t at) { detail::clear(device_, part_.template data<S>() + at, q.length * width()); });
      backward(keys, q, k, part_.template data<S>(), dk, dv, stride);
      each_batch([&](std::int64_t at) {
        kernels::accumulate(device_, static_cast<const S*>(part_.template data<S>() + at), dq_.template data<S>() + at,
                            q.length * width());
      });
    }
  }

  /// All chunks of queries: dq, and what each adds to dk and dv, side by side as `pack_keys_and_values` lays keys and
  /// values, as a leaf of `sum`.
  void add_key_gradients(const key_block<T>& keys, canonical_sum<S, Device>& sum) {
    const std::int64_t side = shape_.kv_heads * shape_.head_dim;
    for (std::size_t i = 0; i < chunks(); ++i)
      sum.add(device_, chunk(i), false, [&](S* out, bool) {
        detail::clear(device_, out, sum.elements());
        add_chunk(i, keys, out, out + side, 2 * side);
      });
  }

  /// Writes dq, with the stride that the shape names.
  template <class G>
  void finish(G* dq) {
    detail::write_rows(device_, dq_.template data<S>(), rows(), width(), dq, shape_.dq_stride);
  }

 private:
  /// Queries of one run against keys of one run; dq is that of all queries, dk and dv of all keys.
  void backward(const key_block<T>& keys, const token_run& q, const token_run& k, S* dq, S* dk, S* dv,
                std::int64_t stride) {
    kernels::attention_shape piece = detail::piece_of(shape_, q, k, in_.first_visible);
    piece.k_stride = keys.stride, piece.v_stride = keys.stride_of_values();
    piece.dk_stride = piece.dv_stride = stride;
    piece.dq_stride = width();
    piece.k_batch = keys.tokens;
    kernels::attention_backward(device_, in_.q + q.at * shape_.q_stride, keys.k + k.at * keys.stride,
                                keys.v + k.at * keys.stride_of_values(), o_ + q.at * width(), lse_ + q.at,
                                d_o_ + q.at * width(), dq + q.at * width(), dk + k.at * stride, dv + k.at * stride,
                                piece, kernels::attention_accumulate{true, true}, delta_.template data<S>() + q.at);
  }

  std::int64_t rows() const { return shape_.batch * shape_.q_len; }
  std::int64_t width() const { return shape_.heads * shape_.head_dim; }

  Device& device_;
  kernels::attention_shape shape_;
  attention_inputs<T> in_;
  std::int64_t chunk_;
  std::vector<token_run> queries_;
  const T* o_;
  const S* lse_;
  const T* d_o_;
  buffer<Device> delta_, dq_, part_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
