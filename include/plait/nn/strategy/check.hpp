// Refusals of a class that is no strategy, and of one whose parts do not go together, before specs are derived from it.
// Each layer checks the derived specs itself.
#pragma once

#include "plait/layout/boundary.hpp"
#include "plait/layout/describe.hpp"
#include "plait/nn/attention/policy.hpp"
#include "plait/nn/linear/rule.hpp"

namespace plait {
namespace detail {

/// Says what a class lacks to be a strategy, member by member, and which members mean nothing. Some names near to an
/// optional member's are refused where that member is missing, since the wish would be dropped in silence; C++ cannot
/// see what other names a class has.
template <class S>
struct strategy_requirements {
  static_assert(
      requires { requires mesh_like<typename S::mesh>; },
      "a strategy names its `mesh`: using mesh = plait::mesh<axis<dp>, axis<tp>>");
  static_assert(
      requires { requires spec_like<typename S::residual>; },
      "a strategy names `residual`, a spec: how the values between layers lie");
  static_assert(
      requires { typename S::query_heads; },
      "a strategy names `query_heads`: using query_heads = shard<heads, tp>, or the dim");
  static_assert(
      requires { typename S::key_heads; },
      "a strategy names `key_heads`: using key_heads = shard<kv_heads, tp>, or the dim");
  static_assert(
      requires { typename S::feed_forward; },
      "a strategy names `feed_forward`: using feed_forward = shard<ffn, tp>, or the dim");
  static_assert(
      requires { typename S::vocabulary; },
      "a strategy names `vocabulary`: using vocabulary = shard<vocab, tp>, or the dim");

  // A strategy that derives from another has the members above, so that a misnamed one would change nothing.
  static_assert(
      !requires { typename S::heads; },
      "the strategy has a member `heads`, which means nothing: did you mean `query_heads`?");
  static_assert(
      !requires { typename S::kv_heads; },
      "the strategy has a member `kv_heads`, which means nothing: did you mean `key_heads`?");
  static_assert(
      !requires { typename S::ffn; },
      "the strategy has a member `ffn`, which means nothing: did you mean `feed_forward`?");
  static_assert(
      !requires { typename S::vocab; },
      "the strategy has a member `vocab`, which means nothing: did you mean `vocabulary`?");

  static constexpr bool has_attention = requires { typename S::attention; };
  static_assert(attention_policy<typename attention_of_strategy<S>::type>,
                "a strategy's attention is a policy: a type that names axes = type_list<...> and an engine");
  static_assert(
      has_attention || !requires { typename S::Attention; },
      "the strategy has a member `Attention`, which means nothing: did you mean `attention`?");
  static_assert(
      has_attention || !requires { typename S::attn; },
      "the strategy has a member `attn`, which means nothing: did you mean `attention`?");
  static_assert(
      has_attention || !requires { typename S::attention_policy; },
      "the strategy has a member `attention_policy`, which means nothing: did you mean `attention`?");

  static constexpr bool has_stored = requires { typename S::template stored<spec<hidden>>; };
  static_assert(
      !requires { typename S::stored; },
      "a strategy's `stored` is a template: template <class Weight> using stored = ...");
  static_assert(
      has_stored || !requires { typename S::template store<spec<hidden>>; },
      "the strategy has a member `store`, which means nothing: did you mean `stored`?");
  static_assert(
      has_stored || !requires { typename S::template Stored<spec<hidden>>; },
      "the strategy has a member `Stored`, which means nothing: did you mean `stored`?");
  static_assert(
      has_stored || !requires { typename S::template storage<spec<hidden>>; },
      "the strategy has a member `storage`, which means nothing: did you mean `stored`?");

  static constexpr bool has_branch_input = requires { typename S::branch_input; };
  static constexpr bool has_branch_output = requires { typename S::branch_output; };
  static_assert(has_branch_input == has_branch_output,
                "a strategy names `branch_input` and `branch_output`, both or none: one of them alone means nothing");
};

/// The demands of `strategy_requirements` as a value: nothing is derived from a strategy that it refuses.
template <class S>
concept complete_strategy =
    mesh_like<typename S::mesh> && spec_like<typename S::residual> &&
    requires {
      typename S::query_heads;
      typename S::key_heads;
      typename S::feed_forward;
      typename S::vocabulary;
    } && !requires { typename S::heads; } && !requires { typename S::kv_heads; } && !requires { typename S::ffn; } &&
    !requires { typename S::vocab; } && attention_policy<typename attention_of_strategy<S>::type> &&
    !requires { typename S::stored; } &&
    (
        requires { typename S::attention; } || !requires { typename S::Attention; }) &&
    (
        requires { typename S::attention; } || !requires { typename S::attn; }) &&
    (
        requires { typename S::attention; } || !requires { typename S::attention_policy; }) &&
    (
        requires { typename S::template stored<spec<hidden>>; } ||
        !requires { typename S::template store<spec<hidden>>; }) &&
    (
        requires { typename S::template stored<spec<hidden>>; } ||
        !requires { typename S::template Stored<spec<hidden>>; }) &&
    (
        requires { typename S::template stored<spec<hidden>>; } ||
        !requires { typename S::template storage<spec<hidden>>; }) &&
    (
        requires { typename S::branch_input; } == requires { typename S::branch_output; });

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

/// Layers derive from this in place of a strategy that lacks something, so that one mistake is one error.
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
/// The dim that counts the tokens of a sequence in a residual.
constexpr dim_id sequence_of(const layout& residual) {
  for (dim_id dim : {dim_of<zseq>, dim_of<source_seq>})
    if (residual.has(dim)) return dim;
  return dim_of<seq>;
}

/// Checks a strategy's own parts before anything is derived from them: the layers' rules would speak of derived
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
  // Attention goes by the places of samples and tokens, whatever the first is called.
  const bool lacks_samples = found.empty() || found[0] == sequence;
  dim_list in_order(lacks_samples ? dim_of<batch> : found[0]);
  in_order.push_back(sequence);
  in_order.push_back(dim_of<hidden>);
  verdict dims = compare_dims(operand::residual, in_order, found);
  if (dims.ok()) dims = compare_dims(operand::heads, dim_list(dim_of<plait::heads>), heads.dim_order());
  if (dims.ok()) dims = compare_dims(operand::kv_heads, dim_list(dim_of<plait::kv_heads>), kv_heads.dim_order());
  if (dims.ok()) dims = compare_dims(operand::feed_forward, dim_list(dim_of<plait::ffn>), ffn.dim_order());
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
/// The tags that a refused strategy may be told of.
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
/// Refuses to compile what is no strategy, or one whose parts do not go together.
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

/// A strategy, and a policy that `transformer_specs` has derived from one, are refused once. (One specialisation for
/// both: nvcc takes a second one for the first with other constraints.)
template <class Where>
  requires(detail::strategy_itself<Where> || detail::derived_from_strategy<Where>)
inline constexpr bool refused_before<Where> = detail::refused_with_strategy<Where>();

}  // namespace plait
