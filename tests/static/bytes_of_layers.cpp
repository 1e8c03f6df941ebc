// Communication bytes are constants if extents are, and equal those calculated by hand. Some axes and dims are the
// user's own.
#include "plait/layout/cost.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"

using namespace plait;

namespace {

using machine = mesh<axis<dp, 2>, axis<tp, 4>>;
constexpr mesh_shape shape = machine::static_shape();
constexpr std::uint64_t B = 8, S = 512, H = 1024, element = 2;

constexpr dim_sizes sizes = [] {
  dim_sizes s;
  s.set(dim_of<batch>, B);
  s.set(dim_of<seq>, S);
  s.set(dim_of<hidden>, H);
  return s;
}();

template <class From, class To>
constexpr std::uint64_t forward_bytes =
    bytes(make_plan(layout_v<From>, layout_v<To>, shape, sizes), shape, sizes, element);
template <class From, class To>
constexpr std::uint64_t backward_bytes =
    bytes(mirror(make_plan(layout_v<From>, layout_v<To>, shape, sizes)), shape, sizes, element);

// A tensor-parallel MLP with sequence parallelism: one all-gather and one reduce-scatter forward, and the same
// backward. Every rank receives, or sends, the other (tp - 1) / tp of its replica's tensor.
using residual = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
using gathered = spec<shard<batch, dp>, seq, hidden, replicate<tp>>;
using pending = spec<shard<batch, dp>, seq, hidden, partial<tp>>;
constexpr std::uint64_t one_pass = 3 * B * S * H * element;  // (tp - 1) of the whole batch, over all replicas
static_assert(forward_bytes<residual, gathered> == one_pass);
static_assert(backward_bytes<residual, gathered> == one_pass);
static_assert(forward_bytes<pending, residual> == one_pass);
static_assert(backward_bytes<pending, residual> == one_pass);

// Without sequence parallelism: f sends nothing forward and g nothing backward; an all-reduce costs as much as an
// all-gather and a reduce-scatter.
using plain = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
static_assert(forward_bytes<plain, gathered> == 0 && backward_bytes<plain, gathered> == 2 * one_pass);
static_assert(forward_bytes<pending, plain> == 2 * one_pass && backward_bytes<pending, plain> == 0);

// The payload and the group of one collective, as a ledger counts it.
constexpr plan gather = make_plan(layout_v<residual>, layout_v<gathered>, shape, sizes);
static_assert(gather.steps.size() == 1);
static_assert(cost(gather, 0, shape, sizes, element).kind == collective::all_gather);
static_assert(cost(gather, 0, shape, sizes, element).payload == B / 2 * (S / 4) * H * element);
static_assert(cost(gather, 0, shape, sizes, element).wire == one_pass / 2);

// From a sharded sequence to sharded heads (Ulysses): each rank sends all of its part except 1 / tp.
struct slot : dim_tag<"slot"> {};
constexpr dim_sizes with_slots = [] {
  dim_sizes s = sizes;
  s.set(dim_of<slot>, 16);
  return s;
}();
constexpr plan swap = make_plan(layout_v<spec<shard<seq, tp>, slot, invariant<dp>>>,
                                layout_v<spec<seq, shard<slot, tp>, invariant<dp>>>, shape, with_slots);
static_assert(swap.steps.size() == 1 && swap.steps[0].kind == transition_kind::all_to_all);
static_assert(bytes(swap, shape, with_slots, element) == 2 * (S * 16 * element) * 3 / 4);

// A user's axis and dims: experts over ranks taken from the data-parallel ones.
struct experts : axis_tag<"experts"> {};
struct expert : dim_tag<"expert"> {};
struct token : dim_tag<"token"> {};
struct inner : dim_tag<"inner"> {};
using farm = mesh<axis<dp, 2>, axis<experts, 4>>;
constexpr mesh_shape farm_shape = farm::static_shape();
constexpr dim_sizes farm_sizes = [] {
  dim_sizes s;
  s.set(dim_of<token>, 64);
  s.set(dim_of<expert>, 8);
  s.set(dim_of<hidden>, 32);
  s.set(dim_of<inner>, 128);
  return s;
}();
using routed = spec<expert, shard<token, dp, experts>, hidden>;
using dispatched = spec<shard<expert, experts>, shard<token, dp>, hidden>;
using expert_weight = spec<shard<expert, experts>, inner, hidden, replicate<dp>>;
constexpr plan dispatch = make_plan(layout_v<routed>, layout_v<dispatched>, farm_shape, farm_sizes);
static_assert(dispatch.steps.size() == 1 && dispatch.steps[0].kind == transition_kind::all_to_all);
static_assert(dispatch.communicating_axes() == axis_list{axis_of<experts>});
static_assert(bytes(dispatch, farm_shape, farm_sizes, 4) == 8 * 64 * 32 * 4 * 3 / 4);
// The gradient of expert weights is partial over dp only: experts differ along their own axis.
constexpr derived_layout up =
    contract(layout_v<dispatched>, layout_v<expert_weight>, dim_list{dim_of<expert>, dim_of<token>, dim_of<inner>});
static_assert(up.verdict.ok());
constexpr derived_layout weight_gradient =
    contract(dual(up.result), layout_v<dispatched>, layout_v<expert_weight>.dim_order());
static_assert(weight_gradient.verdict.ok() && weight_gradient.result == layout_v<dual_t<expert_weight>>);
static_assert(weight_gradient.result.partial == axis_list{axis_of<dp>});

// The cost of a plan is an error if a dim has too few elements for its ranks.
static_assert(check_parts(layout_v<dispatched>, farm_shape, farm_sizes).ok());
static_assert(
    check_parts(layout_v<spec<shard<hidden, dp, tp>>>, mesh<axis<dp, 300>, axis<tp, 40>>::static_shape(), sizes).code ==
    layout_error::too_few_elements);

}  // namespace
