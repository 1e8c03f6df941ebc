// Every kernel for the device that computes nothing: a call does nothing, or counts its operations. A kernel that is
// missing here does not compile in a dry run. Next: device/counting.hpp, plan/dry_run.hpp.
#pragma once

#include "plait/device/counting.hpp"
#include "plait/kernels/attention_shape.hpp"

namespace plait::kernels {

template <class... Arguments>
void accumulate(counting_device&, const Arguments&...) {}
template <class... Arguments>
void adamw_update(counting_device&, const Arguments&...) {}
template <class... Arguments>
void add(counting_device&, const Arguments&...) {}
template <class... Arguments>
void add_bias(counting_device&, const Arguments&...) {}
template <class... Arguments>
void add_bins(counting_device&, const Arguments&...) {}
template <class... Arguments>
void add_exact_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void add_sum_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void attention_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void attention_delta(counting_device&, const Arguments&...) {}
template <class... Arguments>
void attention_forward(counting_device&, const Arguments&...) {}
/// Two products of which causal attention needs half.
template <class T, class O, class S>
void attention_forward(counting_device& device, const T*, const T*, const T*, O*, S*, const attention_shape& s) {
  const double pairs = static_cast<double>(s.q_len) * static_cast<double>(s.k_len) * (s.causal ? 0.5 : 1);
  device.count_operations(4 * static_cast<double>(s.batch * s.heads * s.head_dim) * pairs);
}
template <class... Arguments>
void axpy(counting_device&, const Arguments&...) {}
template <class... Arguments>
void bias_gradient(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cast(counting_device&, const Arguments&...) {}
template <class... Arguments>
void clip(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_2d(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_3d(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_box(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_local_statistics(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_loss(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_max(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_rescale(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_statistics(counting_device&, const Arguments&...) {}
template <class... Arguments>
void divide_by_norm(counting_device&, const Arguments&...) {}
template <class... Arguments>
void dropout_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void dropout_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void embedding_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void embedding_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_from(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_normal(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_uniform(counting_device&, const Arguments&...) {}
template <class... Arguments>
void gelu_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void gelu_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void gelu_tanh_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void gelu_tanh_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_apply(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_backward_dots(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_backward_dweight(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_backward_dx(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_statistics(counting_device&, const Arguments&...) {}
template <class... Arguments>
void merge_lse(counting_device&, const Arguments&...) {}
template <class... Arguments>
void muon_momentum(counting_device&, const Arguments&...) {}
template <class... Arguments>
void muon_update(counting_device&, const Arguments&...) {}
template <class... Arguments>
void multiply(counting_device&, const Arguments&...) {}
template <class... Arguments>
void reciprocal(counting_device&, const Arguments&...) {}
template <class... Arguments>
void relu_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void relu_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_apply(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_inverse(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_apply(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dot(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dweight(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dx(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rope_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rope_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rope_table(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_centred_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_sum_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_sums(counting_device&, const Arguments&...) {}
template <class... Arguments>
void scale(counting_device&, const Arguments&...) {}
template <class... Arguments>
void silu_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void silu_forward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum_of_bins(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum_of_multiples(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum(counting_device&, const Arguments&...) {}
template <class... Arguments>
void swiglu_backward(counting_device&, const Arguments&...) {}
template <class... Arguments>
void swiglu_forward(counting_device&, const Arguments&...) {}

}  // namespace plait::kernels
