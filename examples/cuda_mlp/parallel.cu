// plain.cu on every GPU of the machine: tensor-parallel products and a sequence-parallel norm, on the program's own
// memory, streams and NCCL communicators.
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "plait/interop/nccl_attach.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"

namespace pl = plait;
using pl::seq, pl::hidden, pl::ffn, pl::tp;

namespace {

constexpr int tokens = 64, width = 32, inner = 96, steps = 20;
constexpr float rate = 2.0f;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}
void check(ncclResult_t status) {
  if (status != ncclSuccess) throw std::runtime_error(std::string("NCCL: ") + ncclGetErrorString(status));
}

// ---- layouts -------------------------------------------------------------------------------------------------------

using mesh = pl::mesh<pl::axis<tp>>;
using some_tokens = pl::spec<pl::shard<seq, tp>, hidden>;  // on each rank, all features of them
using some_features = pl::spec<seq, pl::shard<ffn, tp>>;   // of all tokens
struct up_layout {
  using input = some_tokens;
  using weight = pl::spec<pl::shard<ffn, tp>, hidden>;
  using output = some_features;
};
struct down_layout {
  using input = some_features;
  using weight = pl::spec<hidden, pl::shard<ffn, tp>>;
  using output = some_tokens;
};

// ---- kernels -------------------------------------------------------------------------------------------------------

__device__ int place() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

/// A number in [-scale, scale) for each place of a matrix, of which `out` is the part that begins at (row, column).
__global__ void fill(float* out, int rows, int columns, int row, int column, unsigned seed, float scale) {
  const int i = place();
  if (i >= rows * columns) return;
  unsigned x = seed * 0x9e3779b9u + static_cast<unsigned>(row + i / columns) * 65537u +
               static_cast<unsigned>(column + i % columns) * 257u;
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  out[i] = (static_cast<float>(x >> 8) / 8388608.0f - 1.0f) * scale;
}
__global__ void fill_ones(float* out, int n) {
  if (place() < n) out[place()] = 1.0f;
}

__global__ void relu_forward(const float* x, float* y, int n) {
  if (place() < n) y[place()] = x[place()] > 0 ? x[place()] : 0.0f;
}
__global__ void relu_backward(const float* y, const float* dy, float* dx, int n) {
  if (place() < n) dx[place()] = y[place()] > 0 ? dy[place()] : 0.0f;
}

/// The task is to move each row's features one place on. squares = (z - target)^2 / count, dz = its gradient.
__global__ void distance(const float* x, const float* z, float* squares, float* dz, int rows, int columns,
                         float count) {
  const int i = place();
  if (i >= rows * columns) return;
  const float error = z[i] - x[i - i % columns + (i + 1) % columns];
  squares[i] = error * error / count;
  dz[i] = 2 * error / count;
}
/// One block.
__global__ void sum(const float* values, float* total, int n) {
  __shared__ float parts[256];
  float mine = 0;
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(n); i += 256) mine += values[i];
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = 128; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *total = parts[0];
}

__global__ void descend(float* weight, const float* gradient, int n) {
  if (place() < n) weight[place()] -= rate * gradient[place()];
}

// ---- one GPU -------------------------------------------------------------------------------------------------------

/// The program's memory and stream.
struct gpu {
  cudaStream_t stream;
  std::vector<float*> rooms;

  explicit gpu(cudaStream_t on) : stream(on) {}
  ~gpu() {
    for (float* room : rooms) cudaFree(room);
  }
  float* room(int n) {
    rooms.push_back(nullptr);
    check(cudaMalloc(reinterpret_cast<void**>(&rooms.back()), static_cast<std::size_t>(n) * sizeof(float)));
    return rooms.back();
  }

  /// What kernel<<<blocks, 256, 0, stream>>>(arguments...) does, with threads for `n` things.
  template <class... Parameters, class... Arguments>
  void launch(int n, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(n + 255) / 256);
    config.blockDim = dim3(256);
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, arguments...));
  }
};

