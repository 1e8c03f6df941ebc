// The numbers and arrays of a step of AdamW and of Muon, as the kernels of all devices take them. The kernels are in
// kernels/cpu/optimizer.hpp and kernels/cuda/optimizer.hpp, the optimizers in parallel/optim/.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/kernels/moments.hpp"

namespace plait::kernels {

/// The settings of AdamW that stay the same over all steps (Loshchilov and Hutter 2019).
struct adamw_settings {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
};

/// The numbers of one step. They lie in the device's memory, so that a norm which was computed there can set
/// `gradient_scale` without a synchronisation.
struct adamw_scalars {
  double learning_rate = 1e-3;
  double correction1 = 1.0;     ///< 1 - beta1^step, the bias of the first average
  double correction2 = 1.0;     ///< 1 - beta2^step, the bias of the second
  double gradient_scale = 1.0;  ///< multiplies the gradient first (clipping)
  double update = 1.0;          ///< 0: the step is skipped, and nothing changes
  std::uint64_t rounding = 0;   ///< the seed of what is rounded stochastically
};

/// The numbers of step `step`, counted from 1. Throws `plait::error` for step < 1.
inline adamw_scalars adamw_scalars_of(const adamw_settings& settings, double learning_rate, std::int64_t step,
                                      double gradient_scale = 1.0, std::uint64_t seed = 0) {
  if (step < 1) fail({"adamw: step = ", step, ", must be at least 1"});
  const auto power = static_cast<double>(step);
  return {learning_rate,
          1.0 - std::pow(settings.beta1, power),
          1.0 - std::pow(settings.beta2, power),
          gradient_scale,
          1.0,
          rounding_seed_of(seed, static_cast<std::uint64_t>(step))};
}

/// One tensor that a step updates: `size` elements of each array. M is the type of the numbers that are kept, G that of
/// the gradient, W that of the weight which the layers read.
template <class M, class G, class W>
struct adamw_tensor {
  M* master = nullptr;
  const G* gradient = nullptr;
  M* m = nullptr;       ///< the first average
  M* v = nullptr;       ///< the second average
  W* weight = nullptr;  ///< receives the new value rounded to W; may be null
  std::int64_t size = 0;
  double weight_decay = 0.0;
};

/// As `adamw_tensor`, with moments kept as S, which may be bf16, or std::uint8_t for codes in blocks
/// (kernels/moments.hpp); those, and values that are kept in bf16, are rounded stochastically.
template <class M, class G, class W, class S>
struct adamw_rounded_tensor {
  M* master = nullptr;
  const G* gradient = nullptr;
  S* m = nullptr;
  S* v = nullptr;
  std::uint8_t* m_scales = nullptr;  ///< of codes: one for each block that the elements touch
  std::uint8_t* v_scales = nullptr;
  W* weight = nullptr;
  std::int64_t size = 0;
  std::int64_t begin = 0;  ///< the place of the first element in its block
  double weight_decay = 0.0;
  rounded_elements elements{};
};

// Muon takes the numbers of a step of AdamW, which updates the other tensors.

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

/// As `muon_momentum_tensor`, with momenta in bf16: they are rounded stochastically, because rounding
/// to the nearest of numbers in steps of 1/256 would lose small gradients.
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
  double scale = 1.0;         ///< of the direction, times the learning rate
  double weight_decay = 0.0;  ///< times the learning rate
};

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
