// The arrays of a step of Muon, as the kernels of all devices take them. The kernels are kernels/cpu/optimizer.hpp and
// kernels/cuda/muon.hpp; the numbers of a step are those of AdamW (kernels/adamw_settings.hpp), which runs beside it.
#pragma once

#include <cstdint>

#include "plait/core/dtype.hpp"
#include "plait/kernels/stochastic_rounding.hpp"

namespace plait::kernels {

/// The settings of Muon's momentum, which stay the same over all steps (Jordan et al. 2024).
struct muon_settings {
  double momentum = 0.95;
  bool nesterov = true;
};

/// One tensor, or a piece of one, whose momentum a step updates: `size` elements of each array. G and M are the same
/// type, or G is bf16 where M is float.
template <class M, class G>
struct muon_momentum_tensor {
  const G* gradient = nullptr;
  M* momentum = nullptr;
  M* direction = nullptr;  ///< receives what is made orthogonal next
  std::int64_t size = 0;
};

/// As `muon_momentum_tensor`, with momenta in bf16: they are rounded stochastically, because the nearest of numbers
/// that are 1/256 apart would forget small gradients for ever.
template <class M, class G>
struct muon_rounded_tensor {
  const G* gradient = nullptr;
  bf16* momentum = nullptr;
  M* direction = nullptr;
  std::int64_t size = 0;
  rounded_elements elements{};
};

/// One tensor, or a piece of one, whose values a step updates: `size` elements of each array.
template <class M, class W>
struct muon_tensor {
  M* master = nullptr;
  const M* direction = nullptr;
  W* weight = nullptr;  ///< receives the new value rounded to W; may be null
  std::int64_t size = 0;
  double scale = 1.0;         ///< of the direction, beside the learning rate
  double weight_decay = 0.0;  ///< likewise
};

}  // namespace plait::kernels
