#include "attention_reference.hpp"

#include "plait/kernels/cpu/attention_backward.hpp"
#include "plait/kernels/cpu/attention_forward.hpp"

namespace plait::test {

attention_arrays attention_on_cpu(const kernels::attention_shape& shape, const std::vector<double>& q,
                                  const std::vector<double>& k, const std::vector<double>& v,
                                  const std::vector<double>& d_o, const attention_arrays& start,
                                  kernels::attention_accumulate accumulate) {
  cpu device;
  attention_arrays made = start;
  kernels::attention_forward(device, q.data(), k.data(), v.data(), made.o.data(), made.lse.data(), shape);
  kernels::attention_backward(device, q.data(), k.data(), v.data(), made.o.data(), made.lse.data(), d_o.data(),
                              made.dq.data(), made.dk.data(), made.dv.data(), shape, accumulate);
  return made;
}

}  // namespace plait::test