/// The losses of all steps.
std::vector<float> train(ncclComm_t comm, cudaStream_t stream) {
  auto here = pl::attach<mesh>(comm, stream, pl::sizes_of<seq, hidden, ffn>(tokens, width, inner));
  const int ranks = static_cast<int>(here.ranks().size()), rank = static_cast<int>(here.ranks().rank());
  const int my_tokens = tokens / ranks, my_inner = inner / ranks;
  gpu g(stream);
  float *weight = g.room(width), *dweight = g.room(width);
  float *up = g.room(my_inner * width), *dup = g.room(my_inner * width);
  float *down = g.room(width * my_inner), *ddown = g.room(width * my_inner);
  float *x = g.room(my_tokens * width), *normed = g.room(my_tokens * width), *dnormed = g.room(my_tokens * width);
  float *wide = g.room(tokens * my_inner), *active = g.room(tokens * my_inner), *dactive = g.room(tokens * my_inner);
  float *z = g.room(my_tokens * width), *dz = g.room(my_tokens * width), *squares = g.room(my_tokens * width);
  float* loss = g.room(1);
  g.launch(width, fill_ones, weight, width);
  g.launch(my_inner * width, fill, up, my_inner, width, rank * my_inner, 0, 1, 0.2f);
  g.launch(width * my_inner, fill, down, width, my_inner, 0, rank * my_inner, 2, 0.2f);

  pl::rms_norm<float, some_tokens, pl::cuda> norm(here, 1e-5, "norm", weight, dweight);
  pl::linear<float, up_layout, pl::cuda> up_layer(here, "up", {.memory = {up, dup}});
  pl::linear<float, down_layout, pl::cuda> down_layer(here, "down", {.memory = {down, ddown}});

  std::vector<float> losses;
  for (int step = 0; step < steps; ++step) {
    g.launch(my_tokens * width, fill, x, my_tokens, width, rank * my_tokens, 0, 100 + step, 1.0f);

    decltype(norm)::saved norm_saved;
    decltype(up_layer)::saved up_saved, down_saved;
    norm.forward(here, x, normed, &norm_saved);
    up_layer.forward(here, normed, wide, &up_saved);
    g.launch(tokens * my_inner, relu_forward, wide, active, tokens * my_inner);
    down_layer.forward(here, active, z, &down_saved);
    g.launch(my_tokens * width, distance, x, z, squares, dz, my_tokens, width, float{tokens * width});

    const auto clear = [&](auto& parameter) { parameter.zero_gradient(here); };
    norm.visit(clear), up_layer.visit(clear), down_layer.visit(clear);
    down_layer.backward(here, active, down_saved, dz, dactive);
    g.launch(tokens * my_inner, relu_backward, active, dactive, wide, tokens * my_inner);
    up_layer.backward(here, normed, up_saved, wide, dnormed);
    norm.backward(here, x, norm_saved, dnormed, nullptr);
    const auto reduce = [&](auto& parameter) { static_cast<void>(parameter.reduce(here)); };  // in dweight, dup, ddown
    norm.visit(reduce), up_layer.visit(reduce), down_layer.visit(reduce);

    g.launch(width, descend, weight, dweight, width);
    g.launch(my_inner * width, descend, up, dup, my_inner * width);
    g.launch(width * my_inner, descend, down, ddown, width * my_inner);

    g.launch(256, sum, squares, loss, my_tokens * width);
    check(ncclAllReduce(loss, loss, 1, ncclFloat, ncclSum, comm, stream));
    losses.push_back(0);
    check(cudaMemcpyAsync(&losses.back(), loss, sizeof(float), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
  }
  return losses;
}

}  // namespace

int main() {
  int ranks = 0;
  check(cudaGetDeviceCount(&ranks));
  ncclUniqueId id;
  check(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([=] {
      cudaStream_t stream = nullptr;
      ncclComm_t comm = nullptr;
      check(cudaSetDevice(rank));
      check(cudaStreamCreate(&stream));
      check(ncclCommInitRank(&comm, ranks, id, rank));
      const std::vector<float> losses = train(comm, stream);
      for (std::size_t i = 0; i < losses.size() && rank == 0; ++i)
        std::printf("loss %.6f\n", static_cast<double>(losses[i]));
      check(ncclCommDestroy(comm));
    });
  }
  for (std::thread& t : threads) t.join();
  return 0;
}
