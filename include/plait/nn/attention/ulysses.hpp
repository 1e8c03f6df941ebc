// The engine of the policy `ulysses`, alone or around another policy. The extent of its axis must divide a rank's query
// heads.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/nn/attention/all_gather_kv.hpp"

namespace plait {

/// Attention of some heads over a longer sequence. An all-to-all turns a shard of the sequence with all heads into all
/// tokens of the group with some heads. `Inner` computes attention, and another all-to-all returns the output. If there
/// are fewer kv heads than ranks, each kv head goes to all ranks whose query heads need it. Its gradients are summed in
/// the type of statistics. The exchanged q, k, v and output are kept, so the backward pass repeats no exchange.
///
/// Each of c ranks has H query heads, K kv heads and m tokens in all its sequences. Forward, a rank sends (c-1)/c of m
/// (H + 2 max(K, c)) head_dim elements, and (c-1)/c of its output's m H head_dim. Backward, it sends equally many
/// elements. Packed documents add an all-gather of their starts.
template <class Precision, class Device, class Inner>
class ulysses_attention {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  static constexpr bool in_chunks = Inner::in_chunks, with_sinks = detail::takes_sinks<Inner>;
  struct saved {
    buffer<Device> qkv;            ///< [batch, tokens of the group, own heads and twice own kv heads, head_dim]
    buffer<Device> o;              ///< [batch, tokens of the group, own heads, head_dim]
    buffer<Device> first_visible;  ///< [batch, tokens of the group]
    typename Inner::saved inner;

    template <class F>
    void visit(F&& f) {
      for (auto* exchanged : {&qkv, &o, &first_visible}) f(*exchanged);
      visit_saved(inner, f);
    }
  };

  ulysses_attention() = default;
  ulysses_attention(const context<Device>& ctx, const attention_part& part, const axis_list& axes)
      : shape_(part.shape.checked()) {
    axis_list outer = axes;
    outer.pop_back();
    axes_.push_back(axes.back());
    ranks_ = ctx.ranks.shape().extent(axes.back());
    if (ranks_ == 1) {
      inner_ = Inner(ctx, part, outer);
      return;
    }
    comm_ = &ctx.ranks.group(axes_);
    check_heads(part.name);
    if (copies() > 1)
      require_any_order(
          ctx, part.name,
          cat({"kv heads that ranks of ", axes_[0].text(), " share; legal are extents up to ", shape_.kv_heads}));
    heads_ = shape_.heads / ranks_;
    kv_heads_ = copies() > 1 ? 1 : shape_.kv_heads / ranks_;
    const auto group = static_cast<std::size_t>(ranks_);
    attention_part here = part;
    here.mine = part.mine / group;
    here.blocks.clear();
    for (std::size_t b = 0; b < part.blocks.size(); b += group)
      here.blocks.push_back(detail::text_assembly(part.blocks, b, group).runs());
    text_ = {part.blocks, here.mine * group, group};
    kernels::attention_shape& s = here.shape;
    s.heads = heads_, s.kv_heads = kv_heads_;
    s.score = shape_.score;
    first_head_ = static_cast<std::int64_t>(part.mine % group) * heads_;
    s.score.first_head += first_head_;
    s.q_len = s.k_len = text_.length();
    s.q_batch = s.k_batch = s.lse_stride = 0;
    s.q_stride = s.k_stride = s.v_stride = s.dq_stride = s.dk_stride = s.dv_stride = width();
    s.o_stride = s.do_stride = 0;
    inner_ = Inner(ctx, here, outer);
  }

  bool keeps_inputs() const { return ranks_ == 1 && inner_.keeps_inputs(); }

  void forward(const context<Device>& ctx, const attention_inputs<T>& in, T* o, saved* keep) {
    if (ranks_ == 1) return inner_.forward(ctx, in, o, keep ? &keep->inner : nullptr);
    saved scratch;
    saved& kept = keep ? *keep : scratch;
    kept = {};  // drops the values of an earlier pass
    kept.qkv = to_heads(ctx, in);
    if (in.first_visible)
      kept.first_visible =
          detail::gather_starts(ctx.device, *comm_, text_, shape_.batch, shape_.q_len, in.first_visible);
    kept.o = make_buffer<T>(ctx.device, static_cast<std::size_t>(text_tokens() * o_width()));
    inner_.forward(ctx, exchanged(kept, in.sinks), kept.o.template data<T>(), keep ? &keep->inner : nullptr);
    buffer<Device> blocks = split(ctx, kept.o.template data<T>(), o_width());
    blocks = exchange<T>(ctx, std::move(blocks), o_width());
    for (std::int64_t p = 0; p < ranks_; ++p)
      columns<T, T>(ctx.device, blocks.template data<T>() + p * room() * o_width(), o_width(), o_width(),
                    o + p * o_width(), ranks_ * o_width());
  }

