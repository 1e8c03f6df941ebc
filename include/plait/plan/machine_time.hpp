// The times of kernels and collectives on a machine, from its description. Products depend on their shape, attention on
// its operations, and other kernels on their bytes. Collectives depend on their bytes and on the places of their ranks.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "plait/core/collective.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/counting.hpp"
#include "plait/plan/hardware.hpp"

namespace plait::planner {

/// Bytes per element of a product's operand.
constexpr double operand_bytes(number_kind kind) {
  return kind == number_kind::f32 ? 4 : kind == number_kind::bf16 ? 2 : 1;
}

/// Seconds of a dense product of m x k and k x n. The share of the peak falls if k is short, because the start and end
/// of a tile cost as much as `product_depth` steps. They cost more if the product adds to its result, as for weight
/// gradients. The share also falls if the result has too few tiles for all cores. The time is at least that of moving
/// the operands and the result through memory.
inline double product_seconds(const hardware& h, number_kind kind, double m, double n, double k, bool adds = false) {
  const double depth = h.product_depth + (adds ? h.adding_depth : 0);
  const double fill = k / (k + depth) * (m * n / (m * n + h.product_area));
  const double computed = 2 * m * n * k / (h.peak_of(kind) * h.share_of(kind) * fill);
  const double moved = (operand_bytes(kind) * (m * k + k * n) + (kind == number_kind::f32 ? 4 : 2) * m * n) /
                       (h.memory_bandwidth * h.memory_share);
  return h.launch + std::max(computed, moved);
}

/// Seconds of elementwise kernels that read and write `bytes`.
inline double memory_seconds(const hardware& h, double bytes, double launches) {
  return bytes / (h.memory_bandwidth * h.memory_share) + launches * h.launch;
}

/// Seconds of an activation of `values` numbers that moves `bytes`. Backward, computing each takes twice as long.
inline double activation_seconds(const hardware& h, double bytes, double values, bool backward) {
  return std::max(memory_seconds(h, bytes, 0), (backward ? 2 : 1) * values * h.activation);
}

/// Operations per second of a fused attention kernel: a share of the bf16 peak (f32: of its own peak).
inline double attention_rate(const hardware& h, number_kind products) {
  return h.peak_of(products == number_kind::f32 ? products : number_kind::bf16) * h.attention_share;
}

/// Seconds of computation, by kind of work.
struct computed_seconds {
  double products = 0, attention = 0, memory = 0;

  constexpr double total() const { return products + attention + memory; }
  friend constexpr computed_seconds operator-(const computed_seconds& a, const computed_seconds& b) {
    return {a.products - b.products, a.attention - b.attention, a.memory - b.memory};
  }
  constexpr computed_seconds& operator+=(const computed_seconds& b) {
    products += b.products, attention += b.attention, memory += b.memory;
    return *this;
  }
  friend constexpr computed_seconds operator*(double factor, const computed_seconds& a) {
    return {factor * a.products, factor * a.attention, factor * a.memory};
  }
};

/// Sums the seconds of the work that is issued to a `counting_device` (`counting_device::report_to`). The hardware must
/// outlive it.
class work_clock final : public work_meter {
 public:
  explicit work_clock(const hardware& h) : h_(h) {}

  const computed_seconds& now() const { return seconds_; }

  /// Throws if the hardware has no peak for this number type.
  void product(dtype of, double m, double n, double k, bool adds) override {
    const number_kind kind = kind_of(of);
    if (h_.peak_of(kind) == 0)
      fail({"hardware ", h_.name, " has no products in ", name_of(kind), ", in which the program multiplies"});
    seconds_.products += product_seconds(h_, kind, m, n, k, adds);
  }
  void attention(dtype of, double operations, std::int64_t keys, bool forward) override {
    // A causal kernel computes half of a square, and whole blocks on the diagonal.
    const double blocks = 1 + h_.attention_block / static_cast<double>(std::max<std::int64_t>(keys, 1));
    seconds_.attention += operations * blocks / attention_rate(h_, kind_of(of)) + (forward ? 1 : 2) * h_.launch;
  }
  void moved(double bytes) override { seconds_.memory += memory_seconds(h_, bytes, 1); }
  void kernel(dtype of, double operations, double bytes) override {
    const double moved = memory_seconds(h_, bytes, 1);
    const double peak = operations > 0 ? h_.peak_of(kind_of(of)) : 1;
    if (peak == 0)
      fail({"hardware ", h_.name, " has no products in ", name_of(kind_of(of)), ", in which a kernel_cost counts"});
    seconds_.memory += std::max(moved, operations / peak + h_.launch);
  }
  void activation(double bytes, double values, bool backward) override {
    seconds_.memory += activation_seconds(h_, bytes, values, backward) + h_.launch;
  }

