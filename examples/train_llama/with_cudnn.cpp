// cuDNN's attention, or that there is none. PLAIT_WITH_CUDNN comes with plait::cudnn.
#include "cuda_device.hpp"
#ifdef PLAIT_WITH_CUDNN
#include "plait/kernels/cuda/attention_cudnn.hpp"
#endif

#ifdef PLAIT_WITH_CUDNN
bool has_cudnn() { return true; }

std::unique_ptr<plait::attention_library> attention_library_for(const options& opt) {
  if (opt.attention_kernel == "own" || !in_bf16(opt)) return nullptr;
  return std::make_unique<plait::cudnn_attention>(
      plait::cudnn_attention_options{.deterministic = opt.attention_sums == "fixed"});
}
#else
bool has_cudnn() { return false; }

std::unique_ptr<plait::attention_library> attention_library_for(const options&) { return nullptr; }
#endif
