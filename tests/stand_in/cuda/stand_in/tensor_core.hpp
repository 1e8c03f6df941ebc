// What a tensor core multiplies. Optimised and not instrumented, as block.cpp: it touches the registers of lanes alone.
#pragma once

#include "block.hpp"

namespace stand_in {

/// Adds to c, the part of lane `lane` of a 16 x 8 matrix, the product of a 16 x 16 and a 16 x 8 matrix of bf16, in the
/// order of its terms. Of each lane `warp` has a[0] and a[2], a[1] and a[3], b[0] and b[1], as
/// plait/kernels/cuda/math.hpp has them.
void multiply_fragments(const executor::offer* warp, int lane, float (&c)[4]);

}  // namespace stand_in
