// The definitions of layer_split.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

PLAIT_INLINE std::vector<stage_layers> split_layers(const stage_costs& costs, std::int64_t stages) {
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

#include "plait/core/macros_on.hpp"
