// expect: my_policy
// errors-at-most: 1
#include "if_fixed.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/experts.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/plan.hpp"
#include "plait/schedule/errors.hpp"  // a program that trains includes it too; its codes must not be mixed up with those of layouts

using namespace plait;

struct my_policy;

template <dim_list Out, class A, class B>
struct product_of {
  static constexpr verdict value = contract(layout_v<A>, layout_v<B>, Out).verdict;
};
template <combine How, class A, class B>
struct combination_of {
  static constexpr verdict value = pointwise(How, {&layout_v<A>, &layout_v<B>}).verdict;
};
template <class A>
struct nonlinear_of {
  static constexpr verdict value = pointwise(combine::nonlinear, {&layout_v<A>}).verdict;
};
template <class A, class Dim>
struct maximum_of {
  static constexpr verdict value = reduce_nonlinear(layout_v<A>, dim_of<Dim>).verdict;
};
template <class From, class To>
struct move_of {
  static constexpr verdict value = make_plan(layout_v<From>, layout_v<To>).verdict;
};
template <class Q, class KV>
struct attention_of {
  static constexpr verdict value =
      attend(layout_v<Q>, layout_v<KV>, layout_v<KV>, {dim_of<seq>, dim_of<heads>, dim_of<kv_heads>}).verdict;
};
template <class A, class Mesh, class Dim, std::int64_t Size>
struct parts_of {
  static constexpr verdict value = [] {
    dim_sizes sizes;
    sizes.set(dim_of<Dim>, Size);
    return check_parts(layout_v<A>, Mesh::static_shape(), sizes);
  }();
};
template <class... Dims>
inline constexpr dim_list out{dim_of<Dims>...};
using cluster = mesh<axis<dp>, axis<tp, 4>>;

// case: attention_kv_heads_lead
// expect: the axes of kv_heads must be the leading axes of heads: shard<heads, a, b> goes with shard<kv_heads, a, b> or shard<kv_heads, a>
// expect: on_axis<plait::tp>
using q = if_fixed<spec<seq, shard<heads, tp, cp>, head_dim>, spec<seq, shard<heads, cp, tp>, head_dim>>;
using kv = spec<seq, shard<kv_heads, tp>, head_dim, replicate<cp>>;
static_assert(enforced<attention_of<q, kv>, my_policy, q, kv>);

// case: attention_sharded_head_dim
// expect: attention needs whole heads on the rank: the dim that its scores sum over is sharded. Shard the heads instead
// expect: on_axis<plait::tp>
using q = if_fixed<spec<seq, shard<heads, tp>, head_dim>, spec<seq, heads, shard<head_dim, tp>>>;
using kv = if_fixed<spec<seq, shard<kv_heads, tp>, head_dim>, spec<seq, kv_heads, shard<head_dim, tp>>>;
static_assert(enforced<attention_of<q, kv>, my_policy, q, kv>);

// case: attention_sharded_seq
// expect: attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel policy
// expect: on_axis<plait::cp>
using q = if_fixed<spec<seq, heads, head_dim, replicate<cp>>, spec<shard<seq, cp>, heads, head_dim>>;
using kv = if_fixed<spec<seq, kv_heads, head_dim, replicate<cp>>, spec<shard<seq, cp>, kv_heads, head_dim>>;
static_assert(enforced<attention_of<q, kv>, my_policy, q, kv>);

// case: axis_order
// with-nvcc: yes
// expect: a dim is sharded over the same axes in a different order in two operands: the local parts are different rows
// expect: on_dim<plait::seq>
using a = spec<shard<seq, cp, tp>, hidden>;
using b = if_fixed<spec<shard<seq, cp, tp>, hidden>, spec<shard<seq, tp, cp>, hidden>>;
static_assert(enforced<combination_of<combine::sum, a, b>, my_policy, a, b>);

// case: bias_on_partial
// expect: a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending sum first, then add
// expect: on_axis<plait::tp>
using a = if_fixed<spec<shard<seq, tp>, hidden>, spec<seq, hidden, partial<tp>>>;
using b = spec<hidden, replicate<tp>>;
static_assert(enforced<combination_of<combine::sum, a, b>, my_policy, a, b>);

// case: boundary_unknown
// expect: a spec names an axis that the mesh does not have
// expect: on_axis<plait::cp>
using a = if_fixed<spec<shard<batch, dp>, seq, shard<hidden, tp>>,
                   spec<shard<batch, dp>, shard<seq, cp>, shard<hidden, tp>>>;
static_assert(boundary<a, cluster, my_policy>);

// case: boundary_unmentioned
// with-nvcc: yes
// expect: a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, partial<axis> or invariant<axis>
// expect: on_axis<plait::dp>
using a = if_fixed<spec<shard<batch, dp>, shard<hidden, tp>>, spec<batch, shard<hidden, tp>>>;
static_assert(boundary<a, cluster, my_policy>);

// case: forgotten_replicate_of_weight
// expect: an invariant value mixes with nothing but invariant values: its gradient would miss the other ranks' terms. Use it as replicate<axis> (no communication now, one reduction of its gradient)
// expect: on_axis<plait::dp>
using a = spec<shard<batch, dp>, hidden>;
using b = if_fixed<spec<hidden, replicate<dp>>, spec<hidden>>;
static_assert(enforced<combination_of<combine::product, a, b>, my_policy, a, b>);

