// Specs with one meaning are one type, and the dual changes only the states that it must.
#include <concepts>

#include "plait/layout/check.hpp"

using namespace plait;

namespace {

// One meaning, one type: the order of words, and of axes in a set, does not matter. The order of a dim's axes does.
static_assert(
    std::same_as<spec<shard<batch, dp>, hidden, partial<tp, cp>>, spec<partial<cp, tp>, shard<batch, dp>, hidden>>);
static_assert(std::same_as<spec<hidden, partial<tp>, partial<cp>>, spec<hidden, partial<cp, tp>>>);
static_assert(std::same_as<spec<hidden, replicate<tp>, invariant<dp>>, spec<invariant<dp>, hidden, replicate<tp>>>);
static_assert(std::same_as<spec<shard<hidden>>, spec<hidden>>);
static_assert(std::same_as<spec<hidden, partial<>>, spec<hidden>>);
static_assert(!std::same_as<spec<shard<seq, cp, tp>>, spec<shard<seq, tp, cp>>>);
static_assert(!std::same_as<spec<seq, hidden>, spec<hidden, seq>>);
static_assert(!std::same_as<spec<hidden, replicate<tp>>, spec<hidden, invariant<tp>>>);
static_assert(!std::same_as<spec<hidden, invariant<tp>>, spec<hidden>>);
static_assert(equivalent(layout_v<spec<hidden, invariant<tp>>>, layout_v<spec<hidden>>));

// The canonical form of a canonical spec is the spec itself, by its words and by its layout.
using mixed = spec<partial<dp>, shard<seq, cp, tp>, hidden, replicate<ep>, invariant<pp>>;
struct mixed_value {
  static constexpr layout value = layout_v<mixed>;
};
static_assert(std::same_as<spec_from<mixed_value, mixed>, mixed>);
static_assert(layout_v<mixed>.state_of(axis_of<cp>) == state::varying);
static_assert(layout_v<mixed>.sharded_by(axis_of<tp>) == dim_of<seq>);
static_assert(layout_v<mixed>.state_of(axis_of<dp>) == state::partial);
static_assert(layout_v<mixed>.state_of(axis_of<ep>) == state::replicated);
static_assert(layout_v<mixed>.mentions(axis_of<pp>) && !layout_v<spec<hidden>>.mentions(axis_of<pp>));

// The gradient of a replicated value is partial and vice versa; other states stay. The dual of the dual is the value.
static_assert(std::same_as<dual_t<spec<hidden, replicate<tp>>>, spec<hidden, partial<tp>>>);
static_assert(std::same_as<dual_t<spec<hidden, partial<tp>>>, spec<hidden, replicate<tp>>>);
static_assert(std::same_as<dual_t<spec<hidden, invariant<tp>>>, spec<hidden, invariant<tp>>>);
static_assert(std::same_as<dual_t<spec<shard<hidden, tp>>>, spec<shard<hidden, tp>>>);
static_assert(std::same_as<dual_t<mixed>, spec<replicate<dp>, shard<seq, cp, tp>, hidden, partial<ep>, invariant<pp>>>);
static_assert(std::same_as<dual_t<dual_t<mixed>>, mixed>);
static_assert(std::same_as<dual_t<spec<partial<dp, cp>>>, spec<replicate<dp, cp>>>);

// A spec at a boundary names each axis of its mesh and no other. unit/layout/describe.cpp has the errors.
using small = mesh<axis<dp>, axis<tp, 2>>;
static_assert(boundary<spec<shard<batch, dp>, hidden, invariant<tp>>, small, void>);

// Ranks are numbered row-major: the last axis varies fastest.
using cube = mesh<axis<dp, 2>, axis<cp, 3>, axis<tp, 4>>;
constexpr mesh_shape cube_shape = cube{}.shape();
static_assert(cube{}.size() == 24 && cube::rank_dynamic == 0);
static_assert(cube_shape.coordinate(17, axis_of<dp>) == 1 && cube_shape.coordinate(17, axis_of<cp>) == 1);
static_assert(cube_shape.index_in(17, axis_list{axis_of<tp>, axis_of<dp>}) == 3);
static_assert(cube_shape.group_of(17, axis_list{axis_of<cp>}) == 5);
static_assert(cube_shape.coordinate(17, axis_of<pp>) == 0 && cube_shape.extent(axis_of<pp>) == 1);
static_assert(mesh<axis<dp>, axis<tp, 4>>{3}.shape().size() == 12);

}  // namespace
