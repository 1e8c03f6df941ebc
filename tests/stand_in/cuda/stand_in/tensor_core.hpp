// The matrix product of a tensor core. Optimised and not instrumented, as block.cpp: it uses registers of lanes only.
#pragma once

#include "block.hpp"

namespace stand_in {

/// Adds the product of a 16 x 16 and a 16 x 8 matrix of bf16, in the order of its terms, to `lane`'s part of the 16 x 8
/// matrix c. `warp` has a[0] and a[2], a[1] and a[3], b[0] and b[1] of each lane, as plait/kernels/cuda/math.hpp
/// arranges them.
void multiply_fragments(const executor::offer* warp, int lane, float (&c)[4]);

}  // namespace stand_in
