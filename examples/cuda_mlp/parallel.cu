// plain.cu on every GPU of the machine: tensor-parallel products and heads, sequence-parallel norms, on the program's
// own allocator, streams and NCCL communicators.
#include <cuda_runtime.h>
#include <nccl.h>

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

namespace pl = plait;
using pl::seq, pl::hidden, pl::heads, pl::head_dim, pl::ffn, pl::tp;

namespace {

constexpr int tokens = 64, width = 32, inner = 96, head_count = 8, head_size = 4, steps = 20;
constexpr int mixed = head_count * head_size;  // the width of attention's output
constexpr float rate = 2.0f;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}
void check(ncclResult_t status) {
  if (status != ncclSuccess) throw std::runtime_error(std::string("NCCL: ") + ncclGetErrorString(status));
}

// ---- layouts -------------------------------------------------------------------------------------------------------

using mesh = pl::mesh<pl::axis<tp>>;
struct three : pl::dim_tag<"three"> {};  // query, key and value
struct keys : pl::dim_tag<"keys"> {};    // the tokens that a query sees
using my_heads = pl::shard<heads, tp>;
using my_ffn = pl::shard<ffn, tp>;
using some_tokens = pl::spec<pl::shard<seq, tp>, hidden>;  // each rank has some tokens with all features
using some_heads = pl::spec<seq, my_heads, head_dim>;      // each rank has all tokens
using some_features = pl::spec<seq, my_ffn>;               // each rank has all tokens
using projected = pl::spec<seq, three, my_heads, head_dim>;
using scores = pl::spec<my_heads, seq, keys>;
using sum_of_rank = pl::spec<pl::partial<tp>>;
constexpr auto attends = pl::rule::nonlinear.over<seq, keys, three, head_dim>();
constexpr auto attends_back = pl::rule::product.over<seq, keys, three, head_dim>();
template <class Input, class Weight, class Output>
using linear = pl::with_saved<pl::linear<float, pl::layer_policy<Input, Weight, Output>, pl::cuda>>;
using norm_layer = pl::with_saved<pl::rms_norm<float, some_tokens, pl::cuda>>;

// ---- kernels -------------------------------------------------------------------------------------------------------

__device__ int place() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

/// A number in [-scale, scale) for each place of a matrix; `out` is the part that begins at (row, column).
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

/// Causal attention of qkv [rows, 3, heads, head_size]: y [rows, heads, head_size], and for backward the probabilities
/// p [heads, rows, rows]. One thread for each query of a head.
__global__ void attention_forward(float* y, float* p, const float* qkv, int rows, int heads) {
  const int h = place() / rows, t = place() % rows, pitch = 3 * heads * head_size;
  if (h >= heads) return;
  const float *q = qkv + t * pitch + h * head_size, *k = qkv + (heads + h) * head_size, *v = k + heads * head_size;
  float *probability = p + (h * rows + t) * rows, *out = y + (t * heads + h) * head_size;
  float top = -INFINITY, total = 0;
  for (int s = 0; s <= t; ++s) {
    float dot = 0;
    for (int i = 0; i < head_size; ++i) dot += q[i] * k[s * pitch + i];
    probability[s] = dot * rsqrtf(float{head_size});
    top = fmaxf(top, probability[s]);
  }
  for (int s = 0; s <= t; ++s) total += probability[s] = expf(probability[s] - top);
  for (int i = 0; i < head_size; ++i) out[i] = 0;
  for (int s = 0; s <= t; ++s) {
    probability[s] /= total;
    for (int i = 0; i < head_size; ++i) out[i] += probability[s] * v[s * pitch + i];
  }
}
/// The gradients of scores, ds [heads, rows, rows], and of queries. One thread for each query of a head.
__global__ void attention_backward_query(float* ds, float* dqkv, const float* qkv, const float* p, const float* dy,
                                         int rows, int heads) {
  const int h = place() / rows, t = place() % rows, pitch = 3 * heads * head_size;
  if (h >= heads) return;
  const float *k = qkv + (heads + h) * head_size, *v = k + heads * head_size;
  const float *probability = p + (h * rows + t) * rows, *dout = dy + (t * heads + h) * head_size;
  float *dscore = ds + (h * rows + t) * rows, *dq = dqkv + t * pitch + h * head_size;
  float mean = 0;  // of the probabilities' gradients
  for (int s = 0; s <= t; ++s) {
    dscore[s] = 0;
    for (int i = 0; i < head_size; ++i) dscore[s] += dout[i] * v[s * pitch + i];
    mean += probability[s] * dscore[s];
  }
  for (int i = 0; i < head_size; ++i) dq[i] = 0;
  for (int s = 0; s <= t; ++s) {
    dscore[s] = probability[s] * (dscore[s] - mean) * rsqrtf(float{head_size});
    for (int i = 0; i < head_size; ++i) dq[i] += dscore[s] * k[s * pitch + i];
  }
}
/// The gradients of keys and values. One thread for each key of a head.
__global__ void attention_backward_key(float* dqkv, const float* qkv, const float* p, const float* dy, const float* ds,
                                       int rows, int heads) {
  const int h = place() / rows, s = place() % rows, pitch = 3 * heads * head_size;
  if (h >= heads) return;
  float *dk = dqkv + s * pitch + (heads + h) * head_size, *dv = dk + heads * head_size;
  for (int i = 0; i < head_size; ++i) dk[i] = dv[i] = 0;
  for (int t = s; t < rows; ++t) {
    const int at = (h * rows + t) * rows + s;
    for (int i = 0; i < head_size; ++i) {
      dk[i] += ds[at] * qkv[t * pitch + h * head_size + i];
      dv[i] += p[at] * dy[(t * heads + h) * head_size + i];
    }
  }
}

