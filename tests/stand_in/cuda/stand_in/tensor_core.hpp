// What a lane of a tensor core multiplies. Optimised and not instrumented, as block.cpp: it touches no memory.
#pragma once

namespace stand_in {

/// The sum of the products of the four bf16 in each word, to which `sum` is added, in order.
float dot4(unsigned long long a, unsigned long long b, float sum);

}  // namespace stand_in
