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

namespace plait::kernels {

/// *out = the sum of n elements.
template <class S>
void sum(cpu&, const S* x, std::int64_t n, double* out) {
  *out = simd::sum_of<S>(
      n, [](simd::pack<S> v) { return v; }, x);
}

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
