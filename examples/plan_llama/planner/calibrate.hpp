// Fits the description of a machine to measurements of products, attention, memory-bound kernels and collectives. These
// become the numbers that the planner's formulas need. plan_llama --calibrate makes the measurements.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../../median.hpp"
#include "plait/core/collective.hpp"
#include "plait/core/error.hpp"
#include "plait/plan/machine_time.hpp"
#include "plan_llama/planner/hardware_json.hpp"
#include "plan_llama/planner/pipeline_time.hpp"

namespace plait::planner {

/// A product of m x k and k x n, and its seconds. `adds`: it adds to its result.
struct measured_product {
  number_kind kind = number_kind::f32;
  double m = 0, n = 0, k = 0, seconds = 0;
  bool adds = false;
};

/// Passes of fused causal attention over `seq` positions: the operations of visible pairs, and their seconds.
struct measured_attention {
  double operations = 0, seconds = 0;
  double seq = 0;
};

/// Activations: their number of values, including gates, and their seconds. Backward, each value counts twice.
struct measured_activation {
  double values = 0, seconds = 0;
};

/// Kernels: the bytes that they read and write, their number, and their seconds.
struct measured_kernel {
  double bytes = 0, seconds = 0, launches = 1;
};

/// A collective of `ranks`, with `bytes` as `collective_seconds` counts them; `collective::send` is a message. `noise`
/// is the possible error of the measurement in seconds.
struct measured_collective {
  collective kind = collective::all_reduce;
  std::int64_t ranks = 2;
  double bytes = 0, seconds = 0, noise = 0;
};

/// A pipeline of `ranks` that share fewer cores, in the order of 1F1B with equal passes. `alone` is the time of the
/// same passes on ranks with a core each, times the ranks for each core.
struct measured_pipeline {
  std::int64_t ranks = 2, microbatches = 1;
  double seconds = 0, alone = 0;
};

/// A collective that starts before a computation and is waited for after it. The computation is shorter. `alone` and
/// `computing` are the times of each without the other.
struct measured_overlap {
  double alone = 0, computing = 0, seconds = 0;
};

/// Everything that was measured on a machine of one level.
struct measurements {
  std::string name;            ///< of the machine
  double memory = 0;           ///< bytes for each rank
  std::int64_t cores = 0;      ///< cores that the ranks share; 0: each rank has its own
  std::string link = "links";  ///< name of the links between ranks
  std::vector<measured_product> products{};
  std::vector<measured_attention> attention{};
  std::vector<measured_activation> activations{};
  std::vector<measured_kernel> kernels{};
  std::vector<measured_collective> collectives{};
  std::vector<measured_pipeline> pipelines{};  ///< empty if each rank has a core
  std::vector<measured_overlap> overlaps{};    ///< empty: nothing is assumed to be hidden
};

namespace detail {

/// Minimizes `loss` over positive parameters: multiplies each by factors that shrink, while the loss falls.
template <std::size_t N, class Loss>
std::array<double, N> descend(std::array<double, N> at, Loss&& loss) {
  double best = loss(at);
  for (double factor = 4; factor > 1.0005;) {
    bool better = false;
    for (std::size_t i = 0; i < N; ++i)
      for (const double by : {factor, 1 / factor}) {
        std::array<double, N> trial = at;
        trial[i] *= by;
        if (const double here = loss(trial); here < best - 1e-12) best = here, at = trial, better = true;
      }
    if (!better) factor = std::sqrt(factor);
  }
  return at;
}

/// Returns the distance of a prediction from a measurement, relative to the larger one. Differences below `noise` count
/// little. The function is smooth at 0, because a descent along one parameter after the other stops at edges.
inline double distance(double predicted, double measured, double noise = 0) {
  constexpr double near = 0.1;
  return std::hypot(std::log((predicted + noise) / (measured + noise)), near) - near;
}

/// Returns 0 for a fitted number that is too small to be measured.
constexpr double or_none(double value, double least) { return value < least ? 0 : value; }

/// Returns the distance of all measured products in `kind` from those that `h` predicts.
inline double products_distance(const hardware& h, const std::vector<measured_product>& points, number_kind kind) {
  double sum = 0;
  for (const measured_product& p : points)
    if (p.kind == kind) sum += distance(product_seconds(h, kind, p.m, p.n, p.k, p.adds), p.seconds);
  return sum;
}

/// Returns the rate of the fastest product in `kind`; 0: there is none.
inline double fastest(const std::vector<measured_product>& points, number_kind kind) {
  double rate = 0;
  for (const measured_product& p : points)
    if (p.kind == kind) rate = std::max(rate, 2 * p.m * p.n * p.k / p.seconds);
  return rate;
}

/// Fits products in `kind` together with kernels that move memory, because both depend on launches and the memory's
/// rate.
inline void fit_computing(hardware& h, const measurements& all, number_kind kind) {
  const auto at = static_cast<std::size_t>(kind);
  h.product_share[at] = h.memory_share = 1;  // peaks are the reached rates
  const auto put = [&](hardware& to, const std::array<double, 6>& p) {
    to.peak[at] = p[0], to.product_depth = p[1], to.product_area = p[2], to.memory_bandwidth = p[3], to.launch = p[4];
    to.adding_depth = p[5];
  };
  const auto loss = [&](const std::array<double, 6>& p) {
    hardware trial = h;
    put(trial, p);
    double sum = products_distance(trial, all.products, kind);
    for (const measured_kernel& k : all.kernels) sum += distance(memory_seconds(trial, k.bytes, k.launches), k.seconds);
    return sum;
  };
  double rate = 0;
  for (const measured_kernel& k : all.kernels) rate = std::max(rate, k.bytes / k.seconds);
  put(h, descend<6>({fastest(all.products, kind), 16, 1024, rate, 1e-6, 16}, loss));
  h.product_depth = or_none(h.product_depth, 1e-3), h.product_area = or_none(h.product_area, 1e-3);
  h.adding_depth = or_none(h.adding_depth, 1e-3);
  h.launch = or_none(h.launch, 1e-9);
}

/// Fits only the peak of products in another kind.
inline void fit_peak(hardware& h, const measurements& all, number_kind kind) {
  const auto at = static_cast<std::size_t>(kind);
  const double rate = fastest(all.products, kind);
  if (rate == 0) return;
  h.product_share[at] = 1;
  const auto found = descend<1>({rate}, [&](const std::array<double, 1>& p) {
    hardware trial = h;
    trial.peak[at] = p[0];
    return products_distance(trial, all.products, kind);
  });
  h.peak[at] = found[0];
}

/// Fits the rate of attention, and the size of the blocks that it computes whole, which matters at short sequences.
inline void fit_attention(hardware& h, const measurements& all) {
  const double peak = h.peak[0] > 0 ? h.peak[0] : h.peak_of(number_kind::bf16);
  double share = 0;
  for (const measured_attention& p : all.attention) share = std::max(share, p.operations / p.seconds / peak);
  const auto found = descend<2>({share, 32}, [&](const std::array<double, 2>& at) {
    double sum = 0;
    for (const measured_attention& p : all.attention)
      sum += distance(p.operations * (1 + at[1] / p.seq) / (peak * at[0]), p.seconds);
    return sum;
  });
  h.attention_share = std::min(1.0, found[0]);
  h.attention_block = or_none(found[1], 1e-3);
}

/// Fits the time of an activation's value as a median, if it is longer than the time of its bytes.
inline void fit_activation(hardware& h, const measurements& all) {
  std::vector<double> each;
  for (const measured_activation& p : all.activations) each.push_back(p.seconds / p.values);
  h.activation = median(std::move(each));
}

}  // namespace detail

/// Returns the predicted seconds of a measured collective. If ranks share cores, they take turns.
inline double measured_seconds(const hardware& h, const measured_collective& p) {
  const double turns = h.cores > 0 ? std::max(1.0, static_cast<double>(p.ranks) / static_cast<double>(h.cores)) : 1.0;
  if (p.kind == collective::send) return message_seconds(h, {p.ranks, 1}, p.bytes);
  return turns * collective_seconds(h, place_group(h, {p.ranks, 1}), p.kind, p.bytes);
}

namespace detail {

/// Fits the links to collectives and to messages. Each has its own latency and rate.
inline void fit_links(hardware& h, const measurements& all) {
  const auto far = [&](const hardware& trial, bool messages) {
    double sum = 0;
    for (const measured_collective& c : all.collectives)
      if ((c.kind == collective::send) == messages) sum += distance(measured_seconds(trial, c), c.seconds, c.noise);
    return sum;
  };
  network_level level;
  level.name = all.link;
  h.levels = {level};
  const auto with = [&](const std::array<double, 5>& p) {
    hardware trial = h;
    network_level& l = trial.levels[0];
    l.bandwidth = p[0], l.all_reduce_share = p[1], l.latency = p[2], l.launch = p[3], l.fill = p[4];
    return trial;
  };
  h = with(descend<5>({1e9, 1, 1e-6, 1e-6, 1e-6}, [&](const auto& p) { return far(with(p), false); }));
  const auto sending = [&](const std::array<double, 2>& p) {
    hardware trial = h;
    trial.levels[0].message_latency = p[0], trial.levels[0].message_bandwidth = p[1];
    return trial;
  };
  if (far(h, true) > 0)
    h = sending(
        descend<2>({h.levels[0].latency, h.levels[0].bandwidth}, [&](const auto& p) { return far(sending(p), true); }));
  for (double* const seconds :
       {&h.levels[0].latency, &h.levels[0].launch, &h.levels[0].fill, &h.levels[0].message_latency})
    *seconds = or_none(*seconds, 1e-9);
}

/// Fits `turn`, as a median: the seconds that pipelines on fewer cores than ranks take in addition to their work, for
/// each message that a pass waits for.
inline void fit_turn(hardware& h, const measurements& all) {
  std::vector<double> each;
  for (const measured_pipeline& p : all.pipelines) {
    training_layout l;
    l.pp = p.ranks;
    const double passes = p.alone * static_cast<double>(h.cores) / static_cast<double>(p.ranks * p.microbatches);
    const double idle = shared_cores_seconds(l, p.microbatches, h.cores, 1, passes, 0);
    each.push_back(std::max(0.0, p.seconds - p.alone - idle) / messages_in_turn(l, p.microbatches));
  }
  if (!each.empty()) h.turn = median(std::move(each));
}

/// Fits the share of a computation during which a collective is hidden, as a median. A share of a twentieth or less is
/// noise, and so is a share near 1.
inline void fit_overlap(hardware& h, const measurements& all) {
  std::vector<double> parts;
  for (const measured_overlap& p : all.overlaps)
    parts.push_back(std::clamp((p.alone + p.computing - p.seconds) / p.computing, 0.0, 0.99));
  if (!parts.empty()) h.data_hidden = or_none(median(std::move(parts)), 0.05);
}

}  // namespace detail

/// Returns the description that fits the measurements best, by relative errors. Peaks are the rates of large products,
/// so shares of products are 1. Throws `error` if a kind of measurement is missing, or if one is not a time.
inline hardware calibrated(const measurements& all) {
  const auto need = [&](const char* what, const auto& points) {
    if (points.empty()) fail({"calibration: no ", what, " was measured; legal is one or more"});
    for (const auto& p : points) {
      double least = p.seconds;
      if constexpr (requires { p.noise; }) least += p.noise;  // may be too short to measure
      if (!(least > 0 && std::isfinite(least)))
        fail({"calibration: ", what, " took ", p.seconds, " seconds; legal is a positive number"});
    }
  };
  need("product", all.products);
  need("attention", all.attention);
  need("activation", all.activations);
  need("kernel", all.kernels);
  need("collective", all.collectives);
  for (const measured_overlap& p : all.overlaps)
    if (!(p.computing > 0 && std::isfinite(p.alone + p.computing + p.seconds)))
      fail({"calibration: what a collective was started before took ", p.computing,
            " seconds; legal is a positive number"});
  hardware h;
  h.name = all.name, h.memory = all.memory, h.cores = all.cores;
  const bool floats = detail::fastest(all.products, number_kind::f32) > 0;
  detail::fit_computing(h, all, floats ? number_kind::f32 : number_kind::bf16);
  if (floats) detail::fit_peak(h, all, number_kind::bf16);

  detail::fit_attention(h, all);
  detail::fit_activation(h, all);

  detail::fit_links(h, all);
  detail::fit_turn(h, all);
  detail::fit_overlap(h, all);
  validate(h, "calibration");
  return h;
}

}  // namespace plait::planner
