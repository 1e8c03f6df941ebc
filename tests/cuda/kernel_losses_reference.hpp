#pragma once

#include <cstdint>
#include <vector>

#include "plait/kernels/settings.hpp"

namespace plait::test {

struct losses {
  std::vector<double> row_max, sum_exp, loss, dlogits;
};

/// The processor's losses of rows of `range.columns` logits, which are the whole vocabulary, and their gradients, where
/// a row's loss has the gradient scale[r].
losses losses_on_cpu(const std::vector<double>& logits, const std::vector<std::int64_t>& targets,
                     const std::vector<double>& scale, const kernels::vocabulary_range& range,
                     const kernels::cross_entropy_settings& settings);

}  // namespace plait::test
