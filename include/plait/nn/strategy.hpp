// The concept of a strategy, and every spec that the layers of a transformer derive from one. A strategy names no
// extents and runs no code; a single layer needs only a policy (nn/linear.hpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/layout/boundary.hpp"
#include "plait/layout/describe.hpp"
#include "plait/nn/attention/policy.hpp"
#include "plait/nn/linear/overlap.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/nn/sequence_order.hpp"
#include "plait/nn/strategy/check.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// A strategy: how a transformer is laid out, and nothing else.
///
///     struct my_strategy {
///       using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
///       using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;   // between layers; mentions every axis
///       using query_heads = shard<heads, tp>;
///       using key_heads = shard<kv_heads, tp>;                       // over leading axes of heads
///       using feed_forward = shard<ffn, tp>;
///       using vocabulary = shard<vocab, tp>;
///       using attention = ring<cp>;   // over the axes that lead the sequence's; optional: whole_sequence
///       template <class Weight> using stored = Weight;        // how parameters lie between steps; optional
///       using overlap = pl::overlap<4>;      // collectives of linears in chunks, beside their products; optional
///     };
///
/// The residual may shard its last dim, `hidden`, over axes of its own: weights then shard it alike, which is
/// two-dimensional tensor parallelism. `branch_input` and `branch_output`, both or none, are how attention and MLP take
/// and give their tensors, where that is not as the residual lies: `in_parallel` (nn/strategy/parallel.hpp) makes them
/// for blocks whose branches share one gather and one reduction.
template <class S>
concept strategy = mesh_like<typename S::mesh> && spec_like<typename S::residual> && requires {
  typename S::query_heads;
  typename S::key_heads;
  typename S::feed_forward;
  typename S::vocabulary;
};

namespace detail {

/// The layout between the linears of a branch: the residual's without its last dim and without the axes that shard the
/// branch's own dims, followed by those dims. Axes of the branch that do not shard these dims are replicated; those
/// that shard the residual's last dim are invariant, as products over that dim are completed.
constexpr layout inside_branch(const layout& residual, const layout& own, const axis_list& axes) {
  layout a = residual;
  const axis_list features = a.dims.back().axes;
  a.dims.pop_back();
  for (axis_id axis : features) a.set(axis, state::invariant);
  for (axis_id axis : axes) {
    for (dim_placement& p : a.dims)
      if (const int at = p.axes.find(axis); at >= 0) p.axes.erase(static_cast<std::size_t>(at));
    a.set(axis, state::replicated);
  }
  for (const dim_placement& p : own.dims) {
    a.dims.push_back({p.dim, {}});
    for (axis_id axis : p.axes) a.append(p.dim, axis);
  }
  return a;
}

template <class Residual, class Own, class All>
struct inside_value {
  static constexpr layout value = inside_branch(layout_v<Residual>, layout_v<Own>, sharding_axes(layout_v<All>));
};

/// The token ids and labels that go with a residual: its leading dims, whole where the vocabulary's axes shard them.
constexpr layout tokens_of(const layout& residual, const axis_list& vocabulary) {
  layout a = inside_branch(residual, {}, vocabulary);
  for (axis_id axis : vocabulary) a.set(axis, state::invariant);
  return a;
}
template <class Residual, class Vocabulary>
struct tokens_value {
  static constexpr layout value = tokens_of(layout_v<Residual>, sharding_axes(layout_v<Vocabulary>));
};

template <class S, class Weight>
struct stored_under {
  using type = Weight;
};
template <class S, class Weight>
  requires requires { typename S::template stored<Weight>; }
struct stored_under<S, Weight> {
  using type = typename S::template stored<Weight>;
};

template <class Weight, class Dim, class... Axes>
struct sharded_further {
  static constexpr layout value = [] {
    layout a = layout_v<Weight>;
    if (a.has(dim_of<Dim>))
      for (axis_id axis : {axis_of<Axes>...}) a.append(dim_of<Dim>, axis);
    return a;
  }();
};

/// `Weight` with its dim `hidden` placed as the residual's last dim is, but for axes that shard another dim of it.
template <class Residual, class Weight>
struct on_the_stream {
  static constexpr layout value = [] {
    layout a = layout_v<Weight>;
    const dim_placement features = layout_v<Residual>.dims.back();
    if (a.has(features.dim))
      for (axis_id axis : features.axes)
        if (!a.sharded_by(axis)) a.append(features.dim, axis);
    return a;
  }();
};

template <class S>
struct branch_of_strategy {
  using input = typename S::residual;
  using output = typename S::residual;
};
template <class S>
  requires requires {
    typename S::branch_input;
    typename S::branch_output;
  }
struct branch_of_strategy<S> {
  using input = typename S::branch_input;
  using output = typename S::branch_output;
};

}  // namespace detail

