// program: attached_nccl
// examples/cuda_mlp, a layer of attention and MLP: on any number of ranks the parallel program trains as the plain one
// does.
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <nccl.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/typed.hpp"
#include "plait/layout/apply.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/norm.hpp"
#include "plait/tensor/nccl_attach.hpp"

// Two programs in one file: their includes are above.
#define main program
namespace plain {
#include "../../../examples/cuda_mlp/plain.cu"
}
namespace parallel {
#include "../../../examples/cuda_mlp/parallel.cu"
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

/// The losses of every rank; empty if there are too few GPUs.
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
constexpr float allowed = 1e-4f;  // cuBLAS and cuBLASLt sum in different orders
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

TEST_CASE("the gradients of the program's own attention equal finite differences") {
  constexpr int rows = 6, heads = 2, head_size = plain::head_size, n = rows * 3 * heads * head_size, outputs = n / 3;
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  {
    plain::gpu g(stream);
    float *qkv = g.room(n), *dqkv = g.room(n), *y = g.room(outputs), *dy = g.room(outputs);
    float *p = g.room(heads * rows * rows), *ds = g.room(heads * rows * rows);
    g.launch(n, plain::fill, qkv, rows, n / rows, 0, 0, 1u, 1.0f);
    g.launch(outputs, plain::fill, dy, rows, outputs / rows, 0, 0, 2u, 1.0f);
    const auto read = [&](const float* from, int count) {
      std::vector<float> out(static_cast<std::size_t>(count));
      plain::check(cudaMemcpyAsync(out.data(), from, out.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
      plain::check(cudaStreamSynchronize(stream));
      return out;
    };
    const auto weighted = [&] {  // the sum of dy y
      g.launch(rows * heads, plain::attention_forward, y, p, qkv, rows, heads);
      const std::vector<float> a = read(y, outputs), b = read(dy, outputs);
      double total = 0;
      for (std::size_t i = 0; i < a.size(); ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
      return total;
    };
    weighted();
    g.launch(rows * heads, plain::attention_backward_query, ds, dqkv, qkv, p, dy, rows, heads);
    g.launch(rows * heads, plain::attention_backward_key, dqkv, qkv, p, dy, ds, rows, heads);
    const std::vector<float> gradient = read(dqkv, n), values = read(qkv, n);
    const auto set = [&](std::size_t i, float value) {
      plain::check(cudaMemcpyAsync(qkv + i, &value, sizeof value, cudaMemcpyHostToDevice, stream));
      plain::check(cudaStreamSynchronize(stream));
    };
    double most = 0, largest = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      constexpr float step = 0.01f;
      set(i, values[i] + step);
      const double above = weighted();
      set(i, values[i] - step);
      const double below = weighted();
      set(i, values[i]);
      most = std::fmax(most,
                       std::fabs((above - below) / (2 * static_cast<double>(step)) - static_cast<double>(gradient[i])));
      largest = std::fmax(largest, std::fabs(static_cast<double>(gradient[i])));
    }
    CHECK(largest > 0.1);
    CHECK(most < 1e-3);
  }
  cudaStreamDestroy(stream);
}

TEST_CASE("the example's programs run as they are") {
  plain::program();
  parallel::program();
}
