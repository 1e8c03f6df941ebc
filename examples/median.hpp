#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "plait/core/error.hpp"

namespace plait {

/// Returns the median. For an even number of values it is the larger of the two in the middle. Throws `error` if there
/// are no values.
inline double median(std::vector<double> values) {
  if (values.empty()) fail("median: there are no values; legal is one or more");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace plait
