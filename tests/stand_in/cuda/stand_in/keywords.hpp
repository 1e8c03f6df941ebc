// What CUDA adds to the language, as macros and types: function and variable qualifiers, vector types, dim3.
#pragma once

#include <cstddef>
#include <cstdint>

#define __global__ __attribute__((unused))  // a static kernel that nobody launches is no mistake
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
// Blocks run one after the other, under one lock: what a block shares may be plain static memory.
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define STAND_IN_VECTOR_1(name, type, align) \
  struct alignas(align) name {               \
    type x;                                  \
  };                                         \
  inline constexpr name make_##name(type x) { return {x}; }
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

STAND_IN_VECTOR_1(float1, float, 4)
STAND_IN_VECTOR_1(int1, int, 4)
STAND_IN_VECTOR_1(uint1, unsigned, 4)
STAND_IN_VECTOR_2(char2, signed char, 2)
STAND_IN_VECTOR_2(uchar2, unsigned char, 2)
STAND_IN_VECTOR_2(short2, short, 4)
STAND_IN_VECTOR_2(ushort2, unsigned short, 4)
STAND_IN_VECTOR_2(int2, int, 8)
STAND_IN_VECTOR_2(uint2, unsigned, 8)
STAND_IN_VECTOR_2(float2, float, 8)
STAND_IN_VECTOR_2(longlong2, long long, 16)
STAND_IN_VECTOR_2(ulonglong2, unsigned long long, 16)
STAND_IN_VECTOR_2(double2, double, 16)
STAND_IN_VECTOR_3(int3, int)
STAND_IN_VECTOR_3(uint3, unsigned)
STAND_IN_VECTOR_3(float3, float)
STAND_IN_VECTOR_4(char4, signed char, 4)
STAND_IN_VECTOR_4(uchar4, unsigned char, 4)
STAND_IN_VECTOR_4(short4, short, 8)
STAND_IN_VECTOR_4(ushort4, unsigned short, 8)
STAND_IN_VECTOR_4(int4, int, 16)
STAND_IN_VECTOR_4(uint4, unsigned, 16)
STAND_IN_VECTOR_4(float4, float, 16)
STAND_IN_VECTOR_4(double4, double, 16)

#undef STAND_IN_VECTOR_1
#undef STAND_IN_VECTOR_2
#undef STAND_IN_VECTOR_3
#undef STAND_IN_VECTOR_4

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1) : x(x_size), y(y_size), z(z_size) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
