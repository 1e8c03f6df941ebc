// Functions for kernels: barriers, warp collectives, atomics, bit casts and CUDA's functions beyond <math.h>.
#pragma once

#include <math.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "block.hpp"

// ---- barriers and votes --------------------------------------------------------------------------------------------

inline void __syncthreads() { stand_in::executor::instance().barrier(false); }
inline int __syncthreads_count(int predicate) { return stand_in::executor::instance().barrier(predicate != 0); }
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(predicate == 0) == 0; }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  stand_in::executor::instance().collective(stand_in::warp_op::sync, mask, 0, 0);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t vote = predicate != 0;
  return static_cast<unsigned>(stand_in::executor::instance().collective(stand_in::warp_op::ballot, mask, vote, 0));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

[[noreturn]] inline void __trap() { stand_in::die(stand_in::executor::instance().where() + " calls __trap()"); }

// ---- shuffles ------------------------------------------------------------------------------------------------------

namespace stand_in {

template <class T>
concept shuffled = std::same_as<T, int> || std::same_as<T, unsigned> || std::same_as<T, long> ||
                   std::same_as<T, unsigned long> || std::same_as<T, long long> ||
                   std::same_as<T, unsigned long long> || std::same_as<T, float> || std::same_as<T, double>;

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
  using word = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;  // no memcpy: sanitizers slow it down
  const std::uint64_t bits = std::bit_cast<word>(value);
  return std::bit_cast<T>(static_cast<word>(executor::instance().collective(warp_op::shuffle, mask, bits, source)));
}

inline unsigned lane() { return executor::instance().lane(); }

}  // namespace stand_in

template <stand_in::shuffled T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned inside = static_cast<unsigned>(width) - 1;
  return stand_in::shuffle(mask, value, (stand_in::lane() & ~inside) | (static_cast<unsigned>(source) & inside));
}
template <stand_in::shuffled T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = stand_in::lane(), inside = static_cast<unsigned>(width) - 1;
  return stand_in::shuffle(mask, value, (lane & inside) < delta ? lane : lane - delta);
}
template <stand_in::shuffled T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = stand_in::lane(), inside = static_cast<unsigned>(width) - 1;
  return stand_in::shuffle(mask, value, (lane & inside) + delta > inside ? lane : lane + delta);
}
template <stand_in::shuffled T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const unsigned lane = stand_in::lane(), inside = static_cast<unsigned>(width) - 1;
  const unsigned source = lane ^ static_cast<unsigned>(lanes);
  return stand_in::shuffle(mask, value, source > (lane | inside) ? lane : source);
}

// ---- atomics -------------------------------------------------------------------------------------------------------
//
// Threads are switched at collectives only. atomic_ref tells thread sanitizer that these accesses are no race.

namespace stand_in {

/// Replaces *address by next(*address); returns the previous value.
template <class T, class Next>
T replace(T* address, Next next) {
  const std::atomic_ref<T> word(*address);
  const T old = word.load(std::memory_order_relaxed);
  word.store(static_cast<T>(next(old)), std::memory_order_relaxed);
  return old;
}

}  // namespace stand_in

template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return stand_in::replace(address, [&](T old) { return old + value; });
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return stand_in::replace(address, [&](T) { return value; });
}
template <std::integral T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return stand_in::replace(address, [&](T old) { return old == expected ? value : old; });
}
template <std::integral T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return stand_in::replace(address, [&](T old) { return std::max<T>(old, value); });
}

// ---- loads, bits, arithmetic ---------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return std::popcount(x); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// The C library declares functions of these names itself.
#define __expf(x) expf(x)

#define STAND_IN_MIN_MAX(type)                                        \
  inline constexpr type min(type x, type y) { return y < x ? y : x; } \
  inline constexpr type max(type x, type y) { return x < y ? y : x; }
STAND_IN_MIN_MAX(int)
STAND_IN_MIN_MAX(unsigned)
STAND_IN_MIN_MAX(long)
STAND_IN_MIN_MAX(unsigned long)
STAND_IN_MIN_MAX(long long)
STAND_IN_MIN_MAX(unsigned long long)
#undef STAND_IN_MIN_MAX
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline double min(double x, double y) { return std::fmin(x, y); }
inline double max(double x, double y) { return std::fmax(x, y); }
