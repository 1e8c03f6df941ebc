#include "attention.hpp"
#include "plait/kernels/cuda/attention_cudnn.hpp"

std::unique_ptr<plait::attention_library> bench::make_cudnn_attention(bool deterministic) {
  return std::make_unique<plait::cudnn_attention>(plait::cudnn_attention_options{.deterministic = deterministic});
}
