// Parts that all CUDA kernels share: unrolled loops, conversions, accesses of 16 bytes, sums over a warp and a block,
// and the report of a fault.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "plait/core/types.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/version.hpp"

/// Unrolls the loop that follows; what lives in registers must be indexed by constants.
#ifdef __CUDACC__
#define PLAIT_UNROLL _Pragma("unroll")
#define PLAIT_UNROLL_BY(n) PLAIT_PRAGMA(unroll n)
#define PLAIT_PRAGMA(text) _Pragma(#text)
#else
#define PLAIT_UNROLL
#define PLAIT_UNROLL_BY(n)
#endif

namespace plait::kernels {

/// N elements of T side by side. As a bound, an int that depends on a template parameter is a warning of g++'s
/// -Wsign-conversion, in whatever program includes it.
template <class T, int N>
using row_of = T[static_cast<std::size_t>(N)];

inline constexpr unsigned whole_warp = 0xffffffffu;
inline constexpr int warp_lanes = 32;
/// A constant, because kernels may not call std::numeric_limits' functions.
template <class T>
inline constexpr T infinite = std::numeric_limits<T>::infinity();

/// The float that a bf16 stands for.
__host__ __device__ inline float device_float(bf16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// The nearest bf16, ties to even. Every NaN becomes the one that the GPU's instruction makes, 0x7FFF; the processor's
/// `to_bf16` keeps its upper bits. Two neighbours are one instruction, which ptxas puts together.
__host__ __device__ inline bf16 device_bf16(float x) {
  bf16 y;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  y.bits = static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
#endif
  return y;
}

/// x in another type, rounded to nearest even.
template <class To, class From>
__host__ __device__ inline To number(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<From, bf16>) {
    return static_cast<To>(device_float(x));
  } else if constexpr (std::is_same_v<To, bf16>) {
    return device_bf16(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

/// 16 bytes of T, moved by one instruction.
template <class T>
struct alignas(16) vector16 {
  static constexpr int size = 16 / static_cast<int>(sizeof(T));
  row_of<T, size> at;
};

template <class T>
__device__ inline vector16<T> load_vector(const T* from) {
  return *reinterpret_cast<const vector16<T>*>(from);
}
/// To global memory, by an explicit instruction: nvcc splits the copy of an array of small elements, above all in
/// unrolled loops, into a store for each.
template <class T>
__device__ inline void store_vector(T* to, const vector16<T>& value) {
#ifdef PLAIT_CUDA_STAND_IN
  *reinterpret_cast<vector16<T>*>(to) = value;
#else
  uint4 words;
  memcpy(&words, &value, sizeof words);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
#endif
}

/// Whether every pointer is on a 16-byte boundary.
template <class... Pointers>
inline bool aligned16(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

/// The sum over each `lanes` neighbouring lanes, a power of two, on every one of them. The whole warp takes part.
template <class S>
__device__ inline S lane_sum(S value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(whole_warp, value, offset);
  return value;
}
/// The sum over the lanes of a warp, on every lane, in one order.
template <class S>
__device__ inline S warp_sum(S value) {
  return lane_sum(value, warp_lanes);
}
/// How many lanes share `n` numbers that each takes `width` of: the least power of two, at most a warp.
inline int lanes_for(std::int64_t n, int width) {
  int lanes = 1;
  while (lanes < warp_lanes && std::int64_t{lanes} * width < n) lanes *= 2;
  return lanes;
}
template <class S>
__device__ inline S warp_max(S value) {
  for (int offset = warp_lanes / 2; offset > 0; offset /= 2) {
    const S other = __shfl_xor_sync(whole_warp, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

/// The sum over a block of at most 1024 threads, a multiple of 32, on every thread. `scratch` is shared memory for 32
/// values; it may be used again at once. (CUB's `BlockReduce` gives the sum to one thread, and is in no header here.)
template <class S>
__device__ inline S block_sum(S value, S* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes, warp = static_cast<int>(threadIdx.x) / warp_lanes;
  const int warps = static_cast<int>(blockDim.x) / warp_lanes;
  value = warp_sum(value);
  __syncthreads();
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : S(0));
}
template <class S>
__device__ inline S block_max(S value, S* scratch, S least) {
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes, warp = static_cast<int>(threadIdx.x) / warp_lanes;
  const int warps = static_cast<int>(blockDim.x) / warp_lanes;
  value = warp_max(value);
  __syncthreads();
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_max(lane < warps ? scratch[lane] : least);
}

}  // namespace plait::kernels

namespace plait::kernels::detail {

/// Writes down what a kernel cannot throw; the first fault since the last synchronisation is kept. `cuda::synchronize`
/// throws it.
__device__ inline void report_fault(device_fault* faults, int code, std::int64_t row, std::int64_t value,
                                    std::int64_t limit) {
  if (atomicCAS(&faults->code, device_fault::none, code) != device_fault::none) return;
  faults->row = static_cast<int>(row);
  faults->value = value;
  faults->limit = limit;
}

}  // namespace plait::kernels::detail
