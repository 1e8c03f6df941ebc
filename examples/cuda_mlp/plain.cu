// Trains a transformer's layer on one GPU with CUDA and cuBLAS: causal attention and an MLP, with a norm before each.
// The program has its own kernels, allocator, stream and products. parallel.cu is the same program on every GPU of the
// machine.
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int tokens = 64, width = 32, inner = 96, head_count = 8, head_size = 4, steps = 20;
constexpr int mixed = head_count * head_size;  // the width of attention's output
constexpr float rate = 2.0f;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}
void check(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error("cuBLAS: status " + std::to_string(status));
}

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

/// y = x w / sqrt(mean(x^2) + eps). One thread for each row.
__global__ void norm_forward(const float* x, const float* weight, float* y, float* inverse, int rows, int columns) {
  const int r = place();
  if (r >= rows) return;
  float squares = 0;
  for (int c = 0; c < columns; ++c) squares += x[r * columns + c] * x[r * columns + c];
  inverse[r] = rsqrtf(squares / static_cast<float>(columns) + 1e-5f);
  for (int c = 0; c < columns; ++c) y[r * columns + c] = x[r * columns + c] * inverse[r] * weight[c];
}
/// dx = inverse (dy w - x inverse^2 mean(dy w x)). One thread for each row.
__global__ void norm_backward(const float* x, const float* weight, const float* dy, const float* inverse, float* dx,
                              int rows, int columns) {
  const int r = place();
  if (r >= rows) return;
  float dot = 0;
  for (int c = 0; c < columns; ++c) dot += dy[r * columns + c] * weight[c] * x[r * columns + c];
  dot *= inverse[r] * inverse[r] / static_cast<float>(columns);
  for (int c = 0; c < columns; ++c)
    dx[r * columns + c] = inverse[r] * (dy[r * columns + c] * weight[c] - x[r * columns + c] * dot);
}
/// dweight += the sum over the rows of dy x inverse. One thread for each column.
__global__ void norm_backward_weight(const float* x, const float* dy, const float* inverse, float* dweight, int rows,
                                     int columns) {
  const int c = place();
  if (c >= columns) return;
  for (int r = 0; r < rows; ++r) dweight[c] += dy[r * columns + c] * x[r * columns + c] * inverse[r];
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

/// The program's memory, stream and products.
struct gpu {
  cudaStream_t stream;
  arena memory{};
  cublasHandle_t blas = nullptr;

  explicit gpu(cudaStream_t on) : stream(on) {
    check(cublasCreate(&blas));
    check(cublasSetStream(blas, stream));
  }
  ~gpu() { cublasDestroy(blas); }
  float* room(int n) { return memory.take(n); }
  void clear(float* values, int n) {
    check(cudaMemsetAsync(values, 0, static_cast<std::size_t>(n) * sizeof(float), stream));
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

  /// c [m, n] = a [m, k] b [k, n] + beta c, all row-major. cuBLAS is column-major, so it computes c' = b' a'.
  void product(bool turn_a, bool turn_b, int m, int n, int k, const float* a, const float* b, float beta, float* c) {
    const float one = 1.0f;
    check(cublasSgemm(blas, turn_b ? CUBLAS_OP_T : CUBLAS_OP_N, turn_a ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b,
                      turn_b ? k : n, a, turn_a ? m : k, &beta, c, n));
  }
};

/// Returns the losses of all steps.
std::vector<float> train(cudaStream_t stream) {
  gpu g(stream);
  float *norm1 = g.room(width), *dnorm1 = g.room(width), *inverse1 = g.room(tokens);
  float *qkv_weight = g.room(3 * mixed * width), *dqkv_weight = g.room(3 * mixed * width);
  float *out_weight = g.room(width * mixed), *dout_weight = g.room(width * mixed);
  float *norm2 = g.room(width), *dnorm2 = g.room(width), *inverse2 = g.room(tokens);
  float *up = g.room(inner * width), *dup = g.room(inner * width);
  float *down = g.room(width * inner), *ddown = g.room(width * inner);
  float *x = g.room(tokens * width), *normed1 = g.room(tokens * width), *dnormed1 = g.room(tokens * width);
  float *qkv = g.room(tokens * 3 * mixed), *dqkv = g.room(tokens * 3 * mixed);
  float *p = g.room(head_count * tokens * tokens), *ds = g.room(head_count * tokens * tokens);
  float *seen = g.room(tokens * mixed), *dseen = g.room(tokens * mixed), *branch = g.room(tokens * width);
  float *h = g.room(tokens * width), *dh = g.room(tokens * width);
  float *normed2 = g.room(tokens * width), *dnormed2 = g.room(tokens * width);
  float *wide = g.room(tokens * inner), *active = g.room(tokens * inner), *dactive = g.room(tokens * inner);
  float *z = g.room(tokens * width), *dz = g.room(tokens * width), *squares = g.room(tokens * width);
  float* loss = g.room(1);
  g.launch(width, fill_ones, norm1, width);
  g.launch(3 * mixed * width, fill, qkv_weight, 3 * mixed, width, 0, 0, 1, 0.2f);
  g.launch(width * mixed, fill, out_weight, width, mixed, 0, 0, 2, 0.2f);
  g.launch(width, fill_ones, norm2, width);
  g.launch(inner * width, fill, up, inner, width, 0, 0, 3, 0.2f);
  g.launch(width * inner, fill, down, width, inner, 0, 0, 4, 0.2f);

  std::vector<float> losses;
  for (int step = 0; step < steps; ++step) {
    g.launch(tokens * width, fill, x, tokens, width, 0, 0, 100 + step, 1.0f);

    g.launch(tokens, norm_forward, x, norm1, normed1, inverse1, tokens, width);
    g.product(false, true, tokens, 3 * mixed, width, normed1, qkv_weight, 0, qkv);
    g.launch(tokens * head_count, attention_forward, seen, p, qkv, tokens, head_count);
    g.product(false, true, tokens, width, mixed, seen, out_weight, 0, branch);
    g.launch(tokens * width, add, h, x, branch, tokens * width);
    g.launch(tokens, norm_forward, h, norm2, normed2, inverse2, tokens, width);
    g.product(false, true, tokens, inner, width, normed2, up, 0, wide);
    g.launch(tokens * inner, relu_forward, active, wide, tokens * inner);
    g.product(false, true, tokens, width, inner, active, down, 0, z);
    g.launch(tokens * width, distance, squares, dz, x, z, tokens, width, float{tokens * width});

    g.clear(dnorm1, width);
    g.clear(dqkv_weight, 3 * mixed * width);
    g.clear(dout_weight, width * mixed);
    g.clear(dnorm2, width);
    g.clear(dup, inner * width);
    g.clear(ddown, width * inner);
    g.product(true, false, width, inner, tokens, dz, active, 1, ddown);
    g.product(false, false, tokens, inner, width, dz, down, 0, dactive);
    g.launch(tokens * inner, relu_backward, wide, active, dactive, tokens * inner);
    g.product(true, false, inner, width, tokens, wide, normed2, 1, dup);
    g.product(false, false, tokens, width, inner, wide, up, 0, dnormed2);
    g.launch(tokens, norm_backward, h, norm2, dnormed2, inverse2, dh, tokens, width);
    g.launch(width, norm_backward_weight, h, dnormed2, inverse2, dnorm2, tokens, width);
    g.product(true, false, width, mixed, tokens, dh, seen, 1, dout_weight);
    g.product(false, false, tokens, mixed, width, dh, out_weight, 0, dseen);
    g.launch(tokens * head_count, attention_backward_query, ds, dqkv, qkv, p, dseen, tokens, head_count);
    g.launch(tokens * head_count, attention_backward_key, dqkv, qkv, p, dseen, ds, tokens, head_count);
    g.product(true, false, 3 * mixed, width, tokens, dqkv, normed1, 1, dqkv_weight);
    g.product(false, false, tokens, width, 3 * mixed, dqkv, qkv_weight, 0, dnormed1);
    g.launch(width, norm_backward_weight, x, dnormed1, inverse1, dnorm1, tokens, width);

    g.launch(width, descend, norm1, dnorm1, width);
    g.launch(3 * mixed * width, descend, qkv_weight, dqkv_weight, 3 * mixed * width);
    g.launch(width * mixed, descend, out_weight, dout_weight, width * mixed);
    g.launch(width, descend, norm2, dnorm2, width);
    g.launch(inner * width, descend, up, dup, inner * width);
    g.launch(width * inner, descend, down, ddown, width * inner);

    g.launch(256, sum, loss, squares, tokens * width);
    losses.push_back(0);
    check(cudaMemcpyAsync(&losses.back(), loss, sizeof(float), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
  }
  return losses;
}

}  // namespace

int main() try {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  for (const float loss : train(stream)) std::printf("loss %.6f\n", static_cast<double>(loss));
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "cuda_mlp_plain: %s\n", e.what());
  return 1;
}
