// Matrix products on the CPU whose sums have one order for all sizes and strides, for `cpu::options::deterministic`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

// Products that add terms one after the other, however rows and columns are split. As in BLIS, tiles of sums are kept
// in registers; no sum is ever split.

/// Computes products by fused multiply-adds, in AVX2 registers if the processor has them, for every target architecture
/// of the program. It keeps buffers for packed copies of the factors. Only one thread may use it at a time.
class ordered_products {
 public:
  /// C = op(A) op(B), or C + op(A) op(B) if `adds`. Each element's terms are added in the order of k, from zero, and
  /// their sum is added to C last. Factors in bf16 are widened, which is exact. It is tuned for up to 256 terms: 16
  /// packed columns of B should stay in the first-level cache. `problem` must have been checked.
  void run(const gemm_problem& problem, const float* a, const float* b, bool adds, float* c);
  void run(const gemm_problem& problem, const bf16* a, const bf16* b, bool adds, float* c);
  void run(const gemm_problem& problem, const double* a, const double* b, bool adds, double* c);

 private:
  std::vector<float> float_a_, float_b_;
  std::vector<double> double_a_, double_b_;
};

/// C = alpha op(A) op(B) + beta C in a fixed order, so splitting rows or columns changes no bit. Up to 256 neighbouring
/// terms along k are added one after the other by fused multiply-adds, from zero. In bf16, hardware adds terms in
/// pairs, the second of each pair first, and treats subnormal numbers as zero (VDPBF16PS). Each of these sums, times
/// alpha, is added to beta C in the order of k.
///
/// On processors with AVX-512, oneDNN adds in this order for products of at least 16 rows and columns. Every new
/// problem is checked, and refused if oneDNN's order differs. `ordered_products` computes small products, products of
/// double, bf16 where oneDNN uses AMX, and all products on processors for which oneDNN has other kernels. Those kernels
/// add different elements of a product in different orders.
class deterministic_products {
 public:
  /// The number of terms that are added to one sum.
  static constexpr std::int64_t chunk = 256;

  /// `library` has oneDNN's products.
  template <class Library, class In, class Out>
  void run(Library& library, const gemm_problem& problem, arithmetic<In> alpha, const In* a, const In* b,
           arithmetic<In> beta, Out* c) {
    using A = arithmetic<In>;
    const bool direct = std::is_same_v<Out, A> && alpha == A(1) && (beta == A(0) || beta == A(1));
    if constexpr (std::is_same_v<Out, A>) {
      if (direct) return chunks(library, problem, a, b, beta == A(1), c);
    }
    gemm_problem p = problem;
    p.ldc = p.n;
    auto& sums = std::get<std::vector<A>>(scratch_);
    sums.resize(static_cast<std::size_t>(p.m * p.n));
    chunks(library, p, a, b, false, sums.data());
    for (std::int64_t i = 0; i < p.m; ++i) {
      Out* const row = c + i * problem.ldc;
      const A* const sum = sums.data() + i * p.n;
      for (std::int64_t j = 0; j < p.n; ++j)
        row[j] = converted<Out>(beta == A(0) ? alpha * sum[j] : std::fma(beta, widened(row[j]), alpha * sum[j]));
    }
  }

 private:
  template <class Library, class In, class A>
  void chunks(Library& library, const gemm_problem& problem, const In* a, const In* b, bool adds, A* c) {
    for (std::int64_t at = 0; at < problem.k; at += chunk, adds = true) {
      gemm_problem p = problem;
      p.k = std::min(chunk, problem.k - at);
      const In* const from_a = a + at * (p.trans_a ? p.lda : 1);
      const In* const from_b = b + at * (p.trans_b ? 1 : p.ldb);
      if constexpr (!std::is_same_v<In, double>) {
        const bool in_order = library.adds_in_order(dtype_of<In>), small = p.m < 16 || p.n < 16;
        const bool in_pairs = in_order && std::is_same_v<In, bf16> && library.supports_bf16();
        if (!small && in_order) {
          checked(library, in_pairs, p, from_a, from_b, adds, c);
          continue;
        }
        if (in_pairs) {
          pair_by_pair(p, from_a, from_b, adds, c);
          continue;
        }
      }
      ordered_.run(p, from_a, from_b, adds, c);
    }
  }

