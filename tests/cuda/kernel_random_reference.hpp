#pragma once

#include <cstdint>
#include <vector>

#include "plait/core/box.hpp"

namespace plait::test {

/// What the processor's kernels make of one part of a tensor, in double.
struct random_part {
  std::vector<double> normal, uniform, dropped;
};
random_part random_on_cpu(const box& part, std::uint64_t seed, std::uint64_t stream, const std::vector<double>& x,
                          double p);

}  // namespace plait::test
