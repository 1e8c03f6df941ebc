// The gradients of a step that are reduced so far, by unit: what a step hands to the norm and to an optimizer.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/data_parallel/units.hpp"

namespace plait {

template <class Precision, compute_device Device>
struct reduced_units {
  using units_type = parameter_units<Precision, Device>;

  typename units_type::gradients all;
  std::map<int, std::pair<std::size_t, std::size_t>> ranges;  ///< of each unit in `all`: where it begins, and how many

  /// Waits for the reduction of a unit, unless that is done.
  void finish(const context<Device>& ctx, units_type& units, int unit) {
    if (ranges.contains(unit)) return;
    const std::size_t begin = all.size();
    units.finish_reduction(ctx, unit, all);
    ranges[unit] = {begin, all.size() - begin};
  }
  std::span<reduced_gradient<Precision, Device>> of(int unit) {
    const auto [begin, count] = ranges.at(unit);
    return std::span(all).subspan(begin, count);
  }
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
