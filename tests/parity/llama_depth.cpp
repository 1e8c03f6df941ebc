// timeout: 300
// program: llama_strategies
// Llama under 2.5-dimensional tensor parallelism, and on a grid whose parameters are stored over the data-parallel
// ranks, equals one rank in double.
#include <doctest/doctest.h>

#include "support/more_strategies.hpp"

using namespace plait;
using namespace plait::test;

// A matrix is sharded over row and column, and in storage over dp as well.
using matrix = transformer_specs<stored_grid>::up;
static_assert(layout_v<matrix::weight>.axes_of(dim_of<ffn>) == axis_list(axis_of<row>));
static_assert(layout_v<matrix::weight>.axes_of(dim_of<hidden>) == axis_list(axis_of<column>));
static_assert(layout_v<matrix::stored>.axes_of(dim_of<hidden>).contains(axis_of<dp>));
static_assert(layout_v<transformer_specs<grid_with_depth>::residual>.axes_of(dim_of<batch>).contains(axis_of<depth>));

TEST_CASE("2.5-dimensional tensor parallelism") {
  CHECK(check_llama<grid_with_depth>({{1, 2, 1, 1}, {1, 2, 2, 2}, {2, 2, 2, 1}, {2, 2, 1, 3}, {2, 2, 2, 2}}).text() ==
        "");
}

TEST_CASE("a grid, with parameters stored over the data-parallel ranks") {
  CHECK(check_llama<stored_grid>({{2, 1, 1}, {2, 2, 1}, {3, 1, 2}, {2, 2, 2}, {4, 4, 1}, {4, 2, 2}}).text() == "");
}
