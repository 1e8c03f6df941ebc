// The definitions of deterministic_products.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// A tile of C: six rows of two of AVX2's registers take twelve of its sixteen. Smaller tiles have fewer rows.
template <class E>
struct product_tile {
  static constexpr std::int64_t rows = 6, columns = 64 / static_cast<std::int64_t>(sizeof(E));
};
/// Rows of A, and then columns of B, whose packed copies of 256 terms stay in the second cache.
inline constexpr std::int64_t rows_at_a_time = 96, columns_at_a_time = 512;

/// c = a b, or c + a b, of `Rows` rows and all columns of a tile. `a` is [k][Rows] and `b` [k][columns].
template <int Rows, class E>
void multiply_tile(std::int64_t k, const E* a, const E* b, bool adds, E* c, std::int64_t ldc) {
  constexpr std::int64_t columns = product_tile<E>::columns;
  E sums[std::size_t{Rows}][std::size_t{columns}] = {};
  for (std::int64_t l = 0; l < k; ++l)
    for (int i = 0; i < Rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) sums[i][j] = std::fma(a[l * Rows + i], b[l * columns + j], sums[i][j]);
  for (int i = 0; i < Rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) c[i * ldc + j] = adds ? c[i * ldc + j] + sums[i][j] : sums[i][j];
}

#if defined(__x86_64__)
/// A register of AVX2, and such a one anywhere in memory. <immintrin.h> has them, and takes compilers half a second.
template <class E>
struct avx2 {
  typedef E pack __attribute__((vector_size(32)));
  typedef E loose_pack __attribute__((vector_size(32), aligned(alignof(E)), may_alias));
};

// The processor's own functions, so that a program for any x86-64 has them.
#define PLAIT_FOR_AVX2 __attribute__((target("avx2,fma")))
// So that sums stay in registers without the highest level of optimisation; nvcc's front end knows no such pragma.
#if defined(__CUDACC__)
#define PLAIT_UNROLL_ROWS
#else
#define PLAIT_UNROLL_ROWS _Pragma("GCC unroll 6")
#endif

/// Adds f x to each lane of `sum`, rounded once.
PLAIT_FOR_AVX2 inline void add_product(avx2<float>::pack& sum, float f, const avx2<float>::pack& x) {
  sum = __builtin_ia32_vfmaddps256(avx2<float>::pack{f, f, f, f, f, f, f, f}, x, sum);
}
PLAIT_FOR_AVX2 inline void add_product(avx2<double>::pack& sum, double f, const avx2<double>::pack& x) {
  sum = __builtin_ia32_vfmaddpd256(avx2<double>::pack{f, f, f, f}, x, sum);
}

template <int Rows, class E>
PLAIT_FOR_AVX2 void multiply_tile_avx2(std::int64_t k, const E* a, const E* b, bool adds, E* c, std::int64_t ldc) {
  using pack = typename avx2<E>::pack;
  using loose_pack = typename avx2<E>::loose_pack;
  pack sums[std::size_t{Rows}][2] = {};
  for (std::int64_t l = 0; l < k; ++l) {
    const auto* const row = reinterpret_cast<const loose_pack*>(b + l * product_tile<E>::columns);
    const pack x = row[0], y = row[1];
    PLAIT_UNROLL_ROWS
    for (int i = 0; i < Rows; ++i) {
      add_product(sums[i][0], a[l * Rows + i], x);
      add_product(sums[i][1], a[l * Rows + i], y);
    }
  }
  PLAIT_UNROLL_ROWS
  for (int i = 0; i < Rows; ++i) {
    auto* const row = reinterpret_cast<loose_pack*>(c + i * ldc);
    for (int j = 0; j < 2; ++j) row[j] = adds ? row[j] + sums[i][j] : sums[i][j];
  }
}
#undef PLAIT_UNROLL_ROWS
#undef PLAIT_FOR_AVX2
#endif

/// The function for tiles of this number of rows on this processor.
template <class E>
using tile_function = void (*)(std::int64_t, const E*, const E*, bool, E*, std::int64_t);
template <class E>
tile_function<E> tile_function_of(std::int64_t rows) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static constexpr tile_function<E> fast[] = {multiply_tile_avx2<1, E>, multiply_tile_avx2<2, E>,
                                              multiply_tile_avx2<3, E>, multiply_tile_avx2<4, E>,
                                              multiply_tile_avx2<5, E>, multiply_tile_avx2<6, E>};
  if (avx2) return fast[rows - 1];
