// examples/cuda_mlp: the parallel program trains as the plain one does, on any number of ranks.
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <nccl.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "plait/interop/nccl_attach.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"

// Two programs in one: all that they include stands above.
#define main program
namespace plain {
#include "../../examples/cuda_mlp/plain.cu"
}
namespace parallel {
#include "../../examples/cuda_mlp/parallel.cu"
}
#undef main

namespace {

std::vector<float> train_plain() {
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  std::vector<float> losses = plain::train(stream);
  cudaStreamDestroy(stream);
  return losses;
}

/// Of every rank; empty where there are too few GPUs.
std::vector<std::vector<float>> train_parallel(int ranks) {
  int there = 0;
  if (cudaGetDeviceCount(&there) != cudaSuccess) return {};
#ifndef PLAIT_CUDA_STAND_IN
  if (there < ranks) return {};
#endif
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  std::vector<std::vector<float>> losses(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      cudaStream_t stream = nullptr;
      ncclComm_t comm = nullptr;
      parallel::check(cudaSetDevice(rank % there));
      parallel::check(cudaStreamCreate(&stream));
      parallel::check(ncclCommInitRank(&comm, ranks, id, rank));
      losses[static_cast<std::size_t>(rank)] = parallel::train(comm, stream);
      parallel::check(ncclCommDestroy(comm));
      cudaStreamDestroy(stream);
    });
  }
  for (std::thread& t : threads) t.join();
  return losses;
}

#ifdef PLAIT_CUDA_STAND_IN
constexpr float allowed = 1e-5f;
#else
constexpr float allowed = 1e-4f;  // cuBLAS and cuBLASLt sum in orders of their own
#endif

}  // namespace

TEST_CASE("the example's two programs have the same losses") {
  const std::vector<float> expected = train_plain();
  REQUIRE(expected.size() == 20);
  CHECK(expected.back() < 0.3f * expected.front());
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    for (const std::vector<float>& losses : train_parallel(ranks)) {
      REQUIRE(losses.size() == expected.size());
      float most = 0;
      for (std::size_t i = 0; i < losses.size(); ++i)
        most = std::fmax(most, std::fabs(losses[i] - expected[i]) / expected[i]);
      CHECK(most < allowed);
    }
  }
}

TEST_CASE("the example's programs run as they are") {
  plain::program();
  parallel::program();
}
