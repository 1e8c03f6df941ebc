#pragma once

#include <cstdint>
#include <vector>

namespace plait::test {

/// Sizes of one causal attention; arrays are [seq, heads, head_dim], one sequence.
struct context_sizes {
  std::int64_t seq = 128, heads = 4, kv_heads = 2, head_dim = 16, window = 0;
};

/// Output and gradients in original order.
struct context_arrays {
  std::vector<double> o, dq, dk, dv;
};

/// The processor's, in double, on one rank. `first_visible` may be empty.
context_arrays context_on_cpu(const context_sizes& sizes, const std::vector<double>& q, const std::vector<double>& k,
                              const std::vector<double>& v, const std::vector<double>& d_o,
                              const std::vector<std::int32_t>& first_visible);

}  // namespace plait::test
