// Arithmetic with axes as types gives what arithmetic with axes as values gives, for every rank.
#include "plait/layout/mesh.hpp"

using namespace plait;

namespace {

template <class Mesh, class... Group>
constexpr bool agrees(const Mesh& ranks) {
  const mesh_shape shape = ranks.shape();
  bool same = true;
  for (std::int64_t r = 0; r < shape.size(); ++r) {
    same = same && ((ranks.template coordinate<Group>(r) == shape.coordinate(r, axis_of<Group>)) && ...);
    same = same && ranks.template index_in<Group...>(r) == shape.index_in(r, axis_list(axis_of<Group>...));
  }
  return same && ((ranks.template extent<Group>() == shape.extent(axis_of<Group>)) && ...);
}

using fixed = mesh<axis<pp, 2>, axis<dp, 3>, axis<cp, 1>, axis<tp, 4>>;
using mixed = mesh<axis<pp, 2>, axis<dp>, axis<cp, 3>, axis<tp>>;
using open = mesh<axis<dp>, axis<tp>>;

static_assert(agrees<fixed, pp, dp, cp, tp>(fixed{}));
static_assert(agrees<fixed, tp, pp>(fixed{}));
static_assert(agrees<fixed, dp>(fixed{}));
static_assert(agrees<fixed, ep, tp>(fixed{}));  // an axis that the mesh does not have
static_assert(agrees<mixed, pp, dp, cp, tp>(mixed{3, 2}));
static_assert(agrees<mixed, tp, cp>(mixed{3, 2}));
static_assert(agrees<mixed, cp, dp>(mixed{1, 5}));
static_assert(agrees<open, tp, dp>(open{3, 4}));
static_assert(fixed{}.stride<pp>() == 12 && fixed{}.stride<dp>() == 4 && fixed{}.stride<tp>() == 1);
static_assert(mixed{3, 2}.stride<pp>() == 18 && mixed{3, 2}.stride<dp>() == 6 && mixed{3, 2}.stride<cp>() == 2);

}  // namespace
