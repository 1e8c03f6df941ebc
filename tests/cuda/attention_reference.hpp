#pragma once

#include <vector>

#include "plait/kernels/attention_shape.hpp"

namespace plait::test {

/// What attention makes, in double: arrays of tokens with the strides of the shape, lse [batch, heads, q_len].
struct attention_arrays {
  std::vector<double> o, lse, dq, dk, dv;
};

/// The processor's attention and its gradients. `start` holds what dq, dk and dv hold before.
attention_arrays attention_on_cpu(const kernels::attention_shape& shape, const std::vector<double>& q,
                                  const std::vector<double>& k, const std::vector<double>& v,
                                  const std::vector<double>& d_o, const attention_arrays& start,
                                  kernels::attention_accumulate accumulate);

}  // namespace plait::test
