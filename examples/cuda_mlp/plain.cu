// An MLP with a norm in front, trained on one GPU with nothing but CUDA and cuBLAS: the program's own kernels, memory,
// stream and products. parallel.cu is the same program on every GPU of the machine.
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int tokens = 64, width = 32, inner = 96, steps = 20;
constexpr float rate = 2.0f;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}
void check(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error("cuBLAS: status " + std::to_string(status));
}

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

/// y = x w / sqrt(mean(x^2) + eps), a row to a thread.
__global__ void norm_forward(const float* x, const float* weight, float* y, float* inverse, int rows, int columns) {
  const int r = place();
  if (r >= rows) return;
  float squares = 0;
  for (int c = 0; c < columns; ++c) squares += x[r * columns + c] * x[r * columns + c];
  inverse[r] = rsqrtf(squares / static_cast<float>(columns) + 1e-5f);
  for (int c = 0; c < columns; ++c) y[r * columns + c] = x[r * columns + c] * inverse[r] * weight[c];
}
/// dweight += the sum over the rows of dy x inverse, a column to a thread.
__global__ void norm_backward(const float* x, const float* dy, const float* inverse, float* dweight, int rows,
                              int columns) {
  const int c = place();
  if (c >= columns) return;
  for (int r = 0; r < rows; ++r) dweight[c] += dy[r * columns + c] * x[r * columns + c] * inverse[r];
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

/// The program's memory, stream and products.
struct gpu {
  cudaStream_t stream;
  cublasHandle_t blas = nullptr;
  std::vector<float*> rooms;

  explicit gpu(cudaStream_t on) : stream(on) {
    check(cublasCreate(&blas));
    check(cublasSetStream(blas, stream));
  }
  ~gpu() {
    cublasDestroy(blas);
    for (float* room : rooms) cudaFree(room);
  }
  float* room(int n) {
    rooms.push_back(nullptr);
    check(cudaMalloc(reinterpret_cast<void**>(&rooms.back()), static_cast<std::size_t>(n) * sizeof(float)));
    return rooms.back();
  }
  void clear(float* values, int n) {
    check(cudaMemsetAsync(values, 0, static_cast<std::size_t>(n) * sizeof(float), stream));
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

  /// c [m, n] = a [m, k] b [k, n] + beta c, all row-major; cuBLAS thinks in columns and is asked for c' = b' a'.
  void product(bool turn_a, bool turn_b, int m, int n, int k, const float* a, const float* b, float beta, float* c) {
    const float one = 1.0f;
    check(cublasSgemm(blas, turn_b ? CUBLAS_OP_T : CUBLAS_OP_N, turn_a ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b,
                      turn_b ? k : n, a, turn_a ? m : k, &beta, c, n));
  }
};

/// The losses of all steps.
std::vector<float> train(cudaStream_t stream) {
  gpu g(stream);
  float *weight = g.room(width), *dweight = g.room(width), *inverse = g.room(tokens);
  float *up = g.room(inner * width), *dup = g.room(inner * width);
  float *down = g.room(width * inner), *ddown = g.room(width * inner);
  float *x = g.room(tokens * width), *normed = g.room(tokens * width), *dnormed = g.room(tokens * width);
  float *wide = g.room(tokens * inner), *active = g.room(tokens * inner), *dactive = g.room(tokens * inner);
  float *z = g.room(tokens * width), *dz = g.room(tokens * width), *squares = g.room(tokens * width);
  float* loss = g.room(1);
  g.launch(width, fill_ones, weight, width);
  g.launch(inner * width, fill, up, inner, width, 0, 0, 1, 0.2f);
  g.launch(width * inner, fill, down, width, inner, 0, 0, 2, 0.2f);

  std::vector<float> losses;
  for (int step = 0; step < steps; ++step) {
    g.launch(tokens * width, fill, x, tokens, width, 0, 0, 100 + step, 1.0f);

    g.launch(tokens, norm_forward, x, weight, normed, inverse, tokens, width);
    g.product(false, true, tokens, inner, width, normed, up, 0, wide);
    g.launch(tokens * inner, relu_forward, wide, active, tokens * inner);
    g.product(false, true, tokens, width, inner, active, down, 0, z);
    g.launch(tokens * width, distance, x, z, squares, dz, tokens, width, float{tokens * width});

    g.clear(dweight, width);
    g.clear(dup, inner * width);
    g.clear(ddown, width * inner);
    g.product(true, false, width, inner, tokens, dz, active, 1, ddown);
    g.product(false, false, tokens, inner, width, dz, down, 0, dactive);
    g.launch(tokens * inner, relu_backward, active, dactive, wide, tokens * inner);
    g.product(true, false, inner, width, tokens, wide, normed, 1, dup);
    g.product(false, false, tokens, width, inner, wide, up, 0, dnormed);
    g.launch(width, norm_backward, x, dnormed, inverse, dweight, tokens, width);

    g.launch(width, descend, weight, dweight, width);
    g.launch(inner * width, descend, up, dup, inner * width);
    g.launch(width * inner, descend, down, ddown, width * inner);

    g.launch(256, sum, squares, loss, tokens * width);
    losses.push_back(0);
    check(cudaMemcpyAsync(&losses.back(), loss, sizeof(float), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
  }
  return losses;
}

}  // namespace

int main() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  for (const float loss : train(stream)) std::printf("loss %.6f\n", static_cast<double>(loss));
  return 0;
}
