#include "kernel_merge_lse_reference.hpp"

#include "plait/kernels/cpu/attention.hpp"

namespace plait::test {

void merge_on_cpu(std::vector<double>& o, std::vector<double>& lse, const std::vector<double>& o_other,
                  const std::vector<double>& lse_other, std::int64_t other_stride,
                  const kernels::attention_shape& shape) {
  cpu device;
  kernels::merge_lse(device, o.data(), lse.data(), o_other.data(), lse_other.data(), other_stride, shape);
}

}  // namespace plait::test
