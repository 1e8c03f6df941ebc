#include "if_fixed.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/moe.hpp"
#include "plait/nn/moe/shared_expert.hpp"
#include "plait/nn/strategy.hpp"

using namespace plait;

// case: attention_engine_incomplete
// expect: the engine of a strategy's attention policy must model plait::attention_engine

// A user-defined policy whose engine has no backward pass.
template <class Precision, class Device>
class forward_only {
 public:
  struct saved {};
  forward_only() = default;
  forward_only(const context<Device>&, const attention_part&, const axis_list&) {}
  bool keeps_inputs() const { return true; }
  void forward(const context<Device>&, const attention_inputs<Precision>&, Precision*, saved*) {}
#ifdef PLAIT_FAIL_FIX
  template <class G>
  void backward(const context<Device>&, const attention_inputs<Precision>&, const Precision*, const Precision*, saved&, attention_gradients<G>) {}
#endif
};
struct my_policy {
  using axes = type_list<cp>;
  template <class Precision, class Device>
  using engine = forward_only<Precision, Device>;
};
struct my_strategy : megatron_sp {
  using attention = my_policy;
};
template class plait::self_attention<float, my_strategy>;

// case: backward_wrong_dual
// expect: a gradient with the wrong spec: the gradient of a value has the dual spec (replicate and partial change places)
// expect: on_axis<plait::tp>
// expect: down_policy
// errors-at-most: 1

struct down_policy {
  using input = spec<shard<batch, dp>, shard<ffn, tp>>;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = spec<shard<batch, dp>, hidden, invariant<tp>>;
};
using down = linear<float, down_policy>;
using gradient = if_fixed<dual_t<down::output>,
                          spec<shard<batch, dp>, hidden, partial<tp>>>;  // the gradient of a replicated output
void backward(context<cpu>& ctx, down& layer, const tensor<float, down::input>& x, down::saved& kept, const tensor<float, gradient>& dy) {
  layer.backward(ctx, x, kept, dy);
}

// case: expert_exchange_without_combine
// expect: a mixture's exchange is a policy: a type with a constructor X(device, expert_group), a route, and the members open, dispatch and combine
// errors-at-most: 1

// Without the error, rows would travel to experts and never return.
template <class T, class Device>
struct one_way {
  using route = int;
  one_way(Device&, const expert_group&) {}
  route open(Device&, host_values<std::int32_t, Device>&, expert_rows&) const { return 0; }
  template <class Work>
  buffer<Device> dispatch(Device&, route, buffer<Device> rows, Work&& meanwhile) const {
    meanwhile();
    return rows;
  }
#ifdef PLAIT_FAIL_FIX
  buffer<Device> combine(Device&, route, buffer<Device> rows) const { return rows; }
#endif
};
struct experts_over_ep {
  using input = spec<shard<batch, ep>, seq, hidden>;
  using weight = spec<shard<experts, ep>, ffn, hidden>;
  using output = input;
  template <class T, class Device>
  using exchange = one_way<T, Device>;
};
template class plait::moe<float, experts_over_ep>;

// case: labels_sharded_otherwise
// expect: a dim is sharded over an axis in one operand and not in the other: the local sizes differ. Gather it, or shard the other operand alike
// expect: on_axis<plait::dp>
// errors-at-most: 1

using logits = spec<shard<batch, dp>, shard<vocab, tp>>;
using labels = if_fixed<spec<shard<batch, dp>, invariant<tp>>, spec<batch, invariant<dp, tp>>>;
template class plait::cross_entropy_loss<float, logits, labels>;

// case: mixture_misnamed_members
// expect: the policy has a member `exchnage`, which means nothing: did you mean `exchange`?
// expect: misspelled
// expect: a policy's `exchange` is a template of two types
// expect: of_one_type
// expect: the policy has a member `has_bias`, which means nothing: a mixture's experts have no bias
// expect: a_bias
// expect: the policy has a member `store`, which means nothing: a mixture stores its weights as it uses them
// expect: a_store
// errors-at-most: 4

struct experts_over_ep {
  using input = spec<shard<batch, ep>, seq, hidden>;
  using weight = spec<shard<experts, ep>, ffn, hidden>;
  using output = input;
};
// Without the errors, all of these members would be ignored.
struct misspelled : experts_over_ep {
#ifdef PLAIT_FAIL_FIX
  template <class T, class Device>
  using exchange = all_to_all_exchange<T, Device>;
#else
  template <class T, class Device>
  using exchnage = all_to_all_exchange<T, Device>;
#endif
};
template class plait::moe<float, misspelled>;

struct of_one_type : experts_over_ep {
#ifdef PLAIT_FAIL_FIX
  template <class T, class Device>
  using exchange = all_to_all_exchange<T, Device>;
#else
  template <class T>
  using exchange = all_to_all_exchange<T, cpu>;
#endif
};
template class plait::moe<float, of_one_type>;

struct a_bias : experts_over_ep {
#ifndef PLAIT_FAIL_FIX
  static constexpr bool has_bias = true;
#endif
};
template class plait::moe<float, a_bias>;

struct a_store : experts_over_ep {
#ifndef PLAIT_FAIL_FIX
  using store = weight;
#endif
};
template class plait::moe<float, a_store>;

