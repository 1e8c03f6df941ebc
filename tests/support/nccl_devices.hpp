#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <vector>

namespace plait::test {

/// A GPU for each of `ranks` NCCL ranks; empty if there are too few. Ranks of the stand-in share its GPUs, unless
/// PLAIT_TEST_ONE_GPU is set.
inline std::vector<int> devices(int ranks) {
  std::vector<int> out;
#ifdef PLAIT_CUDA_STAND_IN
  if (ranks > 1 && std::getenv("PLAIT_TEST_ONE_GPU") != nullptr) return out;
  for (int r = 0; r < ranks; ++r) out.push_back(r % stand_in::device_count());
#else
  int there = 0;
  if (cudaGetDeviceCount(&there) != cudaSuccess || there < ranks) return out;
  for (int r = 0; r < ranks; ++r) out.push_back(r);
#endif
  return out;
}

}  // namespace plait::test
