// The engine of the policy `chosen`, which selects ring, all_gather_kv or ulysses at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/layout/check.hpp"
#include "plait/nn/attention/all_gather_kv.hpp"
#include "plait/nn/attention/ring.hpp"
#include "plait/nn/attention/ulysses.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {

// Context parallelism for a program's own layers: one policy on plain arrays.

namespace detail {

/// An array of rows of `width` elements, whose beginnings are `stride` elements apart. `written`: a call writes it.
struct array_of_rows {
  template <class T>
  array_of_rows(const char* called, T* begin, std::int64_t count, std::int64_t elements, std::int64_t apart)
      : name(called),
        at(reinterpret_cast<std::uintptr_t>(begin)),
        width(static_cast<std::uintptr_t>(elements) * sizeof(T)),
        stride(static_cast<std::uintptr_t>(apart) * sizeof(T)),
        bytes(begin && count > 0 ? static_cast<std::uintptr_t>(count - 1) * stride + width : 0),
        written(!std::is_const_v<T>) {}

  /// Whether the arrays share bytes. Rows of equal strides may lie side by side, as in one packed array.
  bool shares(const array_of_rows& other) const {
    if (bytes == 0 || other.bytes == 0 || at >= other.at + other.bytes || other.at >= at + bytes) return false;
    if (stride != other.stride) return true;
    const std::uintptr_t behind =
        at <= other.at ? (other.at - at) % stride : (stride - (at - other.at) % stride) % stride;
    return behind < width || behind + other.width > stride;
  }

  const char* name;
  std::uintptr_t at, width, stride, bytes;
  bool written;
};

/// Throws if `call` writes an array that shares bytes with another of its arrays.
inline void require_own_rows(const std::string& layer, const char* call, std::initializer_list<array_of_rows> all) {
  for (const array_of_rows& a : all)
    for (const array_of_rows& b : all)
      if (&a != &b && a.written && a.shares(b))
        fail({layer, ": ", call, " writes ", a.name, b.written ? " and " : " while it still reads ", b.name, ", and ",
              a.at == b.at ? "both are one array" : "they overlap", ": give each an array of its own"});
}

}  // namespace detail

/// Attention under a context-parallel policy on the caller's arrays, without projections, rotation or parameters.
///
///     context_attention<float, ring<cp>> attention(ctx, shape, sequence_order::zigzag(seq, cp_ranks));
///     attention.forward(ctx, {q, k, v}, o, &kept);
///     attention.backward(ctx, {q, k, v}, o, d_o, kept, {dq, dk, dv});
///
/// Arrays hold this rank's tokens [batch, tokens, heads, head_dim] with the strides that the shape gives. The tokens'
/// positions in the text are `positions()`. o and d_o have no gaps.
template <class Precision, attention_policy Policy, compute_device Device = cpu>
class context_attention {
 public:
  using value_type = activation_of<Precision>;
  using engine = typename Policy::template engine<Precision, Device>;
  using saved = typename engine::saved;
  static_assert(attention_engine<engine, Precision, Device>,
                "the engine of an attention policy must model plait::attention_engine");

  /// `shape` describes this rank's tokens; q_len, k_len and offsets are derived from `order` and the ranks along the
  /// policy's axes. Throws if the sequence has fewer tokens than ranks.
  context_attention(const context<Device>& ctx, kernels::attention_shape shape, const sequence_order& order,
                    bool documents = false, std::string name = "attention") {
    const axis_list& axes = context_axes<Policy>;
    const std::int64_t ranks = ctx.ranks.shape().size(axes), length = order.length();
    if (length < ranks)
      fail({name, ": a sequence of ", length, " over ", ranks, " ranks of ", describe(axes), "; the least length is ",
            ranks});
    const auto begin = [&](std::int64_t r) { return part_begin(length, ranks, r); };
    const std::int64_t mine = ctx.ranks.shape().index_in(ctx.ranks.rank(), axes), own = begin(mine + 1) - begin(mine);
    shape.q_len = shape.k_len = own;
    shape.q_offset = shape.k_offset = 0;
    shape.q_batch = shape.k_batch = shape.lse_stride = 0;
    shape_ = shape.checked();
    for (const std::int64_t stride : {shape.o_stride, shape.do_stride})
      if (stride != 0 && stride != shape.heads * shape.head_dim)
        fail({name, ": o_stride or do_stride is ", stride,
              "; o and its gradient are without gaps, so that legal are 0 and ", shape.heads * shape.head_dim});
    documents_ = documents;
    name_ = name;
    attention_part part{shape, {}, static_cast<std::size_t>(mine), documents, std::move(name)};
    part.chunk = detail::chunk_of<engine>(ctx, length, part.name);
    for (std::int64_t r = 0; r < ranks; ++r) part.blocks.push_back(order.runs(begin(r), begin(r + 1) - begin(r)));
    require_whole_chunks(part);
    positions_ = order.positions(begin(mine), own);
    engine_ = engine(ctx, part, axes);
  }

  /// Positions of this rank's tokens in the text.
  const std::vector<std::int64_t>& positions() const { return positions_; }

