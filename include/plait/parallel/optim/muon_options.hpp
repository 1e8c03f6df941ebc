// The policy of Muon: its options, which parameters it takes, and how far a matrix moves.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/optim/newton_schulz.hpp"

namespace plait {

/// The factor of a matrix' update, beside the learning rate; named as by torch.optim.Muon.
enum class muon_scale : std::uint8_t {
  original,         ///< max(1, rows / columns)^0.5 (Jordan et al. 2024)
  match_rms_adamw,  ///< 0.2 max(rows, columns)^0.5, the size of AdamW's updates (Liu et al. 2025, arXiv 2502.16982)
};

struct muon_options {
  double momentum = 0.95;
  bool nesterov = true;
  muon_scale scale = muon_scale::match_rms_adamw;
  double learning_rate_ratio = 1.0;  ///< the learning rate of hidden matrices over that of a step, which AdamW has
  double weight_decay = 0.1;         ///< on hidden matrices that decay
  newton_schulz_options newton_schulz{};
  adamw_options adamw{};  ///< for every other parameter; its `moments` are the form of Muon's momentum as well
};

/// Throws unless the options are legal.
inline void check(const muon_options& o) {
  if (!(o.momentum >= 0 && o.momentum < 1)) fail({"muon: momentum = ", o.momentum, ", must be at least 0 and below 1"});
  if (!(o.learning_rate_ratio > 0 && std::isfinite(o.learning_rate_ratio)))
    fail({"muon: learning_rate_ratio = ", o.learning_rate_ratio, ", must be positive and finite"});
  if (!(o.weight_decay >= 0)) fail({"muon: weight_decay = ", o.weight_decay, ", must be at least 0"});
  if (o.scale != muon_scale::original && o.scale != muon_scale::match_rms_adamw)
    fail({"muon: scale = ", static_cast<int>(o.scale), ", must be original or match_rms_adamw"});
  if (o.newton_schulz.steps < 1) fail({"muon: newton_schulz.steps = ", o.newton_schulz.steps, ", must be at least 1"});
  if (!(o.newton_schulz.epsilon > 0))
    fail({"muon: newton_schulz.epsilon = ", o.newton_schulz.epsilon, ", must be positive"});
  if (o.adamw.moments != moment_type::full && o.adamw.moments != moment_type::bf16)
    fail({"muon: adamw.moments = ", name_of(o.adamw.moments), ", must be full or bf16, as Muon's own momentum is"});
}

/// Returns the factor of a matrix' update.
inline double scale_of(muon_scale scale, std::int64_t rows, std::int64_t columns) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  return scale == muon_scale::original ? std::sqrt(std::max(1.0, r / c)) : 0.2 * std::sqrt(std::max(r, c));
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
