// Attention engines: their concept, the sums that they share, and the engine for one rank.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/deterministic/sums.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/layout.hpp"
#include "plait/nn/attention/policy.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/sequence_order.hpp"

namespace plait {

/// One rank's attention as its engine receives it. The local sequence has shape.q_len = shape.k_len tokens. Strides are
/// between tokens of the caller's arrays. Outputs are [batch, q_len, heads, head_dim] without gaps.
struct attention_part {
  kernels::attention_shape shape;
  /// For each rank along the policy's axes, in their order: the positions of its tokens in the text.
  std::vector<std::vector<token_run>> blocks;
  std::size_t mine = 0;                         ///< index of this rank's block
  bool documents = false;                       ///< whether `first_visible` is given
  std::string name;                             ///< the layer's name, for messages
  chosen_policy context = chosen_policy::ring;  ///< the selected policy, if it is chosen at run time
  /// Tokens per chunk of the sequence with deterministic sums; 0 without them. Each chunk of queries attends to one
  /// chunk of keys at a time, and results are merged in a fixed order of chunks.
  std::int64_t chunk = 0;
};

/// The inputs of attention: queries and keys (both rotated), and values. `first_visible` [batch, q_len] has the
/// position of the first token that each local query may attend to, such as its document's beginning. It is null if
/// documents are not packed. `end_visible` has the position after the last such token; engines compute it if queries
/// look ahead in documents. `sinks` [heads] are added to the softmax of every query (`kernels::join_sinks`); null: no
/// sinks.
template <class T>
struct attention_inputs {
  const T* q = nullptr;
  const T* k = nullptr;
  const T* v = nullptr;
  const std::int32_t* first_visible = nullptr;
  const T* sinks = nullptr;
  const std::int32_t* end_visible = nullptr;
};
template <class G>
struct attention_gradients {
  G* dq = nullptr;
  G* dk = nullptr;
  G* dv = nullptr;
  statistic_of<G>* dsinks = nullptr;  ///< [heads]; null: not computed
};

/// Computes attention for one layer under a policy: local queries against the whole sequence. The constructor takes
/// (context, attention_part, axes of the policy). `forward` writes o and keeps what `backward` needs. `backward`
/// overwrites the gradients, whose type G is T or the type of statistics. If `keeps_inputs()`, the caller keeps q, k
/// and v for it.
template <class E, class Precision, class Device>
concept attention_engine =
    std::constructible_from<E, const context<Device>&, const attention_part&, const axis_list&> &&
    std::default_initializable<typename E::saved> &&
    requires(E& e, const E& c, const context<Device>& ctx, const attention_inputs<activation_of<Precision>>& in,
             activation_of<Precision>* o, typename E::saved& kept,
             attention_gradients<activation_of<Precision>> gradients) {
      e.forward(ctx, in, o, &kept);
      e.backward(ctx, in, o, o, kept, gradients);
      { c.keeps_inputs() } -> std::convertible_to<bool>;
    };

namespace detail {

/// Whether visibility or scores depend on positions beyond the mask: with document starts or ALiBi.
template <class T>
bool needs_positions(const kernels::attention_shape& shape, const attention_inputs<T>& in) {
  return shape.score.alibi || in.first_visible != nullptr;
}

/// The `attention_shape` of one run of queries against one run of keys.
inline kernels::attention_shape piece_of(const kernels::attention_shape& whole, const token_run& q, const token_run& k,
                                         const std::int32_t* first_visible = nullptr,
                                         const std::int32_t* end_visible = nullptr) {
  kernels::attention_shape s = whole;
  s.q_batch = s.lse_stride = whole.q_len;
  s.q_len = q.length, s.q_offset = q.position;
  s.k_len = k.length, s.k_offset = k.position;
  s.first_visible = first_visible ? first_visible + q.at : nullptr;
  s.end_visible = end_visible ? end_visible + q.at : nullptr;
  return s;
}

/// Whether attention needs the ends of documents: if they are packed and queries look ahead.
inline bool needs_ends(const attention_part& part) { return part.documents && part.shape.mask.looks_ahead(); }

/// Returns the document ends of the queries (`attention_inputs::end_visible`). `starts` [batch, length] has the
/// document starts of the whole text in its order.
template <class Device>
buffer<Device> ends_of_documents(Device& device, const kernels::attention_shape& shape,
                                 const std::vector<token_run>& queries, const std::int32_t* starts,
                                 std::int64_t length) {
  auto ends = make_buffer<std::int32_t>(device, static_cast<std::size_t>(shape.batch * shape.q_len));
  for (const token_run& q : queries)
    kernels::document_ends(device, starts, length, ends.template data<std::int32_t>() + q.at, shape.batch, q.position,
                           q.length, shape.q_len);
  return ends;
}

/// Writes rows of `width` elements without gaps to rows with a stride of `stride` elements. Converts elements if the
/// types differ.
template <class From, class To, class Device>
void write_rows(Device& device, const From* from, std::int64_t rows, std::int64_t width, To* to, std::int64_t stride) {
  if constexpr (std::is_same_v<From, To>) {
    constexpr auto size = static_cast<std::int64_t>(sizeof(To));
    kernels::copy_2d(device, from, to, rows, width * size, width * size, stride * size);
  } else {
    if (stride == width) return kernels::cast(device, from, to, rows * width);
    auto narrow = make_buffer<To>(device, static_cast<std::size_t>(rows * width));
    kernels::cast(device, from, narrow.template data<To>(), rows * width);
    write_rows(device, narrow.template data<To>(), rows, width, to, stride);
  }
}

template <class T>
void clear(auto& device, T* data, std::int64_t count) {
  device.zero(data, static_cast<std::size_t>(count) * sizeof(T), device.main_stream());
}

/// Returns the runs in pieces of `chunk` tokens, sorted by position. With a `chunk` of 0 it returns the runs unchanged.
std::vector<token_run> in_chunks(const std::vector<token_run>& runs, std::int64_t chunk);
#ifndef PLAIT_COMPILED
PLAIT_INLINE std::vector<token_run> in_chunks(const std::vector<token_run>& runs, std::int64_t chunk) {
  if (chunk == 0) return runs;
  std::vector<token_run> all;
  for (const token_run& run : runs)
    for (std::int64_t at = 0; at < run.length; at += chunk) all.push_back({run.at + at, run.position + at, chunk});
  std::sort(all.begin(), all.end(), [](const token_run& a, const token_run& b) { return a.position < b.position; });
  return all;
}
#endif

/// Whether an engine supports `attention_part::chunk`; the library's engines do.
template <class Engine>
inline constexpr bool knows_chunks = requires { requires Engine::in_chunks; };
/// Whether an engine reads `attention_inputs::sinks` and writes their gradients; the library's engines do.
template <class Engine>
inline constexpr bool takes_sinks = requires { requires Engine::with_sinks; };

/// Tokens per chunk of a sequence; 0 if sums are not deterministic. Throws if the engine does not support chunks, or if
/// the number of chunks does not divide the length.
template <class Engine, compute_device Device>
std::int64_t chunk_of(const context<Device>& ctx, std::int64_t length, const std::string& name) {
  const deterministic_leaves& order = ctx.deterministic;
  if (!order) return 0;
  if constexpr (!knows_chunks<Engine>)
    fail({name, ": deterministic sums have no order for the engine of this attention policy"});
  if (length % order.sequence != 0)
    fail({name, ": deterministic sums cut a sequence of ", length, " tokens into ", order.sequence,
          " chunks (deterministic_leaves::sequence), which do not divide it"});
  return length / order.sequence;
}
}  // namespace detail

/// Throws unless every run of every rank consists of whole chunks of deterministic sums.
inline void require_whole_chunks(const attention_part& part) {
  if (part.chunk == 0) return;
  for (const auto& block : part.blocks)
    for (const token_run& run : block)
      if (run.position % part.chunk != 0 || run.length % part.chunk != 0)
        fail({part.name, ": deterministic sums cut the sequence into chunks of ", part.chunk,
              " tokens (deterministic_leaves::sequence), and a rank has a run of ", run.length, " from ", run.position,
              "; legal are more chunks, so that each run consists of whole chunks"});
}
/// Throws if zigzag order gives the busiest rank over one eighth more work than the order of the text does. The work of
/// one more token is tolerated. Only masks that hide distant tokens on both sides can be refused (`attention_work`).
inline void require_even_work(const attention_part& part) {
  const kernels::attention_mask& mask = part.shape.mask;
  const auto ranks = static_cast<std::int64_t>(part.blocks.size());
  const bool zigzag = std::any_of(part.blocks.begin(), part.blocks.end(), [](const auto& b) { return b.size() > 1; });
  if (!zigzag || mask.before == mask.all || mask.after == 0 || mask.after == mask.all) return;
  std::int64_t length = 0, busiest = 0;
  for (const auto& block : part.blocks) length += tokens_of(block);
  for (const auto& block : part.blocks) busiest = std::max(busiest, visible_pairs(block, {{0, 0, length}}, mask));
  const std::vector<std::int64_t> of_text = attention_work(sequence_order::original(length), ranks, mask);
  const std::int64_t least = *std::max_element(of_text.begin(), of_text.end());
  const std::int64_t of_a_token = std::min(length, mask.before + mask.after + 1);
  if (8 * (busiest - of_a_token) <= 9 * least) return;
  fail({part.name, ": under the mask ", kernels::describe(mask), ", zigzag order gives the busiest of ", ranks,
        " ranks ", busiest, " pairs of a query and a key in each sequence, and the order of the text ", least,
        "; use that order (plait::contiguous)"});
}
/// Keys and values of a block of tokens, in runs of the text. Token i of batch b is at (b * tokens + i) * stride.
/// `v_stride` is the stride of values if it is not 0.
template <class T>
struct key_block {
  const T* k = nullptr;
  const T* v = nullptr;
  std::int64_t stride = 0;
  std::int64_t tokens = 0;
  const std::vector<token_run>* runs = nullptr;
  std::int64_t v_stride = 0;