  /// `kept` holds values for `backward`; null: no backward pass follows. q, k and v must live until the backward pass.
  /// `in.first_visible` is given if, and only if, the constructor's `documents` is true. o shares no bytes with an
  /// input.
  void forward(const context<Device>& ctx, const attention_inputs<value_type>& in, value_type* o, saved* kept) {
    check_documents(in);
    require_inputs(in);
    detail::require_array(name_, "o", o, queries() * q_width());
    detail::require_own_rows(name_, "forward",
                             {query_rows("o", o, q_width()), query_rows("q", in.q, shape_.q_stride),
                              key_rows("k", in.k, shape_.k_stride), key_rows("v", in.v, shape_.v_stride)});
    engine_.forward(ctx, in, o, kept);
  }
  /// Overwrites the gradients in `out`, each of which shares no bytes with another array of the call.
  void backward(const context<Device>& ctx, const attention_inputs<value_type>& in, const value_type* o,
                const value_type* d_o, saved& kept, const attention_gradients<value_type>& out) {
    check_documents(in);
    detail::require_array(name_, "o", o, queries() * q_width());
    detail::require_array(name_, "d_o", d_o, queries() * q_width());
    detail::require_array(name_, "dq", out.dq, queries() * q_width());
    detail::require_array(name_, "dk", out.dk, keys() * k_width());
    detail::require_array(name_, "dv", out.dv, keys() * k_width());
    attention_inputs<value_type> read;  // none, if the engine keeps its own
    if (engine_.keeps_inputs()) {
      require_inputs(in);
      read = in;
    }
    detail::require_own_rows(name_, "backward",
                             {query_rows("dq", out.dq, shape_.dq_stride), key_rows("dk", out.dk, shape_.dk_stride),
                              key_rows("dv", out.dv, shape_.dv_stride), query_rows("q", read.q, shape_.q_stride),
                              key_rows("k", read.k, shape_.k_stride), key_rows("v", read.v, shape_.v_stride),
                              query_rows("o", o, q_width()), query_rows("d_o", d_o, q_width())});
    engine_.backward(ctx, in, o, d_o, kept, out);
  }

 private:
  std::int64_t queries() const { return shape_.batch * shape_.q_len; }
  std::int64_t keys() const { return shape_.batch * shape_.k_len; }
  std::int64_t q_width() const { return shape_.heads * shape_.head_dim; }
  std::int64_t k_width() const { return shape_.kv_heads * shape_.head_dim; }
  template <class T>
  detail::array_of_rows query_rows(const char* name, T* at, std::int64_t stride) const {
    return {name, at, queries(), q_width(), stride};
  }
  template <class T>
  detail::array_of_rows key_rows(const char* name, T* at, std::int64_t stride) const {
    return {name, at, keys(), k_width(), stride};
  }

  void require_inputs(const attention_inputs<value_type>& in) const {
    detail::require_array(name_, "q", in.q, queries() * q_width());
    detail::require_array(name_, "k", in.k, keys() * k_width());
    detail::require_array(name_, "v", in.v, keys() * k_width());
  }
  /// A rank without tokens may have no `first_visible`.
  void check_documents(const attention_inputs<value_type>& in) const {
    if ((in.first_visible != nullptr) == documents_ || (documents_ && queries() == 0)) return;
    fail(
        {name_, documents_
                    ? ": its constructor's `documents` is true, but attention_inputs::first_visible is null: give in "
                      "each call the position where each token's document begins"
                    : ": attention_inputs::first_visible is given, but its constructor's `documents` is not true: pass "
                      "true, or leave first_visible null"});
  }

  std::string name_;
  kernels::attention_shape shape_;
  bool documents_ = false;
  std::vector<std::int64_t> positions_;
  engine engine_;
};

/// The policy over one axis that `attention_options::context` selects, so that one program serves all policies. All
/// three shard the sequence in the same way.
template <class Precision, class Device>
class chosen_attention {
  using T = activation_of<Precision>;
  using ring_engine = ring_attention<Precision, Device>;
  using gathered_engine = all_gather_kv_attention<Precision, Device>;
  using exchanged_engine = ulysses_attention<Precision, Device, whole_attention<Precision, Device>>;

 public:
  static constexpr bool in_chunks = true, with_sinks = true;
  struct saved {
    /// Of the engine of `ring` or `all_gather_kv`, which keep the same; or of that of `ulysses`.
    std::variant<typename gathered_engine::saved, typename exchanged_engine::saved> kept;

    template <class F>
    void visit(F&& f) {
      std::visit([&](auto& one) { visit_saved(one, f); }, kept);
    }
  };

  chosen_attention() = default;
  chosen_attention(const context<Device>& ctx, const attention_part& part, const axis_list& axes) {
    switch (part.context) {
      case chosen_policy::ring:
        engine_ = ring_engine(ctx, part, axes);
        break;
      case chosen_policy::all_gather_kv:
        engine_ = gathered_engine(ctx, part, axes);
        break;
      case chosen_policy::ulysses:
        engine_ = exchanged_engine(ctx, part, axes);
        break;
    }
  }

  bool keeps_inputs() const {
    return std::visit([](const auto& e) { return e.keeps_inputs(); }, engine_);
  }
  void forward(const context<Device>& ctx, const attention_inputs<T>& in, T* o, saved* keep) {
    const auto run = [&]<class Engine>(Engine& e) {
      e.forward(ctx, in, o, keep ? &keep->kept.template emplace<typename Engine::saved>() : nullptr);
    };
    std::visit(run, engine_);
  }
  template <class G>
  void backward(const context<Device>& ctx, const attention_inputs<T>& in, const T* o, const T* d_o, saved& kept,
                attention_gradients<G> out) {
    const auto run = [&]<class Engine>(Engine& e) {
      e.backward(ctx, in, o, d_o, std::get<typename Engine::saved>(kept.kept), out);
    };
    std::visit(run, engine_);
  }

 private:
  std::variant<ring_engine, gathered_engine, exchanged_engine> engine_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
