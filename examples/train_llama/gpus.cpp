// Starts the ranks of a run on GPUs. Throws if this program was built without CUDA, NCCL or cuDNN.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plan.hpp"
#include "run.hpp"

#ifdef PLAIT_TRAINER_CUDA
#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#ifdef PLAIT_WITH_CUDNN
#include "plait/kernels/cuda/attention_cudnn.hpp"
#endif
#ifdef PLAIT_WITH_NCCL
#include "plait/comm/launch/nccl.hpp"
#ifdef PLAIT_WITH_MPI
#include "plait/comm/launch/nccl_mpi.hpp"
#endif
#endif

namespace {

#ifdef PLAIT_WITH_NCCL
constexpr bool has_nccl = true;
#else
constexpr bool has_nccl = false;
#endif

/// Returns the number of GPUs that this process sees, without making a context. Throws if there is none.
int count_gpus() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  reject("--device cuda: there is no CUDA device here ({})", std::string(cudaGetErrorString(status)));
}

/// Makes a context on GPU `index`. Throws if the GPU cannot be used, or lacks the memory for `bytes`.
void check_gpu(const setup& s, int index, double bytes) {
  std::string fault;
  try {
    const plait::cuda device({.device = index, .workspace_bytes = 0});
    std::size_t free = 0, total = 0;
    plait::detail::cuda_check(cudaMemGetInfo(&free, &total), "asking for the device's memory");
    fault = memory_fault(s, bytes, static_cast<double>(free), "the memory of GPU " + std::to_string(index));
  } catch (const plait::error& e) {
    const std::string why = e.what();
    reject("--device cuda: {}", why.starts_with("cuda: ") ? why.substr(6) : why);
  }
  if (!fault.empty()) plait::fail(fault);
}

/// Returns the device options of a rank's GPU.
plait::cuda::options device_options(const setup& s, int index) {
  return {.device = index, .tf32 = s.opt.tf32, .offload_optimizer = offloads_optimizer(s.opt)};
}

/// Returns cuDNN's attention for a rank's GPU; null if it was not built or the options exclude it.
std::unique_ptr<plait::attention_library> attention_library_for([[maybe_unused]] const options& opt) {
#ifdef PLAIT_WITH_CUDNN
  if (opt.attention_kernel != "own" && in_bf16(opt))
    return std::make_unique<plait::cudnn_attention>(
        plait::cudnn_attention_options{.deterministic = opt.attention_sums == "fixed"});
#endif
  return nullptr;
}

/// Runs a rank's training on its own device.
void run_on_gpu(const setup& s, plait::cuda& device, plait::any_communicator ranks, const rank_body& body) {
  using plait::attention_backend;
  device.expect_bytes(static_cast<std::size_t>(fullest_plan(s).bytes()));
  const std::unique_ptr<plait::attention_library> library = attention_library_for(s.opt);
  device.use_attention({s.opt.attention_kernel == "own"     ? attention_backend::own
                        : s.opt.attention_kernel == "cudnn" ? attention_backend::cudnn
                                                            : attention_backend::automatic,
                        library.get()});
  const std::unique_ptr<model_run> run = cuda_program(s.opt)(s, device, std::move(ranks));
  body(*run);
}

}  // namespace

bool has_cudnn() {
#ifdef PLAIT_WITH_CUDNN
  return true;
#else
  return false;
#endif
}

void check_built(const options& opt) {
  if (opt.device != "cuda") return;
  if (opt.backend == "nccl" && !has_nccl)
    plait::fail(
        "--backend nccl: this program was built without NCCL; build it where CMake finds NCCL, in a CUDA toolkit or in "
        "Python wheels (-DPLAIT_CUDA_WHEELS=FOLDER); --backend threads is legal here");
  const bool for_cudnn = opt.attention_kernel == "cudnn" || opt.attention_sums == "any";
  if (for_cudnn && !has_cudnn())
    reject(
        "{}: this program was built without cuDNN; build it where CMake finds cuDNN 9 and its frontend "
        "(-DPLAIT_CUDNN_FRONTEND_INCLUDE_DIR=FOLDER); --attention-kernel auto and own with --attention-sums fixed are "
        "legal here",
        opt.attention_kernel == "cudnn" ? std::string("--attention-kernel cudnn") : "--attention-sums any");
}