  template <class Library, class In>
  void checked(Library& library, bool pairs, const gemm_problem& p, const In* a, const In* b, bool adds, float* c) {
    const auto run = [&] { library.run(p, 1.0f, a, b, adds ? 1.0f : 0.0f, c); };
    const known same{p, adds, std::is_same_v<In, bf16>};
    if (std::find(checked_.begin(), checked_.end(), same) != checked_.end()) return run();
    constexpr std::int64_t samples = 24;
    float before[samples];
    std::int64_t at[samples];
    for (std::int64_t s = 0; s < samples; ++s) {  // the corners, then samples spread by the golden ratio
      const std::int64_t i = s < 4 ? (s & 1) * (p.m - 1) : s * 40503 % p.m,
                         j = s < 4 ? (s >> 1) * (p.n - 1) : s * 26543 % p.n;
      at[s] = i * p.ldc + j;
      before[s] = adds ? c[at[s]] : 0.0f;
    }
    run();
    for (std::int64_t s = 0; s < samples; ++s) {
      const std::int64_t i = at[s] / p.ldc, j = at[s] % p.ldc;
      const In* const row = a + (p.trans_a ? i : i * p.lda);
      float sum = 0;
      const auto add = [&](std::int64_t k) {
        const float x = widened(row[k * (p.trans_a ? p.lda : 1)]),
                    y = widened(b[p.trans_b ? j * p.ldb + k : k * p.ldb + j]);
        sum = pairs ? flushed(std::fma(flushed(x), flushed(y), sum)) : std::fma(x, y, sum);
      };
      each_term(pairs, p.k, add);
      const float expected = adds ? before[s] + sum : sum;
      if (std::memcmp(&expected, &c[at[s]], sizeof expected) != 0 && expected == expected)
        fail({p.text(),
              ": the library does not add the terms of this product one after the other on this processor, so "
              "that its bits depend on the layout; leave cpu::options::deterministic out"});
    }
    checked_.push_back(same);
  }

  template <class F>
  static void each_term(bool pairs, std::int64_t k, F&& add) {
    if (!pairs) {
      for (std::int64_t i = 0; i < k; ++i) add(i);
    } else {
      for (std::int64_t i = 0; i < k; i += 2) {
        if (i + 1 < k) add(i + 1);
        add(i);
      }
    }
  }
  static float flushed(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
  }

  /// A small bf16 product with the arithmetic of the processor's bf16 instruction.
  template <class In>
  void pair_by_pair(const gemm_problem& p, const In* a, const In* b, bool adds, float* c) {
    constexpr std::int64_t width = 64;
    columns_.resize(static_cast<std::size_t>(p.k * width));
    for (std::int64_t first = 0; first < p.n; first += width) {
      const std::int64_t count = std::min(width, p.n - first);
      for (std::int64_t k = 0; k < p.k; ++k)
        for (std::int64_t j = 0; j < width; ++j)
          columns_[static_cast<std::size_t>(k * width + j)] =
              j < count ? flushed(widened(b[p.trans_b ? (first + j) * p.ldb + k : k * p.ldb + first + j])) : 0.0f;
      for (std::int64_t i = 0; i < p.m; ++i) {
        float sums[width] = {};
        each_term(true, p.k, [&](std::int64_t k) {
          const float x = flushed(widened(a[p.trans_a ? k * p.lda + i : i * p.lda + k]));
          const float* const y = columns_.data() + k * width;
          for (std::int64_t j = 0; j < width; ++j) sums[j] = std::fma(x, y[j], sums[j]);
          for (std::int64_t j = 0; j < width; ++j) sums[j] = flushed(sums[j]);
        });
        float* const row = c + i * p.ldc + first;
        for (std::int64_t j = 0; j < count; ++j) row[j] = adds ? row[j] + sums[j] : sums[j];
      }
    }
  }

