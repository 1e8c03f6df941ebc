#pragma once

#include "plait/kernels/cuda/kernels.hpp"

namespace plait::test {

/// An attention library like cuDNN: bf16 inputs and outputs, rows of lse without gaps, causal masks whose queries and
/// keys start or end together, and gradients that are overwritten. It computes with plait's kernels, reports calls that
/// it does not support as errors, and counts its calls.
class rounding_library final : public attention_library {
 public:
  int forwards = 0, backwards = 0;

  bool supports(const kernels::attention_shape& shape, dtype type) override {
    const kernels::attention_shape s = shape.checked();
    const bool sees_all = s.visible(0) == s.k_len;
    const bool ends_together = s.q_offset + s.q_len == s.k_offset + s.k_len && s.q_len <= s.k_len;
    return type == dtype::bf16 && s.q_len > 0 && s.k_len > 0 && s.first_visible == nullptr &&
           !s.mask.needs_positions() && s.lse_stride == s.q_len &&
           (sees_all || s.q_offset == s.k_offset || ends_together);
  }
  void forward(cuda& device, const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse,
               const kernels::attention_shape& shape) override {
    require(supports(shape, dtype::bf16), "rounding_library: forward of a shape that it does not support");
    kernels::attention_forward(device, q, k, v, o, lse, shape, {attention_backend::own, nullptr});
    ++forwards;
  }
  void backward(cuda& device, const bf16* q, const bf16* k, const bf16* v, const bf16* o, const float* lse,
                const bf16* d_o, bf16* dq, bf16* dk, bf16* dv, const kernels::attention_shape& shape) override {
    require(supports(shape, dtype::bf16), "rounding_library: backward of a shape that it does not support");
    kernels::attention_backward(device, q, k, v, o, lse, d_o, dq, dk, dv, shape, {}, nullptr,
                                {attention_backend::own, nullptr});
    ++backwards;
  }
};

}  // namespace plait::test
