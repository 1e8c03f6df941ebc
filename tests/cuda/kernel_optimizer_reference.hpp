#pragma once

#include <cstdint>
#include <vector>

#include "plait/kernels/adamw_settings.hpp"

namespace plait::test {

/// One tensor's numbers between steps.
struct adamw_numbers {
  std::vector<double> master, m, v;
};

/// The processor's step.
void adamw_on_cpu(adamw_numbers& tensor, const std::vector<double>& gradient, double weight_decay,
                  const kernels::adamw_settings& settings, const kernels::adamw_scalars& scalars);

/// sqrt(squares) and the factor that the processor clips with.
struct clipped {
  double norm, factor;
};
clipped clip_on_cpu(double squares, double limit);

}  // namespace plait::test