  template <class G>
  void backward(const context<Device>& ctx, const attention_inputs<T>& in, const T* o, const T* d_o, saved& kept,
                attention_gradients<G> out) {
    if (ranks_ == 1) return inner_.backward(ctx, in, o, d_o, kept.inner, out);
    buffer<Device> blocks = make_blocks<T>(ctx, o_width());
    for (std::int64_t p = 0; p < ranks_; ++p)
      columns<T, T>(ctx.device, d_o + p * o_width(), o_width(), ranks_ * o_width(),
                    blocks.template data<T>() + p * room() * o_width(), o_width());
    blocks = exchange<T>(ctx, std::move(blocks), o_width());
    const buffer<Device> output_gradient = join<T>(ctx, blocks, o_width());
    blocks.reset();
    if (copies() > 1)
      backward_as<S>(ctx, in.sinks, kept, output_gradient, out);
    else
      backward_as<G>(ctx, in.sinks, kept, output_gradient, out);
  }

 private:
  void check_heads(const std::string& name) const {
    const auto legal = [&](std::int64_t c) {
      return shape_.heads % c == 0 && (shape_.kv_heads % c == 0 || c % shape_.kv_heads == 0);
    };
    if (legal(ranks_)) return;
    std::string extents;
    for (std::int64_t c = 1; c <= shape_.heads; ++c)
      if (legal(c)) append(extents, {(extents.empty() ? "" : ", "), c});
    fail({name, ": ulysses shares out the heads of a rank over ", axes_[0].text(), " = ", ranks_, ", but a rank has ",
          shape_.heads, " query heads and ", shape_.kv_heads,
          " kv heads; the extents that divide them (or are a multiple of the kv heads) are ", extents});
  }

  std::int64_t tokens() const { return shape_.batch * shape_.q_len; }
  /// Token capacity of a message, and the number of all tokens of the group.
  std::int64_t room() const { return shape_.batch * text_.largest(); }
  std::int64_t text_tokens() const { return shape_.batch * text_.length(); }
  /// Elements per token for each rank: its query heads, and its key and value heads.
  std::int64_t width() const { return (heads_ + 2 * kv_heads_) * shape_.head_dim; }
  std::int64_t o_width() const { return heads_ * shape_.head_dim; }
  std::int64_t kv_width() const { return kv_heads_ * shape_.head_dim; }
  /// Number of ranks that share one kv head.
  std::int64_t copies() const { return shape_.kv_heads < ranks_ ? ranks_ / shape_.kv_heads : 1; }
  /// Offset of rank p's keys in a row of all keys.
  std::int64_t keys_of(std::int64_t p) const { return (copies() > 1 ? p / copies() : p) * kv_width(); }

  attention_inputs<T> exchanged(const saved& kept, const T* sinks) const {
    const T* const q = kept.qkv.template data<T>();
    return {q, q + o_width(), q + o_width() + kv_width(), kept.first_visible.template data<std::int32_t>(),
            sinks != nullptr ? sinks + first_head_ : nullptr};
  }

  /// Copies `count` columns of this rank's tokens between rows with different strides.
  template <class From, class To>
  void columns(Device& device, const From* from, std::int64_t count, std::int64_t stride, To* to,
               std::int64_t to_stride) const {
    constexpr auto size = static_cast<std::int64_t>(sizeof(From));
    if constexpr (std::is_same_v<From, To>) {
      kernels::copy_2d(device, from, to, tokens(), count * size, stride * size, to_stride * size);
    } else {
      auto packed = make_buffer<From>(device, static_cast<std::size_t>(tokens() * count));
      kernels::copy_2d(device, from, packed.data(), tokens(), count * size, stride * size, count * size);
      detail::write_rows(device, packed.template data<From>(), tokens(), count, to, to_stride);
    }
  }