__global__ void add(float* out, const float* a, const float* b, int n) {
  if (place() < n) out[place()] = a[place()] + b[place()];
}
__global__ void relu_forward(float* y, const float* x, int n) {
  if (place() < n) y[place()] = x[place()] > 0 ? x[place()] : 0.0f;
}
__global__ void relu_backward(float* dx, const float* y, const float* dy, int n) {
  if (place() < n) dx[place()] = y[place()] > 0 ? dy[place()] : 0.0f;
}

/// The target is x with each row's features moved one place. squares = (z - target)^2 / count, dz = its gradient.
__global__ void distance(float* squares, float* dz, const float* x, const float* z, int rows, int columns,
                         float count) {
  const int i = place();
  if (i >= rows * columns) return;
  const float error = z[i] - x[i - i % columns + (i + 1) % columns];
  squares[i] = error * error / count;
  dz[i] = 2 * error / count;
}
/// Sums n values. Launched with one block.
__global__ void sum(float* total, const float* values, int n) {
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

/// The program's allocator: one block of memory, taken piece by piece, on boundaries of 256 bytes.
struct arena {
  static constexpr std::size_t bytes = std::size_t{1} << 20;
  char* block = nullptr;
  std::size_t used = 0;

  arena() { check(cudaMalloc(reinterpret_cast<void**>(&block), bytes)); }
  ~arena() { cudaFree(block); }
  float* take(int n) {
    float* const piece = reinterpret_cast<float*>(block + used);
    used += (static_cast<std::size_t>(n) * sizeof(float) + 255) / 256 * 256;
    if (used > bytes) throw std::runtime_error("the arena has " + std::to_string(bytes) + " bytes, which are too few");
    return piece;
  }
};

/// The program's memory and stream.
struct gpu {
  cudaStream_t stream;
  arena memory{};

  explicit gpu(cudaStream_t on) : stream(on) {}
  float* room(int n) { return memory.take(n); }
  /// A rank's part of an array.
  template <class Spec>
  pl::part<float, Spec> room(const pl::attached_rank& here) {
    return {here, memory.take(static_cast<int>(pl::part_of<Spec>(here).local_size()))};
  }

  /// Launches k<<<blocks, 256, 0, stream>>>(arguments...) with at least n threads.
  template <class... Parameters, class... Arguments>
  void launch(int n, void (*k)(Parameters...), Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(n + 255) / 256);
    config.blockDim = dim3(256);
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, k, arguments...));
  }
  /// The same for `pl::apply`, which has the arrays.
  template <class Kernel, class... Arguments>
  auto kernel(int n, Kernel k, Arguments... arguments) {
    return [=, this](auto*... arrays) { this->launch(n, k, arrays..., arguments...); };
  }
};

