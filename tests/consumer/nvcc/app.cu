// A program with its own kernels and arrays, compiled by nvcc only. It runs a norm and a column-parallel linear of
// plait on its __nv_bfloat16 arrays, on the one GPU of its communicator. Without a GPU it prints that; the test then
// shows that the program links.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdio>
#include <exception>

#include "plait/cuda.hpp"
#include "plait/tensor/nccl_attach.hpp"

namespace pl = plait;

namespace {

using rows = pl::spec<pl::shard<pl::seq, pl::tp>, pl::hidden>;
using wide = pl::spec<pl::seq, pl::shard<pl::ffn, pl::tp>>;
constexpr int tokens = 64, width = 64, inner = 128;

__global__ void fill(__nv_bfloat16* out, int n, float value) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] = __float2bfloat16(value);
}

__nv_bfloat16* filled(int n, float value) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<std::size_t>(n) * sizeof(__nv_bfloat16)) != cudaSuccess) return nullptr;
  fill<<<static_cast<unsigned>(n + 255) / 256, 256>>>(static_cast<__nv_bfloat16*>(memory), n, value);
  return static_cast<__nv_bfloat16*>(memory);
}

void forward(ncclComm_t comm, cudaStream_t stream) {
  auto here = pl::attach<pl::mesh<pl::axis<pl::tp>>>(comm, stream,
                                                     pl::sizes_of<pl::seq, pl::hidden, pl::ffn>(tokens, width, inner));
  pl::rms_norm<pl::bf16, rows, pl::cuda> norm(
      here, 1e-5, "norm", {.weight = filled(width, 1.0f), .gradient = pl::own_memory, .master = pl::own_memory});
  pl::linear<pl::bf16, pl::layer_policy<rows, pl::spec<pl::shard<pl::ffn, pl::tp>, pl::hidden>, wide>, pl::cuda> up(
      here, "up",
      {.memory = {.weight = filled(inner * width, 0.5f), .gradient = pl::own_memory, .master = pl::own_memory}});
  pl::gather_parameters(here.context(), norm, up);
  const pl::part<__nv_bfloat16, rows> x(here, filled(tokens * width, 1.0f)), y(here, filled(tokens * width, 0.0f));
  const pl::part<__nv_bfloat16, wide> z(here, filled(tokens * inner, 0.0f));
  norm.forward(here, x, y);
  up.forward(here, y, z);
  here.device().synchronize();
}

}  // namespace

int main() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return std::puts("no GPU"), 0;
  try {
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;
    if (ncclGetUniqueId(&id) != ncclSuccess || ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess ||
        cudaStreamCreate(&stream) != cudaSuccess)
      return std::puts("no communicator"), 1;
    forward(comm, stream);
    std::puts("computed");
    return 0;
  } catch (const std::exception& e) {
    return std::fprintf(stderr, "%s\n", e.what()), 1;
  }
}
