// Functions for kernels: barriers, warp collectives, atomics, bit casts and CUDA's functions beyond <math.h>.
#pragma once

#include <math.h>

#include <atomic>
#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "block.hpp"

// ---- barriers and votes --------------------------------------------------------------------------------------------

inline void __syncthreads() { stand_in::executor::instance().barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  stand_in::executor::instance().collective(stand_in::warp_op::sync, mask, 0, 0);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t vote = predicate != 0;
  return static_cast<unsigned>(stand_in::executor::instance().collective(stand_in::warp_op::ballot, mask, vote, 0));
}

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
template <std::integral T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return stand_in::replace(address, [&](T old) { return old == expected ? value : old; });
}

// ---- loads, bits, arithmetic ---------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return std::popcount(x); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// The C library declares functions of these names itself.
#define __expf(x) expf(x)
