#include "attention_reference.hpp"

#include "plait/kernels/cpu/attention.hpp"

namespace plait::test {

attention_arrays attention_on_cpu(const attention_piece& piece, const std::vector<double>& q,
                                  const std::vector<double>& k, const std::vector<double>& v,
                                  const std::vector<double>& d_o, const attention_arrays& start) {
  cpu device;
  const kernels::attention_shape s = piece.shape.checked();
  attention_arrays made = start;
  const double *const q_at = q.data() + piece.q_lead * s.q_stride, *const k_at = k.data() + piece.k_lead * s.k_stride;
  const double *const v_at = v.data() + piece.k_lead * s.v_stride, *const d_o_at =
                                                                       d_o.data() + piece.q_lead * s.do_stride;
  double *const o_at = made.o.data() + piece.q_lead * s.o_stride, *const lse_at = made.lse.data() + piece.lse_lead;
  kernels::attention_forward(device, q_at, k_at, v_at, o_at, lse_at, s);
  kernels::attention_backward(device, q_at, k_at, v_at, o_at, lse_at, d_o_at,
                              made.dq.data() + piece.q_lead * s.dq_stride, made.dk.data() + piece.k_lead * s.dk_stride,
                              made.dv.data() + piece.k_lead * s.dv_stride, s, piece.accumulate);
  return made;
}

}  // namespace plait::test
