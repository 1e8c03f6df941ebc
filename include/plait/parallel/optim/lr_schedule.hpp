// The learning rate of every step: warm-up, then decay. Pass it to an optimizer's `begin_step`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// The shape of the learning rate's decay after warm-up.
enum class lr_decay { constant, linear, cosine };

constexpr const char* name_of(lr_decay decay) {
  constexpr const char* names[] = {"constant", "linear", "cosine"};
  return names[static_cast<std::size_t>(decay)];
}

/// Returns the decay with this name. Otherwise throws `error` with `field` and the legal names.
inline lr_decay lr_decay_from(std::string_view name, const std::string& field = "decay") {
  for (auto decay : {lr_decay::constant, lr_decay::linear, lr_decay::cosine}) {
    if (name == name_of(decay)) return decay;
  }
  fail({field, ": unknown schedule '", name, "'; legal are constant, linear, cosine"});
}

struct lr_schedule_config {
  double peak = 1e-3;
  std::int64_t steps = 1;         ///< of the whole training
  std::int64_t warmup_steps = 0;  ///< at most `steps`
  double min_ratio = 0.1;         ///< last step's rate over `peak`, in [0, 1]; unused by a constant schedule
  lr_decay decay = lr_decay::cosine;
  std::string peak_field = "peak";
  std::string steps_field = "steps";
  std::string warmup_field = "warmup_steps";
  std::string min_ratio_field = "min_ratio";
};

/// The learning rate of each optimizer step, as a function of the step alone, with w warm-up steps of n and floor m.
/// Step s < w has the rate peak (s + 1) / w, so step 0 changes weights and step w - 1 has the peak. Then t = (s + 1 -
/// w) / (n - w) rises to 1 at the last step. The rate is peak (m + (1 - m) d(t)). d is 1 (constant), 1 - t (linear) or
/// (1 + cos(pi t)) / 2 (cosine). Later steps keep the last rate.
class lr_schedule {
 public:
  /// Throws `error` with the name of a field that is out of range.
  explicit lr_schedule(lr_schedule_config config) : config_(std::move(config)) {
    const auto& c = config_;
    if (!(c.peak > 0 && std::isfinite(c.peak))) {
      fail({c.peak_field, ": ", c.peak, " is not a learning rate; legal is a positive number"});
    }
    if (c.steps < 1) fail({c.steps_field, ": ", c.steps, " steps; at least 1 is legal"});
    if (c.warmup_steps < 0 || c.warmup_steps > c.steps) {
      fail(
          {c.warmup_field, ": ", c.warmup_steps, " warm-up steps; legal are 0 to ", c.steps, " (", c.steps_field, ")"});
    }
    if (!(c.min_ratio >= 0 && c.min_ratio <= 1)) {
      fail({c.min_ratio_field, ": ", c.min_ratio, " of the peak; legal is 0 to 1"});
    }
  }

  /// The rate of step `step`, counted from 0.
  double at(std::int64_t step) const {
    const auto& c = config_;
    if (step < 0) fail({"learning-rate schedule: step ", step, "; steps count from 0"});
    if (step < c.warmup_steps) return c.peak * static_cast<double>(step + 1) / static_cast<double>(c.warmup_steps);
    if (c.decay == lr_decay::constant) return c.peak;
    const std::int64_t length = std::max<std::int64_t>(1, c.steps - c.warmup_steps);
    const double t = std::min(1.0, static_cast<double>(step + 1 - c.warmup_steps) / static_cast<double>(length));
    const double d = c.decay == lr_decay::linear ? 1 - t : (1 + std::cos(std::numbers::pi * t)) / 2;
    return c.peak * (c.min_ratio + (1 - c.min_ratio) * d);
  }

  const lr_schedule_config& config() const { return config_; }

 private:
  lr_schedule_config config_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