void start_on_one_gpu(const setup& s, const rank_body& body) {
  check_gpu(s, 0, least_bytes_of_all(s).gpu);
  plait::threads::run(static_cast<int>(s.mesh.size()), device_options(s, 0),
                      [&](plait::threads::communicator ranks, plait::cuda& device) {
                        run_on_gpu(s, device, plait::any_communicator(std::move(ranks)), body);
                      });
}

#ifdef PLAIT_WITH_NCCL
namespace {

/// Returns the index of a rank's GPU among those that this process sees. A launcher may show each process only its own.
/// NCCL refuses a GPU that another rank uses. The process must not look at other GPUs: a context takes half a GB there,
/// and fails if another process uses the GPU exclusively.
int gpu_of(const setup& s, std::int64_t rank, int local_rank) {
  const int index = local_rank % count_gpus();
  check_gpu(s, index, least_bytes_of(s, rank).gpu);
  return index;
}

plait::nccl::options nccl_options(const setup& s) { return {.deadline = s.opt.deadline}; }

}  // namespace

void start_on_all_gpus(const setup& s, const rank_body& body) {
  std::vector<int> devices;
  const int count = count_gpus();
  if (s.mesh.size() > count)
    reject(
        "--mesh {} has {} ranks, but --backend nccl was started as one process, which sees {}{}; start it by torchrun, "
        "srun or mpirun on several machines, or let ranks share a GPU by --backend threads",
        s.opt.mesh, s.mesh.size(), count, count == 1 ? " GPU" : " GPUs");
  check_gpu(s, 0, least_bytes_of(s, 0).gpu);
  for (int i = 0; i < s.mesh.size(); ++i) devices.push_back(i);
  plait::nccl::run(devices, device_options(s, 0), nccl_options(s),
                   [&](plait::nccl::communicator ranks, plait::cuda& device) {
                     run_on_gpu(s, device, plait::any_communicator(std::move(ranks)), body);
                   });
}

void start_launched(const setup& s, const rank_body& body) {
  const plait::nccl::launch_place place = plait::nccl::place_from_environment();
  plait::cuda device(device_options(s, gpu_of(s, place.rank, place.local_rank)));
  plait::any_communicator ranks(plait::nccl::from_environment(device, nccl_options(s)));
  plait::require_agreement(device, ranks, agreed_settings(s));
  run_on_gpu(s, device, std::move(ranks), body);
}

#ifdef PLAIT_WITH_MPI
void start_by_mpi(const setup& s, plait::mpi::communicator& ranks, const rank_body& body) {
  plait::cuda device(device_options(s, gpu_of(s, ranks.rank(), plait::nccl::local_rank(ranks))));
  run_on_gpu(s, device, plait::nccl::from_mpi(ranks, device, nccl_options(s)), body);
}
#endif
#endif
#else
bool has_cudnn() { return false; }

void check_built(const options& opt) {
  if (opt.device != "cuda") return;
#if defined(PLAIT_TRAINER_PRECISIONS) || defined(PLAIT_TRAINER_STRATEGIES)
  plait::fail(
      "--device cuda: this program was built for the CPU alone, as examples/run.sh does; build it with "
      "-DPLAIT_TRAINER_PRECISIONS=all -DPLAIT_TRAINER_STRATEGIES=all");
#endif
  plait::fail(
      "--device cuda: this program was built without CUDA; build it where CMake finds nvcc and cuBLASLt "
      "(-DPLAIT_CUDA=ON, -DPLAIT_CUDA_ROOT=FOLDER for a toolkit in another place), or use --device cpu");
}

void start_on_one_gpu(const setup& s, const rank_body&) { check_built(s.opt); }
#endif

#ifndef PLAIT_WITH_NCCL
void start_on_all_gpus(const setup& s, const rank_body&) { check_built(s.opt); }
void start_launched(const setup& s, const rank_body&) { check_built(s.opt); }
void start_by_mpi(const setup& s, plait::mpi::communicator&, const rank_body&) { check_built(s.opt); }
#endif