// case: mixture_with_members_of_linears
// expect: a mixture's experts have no bias: leave `bias` out of its policy
// expect: a_bias
// expect: a mixture stores its weights as it uses them: leave `stored` out of its policy
// expect: a_store
// expect: a mixture's products do not overlap with collectives in chunks: leave `overlap` out of its policy
// expect: an_overlap
// errors-at-most: 3

struct experts_over_ep {
  using input = spec<shard<batch, ep>, seq, hidden>;
  using weight = spec<shard<experts, ep>, ffn, hidden>;
  using output = input;
};
struct a_bias : experts_over_ep {
#ifndef PLAIT_FAIL_FIX
  static constexpr bool bias = true;
#endif
};
template class plait::moe<float, a_bias>;

struct a_store : experts_over_ep {
#ifndef PLAIT_FAIL_FIX
  using stored = weight;
#endif
};
template class plait::moe<float, a_store>;

struct an_overlap : experts_over_ep {
#ifndef PLAIT_FAIL_FIX
  using overlap = plait::overlap<4>;
#endif
};
template class plait::moe<float, an_overlap>;

// case: mixture_outside_its_mesh
// expect: a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, partial<axis> or invariant<axis>
// expect: on_axis<plait::tp>
// expect: experts_over_ep
// errors-at-most: 1

// Without the error, the specs would not be checked against the mesh.
struct experts_over_ep {
  using mesh = plait::mesh<axis<ep>, axis<tp>>;
  using input = if_fixed<spec<shard<batch, ep>, seq, hidden, invariant<tp>>, spec<shard<batch, ep>, seq, hidden>>;
  using weight = spec<shard<experts, ep>, ffn, hidden>;
  using output = input;
};
template class plait::moe<float, experts_over_ep>;

// case: mixture_without_weight
// expect: a policy names `weight`, the spec of the weight in use: using weight = spec<...>
// expect: experts_over_ep
// errors-at-most: 1

struct experts_over_ep {
  using input = spec<shard<batch, ep>, seq, hidden>;
#ifdef PLAIT_FAIL_FIX
  using weight = spec<shard<experts, ep>, ffn, hidden>;
#endif
  using output = input;
};
template class plait::moe<float, experts_over_ep>;

// case: strategy_misnamed_exchange
// expect: the policy has a member `exchnage`, which means nothing: did you mean `exchange`?
// expect: my_strategy
// errors-at-most: 1

struct my_strategy : megatron_experts {
#ifndef PLAIT_FAIL_FIX
  template <class T, class Device>
  using exchnage = all_to_all_exchange<T, Device>;
#endif
};
template class plait::moe<float, mixture_policy<my_strategy>>;

// case: overlap_in_parallel
// expect: `overlap` would hide nothing: by their specs, its linears gather no input and reduce no output
// expect: beside
// errors-at-most: 1

// The branches share one gather and one reduction, which are outside of their linears.
struct beside : in_parallel<megatron_sp> {
#ifndef PLAIT_FAIL_FIX
  using overlap = plait::overlap<4>;
#endif
};
template class plait::swiglu_mlp<float, beside>;

// case: policy_without_specs
// expect: a policy names `input`, the spec of the layer's input: using input = spec<...>
// expect: up_policy
// expect: a policy names `weight`, the spec of the weight in use: using weight = spec<...>
// expect: table_policy
// errors-at-most: 2

// A linear without a spec of its input.
struct up_policy {
#ifdef PLAIT_FAIL_FIX
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
#endif
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
};
template class plait::linear<float, up_policy>;

// An embedding whose table is not a spec.
struct table_policy {
  using input = spec<shard<batch, dp>>;
#ifdef PLAIT_FAIL_FIX
  using weight = spec<vocab, hidden>;
#else
  static constexpr int weight = 1;
#endif
  using output = spec<shard<batch, dp>, hidden>;
};
template class plait::embedding<float, table_policy>;

// case: positions_without_samples
// expect: learned positions take [samples, tokens, features]

using value = if_fixed<spec<shard<batch, dp>, seq, hidden>, spec<shard<batch, dp>, hidden>>;
using taken = plait::learned_positions<float, value>::input;

// case: shared_expert_sharded_hidden
// expect: a shared expert multiplies whole rows by its gate: the residual must not shard its last dim

struct rows : axis_tag<"rows"> {};

// Two-dimensional tensor parallelism: each rank has a part of each row.
struct two_dims {
  using mesh = plait::mesh<axis<dp>, axis<rows>, axis<tp>>;
  using residual = if_fixed<spec<shard<batch, dp>, seq, hidden, invariant<tp, rows>>,
                            spec<shard<batch, dp>, seq, shard<hidden, rows>, invariant<tp>>>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
};
template class plait::shared_expert<float, two_dims>;

// case: strategy_misnamed_attention
// expect: the strategy has a member `attn`, which means nothing: did you mean `attention`?
// expect: my_strategy
// expect: the strategy has a member `ffn`, which means nothing: did you mean `feed_forward`?
// errors-at-most: 2

// Without the error, the ring would be ignored.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
#ifdef PLAIT_FAIL_FIX
  using attention = ring<cp>;
#else
  using attn = ring<cp>;
#endif
};
template class plait::self_attention<float, my_strategy>;

// The base strategy has the member whose name is misspelled here.
struct derived_strategy : megatron_sp {
#ifndef PLAIT_FAIL_FIX
  using ffn = shard<plait::ffn, tp, tp_rep>;
#endif
};
template class plait::self_attention<float, derived_strategy>;
