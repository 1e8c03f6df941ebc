// The split of a model's layers into stages of balanced costs. The rank of a stage is not decided here, but by the
// schedule's shape: schedule/pipeline_shape.hpp. Next: models/llama_stages.hpp for costs.
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
inline std::vector<stage_layers> split_layers(const stage_costs& costs, std::int64_t stages) {
  const auto layers = static_cast<std::int64_t>(costs.layers.size());
  if (stages < 1) fail({"pipeline: ", stages, " stages, must be at least 1"});
  if (stages > layers)
    fail({"pipeline: ", layers, " layers for ", stages,
          " stages (pp times the chunks of a rank), and each needs at least one: use at most ", layers,
          " stages, or a model of more layers"});
  std::vector<double> before(static_cast<std::size_t>(layers + 1), 0.0);
  for (std::size_t i = 0; i < costs.layers.size(); ++i) before[i + 1] = before[i] + costs.layers[i];
  const auto cost = [&](std::int64_t begin, std::int64_t end, std::int64_t stage) {
    return before[static_cast<std::size_t>(end)] - before[static_cast<std::size_t>(begin)] +
           (stage == 0 ? costs.embedding : 0) + (stage == stages - 1 ? costs.head : 0);
  };
  // Two tables over (stage, first layer), filled from the back: the least possible maximum, then, with that as a limit,
  // the least sum of squares.
  constexpr double never = std::numeric_limits<double>::infinity();
  const auto width = static_cast<std::size_t>(layers + 1);
  using table = std::vector<double>;
  const auto at = [&](auto& values, std::int64_t stage, std::int64_t from) -> auto& {
    return values[static_cast<std::size_t>(stage) * width + static_cast<std::size_t>(from)];
  };
  const auto solve = [&](auto&& join) {
    table best(static_cast<std::size_t>(stages + 1) * width, never);
    at(best, stages, layers) = 0;
    for (std::int64_t s = stages; s-- > 0;)
      for (std::int64_t from = s; from < layers; ++from)
        for (std::int64_t to = from + 1; to <= layers - (stages - 1 - s); ++to)
          at(best, s, from) = std::min(at(best, s, from), join(cost(from, to, s), at(best, s + 1, to)));
    return best;
  };
  constexpr double slack = 1 + 1e-12;  // sums of the same costs in another order
  const table most = solve([](double c, double rest) { return std::max(c, rest); });
  const double limit = at(most, 0, 0) * slack;
  const auto even = [&](double c, double rest) { return c <= limit ? c * c + rest : never; };
  const table squares = solve(even);
  std::vector<stage_layers> parts;
  std::int64_t from = 0;
  for (std::int64_t s = 0; s < stages; ++s) {
    std::int64_t to = layers - (stages - 1 - s);
    while (even(cost(from, to, s), at(squares, s + 1, to)) > at(squares, s, from) * slack) --to;
    parts.push_back({from, to, s == 0, s == stages - 1});
    from = to;
  }
  return parts;
}

}  // namespace plait
