// Sums on the CPU into a number in the device's memory, and numbers that are computed from such ones: nothing here
// returns a value to the host, so that no device has to wait. Sums over ranks are collectives. Next:
// train/optim/gradient_norm.hpp for their use, tests/unit/kernels/elementwise.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/elements.hpp"
#include "plait/kernels/exact_squares.hpp"

namespace plait::kernels {

/// *out = the sum of n elements.
template <class S>
void sum(cpu&, const S* x, std::int64_t n, double* out) {
  *out = simd::sum_of<S>(
      n, [](simd::pack<S> v) { return v; }, x);
}

/// *out = the sum of n elements, each rounded to a multiple of `quantum`, a power of 2: exact while it is below 2^53
/// quanta, so that it depends on no order.
template <class S>
void sum_of_multiples(cpu&, const S* x, std::int64_t n, double quantum, double* out) {
  double total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += std::nearbyint(static_cast<double>(x[i]) / quantum) * quantum;
  *out = total;
}

/// Adds the squares of all elements of all parts to `bins`, exactly: each square, rounded to double, is added as an
/// integer to the three digits of its exponent's bin (kernels/exact_squares.hpp).
template <class G>
void add_exact_squares(cpu&, std::span<const const_elements<G>> parts, std::int64_t* bins) {
  for (const const_elements<G>& part : parts)
    for (std::int64_t i = 0; i < part.size; ++i) {
      const auto x = static_cast<double>(part.data[i]);
      exact_squares::add(bins, x * x);
    }
}
/// all += own
inline void add_bins(cpu&, const std::int64_t* own, std::int64_t* all) {
  for (int i = 0; i < exact_squares::words; ++i) all[i] += own[i];
}
/// *out = the sum that the bins are.
inline void sum_of_bins(cpu&, const std::int64_t* bins, double* out) { *out = exact_squares::total(bins); }

/// *out += the sum of the squares of all elements of all parts.
template <class G>
void add_sum_squares(cpu&, std::span<const const_elements<G>> parts, double* out) {
  for (const const_elements<G>& part : parts) {
    *out += simd::sum_of<G>(
        part.size, [](simd::pack<G> v) { return v * v; }, part.data);
  }
}

/// *y = 1 / *x where *x > 0, else 0.
inline void reciprocal(cpu&, const double* x, double* y) { *y = *x > 0 ? 1 / *x : 0.0; }

/// y[i] = *value, rounded to T.
template <class T>
void fill_from(cpu& device, T* y, std::int64_t n, const double* value) {
  fill(device, y, n, *value);
}

/// norm = sqrt(*squares), factor = what clipping to `limit` multiplies gradients with: PyTorch's clip_grad_norm_,
/// limit / (norm + 1e-6) where that is below 1 (a limit of 0 does not clip), and update = 1, or 0 where the norm is not
/// finite: then the step must be skipped, and factor is 0.
inline void clip(cpu&, const double* squares, double limit, clip_numbers* out) {
  out->norm = std::sqrt(*squares);
  const double ratio = limit / (out->norm + 1e-6);
  out->update = std::isfinite(out->norm) ? 1.0 : 0.0;
  out->factor = out->update == 0 ? 0.0 : limit > 0 && ratio < 1 ? ratio : 1.0;
}

}  // namespace plait::kernels
