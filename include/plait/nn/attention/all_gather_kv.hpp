// The engine of the policy `all_gather_kv`, which holds the keys and values of the whole sequence at once. (The engine
// of `ring` holds two blocks.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/deterministic/exchange.hpp"
#include "plait/nn/attention/engine.hpp"

namespace plait {
namespace detail {

/// Converts between blocks of tokens and one array in the order of the text. Each block has memory for `largest()`
/// tokens per sequence, and begins with its own tokens [batch, tokens, row].
class text_assembly {
 public:
  text_assembly() = default;
  /// Assembles blocks `first` to `first + count - 1`.
  text_assembly(const std::vector<std::vector<token_run>>& blocks, std::size_t first, std::size_t count);

  std::int64_t length() const { return length_; }
  /// Tokens of the largest block; every block has memory for that many.
  std::int64_t largest() const { return largest_; }
  /// The runs of the assembled tokens.
  const std::vector<token_run>& runs() const { return runs_; }

  /// Copies blocks to [batch, length, row]; `row` is in bytes.
  template <class Device>
  void join(Device& device, const void* blocks, void* text, std::int64_t batch, std::int64_t row) const {
    for (const piece& p : pieces_)
      kernels::copy_3d(device, place(blocks, block_of(p, batch) * row), place(text, p.to * row), batch, p.length, row,
                       p.tokens * row, row, length_ * row, row);
  }
  /// Copies [batch, length, row] back to blocks.
  template <class Device>
  void split(Device& device, const void* text, void* blocks, std::int64_t batch, std::int64_t row) const {
    for (const piece& p : pieces_)
      kernels::copy_3d(device, place(text, p.to * row), place(blocks, block_of(p, batch) * row), batch, p.length, row,
                       length_ * row, row, p.tokens * row, row);
  }

 private:
  struct piece {
    std::size_t block;
    std::int64_t at, to, position, length;
    std::int64_t tokens;  ///< tokens of the whole block
  };
  /// The first token of a piece, in rows from the first block's begin.
  std::int64_t block_of(const piece& p, std::int64_t batch) const {
    return static_cast<std::int64_t>(p.block) * batch * largest_ + p.at;
  }
  static const void* place(const void* p, std::int64_t bytes) { return static_cast<const char*>(p) + bytes; }
  static void* place(void* p, std::int64_t bytes) { return static_cast<char*>(p) + bytes; }

  std::int64_t largest_ = 0, length_ = 0;
  std::vector<piece> pieces_;
  std::vector<token_run> runs_;
};

#ifndef PLAIT_COMPILED
PLAIT_INLINE text_assembly::text_assembly(const std::vector<std::vector<token_run>>& blocks, std::size_t first,
                                          std::size_t count) {
  for (std::size_t b = 0; b < count; ++b) {
    const std::int64_t tokens = tokens_of(blocks[first + b]);
    largest_ = std::max(largest_, tokens);
    for (const token_run& r : blocks[first + b]) pieces_.push_back({b, r.at, 0, r.position, r.length, tokens});
  }
  std::sort(pieces_.begin(), pieces_.end(), [](const piece& a, const piece& b) { return a.position < b.position; });
  std::int64_t at = 0;
  std::vector<token_run> runs;
  for (piece& p : pieces_) {
    p.to = at;
    runs.push_back({at, p.position, p.length});
    at += p.length;
  }
  length_ = at;
  runs_ = joined(std::move(runs));
}
#endif

/// Gathers the document starts of all tokens of a text, [batch, length], from those of this rank's `tokens` in each
/// batch.
template <class Device>
buffer<Device> gather_starts(Device& device, any_communicator& comm, const text_assembly& text, std::int64_t batch,
                             std::int64_t tokens, const std::int32_t* starts) {
  const std::int64_t room = batch * text.largest();
  auto blocks = make_buffer<std::int32_t>(device, static_cast<std::size_t>(room * comm.size())), own = buffer<Device>();
  if (batch * tokens < room) {
    own = make_buffer<std::int32_t>(device, static_cast<std::size_t>(room));
    clear(device, own.template data<std::int32_t>(), room);
    write_rows(device, starts, 1, batch * tokens, own.template data<std::int32_t>(), batch * tokens);
    starts = own.template data<std::int32_t>();
  }
  comm.all_gather(starts, blocks.data(), static_cast<std::size_t>(room), dtype::i32);
  auto all = make_buffer<std::int32_t>(device, static_cast<std::size_t>(batch * text.length()));
  text.join(device, blocks.data(), all.data(), batch, sizeof(std::int32_t));
  return all;
}

}  // namespace detail

/// Attention of local queries over gathered keys and values. It does not keep the gathered arrays: the backward pass
/// gathers again, and reduce-scatters dk and dv in the type of statistics. There are no partial outputs to merge.
///
/// Let B = 2 batch seq kv_heads head_dim be the elements of all keys and values of a rank's heads. Over c ranks, each
/// rank sends (c-1)/c B elements of the activations' type forward. Backward it sends as many again, and (c-1)/c B
/// elements of the type of statistics.
template <class Precision, class Device>
class all_gather_kv_attention {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;
  using alone = whole_attention<Precision, Device>;

