// The concept of a strategy, the specs that a transformer's layers derive from it, and the strategies of the
// literature.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/deterministic/leaves.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/attention/policy.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/sequence_order.hpp"

namespace plait {

// Compile errors for a class that is not a strategy, or whose members do not fit together. Layers check the derived
// specs.

namespace detail {

/// Which members of a strategy a class has, and which members with similar names. C++ cannot list a class's other
/// members.
template <class S>
struct strategy_members {
  static constexpr bool mesh = requires { requires mesh_like<typename S::mesh>; };
  static constexpr bool residual = requires { requires spec_like<typename S::residual>; };
  static constexpr bool query_heads = requires { typename S::query_heads; };
  static constexpr bool key_heads = requires { typename S::key_heads; };
  static constexpr bool feed_forward = requires { typename S::feed_forward; };
  static constexpr bool vocabulary = requires { typename S::vocabulary; };
  static constexpr bool branch_input = requires { typename S::branch_input; };
  static constexpr bool branch_output = requires { typename S::branch_output; };
  static constexpr bool policy = attention_policy<typename attention_of_strategy<S>::type>;
  // A strategy that derives from another inherits the members above, so misnamed ones would have no effect.
  static constexpr bool no_heads = !requires { typename S::heads; };
  static constexpr bool no_kv_heads = !requires { typename S::kv_heads; };
  static constexpr bool no_ffn = !requires { typename S::ffn; };
  static constexpr bool no_vocab = !requires { typename S::vocab; };
  // Optional members; a misnamed one would be ignored silently.
  static constexpr bool attention = requires { typename S::attention; };
  static constexpr bool no_Attention = attention || !requires { typename S::Attention; };
  static constexpr bool no_attn = attention || !requires { typename S::attn; };
  static constexpr bool no_attention_policy = attention || !requires { typename S::attention_policy; };
  static constexpr bool stored_is_template = !requires { typename S::stored; };
  static constexpr bool stored = requires { typename S::template stored<spec<hidden>>; };
  static constexpr bool no_store = stored || !requires { typename S::template store<spec<hidden>>; };
  static constexpr bool no_Stored = stored || !requires { typename S::template Stored<spec<hidden>>; };
  static constexpr bool no_storage = stored || !requires { typename S::template storage<spec<hidden>>; };

