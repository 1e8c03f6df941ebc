// What two shared libraries that hide their symbols share: axes and dims of their own, and three functions.
#pragma once

#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"

namespace house {
struct column : plait::axis_tag<"column"> {};
struct row : plait::axis_tag<"row"> {};
struct points : plait::dim_tag<"points"> {};
struct width : plait::dim_tag<"width"> {};
struct wide : plait::dim_tag<"wide"> {};

using grid = plait::mesh<plait::axis<row>, plait::axis<column>>;
using residual = plait::spec<plait::shard<points, row, column>, width>;
}  // namespace house

#define PLAIT_TEST_EXPORT __attribute__((visibility("default")))

/// In the first library: calls `work` on each of four in-process ranks, with a context of the grid 2 x 2.
PLAIT_TEST_EXPORT void on_the_grid(void (*work)(const plait::context<plait::cpu>&));

/// In the second: the gradients of a norm's weight and of a column-parallel linear's, every input and gradient being 1,
/// and the product of the ranks' rows as the tensor's state says. Throws what plait throws.
PLAIT_TEST_EXPORT double norm_gradient(const plait::context<plait::cpu>&);
PLAIT_TEST_EXPORT double linear_gradient(const plait::context<plait::cpu>&);
/// Floats have another library for their products than doubles have.
PLAIT_TEST_EXPORT double float_linear_gradient(const plait::context<plait::cpu>&);
/// In the second: a layer on axes that the grid has not. Throws `plait::error`.
PLAIT_TEST_EXPORT void on_other_axes(const plait::context<plait::cpu>&);