 public:
  static constexpr bool in_chunks = true, with_sinks = true;
  using saved = typename alone::saved;

  all_gather_kv_attention() = default;
  all_gather_kv_attention(const context<Device>& ctx, const attention_part& part, const axis_list& axes)
      : part_(part), text_(part.blocks, 0, part.blocks.size()) {
    require_even_work(part);
    part_.shape = part.shape.checked();
    if (part.blocks.size() == 1)
      alone_ = alone(ctx, part, axes);
    else
      comm_ = &ctx.ranks.group(axes);
  }

  bool keeps_inputs() const { return true; }

  void forward(const context<Device>& ctx, const attention_inputs<T>& given, T* o, saved* keep) {
    if (part_.blocks.size() == 1) return alone_.forward(ctx, given, o, keep);
    saved scratch;
    saved& kept = keep ? *keep : scratch;
    kept = {};  // drops the values of an earlier pass
    kept.ends = find_ends(ctx, given.first_visible);
    const attention_inputs<T> in = kept.with_ends(given);
    const buffer<Device> keys = gather(ctx, in);
    auto lse = make_buffer<S>(ctx.device, static_cast<std::size_t>(rows()));
    if (part_.chunk > 0) {
      attention_sum<Precision, Device> sum(ctx.device, part_.shape, in, queries(), o, lse.template data<S>(),
                                           part_.chunk);
      sum.add(all_keys(keys));
      sum.finish();
      kept.lse = std::move(lse);
      return;
    }
    for (const token_run& q : queries())
      kernels::attention_forward(ctx.device, in.q + q.at * part_.shape.q_stride, key_at(keys, q),
                                 key_at(keys, q) + width(), o + q.at * o_width(), lse.template data<S>() + q.at,
                                 piece(q, in));
    if (in.sinks != nullptr) kernels::join_sinks(ctx.device, in.sinks, o, lse.template data<S>(), part_.shape);
    kept.lse = std::move(lse);
  }

  template <class G>
  void backward(const context<Device>& ctx, const attention_inputs<T>& given, const T* o, const T* d_o, saved& kept,
                attention_gradients<G> out) {
    if (part_.blocks.size() == 1) return alone_.backward(ctx, given, o, d_o, kept, out);
    const attention_inputs<T> in = kept.with_ends(given);
    if (part_.chunk > 0) return backward_in_chunks(ctx, in, o, d_o, kept, out);
    const std::int64_t row = 2 * width() * static_cast<std::int64_t>(sizeof(S));
    const auto own = static_cast<std::size_t>(block_size()), all = own * part_.blocks.size();
    buffer<Device> text = make_buffer<S>(ctx.device, static_cast<std::size_t>(text_size()));
    detail::clear(ctx.device, text.template data<S>(), text_size());
    {
      const buffer<Device> keys = gather(ctx, in);
      attention_gradient_sum<Precision, Device> sum(ctx.device, part_.shape, in, queries(), o,
                                                    kept.lse.template data<S>(), d_o);
      sum.add(all_keys(keys), text.template data<S>(), text.template data<S>() + width(), 2 * width());
      sum.finish(out.dq, out.dsinks);
    }
    buffer<Device> blocks = make_buffer<S>(ctx.device, all), mine = make_buffer<S>(ctx.device, own);
    if (text_size() < static_cast<std::int64_t>(all))  // padding is sent too, so it must be defined
      detail::clear(ctx.device, blocks.template data<S>(), static_cast<std::int64_t>(all));
    text_.split(ctx.device, text.data(), blocks.data(), part_.shape.batch, row);
    comm_->reduce_scatter(blocks.data(), mine.data(), own, dtype_of<S>, reduce_op::sum);
    write_key_gradients(ctx.device, mine.template data<S>(), part_.shape, out);
  }

 protected:
  /// The document ends of the local queries; empty if the mask does not need them.
  buffer<Device> find_ends(const context<Device>& ctx, const std::int32_t* first_visible) {
    if (!detail::needs_ends(part_) || first_visible == nullptr) return {};
    const buffer<Device> starts =
        detail::gather_starts(ctx.device, *comm_, text_, part_.shape.batch, part_.shape.q_len, first_visible);
    return detail::ends_of_documents(ctx.device, part_.shape, queries(), starts.template data<std::int32_t>(),
                                     text_.length());
  }
  const std::vector<token_run>& queries() const { return part_.blocks[part_.mine]; }
  std::int64_t rows() const { return part_.shape.batch * part_.shape.heads * part_.shape.q_len; }
  std::int64_t width() const { return part_.shape.kv_heads * part_.shape.head_dim; }

