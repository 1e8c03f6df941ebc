// Products on the CPU whose sums have one order, whatever the sizes and strides of the factors, for
// `cpu::options::deterministic`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

// Products on the CPU whose terms are added one after the other, whatever is cut: tiles of sums in registers, as in
// BLIS, and no sum is ever split.

/// Multiplies by fused multiply-adds, in registers of AVX2 where the processor has them, whatever the program is
/// compiled for. Keeps memory for packed copies of the factors. Used by one thread at a time.
class ordered_products {
 public:
  /// C = op(A) op(B), or, where it `adds`, C + op(A) op(B): each element's terms are added in the order of k, from
  /// zero, and their sum is added to C last. Factors in bf16 are widened, which is exact. Made for sums of up to 256
  /// terms: 16 columns of B, packed, are to stay in the first cache. `problem` has been checked.
  void run(const gemm_problem& problem, const float* a, const float* b, bool adds, float* c);
  void run(const gemm_problem& problem, const bf16* a, const bf16* b, bool adds, float* c);
  void run(const gemm_problem& problem, const double* a, const double* b, bool adds, double* c);

 private:
  std::vector<float> float_a_, float_b_;
  std::vector<double> double_a_, double_b_;
};

/// C = alpha op(A) op(B) + beta C in this order. The terms of up to 256 neighbours in k are added one after the other
/// by fused multiply-adds, from zero. Hardware adds bf16 pair by pair, the second of each first, and takes subnormal
/// numbers for zero (VDPBF16PS). Each of these sums, times alpha, is added to beta C in the order of k. So cutting rows
/// or columns changes no bit. On processors with AVX-512, oneDNN keeps to this for products of 16 rows and columns or
/// more. This is checked for every new problem, and refused where it does not hold. `ordered_products` computes all
/// others: small ones, products of double, bf16 where oneDNN uses AMX, and all on processors for which oneDNN has other
/// kernels. Those kernels add some elements of a product in one order and some in another.
class deterministic_products {
 public:
  /// The terms that are added without a break.
  static constexpr std::int64_t chunk = 256;

  /// `library` is oneDNN's products.
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
    std::vector<A>& sums = scratch<A>();
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
    for (std::int64_t s = 0; s < samples; ++s) {  // corners, then spread by the golden ratio
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

  /// A small product of bf16 as the processor's own instruction makes it.
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
  template <class A>
  std::vector<A>& scratch() {
    if constexpr (std::is_same_v<A, double>)
      return double_scratch_;
    else
      return float_scratch_;
  }

  ordered_products ordered_;
  std::vector<known> checked_;
  std::vector<float> float_scratch_, columns_;
  std::vector<double> double_scratch_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/device/deterministic_products.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
