// program: layout_plans
#include <doctest/doctest.h>

#include <limits>

#include "plait/layout/check.hpp"
#include "plait/layout/cost.hpp"
#include "plait/layout/plan.hpp"
#include "support/placed_value.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_plan_optimal {  // files of one program may have helpers of the same name

struct depth : dim_tag<"depth"> {};
const std::vector<dim_id> two{dim_of<row>, dim_of<column>}, three{dim_of<row>, dim_of<column>, dim_of<depth>};

constexpr std::uint64_t far = std::numeric_limits<std::uint64_t>::max() / 4;

/// The place of an axis: its state, the dim that it shards, and the axes outside it there.
struct position {
  state where;
  dim_id dim;
  axis_list outside;
  friend bool operator==(const position&, const position&) = default;
};
position position_of(const layout& a, axis_id axis) {
  position p{a.state_of(axis), a.sharded_by(axis), {}};
  for (axis_id other : a.axes_of(p.dim)) {
    if (other == axis) break;
    p.outside.push_back(other);
  }
  return p;
}
axis_list moved_axes(const layout& a, const layout& b, const mesh_shape& mesh) {
  axis_list moved;
  for (axis_id axis : mesh.axes)
    if (!(position_of(a, axis) == position_of(b, axis))) moved.push_back(axis);
  return moved;
}

/// Shortest paths by brute force, sharing with the planner only the cost of one step. All layouts are nodes, and two
/// are neighbours if one collective or local step turns one into the other.
class brute_force {
 public:
  /// Includes layouts that split every dim evenly only: the planner does not count the padding of messages.
  brute_force(const std::vector<dim_id>& dims, const world& w) : w_(w), layouts_(layouts_that_fit(dims, w)) {
    std::erase_if(layouts_, [&](const layout& a) { return !even(a, w.mesh, w.sizes); });
    for (const layout& a : layouts_) {
      step_.emplace_back();
      for (const layout& b : layouts_) step_.back().push_back(one_step(a, b));
    }
  }
  std::size_t size() const { return layouts_.size(); }
  const layout& at(std::size_t i) const { return layouts_[i]; }

  /// Bytes, forward and backward, from node `from` to every node, by paths over the nodes that `admits` accepts.
  template <class Admits>
  std::vector<std::uint64_t> distances(std::size_t from, Admits&& admits) const {
    std::vector<std::uint64_t> best(size(), far);
    std::vector<char> closed(size(), 0);
    best[from] = 0;
    for (;;) {
      std::size_t near = size();
      for (std::size_t i = 0; i < size(); ++i)
        if (!closed[i] && best[i] < far && (near == size() || best[i] < best[near])) near = i;
      if (near == size()) return best;
      closed[near] = 1;
      for (std::size_t i = 0; i < size(); ++i)
        if (step_[near][i] < far && admits(i)) best[i] = std::min(best[i], best[near] + step_[near][i]);
    }
  }

  std::uint64_t cost_of(const plan& p) const {
    return bytes(p, w_.mesh, w_.sizes, 1) + bytes(mirror(p), w_.mesh, w_.sizes, 1);
  }
  std::uint64_t planned(std::size_t from, std::size_t to) const {
    const plan p = make_plan(layouts_[from], layouts_[to], w_.mesh, w_.sizes);
    REQUIRE(p.verdict.ok());
    return cost_of(p);
  }
  /// Nodes between `from` and `to` that change only the axes on which these differ, to states and dims of `from` or
  /// `to`.
  std::vector<char> without_detours(std::size_t from, std::size_t to) const {
    const axis_list moving = moved_axes(at(from), at(to), w_.mesh);
    std::vector<char> allowed(size(), 0);
    for (std::size_t i = 0; i < size(); ++i) {
      bool fits = true;
      for (axis_id axis : moved_axes(at(from), at(i), w_.mesh)) fits = fits && moving.contains(axis);
      for (axis_id axis : moving)
        if (const dim_id dim = at(i).sharded_by(axis))
          fits = fits && (dim == at(from).sharded_by(axis) || dim == at(to).sharded_by(axis));
      allowed[i] = fits;
    }
    return allowed;
  }

