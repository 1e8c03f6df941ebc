// expect: my_strategy
// errors-at-most: 1
#include "if_fixed.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/strategy.hpp"

using namespace plait;

// The members of a strategy, for cases that lack one of them.
struct with_mesh {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
};
struct with_residual {
  using residual = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
};
struct with_queries {
  using query_heads = shard<heads, tp>;
};
struct with_keys {
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
};
struct with_vocabulary {
  using vocabulary = shard<vocab, tp>;
};
struct sharded_heads : with_queries, with_keys, with_vocabulary {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
};

// case: attention_axis_of_heads
// expect: an axis of context-parallel attention shards the heads too: a policy such as ring<cp> needs an axis of its own, which shards the sequence and no heads
// expect: on_axis<plait::tp>
struct my_strategy : megatron_sp {
#ifndef PLAIT_FAIL_FIX
  using attention = ring<tp>;
#endif
};
template class plait::self_attention<float, my_strategy>;

// case: attention_kv_heads_do_not_lead
// expect: the axes of kv_heads must be the leading axes of heads: shard<heads, a, b> goes with shard<kv_heads, a, b> or shard<kv_heads, a>
struct outer : axis_tag<"outer"> {};
struct inner : axis_tag<"inner"> {};

struct my_strategy : sharded_heads {
  using mesh = plait::mesh<axis<dp>, axis<outer>, axis<inner>>;
  using residual = spec<shard<batch, dp>, shard<seq, outer, inner>, hidden>;
  using query_heads = shard<heads, outer, inner>;
  using key_heads = if_fixed<shard<kv_heads, outer>, shard<kv_heads, inner>>;
  using feed_forward = shard<ffn, outer, inner>;
  using vocabulary = shard<vocab, outer, inner>;
};
template class plait::self_attention<float, my_strategy>;

// case: attention_policy_axes
// expect: attention needs the sequence sharded over exactly the axes of its context-parallel policy, in its order
// expect: on_axis<plait::cp>
// expect: on_dim<plait::seq>
// A ring over cp whose ranks have the same tokens, because cp shards the batch.
struct my_strategy : sharded_heads {
  using residual = if_fixed<spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>,
                            spec<shard<batch, dp, cp>, shard<seq, tp>, hidden>>;
  using attention = ring<cp>;
};
template class plait::self_attention<float, my_strategy>;

// case: attention_second_axis
// expect: attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel policy
// expect: on_axis<inner>
struct inner : axis_tag<"inner"> {};

// The sequence is sharded over two axes, but the policy names one of them.
struct my_strategy : megatron_sp {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<inner>, axis<tp>, axis<tp_rep>>;
  using residual = spec<shard<batch, dp>, shard<zseq, cp, inner, tp, tp_rep>, hidden>;
  using attention = if_fixed<ulysses<inner, ring<cp>>, ring<cp>>;
};
template class plait::self_attention<float, my_strategy>;

// case: attention_sharded_keys
// expect: attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel policy
// expect: on_axis<plait::cp>
// expect: on_dim<plait::seq>
// Over cp each rank would attend to its own part of the sequence only.
struct my_strategy : sharded_heads {
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
#ifdef PLAIT_FAIL_FIX
  using attention = ring<cp>;
#endif
};
template class plait::self_attention<float, my_strategy>;

// case: strategy_forgotten_dp_everywhere
// expect: a boundary spec must mention every axis of its mesh
// expect: on_axis<plait::dp>
// Every layer of a model derives its specs from the residual, but there is one error only.
struct my_strategy : sharded_heads {
  using residual = if_fixed<spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>,
                            spec<batch, shard<seq, cp, tp>, hidden>>;
  using attention = ring<cp>;
};
template class plait::llama<float, my_strategy>;

// case: strategy_kv_heads_dim
// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::kv_heads>, plait::expected_dims<plait::kv_heads>, plait::given_dims<plait::heads>
// The dim of the queries in place of the dim of the keys.
struct my_strategy : sharded_heads {
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using key_heads = if_fixed<shard<kv_heads, tp>, shard<heads, tp>>;
  using attention = ring<cp>;
};
template class plait::self_attention<float, my_strategy>;

// case: strategy_kv_heads_on_dp
// expect: the axes of kv_heads must be the leading axes of heads
// expect: on_axis<plait::dp>, plait::on_dim<plait::kv_heads>
// dp shards the batch.
struct my_strategy : sharded_heads {
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using key_heads = if_fixed<shard<kv_heads, tp>, shard<kv_heads, dp>>;
  using attention = ring<cp>;
};
template class plait::self_attention<float, my_strategy>;

// case: strategy_misnamed_stored
// expect: the strategy has a member `store`, which means nothing: did you mean `stored`?
// Without the error, weights would be stored as they are used.
struct my_strategy : sharded_heads {
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using attention = ring<cp>;
  template <class Weight>
#ifdef PLAIT_FAIL_FIX
  using stored = Weight;
#else
  using store = Weight;
#endif
};
template class plait::self_attention<float, my_strategy>;

