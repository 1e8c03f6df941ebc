// Reductions of several arrays in the host's memory, in the order of the arrays. bf16 is summed in float. Test:
// tests/unit/comm/accounting.cpp.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "plait/core/collective.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait {

namespace detail {

/// One step of a reduction. max and min return NaN if either operand is NaN; integer sums wrap around.
template <reduce_op Op, class T>
PLAIT_HOST_DEVICE constexpr T reduced(T a, T b) {
  if constexpr (Op == reduce_op::sum && std::is_integral_v<T>) {
    using word = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<word>(a) + static_cast<word>(b));
  } else if constexpr (Op == reduce_op::sum) {
    return a + b;
  } else if constexpr (Op == reduce_op::max) {
    return ((a > b) | (a != a)) ? a : b;
  } else {
    return ((a < b) | (a != a)) ? a : b;
  }
}

// Elements per block. Compilers vectorise loops of a constant trip count over restrict pointers at -O2 too, and a block
// of accumulators fits into the first-level cache.
inline constexpr std::size_t reduce_block = 1024;

template <class T, class A>
inline void load_block(A* __restrict acc, const T* __restrict src, std::size_t n) {
  if constexpr (std::is_same_v<T, bf16>) {
    for (std::size_t i = 0; i < n; ++i) acc[i] = to_float(src[i]);
  } else {
    std::memcpy(acc, src, n * sizeof(T));
  }
}

/// acc = a op b
template <reduce_op Op, class T, class A>
inline void begin_block(A* __restrict acc, const T* __restrict a, const T* __restrict b, std::size_t n) {
  std::size_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (std::size_t j = i; j < i + 64; ++j) acc[j] = reduced<Op>(widened(a[j]), widened(b[j]));
  }
  for (; i < n; ++i) acc[i] = reduced<Op>(widened(a[i]), widened(b[i]));
}

/// acc = acc op a
template <reduce_op Op, class T, class A>
inline void combine_block(A* __restrict acc, const T* __restrict a, std::size_t n) {
  std::size_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (std::size_t j = i; j < i + 64; ++j) acc[j] = reduced<Op>(acc[j], widened(a[j]));
  }
  for (; i < n; ++i) acc[i] = reduced<Op>(acc[i], widened(a[i]));
}

/// acc = (acc op a) op b: equal to two calls, with half as many passes over the accumulators
template <reduce_op Op, class T, class A>
inline void combine_block(A* __restrict acc, const T* __restrict a, const T* __restrict b, std::size_t n) {
  std::size_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (std::size_t j = i; j < i + 64; ++j) acc[j] = reduced<Op>(reduced<Op>(acc[j], widened(a[j])), widened(b[j]));
  }
  for (; i < n; ++i) acc[i] = reduced<Op>(reduced<Op>(acc[i], widened(a[i])), widened(b[i]));
}

template <class T, class A>
inline void store_block(T* __restrict dst, const A* __restrict acc, std::size_t n) {
  if constexpr (std::is_same_v<T, bf16>) {
    for (std::size_t i = 0; i < n; ++i) dst[i] = to_bf16(acc[i]);
  } else {
    std::memcpy(dst, acc, n * sizeof(T));
  }
}

/// Reduces elements [begin, end) of `n` sources, and passes every finished block to `store(begin, block, count)`. The
/// order is source 0, 1, ..., n-1 on every rank, so the result depends only on the data. A block is read from all
/// sources before it is stored, so a destination may be one of the sources.
template <reduce_op Op, class T, class Source, class Store>
void reduce_range(int n, const Source& source, std::size_t begin, std::size_t end, const Store& store) {
  alignas(64) arithmetic<T> acc[reduce_block];
  alignas(64) T rounded[std::is_same_v<T, bf16> ? reduce_block : 1];
  for (std::size_t at = begin; at < end; at += reduce_block) {
    const std::size_t count = end - at < reduce_block ? end - at : reduce_block;
    const auto from = [&](int k) { return reinterpret_cast<const T*>(source(k)) + at; };
    int k = 1;
    if (n == 1) {
      load_block(acc, from(0), count);
    } else {
      begin_block<Op>(acc, from(0), from(1), count);
      k = 2;
    }
    for (; k + 1 < n; k += 2) combine_block<Op>(acc, from(k), from(k + 1), count);
    if (k < n) combine_block<Op>(acc, from(k), count);
    if constexpr (std::is_same_v<T, bf16>) {
      store_block(rounded, acc, count);
      store(at, rounded, count);
    } else {
      store(at, acc, count);
    }
  }
}

/// Calls `f.template operator()<Op, T>()` for run-time values of both.
template <class F>
decltype(auto) with_reduction(reduce_op op, dtype type, const F& f) {
  const auto with_type = [&]<reduce_op Op>() -> decltype(auto) {
    switch (type) {
      case dtype::f32:
        return f.template operator()<Op, float>();
      case dtype::f64:
        return f.template operator()<Op, double>();
      case dtype::bf16:
        return f.template operator()<Op, bf16>();
      case dtype::i32:
        return f.template operator()<Op, std::int32_t>();
      case dtype::i64:
        return f.template operator()<Op, std::int64_t>();
      case dtype::u8:
        break;
    }
    fail({"a reduction of ", name_of(type), " was asked for; reducible are float, double, bf16, int32, int64"});
  };
  switch (op) {
    case reduce_op::max:
      return with_type.template operator()<reduce_op::max>();
    case reduce_op::min:
      return with_type.template operator()<reduce_op::min>();
    case reduce_op::sum:
      break;
  }
  return with_type.template operator()<reduce_op::sum>();
}

}  // namespace detail

/// out[i] = in[0][i] op in[1][i] op ..., for `count` elements of `in.size()` arrays in the host's memory, in this
/// order. `out` may be one of them. bf16 is summed in float. Throws for bytes (dtype::u8).
inline void reduce_arrays(std::span<const void* const> in, void* out, std::size_t count, dtype type, reduce_op op) {
  detail::with_reduction(op, type, [&]<reduce_op Op, class T>() {
    detail::reduce_range<Op, T>(
        static_cast<int>(in.size()),
        [&](int k) { return static_cast<const std::byte*>(in[static_cast<std::size_t>(k)]); }, 0, count,
        [&](std::size_t at, const T* block, std::size_t n) {
          std::memcpy(static_cast<T*>(out) + at, block, n * sizeof(T));
        });
  });
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
