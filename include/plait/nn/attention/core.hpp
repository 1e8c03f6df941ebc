// Attention on tensors of queries, keys and values, for a program's own layers. A rank must hold all keys that its
// queries attend to.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/layer.hpp"

namespace plait::detail {

// Local kv heads if kv heads are replicated over some axes of the query heads.

/// The range of a rank's kv heads that its query heads use.
struct local_heads {
  std::int64_t first = 0;  ///< index of the first used head among the local kv heads
  std::int64_t used = 0;
};

/// `q` and `k` are this rank's parts [batch, seq, heads, head_dim]. If kv heads are replicated over further axes, the
/// local queries need only some of them. Throws unless a rank's query heads form whole groups or lie in one group.
inline local_heads share_of_heads(const box& q, const box& k, const std::string& name) {
  const std::int64_t group = q.global[2] / k.global[2];  // query heads per kv head
  const std::int64_t begin = q.offset[2], end = begin + q.local[2], first = begin / group, last = (end - 1) / group;
  const bool whole = begin % group == 0 && end % group == 0;
  const bool here = first >= k.offset[2] && last < k.offset[2] + k.local[2];
  if (q.global[2] % k.global[2] != 0 || (first != last && !whole) || !here)
    fail({name, ": heads = ", q.global[2], ", kv_heads = ", k.global[2], ", and a rank has query heads ", begin, " to ",
          end - 1, " and kv heads ", k.offset[2], " to ", k.offset[2] + k.local[2] - 1,
          ": heads must be a multiple of kv_heads, and the query heads of a rank must be whole groups of ", group,
          " or lie in one group, whose kv head it has; blocks of ", group,
          " heads (dim_sizes::set) keep groups together"});
  return {first - k.offset[2], last - first + 1};
}

}  // namespace plait::detail

namespace plait {

/// Options of an `attention_core`, in addition to its specs.
struct attention_core_options {
  /// Which keys a query attends to; positions begin at 0 in both sequences.
  kernels::attention_mask mask = kernels::attention_mask::full();
  /// The change of each score before the softmax.
  kernels::attention_score score{};
  /// The factor of the scores; 0: 1 / sqrt(head_dim).
  double scale = 0;
  /// Inverse rotary frequencies, head_dim / 2 of them, for positions that begin at 0 in both sequences. Empty: no
  /// rotation.
  std::vector<double> frequencies{};
};

namespace detail {

/// Dim `i` of a [batch, tokens, heads, head_dim] layout; none if the layout has not four dims.
constexpr dim_id dim_at(const layout& a, std::size_t i) { return a.dims.size() == 4 ? a.dims[i].dim : dim_id{}; }

template <class Q, class K>
struct attention_core_value {
  static constexpr verdict value = attend(layout_v<Q>, layout_v<K>, layout_v<K>,
                                          {dim_at(layout_v<K>, 1), dim_at(layout_v<Q>, 2), dim_at(layout_v<K>, 2)})
                                       .verdict;
};

/// The layout of one number per head of `Q`, replicated over the other axes that shard `Q`.
template <class Q>
struct heads_value {
  static constexpr layout value = [] {
    layout a = layout_v<Q>;
    a.dims = {};
    a.dims.push_back(layout_v<Q>.dims[2]);
    for (const dim_placement& p : layout_v<Q>.dims)
      if (p.dim != a.dims[0].dim)
        for (const axis_id axis : p.axes) a.set(axis, state::replicated);
    return a;
  }();
};

}  // namespace detail

/// Grouped-query attention without projections, parameters or communication. Queries are a tensor of spec `Q` [batch,
/// tokens, heads, head_dim]; keys and values are tensors of `K`. Keys have their own number of tokens, and their own
/// dim if they belong to another sequence. Every rank must hold all keys that its queries attend to;
/// nn/attention/chosen.hpp serves sequences of keys that are sharded.
template <class Precision, spec_like Q, spec_like K, compute_device Device = cpu>
class attention_core {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;
  static_assert(
      layout_v<Q>.dims.size() == 4 && layout_v<K>.dims.size() == 4,
      "queries and keys of an attention are [batch, tokens, heads, head_dim]: let their specs have four dims");
  static_assert(enforced<detail::attention_core_value<Q, K>, among<Q, K>, Q, K>);

 public:
  using queries = Q;
  using keys = K;
  using output = Q;
  /// [heads]: the sink of each head, whose exponential is added to the softmax sum of every query.
  using sinks = spec_from<detail::heads_value<Q>, Q>;
  template <class Spec>
  using tensor_of = tensor<T, Spec, Device>;

