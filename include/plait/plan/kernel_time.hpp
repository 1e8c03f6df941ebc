// The time of kernels on one accelerator: products by their shape, attention by its operations, and what only moves
// memory by its bytes. Communication is in plan/network_time.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plait/core/macros_off.hpp"
#include "plait/plan/hardware.hpp"

namespace plait::planner {

/// Bytes of an operand of a product.
constexpr double operand_bytes(number_kind kind) {
  return kind == number_kind::f32 ? 4 : kind == number_kind::bf16 ? 2 : 1;
}

/// Seconds of a dense product of m x k and k x n. The share of the peak falls where k is short, because a tile's start
/// and end cost as much as so many steps, more where it adds to a result that was there, as weight gradients do; and
/// where the result has few tiles for all cores; below that is the time in which the operands and the result pass
/// memory.
inline double product_seconds(const hardware& h, number_kind kind, double m, double n, double k, bool adds = false) {
  const double depth = h.product_depth + (adds ? h.adding_depth : 0);
  const double fill = k / (k + depth) * (m * n / (m * n + h.product_area));
  const double computed = 2 * m * n * k / (h.peak_of(kind) * h.share_of(kind) * fill);
  const double moved = (operand_bytes(kind) * (m * k + k * n) + (kind == number_kind::f32 ? 4 : 2) * m * n) /
                       (h.memory_bandwidth * h.memory_share);
  return h.launch + std::max(computed, moved);
}

/// Seconds of elementwise kernels that read and write so many bytes.
inline double memory_seconds(const hardware& h, double bytes, double launches) {
  return bytes / (h.memory_bandwidth * h.memory_share) + launches * h.launch;
}

/// Seconds of an activation of so many values, which passes `bytes`; backward, each takes twice as long to compute.
inline double activation_seconds(const hardware& h, double bytes, double values, bool backward) {
  return std::max(memory_seconds(h, bytes, 0), (backward ? 2 : 1) * values * h.activation);
}

/// Operations per second of a fused attention kernel: a share of the bf16 peak (f32: of its own peak).
inline double attention_rate(const hardware& h, number_kind products) {
  return h.peak_of(products == number_kind::f32 ? products : number_kind::bf16) * h.attention_share;
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
