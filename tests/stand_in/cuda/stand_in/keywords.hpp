// CUDA's additions to the language, as macros and types: function and variable qualifiers, vector types, dim3.
#pragma once

#include <cstddef>
#include <cstdint>

#define __global__ __attribute__((unused))  // no warning for a static kernel that is never launched
#define __device__
#define __host__
#define __grid_constant__
// Blocks run one after the other, under one lock, so shared memory of a block can be static memory.
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1) : x(x_size), y(y_size), z(z_size) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