  /// Allocates one message for each rank.
  template <class E>
  buffer<Device> make_blocks(const context<Device>& ctx, std::int64_t row) const {
    const std::int64_t elements = room() * ranks_ * row;
    buffer<Device> blocks = make_buffer<E>(ctx.device, static_cast<std::size_t>(elements));
    if (text_tokens() < room() * ranks_) detail::clear(ctx.device, blocks.template data<E>(), elements);
    return blocks;
  }
  template <class E>
  buffer<Device> split(const context<Device>& ctx, const E* text, std::int64_t row) const {
    buffer<Device> blocks = make_blocks<E>(ctx, row);
    text_.split(ctx.device, text, blocks.data(), shape_.batch, row * static_cast<std::int64_t>(sizeof(E)));
    return blocks;
  }
  template <class E>
  buffer<Device> join(const context<Device>& ctx, const buffer<Device>& blocks, std::int64_t row) const {
    buffer<Device> text = make_buffer<E>(ctx.device, static_cast<std::size_t>(text_tokens() * row));
    text_.join(ctx.device, blocks.data(), text.data(), shape_.batch, row * static_cast<std::int64_t>(sizeof(E)));
    return text;
  }
  template <class E>
  buffer<Device> exchange(const context<Device>& ctx, buffer<Device> out, std::int64_t row) {
    buffer<Device> in = make_buffer<E>(ctx.device, static_cast<std::size_t>(room() * ranks_ * row));
    comm_->all_to_all(out.data(), in.data(), static_cast<std::size_t>(room() * row), dtype_of<E>);
    return in;
  }

  buffer<Device> to_heads(const context<Device>& ctx, const attention_inputs<T>& in) {
    buffer<Device> blocks = make_blocks<T>(ctx, width());
    for (std::int64_t p = 0; p < ranks_; ++p) {
      T* const block = blocks.template data<T>() + p * room() * width();
      columns<T, T>(ctx.device, in.q + p * o_width(), o_width(), shape_.q_stride, block, width());
      columns<T, T>(ctx.device, in.k + keys_of(p), kv_width(), shape_.k_stride, block + o_width(), width());
      columns<T, T>(ctx.device, in.v + keys_of(p), kv_width(), shape_.v_stride, block + o_width() + kv_width(),
                    width());
    }
    return join<T>(ctx, exchange<T>(ctx, std::move(blocks), width()), width());
  }

  /// E is the type in which the gradients of q, k and v travel.
  template <class E, class G>
  void backward_as(const context<Device>& ctx, const T* sinks, saved& kept, const buffer<Device>& output_gradient,
                   attention_gradients<G> out) {
    if (out.dsinks != nullptr) detail::clear(ctx.device, out.dsinks, shape_.heads);  // other ranks' heads
    buffer<Device> text = make_buffer<E>(ctx.device, static_cast<std::size_t>(text_tokens() * width()));
    E* const d = text.template data<E>();
    inner_.backward(ctx, exchanged(kept, sinks), kept.o.template data<T>(), output_gradient.template data<T>(),
                    kept.inner,
                    attention_gradients<E>{d, d + o_width(), d + o_width() + kv_width(),
                                           out.dsinks != nullptr ? out.dsinks + first_head_ : nullptr});
    buffer<Device> blocks = split(ctx, d, width());
    text.reset();
    blocks = exchange<E>(ctx, std::move(blocks), width());
    const auto block = [&](std::int64_t p) { return blocks.template data<E>() + p * room() * width(); };
    for (std::int64_t p = 0; p < ranks_; ++p)
      columns<E, G>(ctx.device, block(p), o_width(), width(), out.dq + p * o_width(), shape_.dq_stride);
    buffer<Device> sum, term;
    for (std::int64_t p = 0; p < ranks_; p += copies()) {
      const E* from = block(p) + o_width();
      std::int64_t stride = width();
      if (copies() > 1) {
        stride = 2 * kv_width();
        const auto count = static_cast<std::size_t>(tokens() * stride);
        if (sum.empty()) sum = make_buffer<E>(ctx.device, count), term = make_buffer<E>(ctx.device, count);
        columns<E, E>(ctx.device, from, stride, width(), sum.template data<E>(), stride);
        for (std::int64_t other = p + 1; other < p + copies(); ++other) {
          columns<E, E>(ctx.device, block(other) + o_width(), stride, width(), term.template data<E>(), stride);
          kernels::accumulate(ctx.device, term.template data<E>(), sum.template data<E>(), tokens() * stride);
        }
        from = sum.template data<E>();
      }
      columns<E, G>(ctx.device, from, kv_width(), stride, out.dk + keys_of(p), shape_.dk_stride);
      columns<E, G>(ctx.device, from + kv_width(), kv_width(), stride, out.dv + keys_of(p), shape_.dv_stride);
    }
  }

  kernels::attention_shape shape_;
  axis_list axes_;
  std::int64_t ranks_ = 1, heads_ = 0, kv_heads_ = 0;
  std::int64_t first_head_ = 0;  ///< this rank's first head among `shape_.heads`
  detail::text_assembly text_;
  any_communicator* comm_ = nullptr;
  Inner inner_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
