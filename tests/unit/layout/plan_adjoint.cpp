// program: layout_plans
#include <doctest/doctest.h>

#include "plait/layout/check.hpp"
#include "plait/layout/cost.hpp"
#include "support/plan_simulator.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_plan_adjoint {  // files of one program may have helpers of the same name

const std::vector<dim_id> dims{dim_of<row>, dim_of<column>};

element dot(const shards& a, const shards& b) {
  element sum = 0;
  for (std::size_t r = 0; r < a.size(); ++r)
    for (std::size_t i = 0; i < a[r].data.size(); ++i) sum += a[r].data[i] * b[r].data[i];
  return sum;
}
element invariant_ranks(const layout& a, const mesh_shape& mesh) {
  element n = 1;
  for (axis_id axis : mesh.axes)
    if (a.state_of(axis) == state::invariant) n *= static_cast<element>(mesh.extent(axis));
  return n;
}

/// A value and a gradient of every layout.
class laboratory {
 public:
  explicit laboratory(const world& w) : w_(w), random_(7), layouts_(layouts_that_fit(dims, w)) {
    value_ = random_array(dims, w.sizes, random_);
    for (const layout& a : layouts_) spread_.push_back(spread(value_, a, w, random_));
    for (const layout& a : layouts_) gradients_.push_back(spread(value_, dual(a), w, random_));
  }

  void check(std::size_t from, std::size_t to, const plan& forward) {
    const plan backward = mirror(forward), twice = mirror(backward);
    const std::string text = describe(forward) + "\n" + describe(backward);
    CAPTURE(text);
    REQUIRE(forward.verdict.ok());

    plan_simulator there(w_), back(w_), again(w_);
    const shards y = there.run(forward, spread_[from]);
    CHECK(assemble(y, layouts_[to], w_) == value_);
    const shards dx = back.run(backward, gradients_[to]);
    CHECK(assemble(dx, dual(layouts_[from]), w_) == value_);
    // <A x, y> = <x, A' y>: a replicated value meets partial gradients, so the ranks' products add up. An invariant one
    // meets the whole gradient on each of its ranks.
    CHECK(dot(y, gradients_[to]) * invariant_ranks(layouts_[from], w_.mesh) ==
          dot(spread_[from], dx) * invariant_ranks(layouts_[to], w_.mesh));
    CHECK(again.run(twice, spread_[from]) == y);
    CHECK(twice.steps.size() == forward.steps.size());
    for (std::size_t i = 0; i < forward.steps.size(); ++i) {
      CHECK(twice.steps[i].kind == forward.steps[i].kind);
      CHECK(equivalent(twice.steps[i].after, forward.steps[i].after));
      CHECK(check_parts(forward.steps[i].after, w_.mesh, w_.sizes).ok());
    }
    CHECK(bytes(forward, w_.mesh, w_.sizes, 4) == 4 * there.sent());
    CHECK(bytes(backward, w_.mesh, w_.sizes, 4) == 4 * back.sent());
  }

  void check_all_pairs() {
    for (std::size_t from = 0; from < layouts_.size(); ++from)
      for (std::size_t to = 0; to < layouts_.size(); ++to)
        check(from, to, make_plan(layouts_[from], layouts_[to], w_.mesh, w_.sizes));
  }
  /// Plans made before extents and sizes are known (`early`) must be right on every mesh.
  void check_some_pairs(int count, bool early = false) {
    for (int i = 0; i < count; ++i) {
      const std::size_t from = random_() % layouts_.size(), to = random_() % layouts_.size();
      check(from, to,
            make_plan(layouts_[from], layouts_[to], early ? mesh_shape{} : w_.mesh, early ? dim_sizes{} : w_.sizes));
    }
  }

 private:
  world w_;
  std::mt19937_64 random_;
  std::vector<layout> layouts_;
  array value_;
  std::vector<shards> spread_, gradients_;
};

laboratory on(std::initializer_list<std::int64_t> extents, std::int64_t rows, std::int64_t columns) {
  return laboratory(make_world(extents, dims, {rows, columns}));
}

TEST_CASE("every pair of layouts on one axis: value, adjoint and bytes") {
  on({2}, 2, 4).check_all_pairs();
  on({3}, 6, 3).check_all_pairs();
  on({3}, 7, 2).check_all_pairs();
}
TEST_CASE("every pair of layouts on two axes") {
  on({2, 2}, 4, 4).check_all_pairs();
  on({2, 3}, 6, 12).check_all_pairs();
  on({2, 3}, 7, 8).check_all_pairs();
}
TEST_CASE("every pair on two axes, where a dim has fewer elements than there are ranks") {
  on({2, 3}, 2, 6).check_all_pairs();
  on({2, 3}, 2, 3).check_all_pairs();
}
TEST_CASE("random pairs on three axes") {
  on({2, 2, 2}, 8, 8).check_some_pairs(2000);
  on({2, 3, 2}, 12, 12).check_some_pairs(1000);
  on({2, 3, 2}, 4, 6).check_some_pairs(1000);
}
TEST_CASE("plans made without extents, on three axes") {
  on({3, 2, 2}, 12, 12).check_some_pairs(2000, true);
  on({2, 4, 2}, 16, 16).check_some_pairs(500, true);
}

}  // namespace layout_plan_adjoint