  attention_part part_;
  any_communicator* comm_ = nullptr;  ///< null if one rank has all tokens

 private:
  /// A backward pass with deterministic sums of dk and dv over chunks of queries, which ranks exchange.
  template <class G>
  void backward_in_chunks(const context<Device>& ctx, const attention_inputs<T>& in, const T* o, const T* d_o,
                          saved& kept, attention_gradients<G> out) {
    const auto ranks = static_cast<std::int64_t>(part_.blocks.size());
    const std::int64_t leaves = text_.length() / part_.chunk, all = block_size() * ranks;
    deterministic_sum<S, Device> sum_of_keys(all, leaves);
    {
      const buffer<Device> keys = gather(ctx, in);
      attention_gradient_sum<Precision, Device> sum(ctx.device, part_.shape, in, queries(), o,
                                                    kept.lse.template data<S>(), d_o, part_.chunk);
      sum.add_key_gradients(all_keys(keys), sum_of_keys);
      sum.finish(out.dq, out.dsinks);
    }
    partial_sums<S, Device> own = sum_of_keys.parts();
    for (S*& values : own.values) {
      own.memory.push_back(make_collective_buffer<S>(ctx.device, static_cast<std::size_t>(all)));
      text_.split(ctx.device, values, own.memory.back().data(), part_.shape.batch,
                  2 * width() * static_cast<std::int64_t>(sizeof(S)));
      values = own.memory.back().template data<S>();
    }
    std::vector<std::vector<tree_node>> members;
    for (const std::vector<token_run>& block : part_.blocks) {
      std::vector<leaf_range> chunks;
      for (const token_run& run : block)
        chunks.push_back({run.position / part_.chunk, (run.position + run.length) / part_.chunk});
      members.push_back(roots_of(chunks, leaves));
    }
    const deterministic_exchange exchange(*comm_, std::move(members), leaves);
    const partial_sums<S, Device> mine = exchange.run(ctx.device, std::move(own), even_parts(all, ranks));
    write_key_gradients(ctx.device, static_cast<const S*>(mine.values[0]), part_.shape, out);
  }
  key_block<T> all_keys(const buffer<Device>& keys) const {
    return {keys.template data<T>(), keys.template data<T>() + width(), 2 * width(), text_.length(), &text_.runs()};
  }
  std::int64_t o_width() const { return part_.shape.heads * part_.shape.head_dim; }
  /// Elements of a message: the keys and values of the largest block.
  std::int64_t block_size() const { return 2 * part_.shape.batch * text_.largest() * width(); }
  std::int64_t text_size() const { return 2 * part_.shape.batch * text_.length() * width(); }

  /// Gathers all keys and values in the order of the text, [batch, seq, 2, kv_heads, head_dim].
  buffer<Device> gather(const context<Device>& ctx, const attention_inputs<T>& in) {
    const auto own = static_cast<std::size_t>(block_size());
    buffer<Device> mine = make_buffer<T>(ctx.device, own);
    buffer<Device> blocks = make_buffer<T>(ctx.device, own * part_.blocks.size());
    if (part_.shape.k_len < text_.largest()) detail::clear(ctx.device, mine.template data<T>(), block_size());
    pack_keys_and_values(ctx.device, in, part_.shape, mine.template data<T>());
    comm_->all_gather(mine.data(), blocks.data(), own, dtype_of<T>);
    buffer<Device> text = make_buffer<T>(ctx.device, static_cast<std::size_t>(text_size()));
    text_.join(ctx.device, blocks.data(), text.data(), part_.shape.batch,
               2 * width() * static_cast<std::int64_t>(sizeof(T)));
    return text;
  }

  /// The first key that a run of queries attends to.
  std::int64_t first_key(const token_run& q) const {
    return std::max<std::int64_t>(0, part_.shape.mask.first(q.position));
  }
  const T* key_at(const buffer<Device>& keys, const token_run& q) const {
    return keys.template data<T>() + first_key(q) * 2 * width();
  }
  kernels::attention_shape piece(const token_run& q, const attention_inputs<T>& in) const {
    const std::int64_t first = first_key(q);
    const std::int64_t end = std::min(text_.length(), part_.shape.mask.end(q.position + q.length - 1));
    kernels::attention_shape s =
        detail::piece_of(part_.shape, q, {first, first, end - first}, in.first_visible, in.end_visible);
    s.k_stride = s.v_stride = 2 * width();
    s.k_batch = text_.length();
    return s;
  }

  detail::text_assembly text_;
  alone alone_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
