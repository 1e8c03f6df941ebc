// Axes, dims and functions that two shared libraries with hidden symbols share.
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

/// In the second: the gradients of a norm's weight and of a column-parallel linear's. Inputs and gradients of outputs
/// are
/// 1. Throws the errors of plait.
PLAIT_TEST_EXPORT double norm_gradient(const plait::context<plait::cpu>&);
PLAIT_TEST_EXPORT double linear_gradient(const plait::context<plait::cpu>&);
/// The same for float, whose products another library computes than those of double.
PLAIT_TEST_EXPORT double float_linear_gradient(const plait::context<plait::cpu>&);
/// In the second: makes a layer on axes that the grid does not have. Throws `plait::error`.
PLAIT_TEST_EXPORT void on_other_axes(const plait::context<plait::cpu>&);
