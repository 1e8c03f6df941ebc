// The time of a collective on the levels of a network, from its bytes and from where the ranks of its group lie. What
// runs beside it is not known here.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "plait/core/collective.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/plan/hardware.hpp"

namespace plait::planner {

/// Where the ranks of a group lie: how many of them share a unit of each level of the network.
struct group_place {
  std::int64_t size = 1;                            ///< ranks of the group
  std::size_t levels = 0;                           ///< of the network
  std::array<std::int64_t, max_levels> together{};  ///< of the group in one unit of each level; the last is `size`
};

/// One axis of a group: its extent, and how many ranks lie from one coordinate to the next.
struct axis_place {
  std::int64_t extent = 1, stride = 1;
};

/// The place of the group of one axis or two. Extents that do not divide a unit count as if they were spread over the
/// fewest units.
inline group_place place_group(const hardware& h, axis_place a, axis_place b = {}) {
  group_place g;
  g.size = a.extent * b.extent;
  g.levels = h.levels.size();  // `validate` has counted them
  const auto within = [](axis_place axis, std::int64_t unit) {
    return std::clamp<std::int64_t>(unit / axis.stride, 1, axis.extent);
  };
  for (std::size_t i = 0; i < g.levels; ++i) {
    const std::int64_t unit = h.levels[i].ranks;
    g.together[i] = unit == 0 ? g.size : within(a, unit) * within(b, unit);
  }
  return g;
}

/// How many accelerators use a link at once: all that have it together, which do the same at the same time.
inline double sharing(const network_level& level) { return static_cast<double>(level.shared_by); }

/// Seconds of one collective of a group. `bytes` are those of the whole array: what each rank holds after an
/// all-gather, before a reduce-scatter, before and after an all-reduce, and sends in an all-to-all.
///
/// A ring moves bytes (n-1)/n through every link (twice for an all-reduce), and where c of the group's ranks share a
/// unit, they have c links out of it (NCCL's rings, one for each network card): the slowest level decides. Steps: n - 1
/// for a ring, of which one for each unit crosses the level; an all-reduce may be a tree, with a logarithm of steps
/// (nccl/src/graph/tuning.cc).
inline double collective_seconds(const hardware& h, const group_place& g, collective kind, double bytes) {
  if (g.size <= 1) return 0;
  const auto n = static_cast<double>(g.size);
  const bool reduces_all = kind == collective::all_reduce;
  const double rounds = reduces_all ? 2 : 1;
  double slowest = 0, ring = 0, tree = 0, launch = 0, fill = 0, inside = 1;
  for (std::size_t i = 0; i < g.levels; ++i) {
    const auto together = static_cast<double>(g.together[i]);
    if (together <= inside) continue;
    const network_level& level = h.levels[i];
    // In an all-to-all only what leaves a unit crosses its links, but one rank's own link carries all of it.
    const double crossing = kind == collective::all_to_all ? (n - inside) / n : (n - 1) / n / inside;
    const double rate = level.bandwidth * (reduces_all ? level.all_reduce_share : 1) / sharing(level);
    slowest = std::max(slowest, rounds * bytes * crossing / rate);
    ring += rounds * (n / inside - n / together) * level.latency;
    tree += rounds * std::log2(together / inside) * level.latency;
    launch = std::max(launch, level.launch);
    fill = std::max(fill, level.fill);
    inside = together;
  }
  const double steps = reduces_all ? std::min(ring, tree) : ring;
  return launch + steps + slowest + std::min(fill, slowest);
}

/// Seconds in which every rank of a group has sent its part of an array of `bytes` to all others by a broadcast of its
/// own, one after the other. Each passes every link once, and the last rank of the ring has it after as many steps as
/// there are ranks (nccl/src/graph/tuning.cc).
inline double broadcasts_seconds(const hardware& h, const group_place& g, double bytes) {
  if (g.size <= 1) return 0;
  const auto n = static_cast<double>(g.size);
  double slowest = 0, steps = 0, launch = 0, fill = 0, inside = 1;
  for (std::size_t i = 0; i < g.levels; ++i) {
    const auto together = static_cast<double>(g.together[i]);
    if (together <= inside) continue;
    const network_level& level = h.levels[i];
    slowest = std::max(slowest, bytes / n / inside * sharing(level) / level.bandwidth);
    steps += (n / inside - n / together) * level.latency;
    launch = std::max(launch, level.launch);
    fill = std::max(fill, level.fill);
    inside = together;
  }
  return n * (launch + steps + slowest + std::min(fill, slowest));
}

/// Seconds in which each rank sends tokens of `bytes` together to the ranks of `chosen` experts each, or gets them
/// back, experts being chosen evenly. An all-to-all sends a token once for each of them; where tokens go `once`, each
/// goes once into every unit that has an expert of it, and is handed on within (DeepEP).
inline double exchange_seconds(const hardware& h, const group_place& g, double bytes, double chosen, bool once) {
  if (!once) return collective_seconds(h, g, collective::all_to_all, bytes * chosen);
  const auto n = static_cast<double>(g.size);
  double slowest = 0, steps = 0, launch = 0, inside = 1;
  for (std::size_t i = 0; i < g.levels; ++i) {
    const auto together = static_cast<double>(g.together[i]);
    if (together <= inside) continue;
    const network_level& level = h.levels[i];
    const double units = n / inside, others = (units - 1) * (1 - std::pow(1 - 1 / units, chosen));
    slowest = std::max(slowest, bytes * std::min(others, chosen * (n - inside) / n) * sharing(level) / level.bandwidth);
    steps += (n / inside - n / together) * level.latency;
    launch = std::max(launch, level.launch);
    inside = together;
  }
  return launch + steps + slowest;
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
