// In place of the files for GPUs, in a program without them.
#include "plait/core/error.hpp"
#include "start_cuda.hpp"

void check_built(const options& opt) {
  if (opt.device != "cuda") return;
#ifdef PLAIT_TRAINER_PRECISIONS
  plait::fail(
      "--device cuda: this program was built for the CPU alone, as examples/run.sh does; build it with "
      "-DPLAIT_TRAINER_PRECISIONS=all");
#endif
  plait::fail(
      "--device cuda: this program was built without CUDA; build it where CMake finds nvcc and cuBLASLt "
      "(-DPLAIT_CUDA=ON, -DPLAIT_CUDA_ROOT=FOLDER for a toolkit in another place), or use --device cpu");
}

bool has_cudnn() { return false; }

void start_on_one_gpu(const setup& s, const rank_body&) { check_built(s.opt); }
void start_on_all_gpus(const setup& s, const rank_body&) { check_built(s.opt); }
void start_launched(const setup& s, const rank_body&) { check_built(s.opt); }
void start_by_mpi(const setup& s, plait::mpi::communicator&, const rank_body&) { check_built(s.opt); }
