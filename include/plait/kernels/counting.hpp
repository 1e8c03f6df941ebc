// Every kernel for the device that computes nothing. Those that are most of a step's time say what they would do, in
// kernels/counting_work.hpp; the others, here, do nothing. A kernel that is missing in both does not compile in a dry
// run.
#pragma once

#include "plait/kernels/counting_work.hpp"  // IWYU pragma: export

namespace plait::kernels {

template <class... Arguments>
void add_exact_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void attention_delta(counting_device&, const Arguments&...) {}
template <class... Arguments>
void clip(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_2d(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_3d(counting_device&, const Arguments&...) {}
template <class... Arguments>
void copy_box(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_loss(counting_device&, const Arguments&...) {}
template <class... Arguments>
void cross_entropy_rescale(counting_device&, const Arguments&...) {}
template <class... Arguments>
void digest(counting_device&, const Arguments&...) {}
template <class... Arguments>
void divide_by_norm(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_from(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_normal(counting_device&, const Arguments&...) {}
template <class... Arguments>
void fill_uniform(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_backward_dots(counting_device&, const Arguments&...) {}
template <class... Arguments>
void layer_norm_statistics(counting_device&, const Arguments&...) {}
template <class... Arguments>
void merge_lse(counting_device&, const Arguments&...) {}
template <class... Arguments>
void muon_momentum(counting_device&, const Arguments&...) {}
template <class... Arguments>
void muon_update(counting_device&, const Arguments&...) {}
template <class... Arguments>
void reciprocal(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_inverse(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_apply(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dot(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dweight(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rms_norm_backward_dx(counting_device&, const Arguments&...) {}
template <class... Arguments>
void rope_table(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_centred_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_sum_squares(counting_device&, const Arguments&...) {}
template <class... Arguments>
void row_sums(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum_of_bins(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum_of_multiples(counting_device&, const Arguments&...) {}
template <class... Arguments>
void sum(counting_device&, const Arguments&...) {}

}  // namespace plait::kernels