  static constexpr bool right = mesh && residual && query_heads && key_heads && feed_forward && vocabulary && policy &&
                                no_heads && no_kv_heads && no_ffn && no_vocab && no_Attention && no_attn &&
                                no_attention_policy && stored_is_template && no_store && no_Stored && no_storage &&
                                branch_input == branch_output;
};

/// Reports each member that a class lacks to be a strategy, and each member without a meaning.
template <class S>
struct strategy_requirements {
  using has = strategy_members<S>;
  static_assert(has::mesh, "a strategy names its `mesh`: using mesh = plait::mesh<axis<dp>, axis<tp>>");
  static_assert(has::residual, "a strategy names `residual`, the spec of the values between layers");
  static_assert(has::query_heads, "a strategy names `query_heads`: using query_heads = shard<heads, tp>, or the dim");
  static_assert(has::key_heads, "a strategy names `key_heads`: using key_heads = shard<kv_heads, tp>, or the dim");
  static_assert(has::feed_forward, "a strategy names `feed_forward`: using feed_forward = shard<ffn, tp>, or the dim");
  static_assert(has::vocabulary, "a strategy names `vocabulary`: using vocabulary = shard<vocab, tp>, or the dim");
  static_assert(has::no_heads, "the strategy has a member `heads`, which means nothing: did you mean `query_heads`?");
  static_assert(has::no_kv_heads,
                "the strategy has a member `kv_heads`, which means nothing: did you mean `key_heads`?");
  static_assert(has::no_ffn, "the strategy has a member `ffn`, which means nothing: did you mean `feed_forward`?");
  static_assert(has::no_vocab, "the strategy has a member `vocab`, which means nothing: did you mean `vocabulary`?");
  static_assert(has::policy,
                "a strategy's attention is a policy: a type that names axes = type_list<...> and an engine");
  static_assert(has::no_Attention,
                "the strategy has a member `Attention`, which means nothing: did you mean `attention`?");
  static_assert(has::no_attn, "the strategy has a member `attn`, which means nothing: did you mean `attention`?");
  static_assert(has::no_attention_policy,
                "the strategy has a member `attention_policy`, which means nothing: did you mean `attention`?");
  static_assert(has::stored_is_template,
                "a strategy's `stored` is a template: template <class Weight> using stored = ...");
  static_assert(has::no_store, "the strategy has a member `store`, which means nothing: did you mean `stored`?");
  static_assert(has::no_Stored, "the strategy has a member `Stored`, which means nothing: did you mean `stored`?");
  static_assert(has::no_storage, "the strategy has a member `storage`, which means nothing: did you mean `stored`?");
  static_assert(has::branch_input == has::branch_output,
                "a strategy names `branch_input` and `branch_output`, both or none: one of them alone means nothing");
};

/// A class from which specs can be derived, because `strategy_requirements` accepts it.
template <class S>
concept complete_strategy = strategy_members<S>::right;

template <class S>
struct mesh_or_none {
  using type = plait::mesh<>;
};
template <class S>
  requires mesh_like<typename S::mesh>
struct mesh_or_none<S> {
  using type = typename S::mesh;
};
template <class S>
struct residual_or_whole {
  using type = spec<batch, seq, hidden>;
};
template <class S>
  requires spec_like<typename S::residual>
struct residual_or_whole<S> {
  using type = typename S::residual;
};

/// Layers use this in place of an incomplete strategy, so one mistake gives one error.
template <class S>
struct stand_in_strategy {
  using mesh = typename mesh_or_none<S>::type;
  using residual = typename residual_or_whole<S>::type;
  using query_heads = heads;
  using key_heads = kv_heads;
  using feed_forward = ffn;
  using vocabulary = vocab;
};
template <class S>
struct strategy_or_stand_in {
  using type = stand_in_strategy<S>;
};
template <complete_strategy S>
struct strategy_or_stand_in<S> {
  using type = S;
};
/// The dim of a residual that counts the tokens of a sequence.
constexpr dim_id sequence_of(const layout& residual) {
  for (dim_id dim : {dim_of<zseq>, dim_of<source_seq>})
    if (residual.has(dim)) return dim;
  return dim_of<seq>;
}

/// Checks a strategy's own members before specs are derived from them. Otherwise the layers' errors would show derived
/// specs that the user never wrote.
constexpr verdict check_strategy(const mesh_shape& mesh, const layout& residual, const layout& heads,
                                 const layout& kv_heads, const layout& ffn, const layout& vocab,
                                 const axis_list& context) {
  if (const verdict v = check_boundary(residual, mesh); !v.ok()) return v;
  for (const layout* part : {&heads, &kv_heads, &ffn, &vocab})
    for (axis_id axis : sharding_axes(*part))
      if (!mesh.has(axis))
        return {layout_error::axis_unknown, axis, part->sharded_by(axis), state::varying, state::varying};
  const dim_id sequence = sequence_of(residual);
  const dim_list found = residual.dim_order();
  // Attention finds samples and tokens by position, so the first dim may have any name.
  const bool lacks_samples = found.empty() || found[0] == sequence;
  dim_list in_order(lacks_samples ? dim_of<batch> : found[0]);
  in_order.push_back(sequence);
  in_order.push_back(dim_of<hidden>);
  verdict dims = compare_dims(operand::residual, in_order, found);
  if (dims.ok()) dims = compare_dims(operand::heads, dim_list(dim_of<plait::heads>), heads.dim_order());
  if (dims.ok()) dims = compare_dims(operand::kv_heads, dim_list(dim_of<plait::kv_heads>), kv_heads.dim_order());
  // The MLPs of layers without experts and of shared experts have their own widths.
  dim_id width = dim_of<plait::ffn>;
  for (dim_id other : {dim_of<plait::shared_ffn>, dim_of<plait::dense_ffn>})
    if (ffn.has(other)) width = other;
  if (dims.ok()) dims = compare_dims(operand::feed_forward, dim_list(width), ffn.dim_order());
  if (dims.ok()) dims = compare_dims(operand::vocabulary, dim_list(dim_of<plait::vocab>), vocab.dim_order());
  if (!dims.ok()) return dims;

  const axis_list head_axes = sharding_axes(heads), kv_axes = sharding_axes(kv_heads);
  for (std::size_t i = 0; i < kv_axes.size(); ++i)
    if (i >= head_axes.size() || !(head_axes[i] == kv_axes[i]))
      return {layout_error::kv_heads_must_lead, kv_axes[i], dim_of<plait::kv_heads>, state::varying, state::varying};
  for (axis_id axis : context)
    if (head_axes.contains(axis))
      return {layout_error::context_axis_shards_heads, axis, dim_of<plait::heads>, state::varying, state::varying};
  const axis_list over = residual.axes_of(sequence);
  for (std::size_t i = 0; i < context.size(); ++i)
    if (i >= over.size() || !(over[i] == context[i]))
      return {layout_error::context_axes_differ, context[i], sequence, residual.state_of(context[i]), state::varying};
  for (std::size_t i = context.size(); i < over.size(); ++i)
    if (!head_axes.contains(over[i]))
      return {layout_error::seq_must_be_whole, over[i], sequence, state::varying, state::varying};
  return {};
}

template <class S>
struct strategy_value {
  static constexpr verdict value =
      check_strategy(S::mesh::static_shape(), layout_v<typename S::residual>, layout_v<spec<typename S::query_heads>>,
                     layout_v<spec<typename S::key_heads>>, layout_v<spec<typename S::feed_forward>>,
                     layout_v<spec<typename S::vocabulary>>, context_axes<typename attention_of_strategy<S>::type>);
};
/// The tags that an error of a strategy may name.
template <class S>
struct strategy_tags {
  using dims = concat<typename S::residual::dims,
                      type_list<batch, seq, zseq, hidden, plait::heads, plait::kv_heads, plait::ffn, plait::vocab>,
                      typename spec<typename S::query_heads>::dims, typename spec<typename S::key_heads>::dims,
                      typename spec<typename S::feed_forward>::dims, typename spec<typename S::vocabulary>::dims>;
  using axes = concat<typename S::mesh::tags, typename S::residual::axes, typename spec<typename S::query_heads>::axes,
                      typename spec<typename S::key_heads>::axes, typename spec<typename S::feed_forward>::axes,
                      typename spec<typename S::vocabulary>::axes, typename attention_of_strategy<S>::type::axes>;
};
/// Refuses to compile if a class is not a strategy or its members do not fit together.
template <class S>
inline constexpr bool strategy_accepted = sizeof(strategy_requirements<S>) > 0;
template <complete_strategy S>
inline constexpr bool strategy_accepted<S> = sizeof(consequence<strategy_value<S>, S, strategy_tags<S>>) > 0;

template <class S>
inline constexpr bool strategy_refused = true;
template <complete_strategy S>
inline constexpr bool strategy_refused<S> = !strategy_value<S>::value.ok();

template <class Where>
concept strategy_itself = requires {
  typename Where::residual;
  typename Where::query_heads;
};
template <class Where>
concept derived_from_strategy = requires { typename Where::derived_from; };
template <class Where>
constexpr bool refused_with_strategy() {
  if constexpr (strategy_itself<Where>)
    return strategy_refused<Where>;
  else
    return strategy_refused<typename Where::derived_from>;
}

}  // namespace detail

/// Marks a strategy, or a policy derived from it by `transformer_specs`, as refused before. (One specialisation serves
/// both, because nvcc takes a second one for a redeclaration.)
template <class Where>
  requires(detail::strategy_itself<Where> || detail::derived_from_strategy<Where>)
inline constexpr bool refused_before<Where> = detail::refused_with_strategy<Where>();

/// A strategy defines the layout of a transformer.
///
///     struct my_strategy {
///       using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
///       using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;   // between layers; mentions every axis
///       using query_heads = shard<heads, tp>;
///       using key_heads = shard<kv_heads, tp>;                       // over leading axes of heads
///       using feed_forward = shard<ffn, tp>;
///       using vocabulary = shard<vocab, tp>;
///       using attention = ring<cp>;   // over the sequence's leading axes; default: whole_sequence
///       template <class Weight> using stored = Weight;        // the specs of parameters between steps; optional
///       using overlap = pl::overlap<4>;      // collectives of linears in chunks that overlap their products; optional
///     };
///
/// The residual may shard its last dim, `hidden`, over further axes. Weights then shard it in the same way, which is
/// two-dimensional tensor parallelism. `branch_input` and `branch_output` (both or none) are the specs of the inputs
/// and outputs of attention and MLP, if these differ from the residual. `in_parallel` defines them for blocks whose
/// branches share one gather and one reduction.
template <class S>
concept strategy = mesh_like<typename S::mesh> && spec_like<typename S::residual> && requires {
  typename S::query_heads;
  typename S::key_heads;
  typename S::feed_forward;
  typename S::vocabulary;
};

namespace detail {

/// The layout between the linears of a branch. It has the residual's dims without the last one and without the axes of
/// the branch, followed by the branch's own dims. Axes of the branch that do not shard these dims are replicated. Axes
/// that shard the residual's last dim are invariant, because products over that dim are complete.
constexpr layout inside_branch(const layout& residual, const layout& own, const axis_list& axes) {
  layout a = residual;
  const axis_list features = a.dims.back().axes;
  a.dims.pop_back();
  for (axis_id axis : features) a.set(axis, state::invariant);
  for (axis_id axis : axes) a.set(axis, state::replicated);
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

/// The layout of token ids and labels for a residual: its leading dims, whole over the vocabulary's axes.
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

/// `Weight` with its dim `hidden` placed like the residual's last dim, without axes that shard another of its dims.
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

/// `Weight` with its dim `Dim` also sharded over `Axes`, innermost. A strategy stores this if parameters are gathered
/// for use; gradients are then reduce-scattered.
template <class Weight, class Dim, class... Axes>
using shard_further = spec_from<detail::sharded_further<Weight, Dim, Axes...>, Weight, placed<shard<Dim, Axes...>>>;

/// All specs that are derived from a strategy. Reports errors of a class that is not a strategy or whose members do not
/// fit together. Layers that derive from it then report no further errors.
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
  /// The policy of a linear under the strategy.
  template <class Input, class Weight, class Output>
  struct policy : placed_policy<Input, Weight, Output> {
    using overlap = plait::overlap<detail::overlap_of<S>>;
  };
  /// The spec of a weight whose dim `hidden` is placed like the residual's.
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
  /// The stored spec of the weight of a norm.
  using norm_weight = stored<weight<hidden>>;
  static_assert(sizeof(detail::overlap_requirements<S>) > 0);
  static_assert(detail::check_overlap<S, query, attention_output, up, down>());
};

/// The order of tokens along the sequence dim of a strategy's tensors. Throws if a sequence in zigzag order has fewer
/// tokens than ranks.
template <strategy S>
sequence_order sequence_order_of(const mesh_shape& mesh, const dim_sizes& sizes) {
  using specs = transformer_specs<S>;
  const std::int64_t length = sizes.of(specs::sequence);
  if (length < 0) fail({"the context gives no size for the dim ", specs::sequence.text()});
  if (!(specs::sequence == dim_of<zseq>)) return sequence_order::original(length);
  const axis_list axes = context_axes<typename specs::attention>;
  return sequence_order::zigzag(length, mesh.size(axes), "seq", "ranks of " + describe(axes),
                                sizes.block_of(specs::sequence));
}

/// Returns `leaves` with the token order of a strategy on a mesh.
template <strategy S>
deterministic_leaves leaves_under(deterministic_leaves leaves, const mesh_shape& mesh) {
  using specs = transformer_specs<S>;
  if (specs::sequence == dim_of<zseq>) leaves.zigzag = mesh.size(context_axes<typename specs::attention>);
  return leaves;
}

namespace detail {

/// Sets the block of a dim that `ranks` ranks shard, so that each rank has whole leaves of `leaves` in total. Changes
/// nothing if ranks already have whole leaves, or if there are more ranks than leaves.
inline void set_block_of_leaf(dim_sizes& sizes, dim_id dim, std::int64_t ranks, std::int64_t leaves) {
  const std::int64_t size = sizes.of(dim);
  if (size < 0 || leaves < ranks || !leaves_of_ranks(sizes, dim, ranks, leaves).empty()) return;
  sizes.set(dim, size, size / leaves);
}

}  // namespace detail

/// Returns the sizes of a transformer, with blocks for features and sequences if ranks of `mesh` would otherwise have
/// parts of leaves. `routed`: routers of experts have leaves of the sequence on every rank that shards it.
template <strategy S>
dim_sizes in_whole_leaves(dim_sizes sizes, const deterministic_leaves& leaves, const mesh_shape& mesh, bool routed) {
  using specs = transformer_specs<S>;
  if (!leaves) return sizes;
  const auto ranks_of = [&](const layout& placed) { return mesh.size(placed.dims[0].axes); };
  const auto leaves_of = [&](dim_id dim) { return feature_leaves(leaves, sizes.of(dim)); };
  // Query heads go with their kv heads, so both have equally many leaves.
  const std::int64_t of_heads = std::gcd(leaves_of(dim_of<heads>), leaves_of(dim_of<kv_heads>));
  const std::int64_t key_ranks = ranks_of(layout_v<spec<typename S::key_heads>>);
  for (const dim_id dim : {dim_of<heads>, dim_of<kv_heads>}) detail::set_block_of_leaf(sizes, dim, key_ranks, of_heads);
  for (const dim_id dim : {dim_of<ffn>, dim_of<shared_ffn>, dim_of<dense_ffn>})
    detail::set_block_of_leaf(sizes, dim, ranks_of(layout_v<spec<typename S::feed_forward>>), leaves_of(dim));
  detail::set_block_of_leaf(sizes, dim_of<vocab>, ranks_of(layout_v<spec<typename S::vocabulary>>),
                            leaves_of(dim_of<vocab>));
  // Norms split each leaf of the sequence further. Ranks that share one leaf must not share another.
  const std::int64_t ranks = mesh.size(layout_v<typename S::residual>.axes_of(specs::sequence));
  const std::int64_t context_ranks = mesh.size(context_axes<typename specs::attention>);
  const std::int64_t pieces = specs::sequence == dim_of<zseq> && context_ranks > 1 ? 2 : 1;
  const std::int64_t length = sizes.of(specs::sequence), whole = leaves.sequence;
  if (whole % (pieces * (routed ? ranks : context_ranks)) == 0)
    detail::set_block_of_leaf(sizes, specs::sequence, ranks, whole * leaves.features);
  else if (length % whole == 0 && whole >= std::max(ranks, pieces * context_ranks))
    sizes.set(specs::sequence, length, length / whole);
  return sizes;
}

// Strategies of the literature, and templates that change a strategy's attention policy or storage.

/// The tensor-parallel ranks over which kv heads are replicated if there are fewer kv heads than ranks. The tensor
/// dimension of the mesh then consists of two axes, `tp` and `tp_rep`.
struct tp_rep : axis_tag<"tp_rep"> {};

/// Tensor and sequence parallelism as in Megatron-LM (Korthikanti et al. 2022). Between the parallel linears the
/// residual stream is sharded along the sequence, so norms and residual sums are also distributed. Over cp the sequence
/// stays sharded inside attention too, as a ring; an extent of 1 costs nothing.
struct megatron_sp {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>, axis<tp_rep>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp, tp_rep>, hidden>;
  using query_heads = shard<heads, tp, tp_rep>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp, tp_rep>;
  using vocabulary = shard<vocab, tp, tp_rep>;
  using attention = ring<cp>;
};

/// Tensor parallelism alone (Shoeybi et al. 2019): the residual stream is whole on every tensor-parallel rank.
struct megatron_tp : megatron_sp {
  using residual = spec<shard<batch, dp>, shard<seq, cp>, hidden, invariant<tp, tp_rep>>;
};

namespace detail {

/// The residual of a strategy under another attention policy. Its sequence is sharded over the policy's axes first,
/// then over the tensor axes of the old residual. The old policy's axes become invariant, unless the new policy uses
/// them.
template <class Base, class Policy, class Dim>
struct residual_in_context {
  static constexpr layout value = [] {
    layout a = layout_v<typename Base::residual>;
    const axis_list before = context_axes<typename attention_of_strategy<Base>::type>;
    axis_list over = context_axes<Policy>;
    for (dim_placement& p : a.dims) {
      if (!(p.dim == dim_of<seq> || p.dim == dim_of<zseq>)) continue;
      for (axis_id axis : p.axes)
        if (!over.contains(axis) && !before.contains(axis)) over.push_back(axis);
      p = {dim_of<Dim>, over};
    }
    for (axis_id axis : before)
      if (!over.contains(axis)) a.set(axis, state::invariant);
    for (axis_id axis : over)
      if (const int at = a.invariant.find(axis); at >= 0) a.invariant.erase(static_cast<std::size_t>(at));
    return a;
  }();
};
template <class Policy, class Placement>
struct context_tags {
  using dims = type_list<typename Placement::dim>;
  using axes = typename Policy::axes;
};

}  // namespace detail

/// `Base` with another attention policy and placement of the sequence: `context_parallel<megatron_sp, ring<cp>,
/// zigzag>`.
template <class Base, attention_policy Policy, class Placement = contiguous>
struct context_parallel : Base {
  using residual = spec_from<detail::residual_in_context<Base, Policy, typename Placement::dim>,
                             typename Base::residual, detail::context_tags<Policy, Placement>>;
  using attention = Policy;
};

/// `Base` with parameters stored sharded over the data-parallel ranks, and gathered for a whole step. Weights with a
/// hidden dim are sharded along it between steps. Weights without one stay whole: norms of heads, and biases of q, k, v
/// and ffn. It is an example of a strategy's `stored`. A step under `zero_level::parameters` gathers unit by unit, as
/// ZeRO-3 does (Rajbhandari et al. 2020), and divides all shapes.
template <class Base>
struct stored_over_dp : Base {
  template <class Weight>
  using stored = shard_further<Weight, hidden, dp>;
};

/// The extents of tp and tp_rep for a number of tensor-parallel ranks: tp shards the kv heads, and tp_rep replicates
/// each of them.
struct tensor_extents {
  std::int64_t tp = 1, tp_rep = 1;
};
inline tensor_extents split_tensor_ranks(std::int64_t ranks, std::int64_t kv_heads) {
  const std::int64_t shared = ranks <= kv_heads ? ranks : std::gcd(ranks, kv_heads);
  return {shared, ranks / shared};
}

// A strategy for blocks whose attention and MLP run in parallel, with one gather and one reduction.

namespace detail {

/// The residual with the axes of a branch's weights in the state `State`; they shard none of its dims.
template <class S, state State>
struct branch_boundary {
  static constexpr layout value = [] {
    layout a = layout_v<typename S::residual>;
    for (axis_id axis : sharding_axes(layout_v<spec<typename S::query_heads>>)) a.set(axis, State);
    return a;
  }();
};

}  // namespace detail

/// `Base` for blocks with parallel branches (PaLM, Chowdhery et al. 2022): y = x + attention(norm(x)) + mlp(norm(x)).
/// Attention and MLP take the stream replicated over the axes of their weights, and their outputs are partial over
/// them. So `sum<residual, residual, attention, mlp>` gathers once and reduces once for both, forward and backward.
template <class Base>
struct in_parallel : Base {
  static_assert(detail::sharding_axes(layout_v<spec<typename Base::query_heads>>) ==
                    detail::sharding_axes(layout_v<spec<typename Base::feed_forward>>),
                "branches side by side need heads and ffn sharded over the same axes, in the same order");
  using branch_input = spec_from<detail::branch_boundary<Base, state::replicated>, typename Base::residual,
                                 spec<typename Base::query_heads>>;
  using branch_output = spec_from<detail::branch_boundary<Base, state::partial>, typename Base::residual,
                                  spec<typename Base::query_heads>>;
};

// Strategies for mixtures of experts.

/// A strategy for mixtures of experts. `expert` is the placement of experts, such as `shard<experts, ep>`. The optional
/// `expert_feed_forward` is the placement of each expert's width, such as `shard<ffn, tp>`; without it each expert is
/// whole on its rank.
template <class S>
concept mixture_strategy = strategy<S> && requires { typename S::expert; };

namespace detail {

template <class S>
struct expert_width {
  using type = ffn;
};
template <class S>
  requires requires { typename S::expert_feed_forward; }
struct expert_width<S> {
  using type = typename S::expert_feed_forward;
};

}  // namespace detail

/// The policy of `moe` under a strategy: its input and output have the residual's spec.
template <mixture_strategy S>
struct mixture_policy {
  using derived_from = S;
  using mesh = typename S::mesh;
  using input = typename S::residual;
  using weight = spec<typename S::expert, typename detail::expert_width<S>::type, hidden>;
  using output = typename S::residual;
};

/// Tensor and sequence parallelism as in Megatron-LM, with experts sharded over a further axis, which also shards
/// samples. Each expert is sharded over tp like an MLP.
struct megatron_experts : megatron_sp {
  using mesh = plait::mesh<axis<dp>, axis<ep>, axis<cp>, axis<tp>, axis<tp_rep>>;
  using residual = spec<shard<batch, dp, ep>, shard<seq, cp, tp, tp_rep>, hidden>;
  using expert = shard<experts, ep>;
  using expert_feed_forward = shard<ffn, tp, tp_rep>;
};

/// `Base` with experts also sharded over the tensor-parallel axes, each whole on its rank: rows travel instead of sums.
template <mixture_strategy Base>
struct experts_over_tp : Base {
  using expert = shard<experts, ep, tp, tp_rep>;
  using expert_feed_forward = ffn;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
