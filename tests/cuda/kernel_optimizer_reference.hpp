#pragma once

#include <cstdint>
#include <vector>

#include "plait/kernels/adamw_settings.hpp"
#include "plait/kernels/elements.hpp"

namespace plait::test {

/// One tensor's numbers between steps.
struct adamw_numbers {
  std::vector<double> master, m, v;
};

/// The processor's step.
void adamw_on_cpu(adamw_numbers& tensor, const std::vector<double>& gradient, double weight_decay,
                  const kernels::adamw_settings& settings, const kernels::adamw_scalars& scalars);

/// What the processor clips with.
kernels::clip_numbers clip_on_cpu(double squares, double limit);

}  // namespace plait::test