  std::int64_t stride_of_values() const { return v_stride == 0 ? stride : v_stride; }
};

/// Views the keys and values of the local tokens.
template <class T>
key_block<T> local_keys(const attention_inputs<T>& in, const kernels::attention_shape& shape,
                        const std::vector<token_run>& runs) {
  const kernels::attention_shape s = shape.checked();
  return {in.k, in.v, s.k_stride, s.k_len, &runs, s.v_stride};
}

/// Packs keys and values side by side, [batch, tokens, 2, kv_heads, head_dim], as one message.
template <class T, class Device>
void pack_keys_and_values(Device& device, const attention_inputs<T>& in, const kernels::attention_shape& shape,
                          T* block) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(T));
  const kernels::attention_shape s = shape.checked();
  const std::int64_t row = s.kv_heads * s.head_dim * size, tokens = s.batch * s.k_len;
  kernels::copy_2d(device, in.k, block, tokens, row, s.k_stride * size, 2 * row);
  kernels::copy_2d(device, in.v, block + s.kv_heads * s.head_dim, tokens, row, s.v_stride * size, 2 * row);
}

/// Unpacks the gradients of keys and values to the strides of the shape.
template <class S, class G, class Device>
void write_key_gradients(Device& device, const S* block, const kernels::attention_shape& shape,
                         const attention_gradients<G>& out) {
  const kernels::attention_shape s = shape.checked();
  const std::int64_t width = s.kv_heads * s.head_dim, tokens = s.batch * s.k_len;
  auto narrow = make_buffer<S>(device, std::is_same_v<S, G> ? 0 : static_cast<std::size_t>(tokens * width));
  for (const bool keys : {true, false}) {
    const S* const from = block + (keys ? 0 : width);
    G* const to = keys ? out.dk : out.dv;
    const std::int64_t stride = keys ? s.dk_stride : s.dv_stride;
    constexpr auto size = static_cast<std::int64_t>(sizeof(S));
    if constexpr (std::is_same_v<S, G>) {
      kernels::copy_2d(device, from, to, tokens, width * size, 2 * width * size, stride * size);
    } else {
      kernels::copy_2d(device, from, narrow.data(), tokens, width * size, 2 * width * size, width * size);
      detail::write_rows(device, narrow.template data<S>(), tokens, width, to, stride);
    }
  }
}