// case: strategy_residual_order
// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::residual>, plait::expected_dims<plait::batch, plait::seq, plait::hidden>, plait::given_dims<plait::seq, plait::batch, plait::hidden>
// Megatron's order: attention would treat the sequence as samples.
struct my_strategy : sharded_heads {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
  using residual = if_fixed<spec<shard<batch, dp>, seq, hidden, invariant<tp>>,
                            spec<seq, shard<batch, dp>, hidden, invariant<tp>>>;
};
template class plait::self_attention<float, my_strategy>;

// case: strategy_sequence_order
// expect: attention needs the sequence sharded over exactly the axes of its context-parallel policy, in its order
// expect: on_axis<plait::cp>, plait::on_dim<plait::seq>
// cp must be major: the ring sends contiguous runs of the sequence.
struct my_strategy : sharded_heads {
  using residual = if_fixed<spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>,
                            spec<shard<batch, dp>, shard<seq, tp, cp>, hidden>>;
  using attention = ring<cp>;
};
template class plait::self_attention<float, my_strategy>;

// case: strategy_unmentioned_axis
// expect: a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, partial<axis> or invariant<axis>
// expect: on_axis<plait::dp>
struct my_strategy : sharded_heads {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
  using residual = if_fixed<spec<shard<batch, dp>, shard<seq, tp>, hidden>, spec<batch, shard<seq, tp>, hidden>>;
};
template class plait::swiglu_mlp<float, my_strategy>;

// case: strategy_vocabulary_dim
// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::vocabulary>, plait::expected_dims<plait::vocab>, plait::given_dims<plait::ffn>
// The embedding would have as many rows as the feed-forward layer is wide.
struct my_strategy : sharded_heads {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using vocabulary = if_fixed<shard<vocab, tp>, shard<ffn, tp>>;
};
template class plait::self_attention<float, my_strategy>;

// case: strategy_without_ffn
// expect: a strategy names `feed_forward`: using feed_forward = shard<ffn, tp>, or the dim
// A strategy without specs of the MLP.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
#ifdef PLAIT_FAIL_FIX
  using feed_forward = shard<ffn, tp>;
#endif
  using vocabulary = shard<vocab, tp>;
  using attention = ring<cp>;
};
template class plait::swiglu_mlp<float, my_strategy>;

// case: strategy_without_mesh
// expect: a strategy names its `mesh`: using mesh = plait::mesh<axis<dp>, axis<tp>>
struct my_strategy : with_residual, with_queries, with_keys, with_vocabulary {
#ifdef PLAIT_FAIL_FIX
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
#endif
};
template class plait::swiglu_mlp<float, my_strategy>;

// case: strategy_without_residual
// expect: a strategy names `residual`, the spec of the values between layers
struct my_strategy : with_mesh, with_queries, with_keys, with_vocabulary {
#ifdef PLAIT_FAIL_FIX
  using residual = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
#endif
};
template class plait::swiglu_mlp<float, my_strategy>;

// case: strategy_without_query_heads
// expect: a strategy names `query_heads`: using query_heads = shard<heads, tp>, or the dim
struct my_strategy : with_mesh, with_residual, with_keys, with_vocabulary {
#ifdef PLAIT_FAIL_FIX
  using query_heads = shard<heads, tp>;
#endif
};
template class plait::swiglu_mlp<float, my_strategy>;

// case: strategy_without_key_heads
// expect: a strategy names `key_heads`: using key_heads = shard<kv_heads, tp>, or the dim
struct my_strategy : with_mesh, with_residual, with_queries, with_vocabulary {
  using feed_forward = shard<ffn, tp>;
#ifdef PLAIT_FAIL_FIX
  using key_heads = shard<kv_heads, tp>;
#endif
};
template class plait::swiglu_mlp<float, my_strategy>;

// case: strategy_without_vocabulary
// expect: a strategy names `vocabulary`: using vocabulary = shard<vocab, tp>, or the dim
struct my_strategy : with_mesh, with_residual, with_queries, with_keys {
#ifdef PLAIT_FAIL_FIX
  using vocabulary = shard<vocab, tp>;
#endif
};
template class plait::swiglu_mlp<float, my_strategy>;

// case: attention_not_a_policy
// expect: a strategy's attention is a policy: a type that names axes = type_list<...> and an engine
// An axis in place of a policy.
struct my_strategy : megatron_sp {
  using attention = if_fixed<ring<cp>, cp>;
};
using residual_of_mine = transformer_specs<my_strategy>::residual;

// case: strategy_branch_input_alone
// expect: a strategy names `branch_input` and `branch_output`, both or none: one of them alone means nothing
// Branches that take the whole sequence. Without the error, their output would have the residual's spec.
struct my_strategy : megatron_sp {
  using branch_input = spec<shard<batch, dp>, shard<seq, cp>, hidden, invariant<tp, tp_rep>>;
#ifdef PLAIT_FAIL_FIX
  using branch_output = residual;
#endif
};
template class plait::swiglu_mlp<float, my_strategy>;