  struct known {
    gemm_problem problem;
    bool adds, rounded;
    bool operator==(const known&) const = default;
  };

  ordered_products ordered_;
  std::vector<known> checked_;
  std::vector<float> columns_;
  std::tuple<std::vector<float>, std::vector<double>> scratch_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
namespace plait::detail {

/// A tile of C: six rows of two AVX2 registers use twelve of the sixteen registers. Smaller tiles have fewer rows.
template <class E>
struct product_tile {
  static constexpr std::int64_t rows = 6, columns = 64 / static_cast<std::int64_t>(sizeof(E));
};
/// Rows of A and columns of B whose packed copies, of 256 terms, stay in the second-level cache.
inline constexpr std::int64_t rows_at_a_time = 96, columns_at_a_time = 512;

/// c = a b, or c + a b, for `Rows` rows and all columns of a tile. `a` is [k][Rows] and `b` [k][columns].
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
/// An AVX2 register, and one at any address in memory. <immintrin.h> has both, but costs half a second of compile time.
template <class E>
struct avx2 {
  typedef E pack __attribute__((vector_size(32)));
  typedef E loose_pack __attribute__((vector_size(32), aligned(alignof(E)), may_alias));
};

// Functions for processors with AVX2, so that programs for any x86-64 processor contain them.
#define PLAIT_FOR_AVX2 __attribute__((target("avx2,fma")))
// Keeps sums in registers without the highest level of optimisation. nvcc's front end does not know this pragma.
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

/// Returns the function for tiles of this number of rows on this processor.
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
void multiply_in_order(const gemm_problem& p, const In* a, const In* b, bool adds, E* c, std::vector<E>& packed_a,
                       std::vector<E>& packed_b) {
  constexpr std::int64_t tile_rows = product_tile<E>::rows, columns = product_tile<E>::columns;
  packed_a.resize(static_cast<std::size_t>(std::min(p.m, rows_at_a_time) * p.k));
  packed_b.resize(static_cast<std::size_t>(std::min(p.n + columns - 1, columns_at_a_time) / columns * columns * p.k));
  for (std::int64_t first = 0; first < p.n; first += columns_at_a_time) {
    const std::int64_t last = std::min(p.n, first + columns_at_a_time);
    for (std::int64_t j = first; j < last; j += columns) {  // [k][columns], padded with zeros
      E* const to = packed_b.data() + (j - first) * p.k;
      const std::int64_t count = std::min(columns, last - j);
      for (std::int64_t l = 0; l < p.k; ++l) {
        const In* const from = b + (p.trans_b ? j * p.ldb + l : l * p.ldb + j);
        for (std::int64_t x = 0; x < columns; ++x)
          to[l * columns + x] = x < count ? converted<E>(from[p.trans_b ? x * p.ldb : x]) : E(0);
      }
    }
    for (std::int64_t top = 0; top < p.m; top += rows_at_a_time) {
      const std::int64_t bottom = std::min(p.m, top + rows_at_a_time);
      for (std::int64_t i = top; i < bottom; i += tile_rows) {  // [k][rows]
        E* const to = packed_a.data() + (i - top) * p.k;
        const std::int64_t count = std::min(tile_rows, bottom - i);
        for (std::int64_t x = 0; x < count; ++x) {
          const In* const from = a + (p.trans_a ? i + x : (i + x) * p.lda);
          for (std::int64_t l = 0; l < p.k; ++l) to[l * count + x] = converted<E>(from[p.trans_a ? l * p.lda : l]);
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
#endif

#include "plait/core/macros_on.hpp"