// case: meets_invariant
// expect: an invariant value mixes with nothing but invariant values: its gradient would miss the other ranks' terms. Use it as replicate<axis> (no communication now, one reduction of its gradient)
// expect: on_axis<plait::tp>
using a = if_fixed<spec<seq, hidden, replicate<tp>>, spec<seq, hidden, invariant<tp>>>;
using b = spec<shard<ffn, tp>, hidden>;
static_assert(enforced<product_of<out<seq, ffn>, a, b>, my_policy, a, b>);

// case: nonlinear_on_partial
// expect: a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first
// expect: on_axis<plait::tp>
using a = if_fixed<spec<seq, shard<ffn, tp>>, spec<seq, ffn, partial<tp>>>;
static_assert(enforced<nonlinear_of<a>, my_policy, a>);

// case: one_axis_two_dims
// expect: one axis shards different dims of two operands: each rank would combine parts that do not belong together
// expect: on_axis<plait::tp>
using a = if_fixed<spec<seq, hidden, replicate<tp>>, spec<shard<seq, tp>, hidden>>;
using b = spec<shard<ffn, tp>, hidden>;
static_assert(enforced<product_of<out<seq, ffn>, a, b>, my_policy, a, b>);

// case: partial_product
// expect: the product of two partial values is not partial: the sum of products is not the product of sums. Resolve one of the pending sums first
// expect: on_axis<plait::tp>
using a = spec<seq, hidden, partial<tp>>;
using b = if_fixed<spec<seq, hidden, replicate<tp>>, spec<seq, hidden, partial<tp>>>;
static_assert(enforced<combination_of<combine::product, a, b>, my_policy, a, b>);

// case: partial_times_varying
// expect: a product of a partial and a sharded value mixes terms of one rank with the shard of another: resolve the pending sum first
// expect: on_axis<plait::tp>
using a = if_fixed<spec<seq, hidden, replicate<tp>>, spec<seq, hidden, partial<tp>>>;
using b = spec<shard<ffn, tp>, hidden>;
static_assert(enforced<product_of<out<seq, ffn>, a, b>, my_policy, a, b>);

// case: redistribute_other_dims
// expect: the dims are not the ones expected here, in this order
using a = spec<shard<seq, tp>, hidden>;
using b = if_fixed<spec<seq, shard<hidden, tp>>, spec<hidden, shard<seq, tp>>>;
static_assert(enforced<move_of<a, b>, my_policy, a, b>);

// case: reduced_over_shard
// expect: a nonlinear reduction over a dim that is sharded: each rank sees only its part. Gather the dim first
// expect: on_axis<plait::cp>
// expect: on_dim<plait::seq>
using a = if_fixed<spec<seq, shard<hidden, cp>>, spec<shard<seq, cp>, hidden>>;
static_assert(enforced<maximum_of<a, seq>, my_policy, a>);

// case: residual_on_partial
// expect: a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending sum first, then add
// expect: on_axis<plait::dp>
using a = spec<shard<seq, tp>, hidden, partial<dp>>;
using b = if_fixed<spec<shard<seq, tp>, hidden, partial<dp>>, spec<shard<seq, tp>, hidden, invariant<dp>>>;
static_assert(enforced<combination_of<combine::sum, a, b>, my_policy, a, b>);

// case: rows_of_other_tokens
// expect: the rows of experts are not on the ranks of their tokens: `slot` must be sharded over exactly the axes that shard tokens. Redistribute the rows first
// expect: on_axis<plait::ep>
template <class Rows, class Weights>
struct mixture_of {
  static constexpr verdict value =
      combine_rows(layout_v<Rows>, layout_v<Weights>, {dim_of<experts>, dim_of<expert_slot>, dim_of<expert_choice>}).verdict;
};

using rows = if_fixed<spec<experts, shard<expert_slot, dp, ep>, hidden>,
                      spec<shard<experts, ep>, shard<expert_slot, dp>, hidden>>;  // still at the experts
using weights = spec<shard<batch, dp, ep>, seq, expert_choice>;
static_assert(enforced<mixture_of<rows, weights>, my_policy, rows, weights>);

// case: sharded_and_whole
// expect: a dim is sharded over an axis in one operand and not in the other: the local sizes differ. Gather it, or shard the other operand alike
// expect: on_axis<plait::tp>
// expect: on_dim<plait::hidden>
using a = spec<seq, shard<hidden, tp>>;
using b = if_fixed<spec<ffn, shard<hidden, tp>>, spec<ffn, hidden, replicate<tp>>>;
static_assert(enforced<product_of<out<seq, ffn>, a, b>, my_policy, a, b>);

// case: too_few_elements
// expect: a dim has fewer elements than there are ranks that shard it
// expect: on_axis<plait::tp>
// expect: on_dim<plait::heads>
inline constexpr std::int64_t head_count = fixed ? 8 : 3;
using a = spec<shard<heads, tp>>;
static_assert(enforced<parts_of<a, mesh<axis<tp, 4>>, heads, head_count>, my_policy, a>);

// case: zigzag_is_another_dim
// expect: the dims are not the ones expected here, in this order
// No redistribution turns original order into zigzag order: the data loader places tokens.
using text = spec<shard<batch, dp>, shard<seq, cp>, hidden>;
using other =
    if_fixed<spec<shard<batch, dp>, seq, hidden, replicate<cp>>, spec<shard<batch, dp>, shard<zseq, cp>, hidden>>;
static_assert(enforced<move_of<text, other>, my_policy, text, other>);
