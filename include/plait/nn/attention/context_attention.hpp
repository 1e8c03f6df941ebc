// Context parallelism for programs with layers of their own: one policy, on plain arrays.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/layout/describe.hpp"
#include "plait/nn/attention/context_parallel/chosen.hpp"

namespace plait {

/// Attention under a context-parallel policy alone, over the caller's arrays: no projections, no rotation, no
/// parameters.
///
///     context_attention<float, ring<cp>> attention(ctx, shape, sequence_order::zigzag(seq, cp_ranks));
///     attention.forward(ctx, {q, k, v}, o, &kept);
///     attention.backward(ctx, {q, k, v}, o, d_o, kept, {dq, dk, dv});
///
/// Arrays hold this rank's tokens [batch, tokens, heads, head_dim], those at `positions()` of the text, with the
/// strides that the shape names; o and d_o are without gaps.
template <class Precision, attention_policy Policy, compute_device Device = cpu>
class context_attention {
 public:
  using value_type = activation_of<Precision>;
  using engine = typename Policy::template engine<Precision, Device>;
  using saved = typename engine::saved;
  static_assert(attention_engine<engine, Precision, Device>,
                "the engine of an attention policy must model plait::attention_engine");

  /// `shape` is of this rank's tokens: q_len, k_len and offsets follow from `order` and the ranks along the policy's
  /// axes. Throws where the sequence does not divide by them.
  context_attention(const context<Device>& ctx, kernels::attention_shape shape, const sequence_order& order,
                    bool documents = false, std::string name = "attention") {
    const axis_list& axes = context_axes<Policy>;
    const std::int64_t ranks = ctx.ranks.shape().size(axes), length = order.length(), own = length / ranks;
    if (length % ranks != 0)
      fail({name, ": a sequence of ", length, " over ", ranks, " ranks of ", describe(axes),
            " must divide; the nearest lengths are ", own * ranks, " and ", (own + 1) * ranks});
    const std::int64_t mine = ctx.ranks.shape().index_in(ctx.ranks.rank(), axes);
    shape.q_len = shape.k_len = own;
    shape.q_offset = shape.k_offset = 0;
    shape.q_batch = shape.k_batch = shape.lse_stride = 0;
    static_cast<void>(shape.checked());
    for (const std::int64_t stride : {shape.o_stride, shape.do_stride})
      if (stride != 0 && stride != shape.heads * shape.head_dim)
        fail({name, ": o_stride or do_stride is ", stride,
              "; o and its gradient are without gaps, so that legal are 0 and ", shape.heads * shape.head_dim});
    attention_part part{shape, {}, static_cast<std::size_t>(mine), documents, std::move(name)};
    part.chunk = detail::chunk_of<engine>(ctx.numerics, length, part.name);
    for (std::int64_t r = 0; r < ranks; ++r) part.blocks.push_back(order.runs(r * own, own));
    if (documents && !shape.causal) require_causal_or_whole(part);
    require_whole_chunks(part);
    positions_ = order.positions(mine * own, own);
    engine_ = engine(ctx, part, axes);
  }

  /// Of this rank's tokens in the text.
  const std::vector<std::int64_t>& positions() const { return positions_; }

  /// `kept` is for `backward`; null if there will be none. q, k and v must live until then.
  void forward(const context<Device>& ctx, const attention_inputs<value_type>& in, value_type* o, saved* kept) {
    engine_.forward(ctx, in, o, kept);
  }
  /// Overwrites the gradients.
  void backward(const context<Device>& ctx, const attention_inputs<value_type>& in, const value_type* o,
                const value_type* d_o, saved& kept, const attention_gradients<value_type>& out) {
    engine_.backward(ctx, in, o, d_o, kept, out);
  }

 private:
  std::vector<std::int64_t> positions_;
  engine engine_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
