// timeout: 300
// program: llama_strategies
// Llama whose parameters are stored sharded over the data-parallel ranks, or over some of them, equals one rank in
// double.
#include <doctest/doctest.h>

#include "support/more_strategies.hpp"

using namespace plait;
using namespace plait::test;

// Stored parameters, matrices and norms, are sharded over dp and not over the other data-parallel axis.
template <class Policy>
inline constexpr axis_list storing = layout_v<typename Policy::stored>.axes_of(dim_of<hidden>);
using specs = transformer_specs<hybrid>;
static_assert(storing<specs::up> == axis_list(axis_of<dp>));
static_assert(storing<specs::down> == axis_list(axis_of<dp>));
static_assert(layout_v<specs::norm_weight>.axes_of(dim_of<hidden>) == axis_list(axis_of<dp>));
static_assert(layout_v<specs::up::weight>.axes_of(dim_of<hidden>).empty());

TEST_CASE("hybrid sharding: stored over one of two data-parallel axes") {
  CHECK(check_llama<hybrid>({{2, 1, 1}, {1, 2, 1}, {2, 2, 1}, {2, 4, 1}, {2, 2, 2}, {2, 2, 4}}).text() == "");
}

TEST_CASE("hybrid sharding with a sequence-parallel residual") {
  CHECK(check_llama<hybrid_sp>({{2, 2, 1}, {1, 2, 2}, {2, 3, 2}, {2, 2, 4}, {4, 2, 2}}).text() == "");
}
