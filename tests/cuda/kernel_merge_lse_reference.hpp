#pragma once

#include <cstdint>
#include <vector>

#include "plait/kernels/settings.hpp"

namespace plait::test {

/// The processor's `merge_lse`, in double.
void merge_on_cpu(std::vector<double>& o, std::vector<double>& lse, const std::vector<double>& o_other,
                  const std::vector<double>& lse_other, std::int64_t other_stride,
                  const kernels::attention_shape& shape);

}  // namespace plait::test
