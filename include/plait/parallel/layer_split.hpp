// The split of a model's layers into stages of balanced costs. The rank of a stage is not decided here, but by the
// schedule's shape: schedule/schedule.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"

namespace plait {

/// The part of a model that one pipeline stage holds: consecutive layers; the first stage has the embedding in front
/// of them, the last one the final norm, the output projection and the loss behind them.
struct stage_layers {
  std::int64_t begin = 0, end = 0;
  bool first = true, last = true;

  std::int64_t size() const { return end - begin; }
  friend bool operator==(const stage_layers&, const stage_layers&) = default;
};

/// The costs that stages are balanced by, in any unit: those of the layers, and of what the first and the last stage
/// have beside them.
struct stage_costs {
  std::vector<double> layers;
  double embedding = 0;
  double head = 0;
};

/// Shares out all layers over `stages` stages, each of which gets at least one: so that the most expensive stage costs
/// as little as possible, and beyond that as evenly as possible (least sum of squares; early stages get more where that
/// is all the same). Throws where there are fewer layers than stages.
std::vector<stage_layers> split_layers(const stage_costs& costs, std::int64_t stages);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/parallel/layer_split.ipp"  // IWYU pragma: keep
#endif