/// `Weight` with its dim `Dim` also sharded over `Axes`, innermost: what a strategy stores between steps if parameters
/// are to be gathered for use (and, by the mirror, gradients reduce-scattered).
template <class Weight, class Dim, class... Axes>
using shard_further = spec_from<detail::sharded_further<Weight, Dim, Axes...>, Weight, placed<shard<Dim, Axes...>>>;

/// All the specs that follow from a strategy. Says what is wrong with a class that is none, or whose parts do not go
/// together; what layers derive from it is silent then.
template <class Strategy>
struct transformer_specs {
  static_assert(detail::strategy_accepted<Strategy>);
  using S = typename detail::strategy_or_stand_in<Strategy>::type;
  using residual = typename S::residual;
  using attention = typename detail::attention_of_strategy<S>::type;
  /// The dim that counts the tokens of a sequence.
  static constexpr dim_id sequence = detail::sequence_of(layout_v<residual>);
  using query_dims = spec<typename S::query_heads, head_dim>;
  using key_dims = spec<typename S::key_heads, head_dim>;
  using ffn_dims = spec<typename S::feed_forward>;
  using queries = spec_from<detail::inside_value<residual, query_dims, query_dims>, residual, query_dims>;
  using keys = spec_from<detail::inside_value<residual, key_dims, query_dims>, residual, key_dims, query_dims>;
  using wide = spec_from<detail::inside_value<residual, ffn_dims, ffn_dims>, residual, ffn_dims>;
  using logits = spec_from<detail::inside_value<residual, spec<typename S::vocabulary>, spec<typename S::vocabulary>>,
                           residual, spec<typename S::vocabulary>>;
  using tokens =
      spec_from<detail::tokens_value<residual, spec<typename S::vocabulary>>, residual, spec<typename S::vocabulary>>;

  template <class Weight>
  using stored = typename detail::stored_under<S, Weight>::type;

  template <class Input, class Weight, class Output>
  struct placed_policy {
    using derived_from = Strategy;
    using mesh = typename S::mesh;
    using input = Input;
    using weight = Weight;
    using output = Output;
    using stored = typename transformer_specs::template stored<Weight>;
  };
  /// The policy of a linear.
  template <class Input, class Weight, class Output>
  struct policy : placed_policy<Input, Weight, Output> {
    using overlap = plait::overlap<detail::overlap_of<S>>;
  };
  /// A weight with `hidden` placed as the residual places it.
  template <class... Items>
  using weight = spec_from<detail::on_the_stream<residual, spec<Items...>>, residual, spec<Items...>>;
  using branch_input = typename detail::branch_of_strategy<S>::input;
  using branch_output = typename detail::branch_of_strategy<S>::output;
  using embedding = placed_policy<tokens, weight<typename S::vocabulary, hidden>, residual>;
  using query = policy<branch_input, weight<typename S::query_heads, head_dim, hidden>, queries>;
  using key = policy<branch_input, weight<typename S::key_heads, head_dim, hidden>, keys>;
  using attention_output = policy<queries, weight<hidden, typename S::query_heads, head_dim>, branch_output>;
  using up = policy<branch_input, weight<typename S::feed_forward, hidden>, wide>;
  using down = policy<wide, weight<hidden, typename S::feed_forward>, branch_output>;
  using head = policy<residual, weight<typename S::vocabulary, hidden>, logits>;
  /// How the weight of a norm of the residual is stored.
  using norm_weight = stored<weight<hidden>>;
  static_assert(sizeof(detail::overlap_requirements<S>) > 0);
  static_assert(detail::check_overlap<S, query, attention_output, up, down>());
};

/// The order in which the tokens of a text lie along the sequence dim of a strategy's tensors. Throws where a sequence
/// in zigzag order is not divisible.
template <strategy S>
sequence_order sequence_order_of(const mesh_shape& mesh, const dim_sizes& sizes) {
  using specs = transformer_specs<S>;
  const std::int64_t length = sizes.of(specs::sequence);
  if (length < 0) fail({"the context gives no size for the dim ", specs::sequence.text()});
  if (!(specs::sequence == dim_of<zseq>)) return sequence_order::original(length);
  const axis_list axes = context_axes<typename specs::attention>;
  return sequence_order::zigzag(length, mesh.size(axes), "seq", "ranks of " + describe(axes));
}

/// Numerics for a strategy on a mesh: they know how its sequences lie.
template <strategy S>
numerics numerics_under(numerics order, const mesh_shape& mesh) {
  using specs = transformer_specs<S>;
  if (specs::sequence == dim_of<zseq>) order.zigzag = mesh.size(context_axes<typename specs::attention>);
  return order;
}

/// The positions in the text of the tokens that this rank has, of each of its sequences: of `ids.part()` and of labels.
/// Who fills token ids asks for them.
template <strategy S, compute_device Device>
std::vector<std::int64_t> text_positions(const context<Device>& ctx) {
  const box part =
      local_box(layout_v<typename transformer_specs<S>::tokens>, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
  return sequence_order_of<S>(ctx.ranks.shape(), ctx.sizes).positions(part.offset[1], part.local[1]);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
