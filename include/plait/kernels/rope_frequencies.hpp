// The frequencies of rotary position embeddings, and the cosines and sines of positions, made on the host for every
// device. Queries and keys are rotated by kernels/cpu/elementwise.hpp and kernels/cuda/elementwise.hpp. Test:
// tests/unit/kernels/rope_embedding.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plait/core/error.hpp"

namespace plait::kernels {

/// Llama 3's stretching of the rotary frequencies ("rope_type": "llama3" in a Hugging Face config.json).
struct llama3_rope_scaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position_embeddings = 8192.0;
};

/// The head_dim / 2 inverse frequencies of rotary position embeddings (Su et al. 2021): theta^(-2i / head_dim). With
/// `scaling`, wavelengths beyond original / low_freq_factor are stretched by `factor`, those below original /
/// high_freq_factor are kept, and those between are blended, as transformers' modeling_rope_utils defines it. Throws
/// `plait::error` for an odd or non-positive head_dim, a non-positive theta or an impossible scaling.
std::vector<double> rope_inverse_frequencies(std::int64_t head_dim, double theta,
                                             const std::optional<llama3_rope_scaling>& scaling = {});

/// cosine, sine [count, frequencies]: the rotations of the given positions, in host memory. In float the angle is the
/// product of two floats, as in transformers, so that models trained there see the same rotations.
template <class T>
void rope_rotations(const std::int64_t* positions, std::int64_t count, std::span<const double> frequencies, T* cosine,
                    T* sine) {
  const auto width = static_cast<std::int64_t>(frequencies.size());
  for (std::int64_t p = 0; p < count; ++p) {
    for (std::int64_t i = 0; i < width; ++i) {
      const T angle = static_cast<T>(positions[p]) * static_cast<T>(frequencies[static_cast<std::size_t>(i)]);
      cosine[p * width + i] = static_cast<T>(std::cos(static_cast<double>(angle)));
      sine[p * width + i] = static_cast<T>(std::sin(static_cast<double>(angle)));
    }
  }
}

}  // namespace plait::kernels

#ifndef PLAIT_COMPILED
#include "plait/kernels/rope_frequencies.ipp"  // IWYU pragma: keep
#endif
