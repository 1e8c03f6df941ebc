// Mixtures of experts as static assertions: dispatchers from the literature, their communication, and errors.
#include "plait/layout/experts.hpp"

#include "plait/layout/plan.hpp"
#include "plait/layout/spec.hpp"

using namespace plait;

namespace {

constexpr expert_dims dims{dim_of<experts>, dim_of<expert_slot>, dim_of<expert_choice>};

constexpr bool gives(const derived_layout& r, const layout& expected) {
  return r.verdict.ok() && equivalent(r.result, expected);
}
constexpr bool one_step(const layout& from, const layout& to, transition_kind forward, transition_kind backward) {
  const plan there = make_plan(from, to), back = mirror(there);
  return there.steps.size() == 1 && there.steps[0].kind == forward && back.steps[0].kind == backward;
}

// A choice of experts needs complete scores of all experts; it is sharded as the tokens are.
static_assert(gives(choose_experts(layout_v<spec<shard<batch, dp, ep>, shard<seq, cp>, experts>>, dims),
                    layout_v<spec<shard<batch, dp, ep>, shard<seq, cp>, expert_choice>>));
static_assert(choose_experts(layout_v<spec<batch, shard<experts, tp>>>, dims).verdict.code ==
              layout_error::reduced_over_shard);
static_assert(choose_experts(layout_v<spec<batch, experts, partial<tp>>>, dims).verdict.code ==
              layout_error::partial_nonlinear);

// The router's weight is replicated over every axis that shards tokens, so its gradient is partial over all of them.
constexpr layout scored = layout_v<spec<shard<batch, dp, ep>, shard<seq, tp>, experts>>;
constexpr layout tokens = layout_v<spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>>;
constexpr layout choice = layout_v<spec<shard<batch, dp, ep>, shard<seq, tp>, expert_choice>>;
static_assert(gives(contract(dual(scored), tokens, dim_list{dim_of<experts>, dim_of<hidden>}),
                    layout_v<spec<experts, hidden, partial<dp, ep, tp>>>));

// Every axis that shards tokens shards rows. Experts over ep and tp: one all-to-all to the experts, and one back.
constexpr axis_list of_experts(axis_of<ep>, axis_of<tp>);
constexpr layout rows = layout_v<spec<experts, shard<expert_slot, dp, ep, tp>, hidden>>;
constexpr layout at_experts = layout_v<spec<shard<experts, ep, tp>, shard<expert_slot, dp>, hidden>>;
static_assert(gives(dispatch_rows(tokens, choice, dims, of_experts), rows));
static_assert(one_step(rows, at_experts, transition_kind::all_to_all, transition_kind::all_to_all));
// Experts' weights: their gradient is complete over the axes that shard experts, and partial over the others.
constexpr layout weight = layout_v<spec<shard<experts, ep, tp>, ffn, hidden, replicate<dp>>>;
constexpr layout inside = layout_v<spec<shard<experts, ep, tp>, shard<expert_slot, dp>, ffn>>;
static_assert(gives(contract(at_experts, weight, inside.dim_order()), inside));
static_assert(gives(contract(dual(inside), at_experts, weight.dim_order()), dual(weight)));
// Weights that are invariant over dp would not get that reduction.
static_assert(contract(at_experts, layout_v<spec<shard<experts, ep, tp>, ffn, hidden, invariant<dp>>>,
                       inside.dim_order())
                  .verdict.code == layout_error::meets_invariant);
// The sum over a token's experts: the same rules give the gradients of rows and weights.
static_assert(gives(combine_rows(rows, choice, dims), tokens));
static_assert(gives(dispatch_rows(dual(tokens), choice, dims, of_experts), dual(rows)));

// Rows that are still at the experts, or rows of other tokens, cannot be combined with the tokens.
static_assert(combine_rows(at_experts, choice, dims).verdict.code == layout_error::rows_of_other_tokens);
static_assert(combine_rows(layout_v<spec<experts, shard<expert_slot, ep, tp>, hidden, invariant<dp>>>, choice, dims)
                  .verdict.code == layout_error::rows_of_other_tokens);

// Tokens that are replicated over ep: each rank computes its own experts, and the result is a pending sum over ep.
constexpr layout whole = layout_v<spec<shard<batch, dp>, seq, hidden, replicate<ep>>>;
constexpr layout whole_choice = layout_v<spec<shard<batch, dp>, seq, expert_choice, replicate<ep>>>;
constexpr layout all_rows = layout_v<spec<experts, shard<expert_slot, dp>, hidden, replicate<ep>>>;
constexpr layout own_rows = layout_v<spec<shard<experts, ep>, shard<expert_slot, dp>, hidden>>;
constexpr layout pending = layout_v<spec<shard<batch, dp>, seq, hidden, partial<ep>>>;
static_assert(gives(dispatch_rows(whole, whole_choice, dims), all_rows));
static_assert(one_step(all_rows, own_rows, transition_kind::slice, transition_kind::pad));
static_assert(gives(combine_rows(own_rows, whole_choice, dims), pending));
// The redistribution to the residual reduces the sum. Its adjoint is the gather that hand-written code forgets.
static_assert(one_step(pending, layout_v<spec<shard<batch, dp>, shard<seq, ep>, hidden>>,
                       transition_kind::reduce_scatter, transition_kind::all_gather));
// The weights must be replicated here: their gradient is a term of a sum. Invariant ones lose terms of the router.
static_assert(combine_rows(own_rows, layout_v<spec<shard<batch, dp>, seq, expert_choice, invariant<ep>>>, dims)
                  .verdict.code == layout_error::meets_invariant);

// Tensor parallelism within experts: a pending sum of rows is accepted if the weights are replicated.
constexpr layout partial_rows = layout_v<spec<experts, shard<expert_slot, dp, ep>, hidden, partial<tp>>>;
static_assert(gives(combine_rows(partial_rows, layout_v<spec<shard<batch, dp, ep>, seq, expert_choice, replicate<tp>>>,
                                 dims),
                    layout_v<spec<shard<batch, dp, ep>, seq, hidden, partial<tp>>>));
static_assert(combine_rows(partial_rows, layout_v<spec<shard<batch, dp, ep>, seq, expert_choice, partial<tp>>>, dims)
                  .verdict.code == layout_error::partial_times_partial);
// The pending sum of a shared expert cannot be added to a complete sum of the routed experts.
constexpr layout shared = layout_v<spec<shard<batch, dp, ep>, seq, hidden, partial<tp>>>;
constexpr layout routed = layout_v<spec<shard<batch, dp, ep>, seq, hidden, replicate<tp>>>;
static_assert(pointwise(combine::sum, {&shared, &routed}).verdict.code == layout_error::partial_plus_other);

// Indices of tokens on other ranks are refused.
static_assert(dispatch_rows(tokens, layout_v<spec<shard<batch, dp, ep>, seq, expert_choice, replicate<tp>>>, dims)
                  .verdict.code == layout_error::sharded_and_whole);
static_assert(dispatch_rows(layout_v<spec<batch, shard<hidden, tp>>>, layout_v<spec<shard<batch, tp>, expert_choice>>,
                            dims)
                  .verdict.code == layout_error::one_axis_two_dims);
static_assert(dispatch_rows(layout_v<spec<seq, hidden>>, layout_v<spec<batch, expert_choice>>, dims).verdict.code ==
              layout_error::dims_differ);

}  // namespace