/// Returns the losses of all steps.
std::vector<float> train(ncclComm_t comm, cudaStream_t stream) {
  auto here = pl::attach<mesh>(comm, stream,
                               pl::sizes_of<seq, keys, hidden, three, heads, head_dim, ffn>(
                                   tokens, tokens, width, 3, head_count, head_size, inner));
  pl::context<pl::cuda>& ctx = here.context();
  const int ranks = static_cast<int>(ctx.ranks.size()), rank = static_cast<int>(ctx.ranks.rank());
  const int my_tokens = tokens / ranks, my_head_count = head_count / ranks, my_mixed = mixed / ranks;
  const int my_inner = inner / ranks, queries = tokens * my_head_count;
  const auto over_tp = pl::group_over<tp>(ctx.ranks);
  gpu g(stream);
  float *norm1 = g.room(width), *dnorm1 = g.room(width);
  float *qkv_weight = g.room(3 * my_mixed * width), *dqkv_weight = g.room(3 * my_mixed * width);
  float *out_weight = g.room(width * my_mixed), *dout_weight = g.room(width * my_mixed);
  float *norm2 = g.room(width), *dnorm2 = g.room(width);
  float *up = g.room(my_inner * width), *dup = g.room(my_inner * width);
  float *down = g.room(width * my_inner), *ddown = g.room(width * my_inner);
  const auto x = g.room<some_tokens>(here), normed1 = g.room<some_tokens>(here), dnormed1 = g.room<some_tokens>(here);
  const auto qkv = g.room<projected>(here), dqkv = g.room<projected>(here);
  const auto p = g.room<scores>(here), ds = g.room<scores>(here);
  const auto seen = g.room<some_heads>(here), dseen = g.room<some_heads>(here);
  const auto branch = g.room<some_tokens>(here), h = g.room<some_tokens>(here), dh = g.room<some_tokens>(here);
  const auto normed2 = g.room<some_tokens>(here), dnormed2 = g.room<some_tokens>(here);
  const auto wide = g.room<some_features>(here), active = g.room<some_features>(here);
  const auto dactive = g.room<some_features>(here), dwide = g.room<some_features>(here);
  const auto z = g.room<some_tokens>(here), dz = g.room<some_tokens>(here), squares = g.room<some_tokens>(here);
  const auto loss = g.room<sum_of_rank>(here);
  g.launch(width, fill_ones, norm1, width);
  for (int i = 0; i < 3; ++i)  // this rank's heads of query, key and value
    g.launch(my_mixed * width, fill, qkv_weight + i * my_mixed * width, my_mixed, width, i * mixed + rank * my_mixed, 0,
             1, 0.2f);
  g.launch(width * my_mixed, fill, out_weight, width, my_mixed, 0, rank * my_mixed, 2, 0.2f);
  g.launch(width, fill_ones, norm2, width);
  g.launch(my_inner * width, fill, up, my_inner, width, rank * my_inner, 0, 3, 0.2f);
  g.launch(width * my_inner, fill, down, width, my_inner, 0, rank * my_inner, 4, 0.2f);

  norm_layer norm1_layer(ctx, 1e-5, "norm1", norm1, dnorm1);
  linear<some_tokens, pl::spec<three, my_heads, head_dim, hidden>, projected> qkv_layer(
      ctx, "qkv", {.memory = {qkv_weight, dqkv_weight}});
  linear<some_heads, pl::spec<hidden, my_heads, head_dim>, some_tokens> out_layer(
      ctx, "out", {.memory = {out_weight, dout_weight}});
  norm_layer norm2_layer(ctx, 1e-5, "norm2", norm2, dnorm2);
  linear<some_tokens, pl::spec<my_ffn, hidden>, some_features> up_layer(ctx, "up", {.memory = {up, dup}});
  linear<some_features, pl::spec<hidden, my_ffn>, some_tokens> down_layer(ctx, "down", {.memory = {down, ddown}});

  std::vector<float> losses;
  for (int step = 0; step < steps; ++step) {
    g.launch(my_tokens * width, fill, x.unchecked(), my_tokens, width, rank * my_tokens, 0, 100 + step, 1.0f);

    norm1_layer.forward(ctx, x, normed1);
    qkv_layer.forward(ctx, normed1, qkv);
    pl::apply(attends, g.kernel(queries, attention_forward, tokens, my_head_count), pl::outputs(seen, p), qkv);
    out_layer.forward(ctx, seen, branch);
    pl::apply(pl::rule::sum, g.kernel(my_tokens * width, add, my_tokens * width), h, x, branch);
    norm2_layer.forward(ctx, h, normed2);
    up_layer.forward(ctx, normed2, wide);
    pl::apply(pl::rule::nonlinear, g.kernel(tokens * my_inner, relu_forward, tokens * my_inner), active, wide);
    down_layer.forward(ctx, active, z);
    pl::apply(pl::rule::nonlinear.over<hidden>(),
              g.kernel(my_tokens * width, distance, my_tokens, width, float{tokens * width}), pl::outputs(squares, dz),
              x, z);

    pl::zero_gradients(ctx, norm1_layer, qkv_layer, out_layer, norm2_layer, up_layer, down_layer);
    down_layer.backward(ctx, active, dz, dactive);
    pl::apply(pl::rule::product, g.kernel(tokens * my_inner, relu_backward, tokens * my_inner), dwide, active, dactive);
    up_layer.backward(ctx, normed2, dwide, dnormed2);
    norm2_layer.backward(ctx, h, dnormed2, dh);
    out_layer.backward(ctx, seen, dh, dseen);
    pl::apply(attends_back, g.kernel(queries, attention_backward_query, tokens, my_head_count), pl::outputs(ds, dqkv),
              qkv, p, dseen);
    pl::apply(attends_back, g.kernel(queries, attention_backward_key, tokens, my_head_count), dqkv, qkv, p, dseen, ds);
    qkv_layer.backward(ctx, normed1, dqkv, dnormed1);
    norm1_layer.backward(ctx, x, dnormed1, {});
    pl::reduce_all(ctx, norm1_layer, qkv_layer, out_layer, norm2_layer, up_layer, down_layer);  // in dnorm1 ... ddown

    g.launch(width, descend, norm1, dnorm1, width);
    g.launch(3 * my_mixed * width, descend, qkv_weight, dqkv_weight, 3 * my_mixed * width);
    g.launch(width * my_mixed, descend, out_weight, dout_weight, width * my_mixed);
    g.launch(width, descend, norm2, dnorm2, width);
    g.launch(my_inner * width, descend, up, dup, my_inner * width);
    g.launch(width * my_inner, descend, down, ddown, width * my_inner);

    pl::apply(pl::rule::reduction, g.kernel(256, sum, my_tokens * width), loss, squares);
    const auto total = over_tp.all_reduce<pl::spec<pl::invariant<tp>>>(loss);
    losses.push_back(0);
    check(cudaMemcpyAsync(&losses.back(), total.unchecked(), sizeof(float), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
  }
  return losses;
}

/// Runs one rank in its own thread. If it fails, others may wait for it, so it ends the program.
void run(int rank, int ranks, ncclUniqueId id) try {
  cudaStream_t stream = nullptr;
  ncclComm_t comm = nullptr;
  check(cudaSetDevice(rank));
  check(cudaStreamCreate(&stream));
  check(ncclCommInitRank(&comm, ranks, id, rank));
  const std::vector<float> losses = train(comm, stream);
  for (std::size_t i = 0; i < losses.size() && rank == 0; ++i)
    std::printf("loss %.6f\n", static_cast<double>(losses[i]));
  check(ncclCommDestroy(comm));
} catch (const std::exception& e) {
  std::fprintf(stderr, "cuda_mlp_parallel: rank %d: %s\n", rank, e.what());
  std::_Exit(1);
}

}  // namespace

int main() try {
  int ranks = 0;
  check(cudaGetDeviceCount(&ranks));
  ncclUniqueId id;
  check(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank, ranks, id);
  for (std::thread& t : threads) t.join();
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "cuda_mlp_parallel: %s\n", e.what());
  return 1;
}