 private:
  static number_kind kind_of(dtype of) {
    if (of == dtype::f32) return number_kind::f32;
    if (of == dtype::bf16) return number_kind::bf16;
    fail({"the planner prices products of float and bf16, and the program multiplies in ", name_of(of)});
  }

  const hardware& h_;
  computed_seconds seconds_;
};

// Collectives and messages on the levels of a network.

/// The place of a group's ranks: how many of them share a unit of each level of the network.
struct group_place {
  std::int64_t size = 1;                            ///< number of ranks
  std::size_t levels = 0;                           ///< of the network
  std::array<std::int64_t, max_levels> together{};  ///< ranks of the group in one unit of each level; the last is
                                                    ///< `size`
};

/// One axis of a group: its extent, and the distance in ranks between adjacent coordinates.
struct axis_place {
  std::int64_t extent = 1, stride = 1;
};

/// Returns the place of a group along one axis or two. Extents that do not divide a unit count as spread over the
/// fewest units.
inline group_place place_group(const hardware& h, axis_place a, axis_place b = {}) {
  group_place g;
  g.size = a.extent * b.extent;
  g.levels = h.levels.size();  // at most `max_levels`
  const auto within = [](axis_place axis, std::int64_t unit) {
    return std::clamp<std::int64_t>(unit / axis.stride, 1, axis.extent);
  };
  for (std::size_t i = 0; i < g.levels; ++i) {
    const std::int64_t unit = h.levels[i].ranks;
    g.together[i] = unit == 0 ? g.size : within(a, unit) * within(b, unit);
  }
  return g;
}

/// The number of accelerators that use a link at once: all that share it, since they communicate at the same time.
inline double sharing(const network_level& level) { return static_cast<double>(level.shared_by); }

/// Calls f(level, inside, together) for each level of the network that a group crosses, from the inside to the outside.
/// `inside` ranks of the group share a unit of the previous level, and `together` ranks one of this level.
template <class F>
void each_crossed_level(const hardware& h, const group_place& g, F&& f) {
  double inside = 1;
  for (std::size_t i = 0; i < g.levels; ++i) {
    const auto together = static_cast<double>(g.together[i]);
    if (together <= inside) continue;
    f(h.levels[i], inside, together);
    inside = together;
  }
}

/// Seconds common to all crossed levels: the latest launch, and the fill and the bytes of the slowest level.
struct crossing_seconds {
  double launch = 0, fill = 0, slowest = 0;

  void add(const network_level& level, double bytes_seconds) {
    launch = std::max(launch, level.launch);
    fill = std::max(fill, level.fill);
    slowest = std::max(slowest, bytes_seconds);
  }
};

/// Seconds of one collective of a group. `bytes` is the size of the whole array. This is the array after an all-gather,
/// before a reduce-scatter, in an all-reduce, or the array that each rank sends in an all-to-all.
///
/// A ring moves bytes (n-1)/n through every link, and an all-reduce twice as many. If c ranks of the group share a
/// unit, they have c links out of it (NCCL's rings, one per network card). The slowest level determines the time. A
/// ring has n - 1 steps, and one of them per unit crosses the level. An all-reduce may use a tree, with logarithmically
/// many steps (nccl/src/graph/tuning.cc).
inline double collective_seconds(const hardware& h, const group_place& g, collective kind, double bytes) {
  if (g.size <= 1) return 0;
  const auto n = static_cast<double>(g.size);
  const bool reduces_all = kind == collective::all_reduce;
  const double rounds = reduces_all ? 2 : 1;
  double ring = 0, tree = 0;
  crossing_seconds all;
  each_crossed_level(h, g, [&](const network_level& level, double inside, double together) {
    // In an all-to-all only data for other units crosses a unit's links, but each rank's own link carries all of it.
    const double crossing = kind == collective::all_to_all ? (n - inside) / n : (n - 1) / n / inside;
    const double rate = level.bandwidth * (reduces_all ? level.all_reduce_share : 1) / sharing(level);
    all.add(level, rounds * bytes * crossing / rate);
    ring += rounds * (n / inside - n / together) * level.latency;
    tree += rounds * std::log2(together / inside) * level.latency;
  });
  const double steps = reduces_all ? std::min(ring, tree) : ring;
  return all.launch + steps + all.slowest + std::min(all.fill, all.slowest);
}

/// Seconds of a message of `bytes` from one rank to the next along an axis.
inline double message_seconds(const hardware& h, axis_place axis, double bytes) {
  if (axis.extent <= 1) return 0;
  for (std::size_t i = 0; i < h.levels.size(); ++i) {
    const network_level& level = h.levels[i];
    if (level.ranks == 0 || axis.stride < level.ranks)
      return (level.message_latency > 0 ? level.message_latency : level.latency) +
             bytes * sharing(level) / (level.message_bandwidth > 0 ? level.message_bandwidth : level.bandwidth);
  }
  return 0;
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
