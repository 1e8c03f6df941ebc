// Functions that all CUDA kernels share: unrolled loops, conversions, 16-byte accesses, sums over a warp and a block,
// and reports of faults. It also has products of bf16 tiles on tensor cores.
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

/// Unrolls the next loop. Arrays in registers must be indexed by constants.
#ifdef __CUDACC__
#define PLAIT_UNROLL _Pragma("unroll")
#define PLAIT_UNROLL_BY(n) PLAIT_PRAGMA(unroll n)
#define PLAIT_PRAGMA(text) _Pragma(#text)
#else
#define PLAIT_UNROLL
#define PLAIT_UNROLL_BY(n)
#endif

namespace plait::kernels {

/// N contiguous elements of T. The cast avoids g++'s warning -Wsign-conversion for an int bound that depends on a
/// template parameter.
template <class T, int N>
using row_of = T[static_cast<std::size_t>(N)];

inline constexpr unsigned whole_warp = 0xffffffffu;
inline constexpr int warp_lanes = 32;
/// Infinity as a constant, because kernels may not call functions of std::numeric_limits.
template <class T>
inline constexpr T infinite = std::numeric_limits<T>::infinity();

/// Returns the value of a bf16 as a float.
__host__ __device__ inline float device_float(bf16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// Returns the nearest bf16, ties to even. Every NaN becomes 0x7FFF, as by the GPU's instruction; the CPU's `to_bf16`
/// keeps its upper bits. ptxas combines two neighbouring conversions into one instruction.
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

/// Returns x in another type, rounded to nearest even.
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

/// 16 bytes of T that one instruction moves.
template <class T>
struct alignas(16) vector16 {
  static constexpr int size = 16 / static_cast<int>(sizeof(T));
  row_of<T, size> at;
};

template <class T>
__device__ inline vector16<T> load_vector(const T* from) {
  return *reinterpret_cast<const vector16<T>*>(from);
}
/// Stores to global memory by an explicit instruction. nvcc splits the copy of an array of small elements into one
/// store each, above all in unrolled loops.
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

/// Whether all pointers are on 16-byte boundaries.
template <class... Pointers>
inline bool aligned16(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

/// Returns the sum over each `lanes` neighbouring lanes, a power of two, to all of them. The whole warp must take part.
template <class S>
__device__ inline S lane_sum(S value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(whole_warp, value, offset);
  return value;
}
/// Returns the sum over the lanes of a warp to every lane, in one order.
template <class S>
__device__ inline S warp_sum(S value) {
  return lane_sum(value, warp_lanes);
}
/// Returns how many lanes share `n` numbers, `width` per lane: the smallest sufficient power of two, at most a warp.
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

/// Returns the sum over a block of at most 1024 threads, a multiple of 32, to every thread. `scratch` is shared memory
/// for 32 values, and may be reused at once. (CUB's `BlockReduce` gives the sum to one thread, and headers do not
/// include CUB.)
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

/// Reports a fault, because kernels cannot throw. The first fault since the last synchronisation is kept, and
/// `cuda::synchronize` throws it.
__device__ inline void report_fault(device_fault* faults, int code, std::int64_t row, std::int64_t value,
                                    std::int64_t limit) {
  if (atomicCAS(&faults->code, device_fault::none, code) != device_fault::none) return;
  faults->row = static_cast<int>(row);
  faults->value = value;
  faults->limit = limit;
}

}  // namespace plait::kernels::detail

namespace plait::kernels {

// ---- products on tensor cores ------------------------------------------------------------------------------------
//
// Products of bf16 tiles on tensor cores: one warp's m16n8k16 product, and loads of tiles in the layout of its factors
// (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix"). All 32 lanes of a warp must call them; lane numbers
// are threadIdx.x % 32. In tests without a GPU, lanes read each other's fragments, and copies arrive as late as
// allowed. Products of whole matrices are in device/gemm_cublaslt.hpp.
//
// With group = lane / 4 and pair = lane % 4 a lane holds
//   of the 16 x 16 factor A: rows group and group + 8 at columns 2 pair, 2 pair + 1, 2 pair + 8, 2 pair + 9;
//   of the 16 x 8 factor B: column group at rows 2 pair, 2 pair + 1, 2 pair + 8, 2 pair + 9;
//   of the 16 x 8 result: rows group (elements 0, 1) and group + 8 (2, 3) at columns 2 pair, 2 pair + 1.

__device__ inline int warp_lane() { return static_cast<int>(threadIdx.x) % warp_lanes; }

/// Returns two floats rounded to bf16, the first in the lower half.
__device__ inline unsigned bf16_pair(float first, float second) {
#ifdef PLAIT_CUDA_STAND_IN
  return static_cast<unsigned>(device_bf16(first).bits) | static_cast<unsigned>(device_bf16(second).bits) << 16;
#else
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#endif
}

/// 2^x to 2 units in the last place; results below 2^-126 are 0.
__device__ inline float fast_exp2(float x) {
#ifdef PLAIT_CUDA_STAND_IN
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

#ifdef PLAIT_CUDA_STAND_IN
namespace detail {

inline unsigned long long join(unsigned low, unsigned high) {
  return static_cast<unsigned long long>(low) | static_cast<unsigned long long>(high) << 32;
}

}  // namespace detail
#endif

/// c += A B for the fragments a of a 16 x 16 and (b0, b1) of a 16 x 8 matrix.
__device__ inline void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifdef PLAIT_CUDA_STAND_IN
  const auto* const warp = stand_in::executor::instance().gather(
      {{detail::join(a[0], a[2]), detail::join(a[1], a[3]), detail::join(b0, b1)}});
  stand_in::multiply_fragments(warp, warp_lane(), c);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// Loads four 8 x 8 matrices from shared memory. Lane l passes the address of row l % 8 of matrix l / 8 (8 elements,
/// 16-byte aligned). From matrix i, lane l gets in fragment[i] the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
/// With `Transposed`, they are of column l / 4.
template <bool Transposed>
__device__ inline void load_matrices(unsigned (&fragment)[4], const bf16* row) {
#ifdef PLAIT_CUDA_STAND_IN
  const int group = warp_lane() / 4, pair = warp_lane() % 4;
  const auto* const warp = stand_in::executor::instance().gather({{reinterpret_cast<unsigned long long>(row), 0, 0}});
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int r) { return reinterpret_cast<const bf16*>(warp[8 * i + r].words[0]); };
    bf16 first, second;
    if constexpr (Transposed) {
      const bf16 *const upper = at(2 * pair), *const lower = at(2 * pair + 1);
      first = upper[group];
      second = lower[group];
    } else {
      const bf16* const source = at(group);
      first = source[2 * pair];
      second = source[2 * pair + 1];
    }
    fragment[i] = static_cast<unsigned>(first.bits) | static_cast<unsigned>(second.bits) << 16;
  }
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (Transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

/// Loads the fragment of A at `tile`, a matrix in shared memory whose row stride is `pitch` elements.
__device__ inline void load_a(unsigned (&a)[4], const bf16* tile, int pitch) {
  const int lane = warp_lane();
  load_matrices<false>(a, tile + (lane % 16) * pitch + lane / 16 * 8);
}

/// Loads the fragments of two neighbouring B: columns 0 to 7 in b[0], b[1] and 8 to 15 in b[2], b[3]. Row n of `tile`
/// holds column n of B.
__device__ inline void load_b_columns(unsigned (&b)[4], const bf16* tile, int pitch) {
  const int lane = warp_lane();
  load_matrices<false>(b, tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

/// Loads B where row k of `tile` holds row k of B.
__device__ inline void load_b_rows(unsigned (&b)[4], const bf16* tile, int pitch) {
  const int lane = warp_lane();
  load_matrices<true>(b, tile + (lane % 16) * pitch + lane / 16 * 8);
}

/// Starts to copy 16 bytes from global to shared memory. If not `valid`, it reads nothing, and writes zeros. The bytes
/// are there after `wait_for_copies` and a barrier.
__device__ inline void copy_async(bf16* to, const bf16* from, bool valid) {
#ifdef PLAIT_CUDA_STAND_IN
  stand_in::executor::instance().copy_later(to, valid ? from : nullptr, 16);
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
#endif
}

/// Starts to copy one number of 4 bytes, or to write zero, as above.
template <class T>
  requires(sizeof(T) == 4)
__device__ inline void copy_async(T* to, const T* from, bool valid) {
#ifdef PLAIT_CUDA_STAND_IN
  stand_in::executor::instance().copy_later(to, valid ? from : nullptr, 4);
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
#endif
}

/// Ends a group of copies. `wait_for_copies<N>` waits for all of this thread's groups but the last N.
__device__ inline void commit_copies() {
#ifdef PLAIT_CUDA_STAND_IN
  stand_in::executor::instance().commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int Pending>
__device__ inline void wait_for_copies() {
#ifdef PLAIT_CUDA_STAND_IN
  stand_in::executor::instance().wait_for_copies(Pending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

}  // namespace plait::kernels
