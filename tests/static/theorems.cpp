// Strategies from the literature as static assertions: the rules derive the output of a layer and the communication of
// its backward pass.
#include "plait/layout/plan.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"

using namespace plait;

namespace {

template <class... Dims>
constexpr dim_list dims_v{dim_of<Dims>...};

constexpr bool gives(const derived_layout& r, const layout& expected) {
  return r.verdict.ok() && equivalent(r.result, expected);
}

/// Forward gives `y`. The two products of backward take the dual of `y` and give the duals of the operands.
template <class X, class W, class Y>
constexpr bool linear_is() {
  constexpr layout x = layout_v<X>, w = layout_v<W>, y = layout_v<Y>;
  return gives(contract(x, w, y.dim_order()), y) && gives(contract(dual(y), w, x.dim_order()), dual(x)) &&
         gives(contract(dual(y), x, w.dim_order()), dual(w));
}

// Column-parallel, row-parallel and data-parallel linears.
static_assert(linear_is<spec<shard<batch, dp>, seq, hidden, replicate<tp>>, spec<shard<ffn, tp>, hidden, replicate<dp>>,
                        spec<shard<batch, dp>, seq, shard<ffn, tp>>>());
static_assert(linear_is<spec<shard<batch, dp>, seq, shard<ffn, tp>>, spec<hidden, shard<ffn, tp>, replicate<dp>>,
                        spec<shard<batch, dp>, seq, hidden, partial<tp>>>());
static_assert(
    linear_is<spec<shard<batch, dp>, hidden>, spec<ffn, hidden, replicate<dp>>, spec<shard<batch, dp>, ffn>>());
// A sequence over two axes needs a weight that is replicated over both, so its gradient is partial over both.
static_assert(linear_is<spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>, spec<ffn, hidden, replicate<cp, dp, tp>>,
                        spec<shard<batch, dp>, shard<seq, cp, tp>, ffn>>());
// A two-dimensional weight: the input is sharded over one axis and replicated over the other.
static_assert(linear_is<spec<batch, shard<hidden, cp>, replicate<tp>>, spec<shard<ffn, tp>, shard<hidden, cp>>,
                        spec<batch, shard<ffn, tp>, partial<cp>>>());

// A column-parallel linear is refused if its input is invariant, or if only one operand shards the contracted dim.
static_assert(contract(layout_v<spec<seq, hidden, invariant<tp>>>, layout_v<spec<shard<ffn, tp>, hidden>>,
                       dims_v<seq, ffn>)
                  .verdict.code == layout_error::meets_invariant);
static_assert(contract(layout_v<spec<seq, shard<hidden, tp>>>, layout_v<spec<ffn, hidden, replicate<tp>>>,
                       dims_v<seq, ffn>)
                  .verdict.code == layout_error::sharded_and_whole);
static_assert(contract(layout_v<spec<seq, shard<hidden, tp>>>, layout_v<spec<shard<ffn, tp>, hidden>>, dims_v<seq, ffn>)
                  .verdict.code == layout_error::one_axis_two_dims);

// The transitions of one axis: one step forward, and its adjoint backward.
using whole = spec<seq, hidden, invariant<tp>>;
using used = spec<seq, hidden, replicate<tp>>;
using pending = spec<seq, hidden, partial<tp>>;
using spread = spec<shard<seq, tp>, hidden>;
using across = spec<seq, shard<hidden, tp>>;
template <class From, class To>
constexpr bool goes_by(transition_kind forward, transition_kind backward) {
  const plan p = make_plan(layout_v<From>, layout_v<To>), back = mirror(p);
  return p.verdict.ok() && p.steps.size() == 1 && p.steps[0].kind == forward && p.steps[0].after == layout_v<To> &&
         back.steps.size() == 1 && back.steps[0].kind == backward && back.steps[0].after == dual(layout_v<From>);
}
template <class Spec>
constexpr bool stays = make_plan(layout_v<Spec>, layout_v<Spec>).steps.empty();
static_assert(stays<whole> && stays<used> && stays<pending> && stays<spread>);
// Megatron's f: no communication forward, an all-reduce backward. Its g is the reverse.
static_assert(goes_by<whole, used>(transition_kind::relabel, transition_kind::all_reduce));
static_assert(goes_by<pending, whole>(transition_kind::all_reduce, transition_kind::relabel));
static_assert(goes_by<pending, used>(transition_kind::all_reduce, transition_kind::all_reduce));
// Sequence parallelism: all-gather and reduce-scatter are each other's adjoint.
static_assert(goes_by<spread, used>(transition_kind::all_gather, transition_kind::reduce_scatter));
static_assert(goes_by<pending, spread>(transition_kind::reduce_scatter, transition_kind::all_gather));
static_assert(goes_by<spread, whole>(transition_kind::all_gather, transition_kind::slice));
static_assert(goes_by<whole, spread>(transition_kind::slice, transition_kind::all_gather));
static_assert(goes_by<used, spread>(transition_kind::slice, transition_kind::pad));
static_assert(goes_by<spread, pending>(transition_kind::pad, transition_kind::slice));
static_assert(goes_by<used, pending>(transition_kind::keep_one, transition_kind::keep_one));
static_assert(goes_by<used, whole>(transition_kind::relabel, transition_kind::keep_one));
static_assert(goes_by<whole, pending>(transition_kind::keep_one, transition_kind::relabel));
static_assert(goes_by<spread, across>(transition_kind::all_to_all, transition_kind::all_to_all));
// A parameter stored sharded over dp and used replicated: its gradient is reduce-scattered automatically.
static_assert(goes_by<spec<shard<ffn, dp>, hidden>, spec<ffn, hidden, replicate<dp>>>(transition_kind::all_gather,
                                                                                      transition_kind::reduce_scatter));
// Axes with the same transition share one collective.
static_assert(goes_by<spec<hidden, partial<dp, cp, tp>>, spec<hidden, invariant<dp, cp, tp>>>(
    transition_kind::all_reduce, transition_kind::relabel));
// Other dims, or the same dims in another order, are not a redistribution.
static_assert(make_plan(layout_v<spread>, layout_v<spec<seq>>).verdict.code == layout_error::dims_differ);
static_assert(make_plan(layout_v<spread>, layout_v<spec<hidden, shard<seq, tp>>>).verdict.code ==
              layout_error::dims_differ);
// A plan names the axes it communicates over.
static_assert(make_plan(layout_v<spec<shard<seq, tp>, hidden, invariant<dp>>>,
                        layout_v<spec<seq, shard<hidden, dp>, replicate<tp>>>)
                  .communicating_axes() == axis_list{axis_of<tp>});

// Gating: two sharded values multiply. A bias cannot be added to a pending sum.
constexpr layout gate = layout_v<spec<seq, shard<ffn, tp>>>;
static_assert(gives(pointwise(combine::product, {&gate, &gate}), gate));
static_assert(gives(pointwise(combine::nonlinear, {&gate}), gate));
constexpr layout row_output = layout_v<pending>, bias = layout_v<spec<hidden, replicate<tp>>>;
static_assert(pointwise(combine::sum, {&row_output, &bias}).verdict.code == layout_error::partial_plus_other);
static_assert(pointwise(combine::nonlinear, {&row_output}).verdict.code == layout_error::partial_nonlinear);
// Two column-parallel products have one input, so its gradient is a sum: partial values add, and are reduced once.
static_assert(gives(pointwise(combine::sum, {&row_output, &row_output}), row_output));

// A vocabulary-parallel embedding is partial, its cross-entropy complete.
static_assert(gives(lookup(layout_v<spec<shard<vocab, tp>, hidden, replicate<dp>>>,
                           layout_v<spec<shard<batch, dp>, seq>>, dim_of<vocab>),
                    layout_v<spec<shard<batch, dp>, seq, hidden, partial<tp>>>));
static_assert(gives(cross_entropy(layout_v<spec<shard<batch, dp>, seq, shard<vocab, tp>>>,
                                  layout_v<spec<shard<batch, dp>, seq>>, dim_of<vocab>),
                    layout_v<spec<shard<batch, dp>, seq, invariant<tp>>>));
// The sum of all losses is partial over data axes only.
constexpr layout losses = layout_v<spec<shard<batch, dp>, shard<seq, cp>, invariant<tp>>>;
static_assert(gives(reduce_sum(reduce_sum(losses, dim_of<seq>).result, dim_of<batch>),
                    layout_v<spec<partial<cp, dp>, invariant<tp>>>));

// A norm over a sequence-parallel residual: its weight's gradient is partial over every axis that shards the tokens.
constexpr layout residual = layout_v<spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>>;
static_assert(gives(normalize(residual, layout_v<spec<hidden, replicate<cp, dp, tp>>>, dim_of<hidden>), residual));
static_assert(normalize(residual, layout_v<spec<hidden, replicate<dp, tp>>>, dim_of<hidden>).verdict.code ==
              layout_error::meets_invariant);

// Fewer kv heads than tensor ranks: kv heads are sharded over the first tensor axis and replicated over the second.
struct tp_rep : axis_tag<"tp_rep"> {};
constexpr layout q = layout_v<spec<batch, seq, shard<heads, tp, tp_rep>, head_dim>>;
constexpr layout kv = layout_v<spec<batch, seq, shard<kv_heads, tp>, head_dim, replicate<tp_rep>>>;
static_assert(gives(attend(q, kv, kv, {dim_of<seq>, dim_of<heads>, dim_of<kv_heads>}), q));
static_assert(attend(layout_v<spec<batch, seq, shard<heads, tp_rep, tp>, head_dim>>, kv, kv,
                     {dim_of<seq>, dim_of<heads>, dim_of<kv_heads>})
                  .verdict.code == layout_error::kv_heads_must_lead);

// A sequence stays sharded over the axes of a context-parallel policy, in the policy's order.
constexpr layout parts = layout_v<spec<shard<batch, dp>, shard<seq, cp>, shard<heads, tp>, head_dim>>;
constexpr layout kv_parts = layout_v<spec<shard<batch, dp>, shard<seq, cp>, shard<kv_heads, tp>, head_dim>>;
constexpr layout_error attend_with(const layout& queries, const layout& keys, const axis_list& context) {
  return attend(queries, keys, keys, {dim_of<seq>, dim_of<heads>, dim_of<kv_heads>, context}).verdict.code;
}
static_assert(gives(attend(parts, kv_parts, kv_parts,
                           {dim_of<seq>, dim_of<heads>, dim_of<kv_heads>, axis_list(axis_of<cp>)}),
                    parts));
static_assert(attend_with(parts, kv_parts, {}) == layout_error::seq_must_be_whole);
static_assert(attend_with(parts, kv_parts, axis_list(axis_of<dp>)) == layout_error::context_axes_differ);
static_assert(attend_with(q, kv, axis_list(axis_of<cp>)) == layout_error::context_axes_differ);
static_assert(attend_with(layout_v<spec<shard<seq, cp, dp>, heads, head_dim>>,
                          layout_v<spec<shard<seq, cp, dp>, kv_heads, head_dim>>,
                          axis_list(axis_of<dp>, axis_of<cp>)) == layout_error::context_axes_differ);
static_assert(attend_with(layout_v<spec<shard<seq, cp>, heads, head_dim>>,
                          layout_v<spec<seq, kv_heads, head_dim, replicate<cp>>>,
                          axis_list(axis_of<cp>)) == layout_error::seq_must_be_whole);

}  // namespace
