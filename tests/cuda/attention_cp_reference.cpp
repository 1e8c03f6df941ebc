#include "attention_cp_reference.hpp"

#include <cmath>

#include "plait/kernels/cpu/attention.hpp"

namespace plait::test {

context_arrays context_on_cpu(const context_sizes& sizes, const std::vector<double>& q, const std::vector<double>& k,
                              const std::vector<double>& v, const std::vector<double>& d_o,
                              const std::vector<std::int32_t>& first_visible) {
  cpu device;
  kernels::attention_shape s;
  s.q_len = s.k_len = sizes.seq;
  s.heads = sizes.heads, s.kv_heads = sizes.kv_heads, s.head_dim = sizes.head_dim,
  s.mask = plait::kernels::attention_mask::window_or_causal(sizes.window);
  s.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  if (!first_visible.empty()) s.first_visible = first_visible.data();
  context_arrays made{std::vector<double>(q.size()), std::vector<double>(q.size()), std::vector<double>(k.size()),
                      std::vector<double>(v.size())};
  std::vector<double> lse(static_cast<std::size_t>(s.heads * s.q_len));
  kernels::attention_forward(device, q.data(), k.data(), v.data(), made.o.data(), lse.data(), s);
  kernels::attention_backward(device, q.data(), k.data(), v.data(), made.o.data(), lse.data(), d_o.data(),
                              made.dq.data(), made.dk.data(), made.dv.data(), s);
  return made;
}

}  // namespace plait::test
