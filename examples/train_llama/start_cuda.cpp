#include <cstddef>
#include <string>
#include <utility>

#include "check_memory.hpp"
#include "cuda_device.hpp"
#include "plait/comm/threads/cuda.hpp"

void check_built(const options& opt) {
  if (opt.device != "cuda") return;
  if (opt.backend == "nccl" && !has_nccl())
    plait::fail(
        "--backend nccl: this program was built without NCCL; build it where CMake finds NCCL, in a CUDA toolkit or in "
        "Python wheels (-DPLAIT_CUDA_WHEELS=FOLDER); --backend threads is legal here");
  const bool for_cudnn = opt.attention_kernel == "cudnn" || opt.attention_sums == "any";
  if (for_cudnn && !has_cudnn())
    plait::fail((opt.attention_kernel == "cudnn" ? std::string("--attention-kernel cudnn") : "--attention-sums any") +
                ": this program was built without cuDNN; build it where CMake finds cuDNN 9 and its "
                "frontend (-DPLAIT_CUDNN_FRONTEND_INCLUDE_DIR=FOLDER); --attention-kernel auto and own with "
                "--attention-sums fixed are legal here");
}

int count_gpus() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  plait::fail("--device cuda: there is no CUDA device here (" + std::string(cudaGetErrorString(status)) + ")");
}

void check_gpu(const setup& s, int index, double bytes) {
  std::string fault;
  try {
    const plait::cuda device({.device = index, .workspace_bytes = 0});
    std::size_t free = 0, total = 0;
    plait::detail::cuda_check(cudaMemGetInfo(&free, &total), "asking for the device's memory");
    fault = memory_fault(s, bytes, static_cast<double>(free), "the memory of GPU " + std::to_string(index));
  } catch (const plait::error& e) {
    const std::string why = e.what();
    plait::fail("--device cuda: " + (why.starts_with("cuda: ") ? why.substr(6) : why));
  }
  if (!fault.empty()) plait::fail(fault);
}

void start_on_one_gpu(const setup& s, const rank_body& body) {
  check_gpu(s, 0, least_bytes_of_all(s).gpu);
  plait::threads::run(static_cast<int>(s.mesh.size()), device_options(s, 0),
                      [&](plait::threads::communicator ranks, plait::cuda& device) {
                        run_on_gpu(s, device, plait::any_communicator(std::move(ranks)), body);
                      });
}