// Sums of local queries over blocks of keys, forward and backward. Blocks are summed in the order of arrival, or with
// deterministic sums in a fixed order of chunks.

/// Attention of local queries over blocks of keys that arrive one after another. Partial outputs in the type of
/// statistics are merged by their log-sum-exp (online softmax, Milakov and Gimelshein 2018). So accuracy does not
/// depend on the number of blocks. o and lse are complete after `finish`.
template <class Precision, compute_device Device>
class attention_sum {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  /// `o` [batch, q_len, heads, head_dim] and `lse` [batch, heads, q_len] are the results. With a `chunk`, keys are
  /// processed by chunks and merged in a fixed order of chunks, whatever the order of their arrival.
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
    for (const token_run& q : queries_)
      next_.push_back(from_own() ? q.position / chunk
                                 : std::max<std::int64_t>(0, shape_.mask.first(q.position)) / chunk);
  }

  void add(const key_block<T>& keys) {
    if (chunk_ > 0) return add_chunks(keys);
    const bool exact = detail::needs_positions(shape_, in_);
    for (const auto& [q, k, first_run, runs] : visible_pieces(queries_, *keys.runs, shape_.mask, exact)) {
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
    if (in_.sinks != nullptr) kernels::join_sinks(device_, in_.sinks, total_, lse_, shape_);
    if constexpr (!std::is_same_v<T, S>) kernels::cast(device_, total_, o_, static_cast<std::int64_t>(elements()));
  }

 private:
  /// The result of one chunk of queries and one chunk of keys, which waits for earlier results.
  struct partial {
    std::int64_t chunk;
    buffer<Device> o, lse;
  };

  /// True if merging begins with the queries' own chunk and ends with the first chunk; false for the opposite order.
  bool from_own() const { return !shape_.mask.looks_ahead(); }
  std::size_t rows() const { return static_cast<std::size_t>(shape_.batch * shape_.q_len * shape_.heads); }
  std::size_t elements() const { return rows() * static_cast<std::size_t>(shape_.head_dim); }

  /// Computes queries of one run against keys of one run; o and lse begin at the first query.
  kernels::attention_shape forward(const key_block<T>& keys, const token_run& q, const token_run& k, S* o, S* lse) {
    kernels::attention_shape piece = detail::piece_of(shape_, q, k, in_.first_visible, in_.end_visible);
    piece.k_stride = keys.stride, piece.v_stride = keys.stride_of_values();
    piece.k_batch = keys.tokens;
    kernels::attention_forward(device_, in_.q + q.at * shape_.q_stride, keys.k + k.at * keys.stride,
                               keys.v + k.at * keys.stride_of_values(), o, lse, piece);
    return piece;
  }
  void add_chunks(const key_block<T>& keys) {
    std::vector<token_run> all = detail::in_chunks(*keys.runs, chunk_);
    if (from_own()) std::reverse(all.begin(), all.end());  // the order of merging
    for (std::size_t i = 0; i < queries_.size(); ++i)
      for (const token_run& k : all)
        if (sees(queries_[i], k, shape_.mask)) add_chunk(keys, i, k);
  }
  void add_chunk(const key_block<T>& keys, std::size_t i, const token_run& k) {
    const token_run& q = queries_[i];
    const std::int64_t chunk = k.position / chunk_, o_at = q.at * shape_.heads * shape_.head_dim;
    if (!begun_[i] && chunk == next_[i]) {
      begun_[i] = true;
      next_[i] += from_own() ? -1 : 1;
      forward(keys, q, k, total_ + o_at, lse_ + q.at);
      return merge_waiting(i);
    }
    partial p{chunk, make_buffer<S>(device_, elements()), make_buffer<S>(device_, rows())};
    forward(keys, q, k, p.o.template data<S>() + o_at, p.lse.template data<S>() + q.at);
    waiting_[i].push_back(std::move(p));
    merge_waiting(i);
  }
  /// Merges waiting results in order, up to the first missing one.
  void merge_waiting(std::size_t i) {
    if (!begun_[i]) return;
    const token_run& q = queries_[i];
    const std::int64_t o_at = q.at * shape_.heads * shape_.head_dim;
    const kernels::attention_shape piece = detail::piece_of(shape_, q, q);
    for (auto at = waiting_[i].begin(); at != waiting_[i].end();) {
      if (at->chunk != next_[i]) {
        ++at;
        continue;
      }
      kernels::merge_lse(device_, total_ + o_at, lse_ + q.at, at->o.template data<S>() + o_at,
                         at->lse.template data<S>() + q.at, shape_.heads * shape_.head_dim, piece);
      next_[i] += from_own() ? -1 : 1;
      waiting_[i].erase(at);
      at = waiting_[i].begin();
    }
  }

  /// Marks the queries of these runs as begun, and returns whether none of them had a result. If some had one, the
  /// other queries receive the result of attention to no key.
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
    const kernels::attention_shape nothing = detail::piece_of(shape_, q, {0, q.position, 0});
    kernels::attention_forward(device_, in_.q + q.at * shape_.q_stride, in_.k, in_.v,
                               total_ + q.at * shape_.heads * shape_.head_dim, lse_ + q.at, nothing);
  }

  Device& device_;
  kernels::attention_shape shape_;
  attention_inputs<T> in_;
  std::int64_t chunk_;
  std::vector<token_run> queries_;
  std::vector<bool> begun_;                    ///< whether a run of queries has a partial result
  std::vector<std::int64_t> next_;             ///< for each chunk of queries, the next chunk of keys to merge
  std::vector<std::vector<partial>> waiting_;  ///< results that arrived before an earlier chunk's
  T* o_;
  S* lse_;
  S* total_ = nullptr;
  buffer<Device> total_memory_, part_, part_lse_;
};

