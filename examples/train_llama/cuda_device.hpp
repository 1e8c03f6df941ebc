#pragma once

#include <memory>
#include <utility>

#include "plait/device/cuda.hpp"
#include "start_cuda.hpp"

bool has_nccl();

/// Returns how many GPUs this process sees, and makes a context on none. Throws where there is none.
int count_gpus();
/// Throws where GPU `index` of them cannot be used, or lacks the memory for `bytes`; makes a context on it.
void check_gpu(const setup& s, int index, double bytes);

/// A rank's GPU as the options ask for it.
inline plait::cuda::options device_options(const setup& s, int index) {
  return {.device = index, .tf32 = s.opt.tf32, .offload_optimizer = offloads(s.opt)};
}

/// cuDNN's attention for a rank's GPU, if it is built and may be used; else null.
std::unique_ptr<plait::attention_library> attention_library_for(const options& opt);

/// A rank's training, on a device of its own.
inline void run_on_gpu(const setup& s, plait::cuda& device, plait::any_communicator ranks, const rank_body& body) {
  using plait::attention_backend;
  device.expect_bytes(s.expected_bytes);
  const std::unique_ptr<plait::attention_library> library = attention_library_for(s.opt);
  device.use_attention({s.opt.attention_kernel == "own"     ? attention_backend::own
                        : s.opt.attention_kernel == "cudnn" ? attention_backend::cudnn
                                                            : attention_backend::automatic,
                        library.get()});
  const make_run<plait::cuda> make = has_bf16_gradients(s.opt) ? cuda_bf16_gradients(s.opt)
                                     : in_bf16(s.opt)          ? cuda_bf16(s.opt)
                                                               : cuda_float(s.opt);
  const std::unique_ptr<model_run> run = make(s, device, std::move(ranks));
  body(*run);
}
