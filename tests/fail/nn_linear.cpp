// errors-at-most: 1
#include "if_fixed.hpp"
#include "plait/nn/linear.hpp"

using namespace plait;

struct column {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
};

// case: column_linear_sharded_contraction
// expect: the dim that a linear contracts is sharded in its input but not in its weight: gather the input first, or shard the weight's contracted dim over the same axes (row-parallel)
// expect: on_axis<plait::tp>
// expect: on_dim<plait::hidden>
// expect: up_policy
struct up_policy : column {
  using input = if_fixed<spec<shard<batch, dp>, hidden, invariant<tp>>, spec<shard<batch, dp>, shard<hidden, tp>>>;
};
template class plait::linear<float, up_policy>;

// case: linear_dims_out_of_order
// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::weight>
// expect: expected_dims<plait::heads, plait::head_dim, plait::hidden>
// expect: given_dims<plait::heads, plait::hidden, plait::head_dim>
// expect: up_policy
struct up_policy : column {
  using weight = if_fixed<spec<shard<heads, tp>, head_dim, hidden>, spec<shard<heads, tp>, hidden, head_dim>>;
  using output = spec<shard<batch, dp>, shard<heads, tp>, head_dim>;
};
template class plait::linear<float, up_policy>;

// case: linear_output_dims
// expect: the dims are not the ones expected here, in this order: 'expected_dims' of this message were expected, and 'given_dims' were given
// expect: of_operand<plait::operand::output>
// expect: expected_dims<plait::batch, plait::seq, plait::ffn>
// expect: given_dims<plait::seq, plait::batch, plait::ffn>
// expect: up_policy
struct up_policy : column {
  using input = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
  using output = if_fixed<spec<shard<batch, dp>, seq, shard<ffn, tp>>, spec<seq, shard<batch, dp>, shard<ffn, tp>>>;
};
template class plait::linear<float, up_policy>;

// case: boundary_unmentioned_axis
// expect: a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, partial<axis> or invariant<axis>
// expect: on_axis<plait::dp>
// expect: up_policy
struct up_policy : column {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
  using input = if_fixed<spec<shard<batch, dp>, hidden, invariant<tp>>, spec<batch, hidden, invariant<tp>>>;
  using output = if_fixed<spec<shard<batch, dp>, shard<ffn, tp>>, spec<batch, shard<ffn, tp>>>;
};
template class plait::linear<float, up_policy>;

// case: gather_not_named
// expect: this step would need a collective over an axis that the policy does not name: redistribute explicitly, or let the two specs agree on that axis
// expect: on_axis<plait::cp>
// expect: on_dim<plait::seq>
// expect: up_policy
// The weight is sharded over tp only, so an output with the whole sequence would need a hidden all-gather over cp.
struct up_policy : column {
  using input = spec<shard<seq, cp, tp>, hidden>;
  using output = if_fixed<spec<shard<seq, cp>, shard<ffn, tp>>, spec<seq, shard<ffn, tp>, invariant<cp>>>;
};
template class plait::linear<float, up_policy>;

// case: parameter_stored_replicated
// expect: a forgotten reduction: the value is still partial over an axis on which it has to be complete
// expect: on_axis<plait::dp>
// expect: up_policy
// A weight that is stored replicated would reach the optimizer with a gradient that is still partial.
struct up_policy : column {
  using weight = if_fixed<spec<shard<ffn, tp>, hidden>, spec<shard<ffn, tp>, hidden, replicate<dp>>>;
};
template class plait::linear<float, up_policy>;

// case: policy_misnamed_bias
// expect: the policy has a member `has_bias`, which means nothing: did you mean `bias`?
// expect: up_policy
// Without the error, the bias would be ignored.
struct up_policy : column {
#ifdef PLAIT_FAIL_FIX
  static constexpr bool bias = true;
#else
  static constexpr bool has_bias = true;
#endif
};
template class plait::linear<float, up_policy>;

// case: policy_misnamed_mesh
// expect: the policy has a member `Mesh`, which means nothing: did you mean `mesh`?
// expect: up_policy
// Without the error, the specs would not be checked against the mesh.
struct up_policy : column {
#ifdef PLAIT_FAIL_FIX
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
#else
  using Mesh = plait::mesh<axis<dp>, axis<tp>>;
#endif
};
template class plait::linear<float, up_policy>;

// case: policy_misnamed_stored
// expect: the policy has a member `store`, which means nothing: did you mean `stored`?
// expect: up_policy
// Without the error, the weight would be stored as it is used.
struct up_policy : column {
#ifdef PLAIT_FAIL_FIX
  using stored = spec<shard<ffn, tp>, shard<hidden, dp>>;
#else
  using store = spec<shard<ffn, tp>, shard<hidden, dp>>;
#endif
};
template class plait::linear<float, up_policy>;

// case: policy_bias_is_no_constant
// expect: a policy's `bias` is a constant: static constexpr bool bias = true;
// expect: up_policy
// A member of each object is not a property of the type.
struct up_policy : column {
#ifdef PLAIT_FAIL_FIX
  static constexpr bool bias = true;
#else
  bool bias = true;
#endif
};
template class plait::linear<float, up_policy>;

// case: overlap_is_no_number
// expect: a policy's `overlap` is a type: using overlap = pl::overlap<4>;
// expect: up_policy
struct up_policy : column {
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
#ifdef PLAIT_FAIL_FIX
  using overlap = plait::overlap<4>;
#else
  static constexpr int overlap = 4;
#endif
};
template class plait::linear<float, up_policy>;

// case: overlap_without_chunks
// expect: overlap<chunks> counts chunks of a linear's collectives: at least 1, which is no overlap
#ifdef PLAIT_FAIL_FIX
template struct plait::overlap<1>;
#else
template struct plait::overlap<0>;
#endif

// case: overlap_hides_nothing
// expect: `overlap` would hide nothing: by their specs, its linears gather no input and reduce no output
// expect: local_up
// Every rank has the whole weight, so no communication could be in flight during a product.
struct local_up {
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using weight = if_fixed<spec<shard<ffn, tp>, hidden>, spec<ffn, hidden>>;
  using output = if_fixed<spec<shard<batch, dp>, seq, shard<ffn, tp>>, spec<shard<batch, dp>, shard<seq, tp>, ffn>>;
  using overlap = plait::overlap<4>;
};
template class plait::linear<float, local_up>;

// case: bias_on_partial
// expect: a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending sum first, then add
// expect: on_axis<plait::tp>
// expect: down_policy
struct down_policy {
  using input = spec<shard<batch, dp>, shard<ffn, tp>>;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = if_fixed<spec<shard<batch, dp>, hidden, invariant<tp>>, spec<shard<batch, dp>, hidden, partial<tp>>>;
  static constexpr bool bias = true;
};
template class plait::linear<float, down_policy>;