/// The backward pass of `attention_sum`: dq of the local queries, summed over blocks of keys, and dk and dv of each
/// block. All are in the type of statistics.
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

  /// Adds to dk and dv, which have the order of the block's keys and a stride of `stride` elements.
  void add(const key_block<T>& keys, S* dk, S* dv, std::int64_t stride) {
    const bool exact = detail::needs_positions(shape_, in_);
    for (const auto& [q, k, first_run, runs] : visible_pieces(queries_, *keys.runs, shape_.mask, exact))
      backward(keys, q, k, dq_.template data<S>(), dk, dv, stride);
  }

  // With chunks of tokens and all keys on this rank, the contribution of each chunk of queries is computed separately.

  std::size_t chunks() const { return queries_.size(); }
  std::int64_t chunk(std::size_t i) const { return queries_[i].position / chunk_; }
  /// Adds the contribution of the i-th chunk of queries: its dq, summed over chunks of keys in their order, and its
  /// part of dk and dv. dk and dv must be zero before.
  void add_chunk(std::size_t i, const key_block<T>& keys, S* dk, S* dv, std::int64_t stride) {
    const token_run& q = queries_[i];
    if (part_.empty()) part_ = make_buffer<S>(device_, static_cast<std::size_t>(rows() * width()));
    const auto each_batch = [&](auto&& f) {
      for (std::int64_t b = 0; b < shape_.batch; ++b) f((b * shape_.q_len + q.at) * width());
    };
    for (const token_run& k : detail::in_chunks(*keys.runs, chunk_)) {
      if (!sees(q, k, shape_.mask)) continue;
      each_batch([&](std::int64_t at) { detail::clear(device_, part_.template data<S>() + at, q.length * width()); });
      backward(keys, q, k, part_.template data<S>(), dk, dv, stride);
      each_batch([&](std::int64_t at) {
        kernels::accumulate(device_, static_cast<const S*>(part_.template data<S>() + at), dq_.template data<S>() + at,
                            q.length * width());
      });
    }
  }

  /// Computes dq for all chunks of queries. Each chunk's contribution to dk and dv becomes a leaf of `sum`, laid out as
  /// in `pack_keys_and_values`.
  void add_key_gradients(const key_block<T>& keys, deterministic_sum<S, Device>& sum) {
    const std::int64_t side = shape_.kv_heads * shape_.head_dim;
    for (std::size_t i = 0; i < chunks(); ++i)
      sum.add(device_, chunk(i), false, [&](S* out, bool) {
        detail::clear(device_, out, sum.elements());
        add_chunk(i, keys, out, out + side, 2 * side);
      });
  }

  /// Writes dq with the stride of the shape, and the gradients of sinks unless `dsinks` is null.
  template <class G>
  void finish(G* dq, S* dsinks = nullptr) {
    if (dsinks != nullptr)
      kernels::sink_gradients(device_, in_.sinks, lse_, static_cast<const S*>(delta_.template data<S>()), dsinks,
                              shape_);
    detail::write_rows(device_, dq_.template data<S>(), rows(), width(), dq, shape_.dq_stride);
  }

 private:
  /// Computes the gradients of one run of queries against one run of keys; dq covers all queries, dk and dv all keys.
  void backward(const key_block<T>& keys, const token_run& q, const token_run& k, S* dq, S* dk, S* dv,
                std::int64_t stride) {
    kernels::attention_shape piece = detail::piece_of(shape_, q, k, in_.first_visible, in_.end_visible);
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

// The engine of attention without communication, for ranks that hold the whole sequence.

/// Attention without communication; this rank holds the whole sequence.
template <class Precision, class Device>
class whole_attention {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  static constexpr bool in_chunks = true, with_sinks = true;
  struct saved {
    buffer<Device> lse;   ///< [batch, heads, seq]
    buffer<Device> ends;  ///< [batch, seq], of documents; empty if not needed

    template <class F>
    void visit(F&& f) {
      f(lse);
      f(ends);
    }
    template <class T>
    attention_inputs<T> with_ends(attention_inputs<T> in) const {
      in.end_visible = ends.template data<std::int32_t>();
      return in;
    }
  };

  whole_attention() = default;
  whole_attention(const context<Device>&, const attention_part& part, const axis_list&);

  bool keeps_inputs() const { return true; }

  void forward(const context<Device>& ctx, const attention_inputs<T>& in, T* o, saved* keep);
  template <class G>
  void backward(const context<Device>& ctx, const attention_inputs<T>& in, const T* o, const T* d_o, saved& kept,
                attention_gradients<G> out);

 private:
  std::int64_t rows() const { return shape_.batch * shape_.heads * shape_.q_len; }
  kernels::attention_shape with(const attention_inputs<T>& in) const {
    kernels::attention_shape s = shape_;
    s.first_visible = in.first_visible;
    s.end_visible = in.end_visible;
    return s;
  }

  kernels::attention_shape shape_;
  std::vector<token_run> runs_;
  std::int64_t chunk_ = 0;
  bool needs_ends_ = false;
};

template <class Precision, class Device>
whole_attention<Precision, Device>::whole_attention(const context<Device>&, const attention_part& part,
                                                    const axis_list&)
    : shape_(part.shape), runs_(part.blocks[0]), chunk_(part.chunk), needs_ends_(detail::needs_ends(part)) {
  if (part.blocks.size() != 1 || part.blocks[0].size() != 1)
    fail({part.name, ": attention over the whole sequence was given a part of it"});
  shape_.q_offset = shape_.k_offset = part.blocks[0][0].position;
}

template <class Precision, class Device>
void whole_attention<Precision, Device>::forward(const context<Device>& ctx, const attention_inputs<T>& given, T* o,
                                                 saved* keep) {
  saved scratch;
  saved& kept = keep ? *keep : scratch;
  kept = {};  // drops the values of an earlier pass
  if (needs_ends_ && given.first_visible != nullptr)
    kept.ends = detail::ends_of_documents(ctx.device, shape_, runs_, given.first_visible, shape_.k_len);
  const attention_inputs<T> in = kept.with_ends(given);
  auto lse = make_buffer<S>(ctx.device, static_cast<std::size_t>(rows()));
  if (chunk_ > 0) {
    attention_sum<Precision, Device> sum(ctx.device, shape_, in, runs_, o, lse.template data<S>(), chunk_);
    sum.add(local_keys(in, shape_, runs_));
    sum.finish();
  } else {
    kernels::attention_forward(ctx.device, in.q, in.k, in.v, o, lse.template data<S>(), with(in));
    if (in.sinks != nullptr) kernels::join_sinks(ctx.device, in.sinks, o, lse.template data<S>(), shape_);
  }
  kept.lse = std::move(lse);
}

template <class Precision, class Device>
template <class G>
void whole_attention<Precision, Device>::backward(const context<Device>& ctx, const attention_inputs<T>& given,
                                                  const T* o, const T* d_o, saved& kept, attention_gradients<G> out) {
  const attention_inputs<T> in = kept.with_ends(given);
  if (chunk_ > 0) {
    const std::int64_t row = 2 * shape_.kv_heads * shape_.head_dim, elements = shape_.batch * shape_.k_len * row;
    attention_gradient_sum<Precision, Device> sum(ctx.device, shape_, in, runs_, o, kept.lse.template data<S>(), d_o,
                                                  chunk_);
    deterministic_sum<S, Device> keys(elements, shape_.k_len / chunk_);
    const key_block<T> here = local_keys(in, shape_, runs_);
    sum.add_key_gradients(here, keys);
    sum.finish(out.dq, out.dsinks);
    return write_key_gradients(ctx.device, keys.parts().values[0], shape_, out);
  }
  const S* const lse = kept.lse.template data<S>();
  buffer<Device> delta;
  if (out.dsinks != nullptr) {
    delta = make_buffer<S>(ctx.device, static_cast<std::size_t>(rows()));
    kernels::attention_delta(ctx.device, o, d_o, delta.template data<S>(), shape_);
    kernels::sink_gradients(ctx.device, in.sinks, lse, static_cast<const S*>(delta.template data<S>()), out.dsinks,
                            shape_);
  }
  kernels::attention_backward(ctx.device, in.q, in.k, in.v, o, lse, d_o, out.dq, out.dk, out.dv, with(in),
                              kernels::attention_accumulate{}, static_cast<const S*>(delta.template data<S>()));
}

#define PLAIT_INSTANTIATE(T)                                                                                      \
  PLAIT_COMPILED_TEMPLATE(class whole_attention<T, cpu>)                                                          \
  PLAIT_COMPILED_TEMPLATE(void whole_attention<T, cpu>::backward(const context<cpu>&, const attention_inputs<T>&, \
                                                                 const T*, const T*, saved&, attention_gradients<T>))
PLAIT_INSTANTIATE(float)
PLAIT_INSTANTIATE(bf16)
PLAIT_INSTANTIATE(double)
#undef PLAIT_INSTANTIATE

}  // namespace plait

#include "plait/core/macros_on.hpp"
