// The definitions of rope_frequencies.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <optional>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::kernels {

PLAIT_INLINE std::vector<double> rope_inverse_frequencies(std::int64_t head_dim, double theta,
                                                          const std::optional<llama3_rope_scaling>& scaling) {
  if (head_dim <= 0 || head_dim % 2 != 0) {
    fail({"rope: head_dim = ", head_dim, ", must be positive and even"});
  }
  if (!(theta > 0)) fail({"rope: theta = ", theta, ", must be positive"});
  std::vector<double> frequencies;
  frequencies.reserve(static_cast<std::size_t>(head_dim / 2));
  for (std::int64_t i = 0; i < head_dim; i += 2) {
    frequencies.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(head_dim)));
  }
  if (!scaling) return frequencies;
  const auto& s = *scaling;
  if (!(s.factor > 0) || !(s.low_freq_factor > 0) || !(s.high_freq_factor > s.low_freq_factor) ||
      !(s.original_max_position_embeddings > 0)) {
    fail(
        "rope: llama3 scaling needs factor > 0, 0 < low_freq_factor < high_freq_factor and "
        "original_max_position_embeddings > 0");
  }
  for (double& frequency : frequencies) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength > s.original_max_position_embeddings / s.low_freq_factor) {
      frequency /= s.factor;
    } else if (wavelength >= s.original_max_position_embeddings / s.high_freq_factor) {
      const double smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) /
                            (s.high_freq_factor - s.low_freq_factor);
      frequency = (1 - smooth) * frequency / s.factor + smooth * frequency;
    }
  }
  return frequencies;
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