#endif
  static constexpr tile_function<E> any[] = {multiply_tile<1, E>, multiply_tile<2, E>, multiply_tile<3, E>,
                                             multiply_tile<4, E>, multiply_tile<5, E>, multiply_tile<6, E>};
  return any[rows - 1];
}

template <class In, class E>
E as_term(In x) {
  if constexpr (std::is_same_v<In, E>)
    return x;
  else
    return widened(x);
}

template <class In, class E>
void multiply_in_order(const gemm_problem& p, const In* a, const In* b, bool adds, E* c, std::vector<E>& packed_a,
                       std::vector<E>& packed_b) {
  constexpr std::int64_t tile_rows = product_tile<E>::rows, columns = product_tile<E>::columns;
  packed_a.resize(static_cast<std::size_t>(std::min(p.m, rows_at_a_time) * p.k));
  packed_b.resize(static_cast<std::size_t>(std::min(p.n + columns - 1, columns_at_a_time) / columns * columns * p.k));
  for (std::int64_t first = 0; first < p.n; first += columns_at_a_time) {
    const std::int64_t last = std::min(p.n, first + columns_at_a_time);
    for (std::int64_t j = first; j < last; j += columns) {  // [k][columns], zeros beyond the last
      E* const to = packed_b.data() + (j - first) * p.k;
      const std::int64_t count = std::min(columns, last - j);
      for (std::int64_t l = 0; l < p.k; ++l) {
        const In* const from = b + (p.trans_b ? j * p.ldb + l : l * p.ldb + j);
        for (std::int64_t x = 0; x < columns; ++x)
          to[l * columns + x] = x < count ? as_term<In, E>(from[p.trans_b ? x * p.ldb : x]) : E(0);
      }
    }
    for (std::int64_t top = 0; top < p.m; top += rows_at_a_time) {
      const std::int64_t bottom = std::min(p.m, top + rows_at_a_time);
      for (std::int64_t i = top; i < bottom; i += tile_rows) {  // [k][rows]
        E* const to = packed_a.data() + (i - top) * p.k;
        const std::int64_t count = std::min(tile_rows, bottom - i);
        for (std::int64_t x = 0; x < count; ++x) {
          const In* const from = a + (p.trans_a ? i + x : (i + x) * p.lda);
          for (std::int64_t l = 0; l < p.k; ++l) to[l * count + x] = as_term<In, E>(from[p.trans_a ? l * p.lda : l]);
        }
      }
      for (std::int64_t j = first; j < last; j += columns) {
        const E* const of_b = packed_b.data() + (j - first) * p.k;
        const std::int64_t count = std::min(columns, last - j);
        for (std::int64_t i = top; i < bottom; i += tile_rows) {
          const std::int64_t rows = std::min(tile_rows, bottom - i);
          const E* const of_a = packed_a.data() + (i - top) * p.k;
          const tile_function<E> multiply = tile_function_of<E>(rows);
          E* const to = c + i * p.ldc + j;
          if (count == columns) {
            multiply(p.k, of_a, of_b, adds, to, p.ldc);
            continue;
          }
          E tile[std::size_t{tile_rows * columns}];
          multiply(p.k, of_a, of_b, false, tile, columns);
          for (std::int64_t x = 0; x < rows; ++x)
            for (std::int64_t y = 0; y < count; ++y) {
              const E sum = tile[x * columns + y];
              to[x * p.ldc + y] = adds ? to[x * p.ldc + y] + sum : sum;
            }
        }
      }
    }
  }
}

}  // namespace plait::detail

namespace plait {

PLAIT_INLINE void ordered_products::run(const gemm_problem& problem, const float* a, const float* b, bool adds,
                                        float* c) {
  detail::multiply_in_order(problem, a, b, adds, c, float_a_, float_b_);
}
PLAIT_INLINE void ordered_products::run(const gemm_problem& problem, const bf16* a, const bf16* b, bool adds,
                                        float* c) {
  detail::multiply_in_order(problem, a, b, adds, c, float_a_, float_b_);
}
PLAIT_INLINE void ordered_products::run(const gemm_problem& problem, const double* a, const double* b, bool adds,
                                        double* c) {
  detail::multiply_in_order(problem, a, b, adds, c, double_a_, double_b_);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