  struct saved {
    tensor_of<Q> q;     ///< rotated
    tensor_of<K> k, v;  ///< k rotated
    buffer<Device> lse;
    const T* head_sinks = nullptr;  ///< the caller's

    template <class F>
    void visit(F&& f) {
      f(q);
      f(k);
      f(v);
      f(lse);
    }
  };
  struct gradients {
    tensor_of<dual_t<Q>> q;
    tensor_of<dual_t<K>> k, v;
    tensor<S, dual_t<sinks>, Device> head_sinks{};  ///< empty without sinks
  };

  attention_core(const context<Device>& ctx, const std::string& name, const attention_core_options& how = {}) {
    require_any_order(ctx, name, "attention over another sequence's keys");
    names_ = detail::layer_names(name);
    made_for_ = detail::made_for(ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&layout_v<Q>, &layout_v<K>});
    const std::int64_t rank = ctx.ranks.rank();
    const box q = local_box(layout_v<Q>, ctx.ranks.shape(), ctx.sizes, rank);
    const box k = local_box(layout_v<K>, ctx.ranks.shape(), ctx.sizes, rank);
    enforce_parts(layout_v<Q>, ctx.ranks.shape(), ctx.sizes, name);
    enforce_parts(layout_v<K>, ctx.ranks.shape(), ctx.sizes, name);
    const detail::local_heads own = detail::share_of_heads(q, k, name);
    kv_heads_ = k.local[2];
    first_key_ = own.first * k.local[3];
    shape_.batch = q.local[0];
    shape_.q_len = q.local[1];
    shape_.k_len = k.local[1];
    shape_.heads = q.local[2];
    shape_.kv_heads = own.used;
    shape_.head_dim = q.local[3];
    kernels::require_attention(ctx.device, dtype_of<T>, shape_.head_dim);
    shape_.scale = how.scale != 0 ? how.scale : 1.0 / std::sqrt(static_cast<double>(shape_.head_dim));
    shape_.k_stride = shape_.v_stride = kv_heads_ * shape_.head_dim;
    shape_.mask = how.mask;
    kernels::require_legal(shape_.mask, name);
    shape_.score = how.score;
    shape_.score.all_heads = q.global[2], shape_.score.first_head = q.offset[2];
    shape_.q_offset = q.offset[1];
    const bool positions_matter = !how.mask.sees_all() || how.score.alibi || !how.frequencies.empty();
    if (positions_matter && (layout_v<Q>.has(dim_of<zseq>) || layout_v<K>.has(dim_of<zseq>)))
      fail({name, ": a mask and a rotation need sequences in original order, which zseq is not"});
    if (how.frequencies.empty()) return;
    if (static_cast<std::int64_t>(how.frequencies.size()) * 2 != shape_.head_dim)
      fail({name, ": ", how.frequencies.size(), " rotary frequencies for head_dim = ", shape_.head_dim,
            ", must be half of it"});
    q_rotations_ = make_rotations(ctx, how.frequencies, shape_.q_offset, shape_.q_len);
    k_rotations_ = make_rotations(ctx, how.frequencies, 0, shape_.k_len);
  }

