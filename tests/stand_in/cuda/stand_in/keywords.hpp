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

#define STAND_IN_VECTOR_2(name, type, align) \
  struct alignas(align) name {               \
    type x, y;                               \
  };                                         \
  inline constexpr name make_##name(type x, type y) { return {x, y}; }
#define STAND_IN_VECTOR_3(name, type) \
  struct name {                       \
    type x, y, z;                     \
  };                                  \
  inline constexpr name make_##name(type x, type y, type z) { return {x, y, z}; }
#define STAND_IN_VECTOR_4(name, type, align) \
  struct alignas(align) name {               \
    type x, y, z, w;                         \
  };                                         \
  inline constexpr name make_##name(type x, type y, type z, type w) { return {x, y, z, w}; }

STAND_IN_VECTOR_3(uint3, unsigned)
STAND_IN_VECTOR_4(int4, int, 16)
STAND_IN_VECTOR_4(uint4, unsigned, 16)

#undef STAND_IN_VECTOR_2
#undef STAND_IN_VECTOR_3
#undef STAND_IN_VECTOR_4

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1) : x(x_size), y(y_size), z(z_size) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
