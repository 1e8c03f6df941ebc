// How far arrays differ, for tests of kernels and of models.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace plait::testing {

/// |a - b| / |b| in the Euclidean norm; |a| where b is zero.
inline double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  const double d = std::sqrt(difference);
  return std::isfinite(d) ? (size > 0 ? d / std::sqrt(size) : d) : INFINITY;
}

}  // namespace plait::testing