  /// Takes ownership of queries, keys and values, and rotates them in place. `head_sinks` must live until the backward
  /// pass; null: no sinks.
  tensor_of<output> forward(const microbatch<Device>& mb, tensor_of<Q> q, tensor_of<K> k, tensor_of<K> v,
                            saved* keep = nullptr, const tensor_of<sinks>* head_sinks = nullptr) {
    const context<Device>& ctx = mb.ctx;
    made_for_.require(names_.layer(), ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
    const std::int64_t tokens = shape_.batch * shape_.k_len;
    detail::require_size(names_.layer(), "q", q.size(), output_size());
    for (const tensor_of<K>* one : {&k, &v})
      detail::require_size(names_.layer(), one == &k ? "k" : "v", one->size(), tokens * kv_heads_ * shape_.head_dim);
    rotate(ctx, q.data(), k.data(), [](auto&&... a) { kernels::rope_forward(a...); });
    tensor_of<output> o(ctx);
    auto lse = make_buffer<S>(ctx.device, static_cast<std::size_t>(shape_.batch * shape_.heads * shape_.q_len));
    kernels::attention_forward(ctx.device, static_cast<const T*>(q.data()),
                               static_cast<const T*>(k.data()) + first_key_,
                               static_cast<const T*>(v.data()) + first_key_, o.data(), lse.template data<S>(), shape_);
    if (head_sinks != nullptr) {
      detail::require_size(names_.layer(), "sinks", head_sinks->size(), shape_.heads);
      kernels::join_sinks(ctx.device, head_sinks->data(), o.data(), lse.template data<S>(), shape_);
    }
    if (keep)
      *keep = {std::move(q), std::move(k), std::move(v), std::move(lse), head_sinks ? head_sinks->data() : nullptr};
    return o;
  }

  /// `o` is the output of the forward pass, which the caller has kept; `d_o` is its gradient.
  template <spec_like Gradient>
  gradients backward(const microbatch<Device>& mb, const tensor_of<output>& o, saved& kept,
                     const tensor_of<Gradient>& d_o) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<Q>, Gradient, output>);
    const context<Device>& ctx = mb.ctx;
    made_for_.require(names_.layer(), ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
    detail::require_size(names_.layer(), "o", o.size(), output_size());
    detail::require_size(names_.layer(), "d_o", d_o.size(), output_size());
    gradients d{tensor_of<dual_t<Q>>(ctx), tensor_of<dual_t<K>>(ctx), tensor_of<dual_t<K>>(ctx)};
    if (shape_.kv_heads != kv_heads_)  // the local queries use some of the keys only
      for (auto* unused : {&d.k, &d.v})
        ctx.device.zero(unused->data(), static_cast<std::size_t>(unused->size()) * sizeof(T), ctx.device.main_stream());
    const S* const lse = kept.lse.template data<S>();
    buffer<Device> delta;
    if (kept.head_sinks != nullptr) {
      d.head_sinks = tensor<S, dual_t<sinks>, Device>(ctx);
      delta = make_buffer<S>(ctx.device, static_cast<std::size_t>(shape_.batch * shape_.heads * shape_.q_len));
      kernels::attention_delta(ctx.device, o.data(), d_o.data(), delta.template data<S>(), shape_);
      kernels::sink_gradients(ctx.device, kept.head_sinks, lse, static_cast<const S*>(delta.template data<S>()),
                              d.head_sinks.data(), shape_);
    }
    const tensor_of<Q>& q = kept.q;
    const tensor_of<K>&k = kept.k, &v = kept.v;
    kernels::attention_backward(ctx.device, q.data(), k.data() + first_key_, v.data() + first_key_, o.data(), lse,
                                d_o.data(), d.q.data(), d.k.data() + first_key_, d.v.data() + first_key_, shape_,
                                kernels::attention_accumulate{}, static_cast<const S*>(delta.template data<S>()));
    rotate(ctx, d.q.data(), d.k.data(), [](auto&&... a) { kernels::rope_backward(a...); });
    return d;
  }

 private:
  std::int64_t output_size() const { return shape_.batch * shape_.q_len * shape_.heads * shape_.head_dim; }
  buffer<Device> make_rotations(const context<Device>& ctx, const std::vector<double>& frequencies, std::int64_t first,
                                std::int64_t count) const {
    std::vector<std::int64_t> positions(static_cast<std::size_t>(count));
    std::iota(positions.begin(), positions.end(), first);
    auto table = make_buffer<S>(ctx.device, positions.size() * frequencies.size() * 2);
    kernels::rope_table(ctx.device, positions.data(), count, std::span<const double>(frequencies),
                        table.template data<S>(), table.template data<S>() + count * shape_.head_dim / 2);
    return table;
  }
  template <class F>
  void rotate(const context<Device>& ctx, T* q, T* k, F kernel) const {
    if (q_rotations_.empty()) return;
    const auto apply = [&](T* x, const buffer<Device>& table, std::int64_t tokens, std::int64_t heads) {
      const S* const cosine = table.template data<S>();
      kernel(ctx.device, x, heads * shape_.head_dim, x, cosine, cosine + tokens * shape_.head_dim / 2,
             shape_.batch * tokens, heads, shape_.head_dim, heads * shape_.head_dim, tokens);
    };
    apply(q, q_rotations_, shape_.q_len, shape_.heads);
    apply(k, k_rotations_, shape_.k_len, kv_heads_);
  }

  detail::layer_names names_;
  detail::made_for made_for_;
  kernels::attention_shape shape_;
  std::int64_t kv_heads_ = 0;   ///< on this rank, including unused ones
  std::int64_t first_key_ = 0;  ///< offset of the used heads, in elements
  buffer<Device> q_rotations_, k_rotations_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