 private:
  /// The cost of the step from `a` to `b`, if one step is enough: all axes that change have one old state and one new
  /// state, and a slice or a gather concerns one dim.
  std::uint64_t one_step(const layout& a, const layout& b) const {
    const axis_list moved = moved_axes(a, b, w_.mesh);
    if (moved.empty()) return 0;
    const state from = a.state_of(moved[0]), to = b.state_of(moved[0]);
    dim_id dim;
    for (axis_id axis : moved) {
      if (a.state_of(axis) != from || b.state_of(axis) != to) return far;
      if (from == to) continue;
      const dim_id here = from == state::varying ? a.sharded_by(axis) : b.sharded_by(axis);
      if (dim && !(here == dim)) return far;
      dim = here;
    }
    plan p;
    p.from = a, p.to = b;
    p.steps.push_back({transition(from, to), moved, dim, from, to, b});
    return cost_of(p);
  }

  world w_;
  std::vector<layout> layouts_;
  std::vector<std::vector<std::uint64_t>> step_;
};

void check_optimal(const std::vector<dim_id>& dims, std::initializer_list<std::int64_t> extents,
                   std::initializer_list<std::int64_t> sizes) {
  const world w = make_world(extents, dims, sizes);
  const brute_force all(dims, w);
  const std::string mesh = describe(w.mesh);
  CAPTURE(mesh);
  int worse = 0, wrong = 0;
  std::vector<std::vector<std::uint64_t>> planned;
  for (std::size_t from = 0; from < all.size(); ++from) {
    planned.emplace_back();
    for (std::size_t to = 0; to < all.size(); ++to) {
      planned.back().push_back(all.planned(from, to));
      const std::vector<char> allowed = all.without_detours(from, to);
      const std::uint64_t straight = all.distances(from, [&](std::size_t i) { return allowed[i] != 0; })[to];
      worse += planned.back()[to] > straight, wrong += planned.back()[to] < straight;
      if (planned.back()[to] != straight && worse + wrong < 5)
        MESSAGE(planned.back()[to] << " bytes, brute force " << straight << ": "
                                   << describe(make_plan(all.at(from), all.at(to), w.mesh, w.sizes)));
    }
  }
  CHECK(worse == 0);
  CHECK(wrong == 0);

  // Triangle inequalities hold if the middle corner differs from the ends only on axes and dims on which these differ.
  int triangles = 0, broken = 0;
  for (std::size_t from = 0; from < all.size(); ++from)
    for (std::size_t to = 0; to < all.size(); ++to) {
      const std::vector<char> allowed = all.without_detours(from, to);
      for (std::size_t middle = 0; middle < all.size(); ++middle)
        if (allowed[middle]) ++triangles, broken += planned[from][to] > planned[from][middle] + planned[middle][to];
    }
  CHECK(triangles > 0);
  CHECK(broken == 0);
}

TEST_CASE("plans have the fewest bytes: two dims, two axes") {
  check_optimal(two, {2, 2}, {4, 4});
  check_optimal(two, {2, 3}, {6, 12});
  check_optimal(two, {4, 2}, {8, 8});
}
TEST_CASE("plans have the fewest bytes where layouts in between do not divide") {
  check_optimal(two, {2, 2}, {2, 4});
  check_optimal(two, {2, 3}, {2, 3});
  check_optimal(two, {2, 4}, {4, 2});
}
TEST_CASE("plans have the fewest bytes: three dims, two axes") { check_optimal(three, {2, 3}, {6, 6, 6}); }
TEST_CASE("plans have the fewest bytes: one dim, three axes") { check_optimal({two[0]}, {2, 3, 2}, {12}); }
TEST_CASE("plans have the fewest bytes: random pairs of two dims on three axes") {
  const world w = make_world({2, 3, 2}, two, {12, 12});
  const brute_force all(two, w);
  std::mt19937_64 random(11);
  int wrong = 0;
  for (int i = 0; i < 25; ++i) {
    const std::size_t from = random() % all.size();
    for (int j = 0; j < 12; ++j) {
      const std::size_t to = random() % all.size();
      const std::vector<char> allowed = all.without_detours(from, to);
      const std::uint64_t straight = all.distances(from, [&](std::size_t n) { return allowed[n] != 0; })[to];
      wrong += all.planned(from, to) != straight;
    }
  }
  CHECK(wrong == 0);
}

}  // namespace layout_plan_optimal
