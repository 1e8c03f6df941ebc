// The stand-in CUDA runtime: kernels, and their errors that end the program. Memory freed while an operation in flight
// uses it, or used after it was freed, also ends the program.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "stand_in/cuda/cuda_runtime.h"
#include "support/death_message.hpp"
#include "unit/stand_in/on_device.hpp"

namespace {

using stand_in::run_order;
constexpr run_order orders[] = {run_order::forward, run_order::reverse, run_order::shuffle};

void set_order(run_order order) { stand_in::executor::instance().set_order(order); }

using plait::test::death_message;
using plait::test::launch;
using plait::test::on_device;
using plait::test::on_host;
#define CHECK_DIES(text, ...) CHECK(death_message([&] __VA_ARGS__).find(text) != std::string::npos)

std::vector<double> counting(std::size_t n) {
  std::vector<double> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<double>(i);
  return values;
}

__global__ void total(const double* x, int n, double* out) {
  __shared__ double warps[32];
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) sum += x[i];
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0;
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
  }
}

template <bool WithBarrier>
__global__ void rotate(const double* x, double* y) {
  auto* tile = static_cast<double*>(__stand_in_dynamic_shared());
  tile[threadIdx.x] = x[threadIdx.x];
  if (WithBarrier) __syncthreads();
  y[threadIdx.x] = tile[(threadIdx.x + blockDim.x - 1) % blockDim.x];
}

__global__ void half_at_a_barrier() {
  if (threadIdx.x < 48) __syncthreads();
}
__global__ void half_in_a_shuffle(int* out) {
  if (threadIdx.x < 16) *out = __shfl_sync(0xffffffffu, 1, 0);
}
__global__ void different_collectives(int* out) {
  *out = threadIdx.x < 16 ? __shfl_sync(0xffffffffu, 1, 0) : static_cast<int>(__ballot_sync(0xffffffffu, 1));
}
__global__ void write_at(char* p, int i) { p[i] = 0; }
__global__ void nothing() {}

__global__ void collectives(unsigned* out) {
  const unsigned lane = threadIdx.x % 32, all = 0xffffffffu;
  unsigned* mine = out + threadIdx.x * 5;
  mine[0] = __shfl_sync(all, lane * 10, 5);
  mine[1] = __shfl_xor_sync(all, lane, 3);
  mine[2] = __ballot_sync(all, lane % 2);
  mine[3] = __shfl_sync(all, lane, 1, 8);
  mine[4] = __shfl_xor_sync(all, lane, 4, 4);
}

__global__ void count(unsigned* counters) {
  atomicAdd(&counters[0], 1u);
  atomicCAS(&counters[1], 0u, 1 + threadIdx.x);
}

__global__ void coordinates(unsigned* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 100 + thread;
}

}  // namespace

TEST_CASE("stand-in: a reduction with shared memory and shuffles, in every order") {
  double* x = on_device(counting(10000));
  double* y = on_device(std::vector<double>(3));
  for (const run_order order : orders) {
    set_order(order);
    CHECK(launch(3, 256, 0, total, x, 10000, y) == cudaSuccess);
    CHECK(on_host(y, 3) == std::vector<double>(3, 49995000));
  }
  set_order(run_order::forward);
  cudaFree(x);
  cudaFree(y);
}

TEST_CASE("stand-in: a missing barrier shows in another order of threads") {
  double* x = on_device(counting(64));
  double* y = on_device(counting(64));
  std::vector<double> expected = counting(64);
  for (double& e : expected) e = e == 0 ? 63 : e - 1;
  int shown = 0;
  for (const run_order order : orders) {
    set_order(order);
    launch(1, 64, 64 * sizeof(double), rotate<true>, x, y);
    CHECK(on_host(y, 64) == expected);
    launch(1, 64, 64 * sizeof(double), rotate<false>, x, y);
    const auto got = on_host(y, 64);
    shown += got != expected;
    if (order == run_order::reverse) CHECK(got[40] != got[40]);  // shared memory starts as NaN
  }
  CHECK(shown == 3);
  set_order(run_order::forward);
  cudaFree(x);
  cudaFree(y);
}

namespace {

/// Copies in two groups; reads the first group too early, then in time.
__global__ void copies(const double* x, double* y) {
  auto* shared = static_cast<double*>(__stand_in_dynamic_shared());
  auto& block = stand_in::executor::instance();
  block.copy_later(shared, x, sizeof(double));
  block.commit_copies();
  block.copy_later(shared + 1, x + 1, sizeof(double));
  block.copy_later(shared + 2, nullptr, sizeof(double));
  block.commit_copies();
  y[0] = shared[0];
  block.wait_for_copies(1);
  y[1] = shared[0];
  y[2] = shared[1];
  block.wait_for_copies(0);
  y[3] = shared[1];
  y[4] = shared[2];
}

}  // namespace

TEST_CASE("stand-in: copies arrive only at the wait for their group") {
  double* x = on_device(counting(2));
  double* y = on_device(std::vector<double>(5));
  REQUIRE(launch(1, 1, 3 * sizeof(double), copies, x, y) == cudaSuccess);
  const auto got = on_host(y, 5);
  CHECK(got[0] != got[0]);
  CHECK(got[1] == 0);
  CHECK(got[2] != got[2]);
  CHECK(got[3] == 1);
  CHECK(got[4] == 0);
  cudaFree(x);
  cudaFree(y);
}

TEST_CASE("stand-in: collectives of a warp") {
  for (const run_order order : orders) {
    set_order(order);
    unsigned* out = on_device(std::vector<unsigned>(320));
    CHECK(launch(1, 64, 0, collectives, out) == cudaSuccess);
    const auto got = on_host(out, 320);
    for (unsigned t = 0; t < 64; ++t) {
      const unsigned lane = t % 32;
      const unsigned expected[] = {50, lane ^ 3, 0xaaaaaaaau, lane / 8 * 8 + 1, lane & 4 ? lane - 4 : lane};
      for (unsigned i = 0; i < 5; ++i) {
        CAPTURE(t);
        CAPTURE(i);
        CHECK(got[t * 5 + i] == expected[i]);
      }
    }
    cudaFree(out);
  }
  set_order(run_order::forward);
}

TEST_CASE("stand-in: atomics and coordinates") {
  unsigned* counters = on_device(std::vector<unsigned>(2));
  CHECK(launch(dim3(5, 2), 96, 0, count, counters) == cudaSuccess);
  CHECK(on_host(counters, 2) == std::vector<unsigned>{960, 1});
  cudaFree(counters);

  unsigned* out = on_device(std::vector<unsigned>(24 * 30));
  CHECK(launch(dim3(2, 3, 4), dim3(5, 3, 2), 0, coordinates, out) == cudaSuccess);
  const auto got = on_host(out, 24 * 30);
  int wrong = 0;
  for (unsigned i = 0; i < got.size(); ++i) wrong += got[i] != i / 30 * 100 + i % 30;
  CHECK(wrong == 0);
  cudaFree(out);
}

TEST_CASE("stand-in: launches that a GPU refuses are refused") {
  CHECK(launch(1, 1025, 0, nothing) == cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(launch(0, 32, 0, nothing) == cudaErrorInvalidConfiguration);
  CHECK(launch(dim3(1, 70000), 32, 0, nothing) == cudaErrorInvalidConfiguration);
  CHECK(launch(1, 32, 49153, nothing) == cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) == cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10) == cudaSuccess);
  CHECK(launch(1, 32, 227 << 10, nothing) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("stand-in: errors that end a program") {
  int* number = on_device(std::vector<int>(1));
  char* text = on_device(std::vector<char>(1000));
  CHECK(death_message([] {}) == "");

  CHECK_DIES("host code touched device memory", { *number = 1; });
  CHECK_DIES("byte 17 of an allocation of 1000", {
    const volatile char* p = text;
    static_cast<void>(p[17]);
  });
  CHECK_DIES("of 64 threads 48 wait at a barrier, 0 in a collective of their warp, 16 have returned", {
    launch(1, 64, 0, half_at_a_barrier);
    cudaDeviceSynchronize();
  });
  CHECK_DIES("16 in a collective of their warp, 16 have returned", {
    launch(1, 32, 0, half_in_a_shuffle, number);
    cudaDeviceSynchronize();
  });
  CHECK_DIES("meet in different collectives", {
    launch(1, 32, 0, different_collectives, number);
    cudaDeviceSynchronize();
  });
  CHECK_DIES("a pointer to host memory", {
    int local = 0;
    launch(1, 32, 0, half_in_a_shuffle, &local);
  });
#ifdef STAND_IN_ADDRESS_SANITIZER
  const char* const beyond = "use-after-poison";
  const char* const before = "use-after-poison";
#else
  const char* const beyond = "beyond the end of an allocation of 1000 bytes";
  const char* const before = "before the start of an allocation of 1000 bytes";
#endif
  for (const int i : {1000, 1003}) {
    CHECK_DIES(beyond, {
      launch(1, 1, 0, write_at, text, i);
      cudaFree(text);
    });
  }
  CHECK_DIES(before, {
    launch(1, 1, 0, write_at, text, -1);
    cudaFree(text);
  });
  CHECK_DIES("is handed device memory that was freed, or never allocated", {
    cudaFree(text);
    launch(1, 1, 0, write_at, text, 0);
    cudaDeviceSynchronize();
  });
  cudaFree(number);
  cudaFree(text);
}

namespace {

constexpr std::size_t bytes = 64;

__global__ void increment(int* p) { ++*p; }
struct two_arrays {
  int count;
  int* arrays[2];
};
__global__ void increment_both(two_arrays a) {
  for (int i = 0; i < a.count; ++i) ++*a.arrays[i];
}

struct two_streams {
  cudaStream_t one = nullptr, other = nullptr;
  int *data = nullptr, *more = nullptr, *pinned = nullptr;
  two_streams() {
    for (cudaStream_t* s : {&one, &other}) REQUIRE(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking) == cudaSuccess);
    for (int** p : {&data, &more}) {
      REQUIRE(cudaMallocAsync(p, bytes, one) == cudaSuccess);
      REQUIRE(cudaMemsetAsync(*p, 0, bytes, one) == cudaSuccess);
    }
    REQUIRE(cudaMallocHost(&pinned, bytes) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(one) == cudaSuccess);
  }
  void free_in_one() const {
    cudaFreeAsync(data, one);
    cudaStreamSynchronize(one);
  }
};

}  // namespace

TEST_CASE("freeing memory in a stream ends the program if an operation of another stream still uses it") {
  const two_streams s;
  const char* const freed = "cudaFreeAsync frees 64 bytes that an operation in flight uses: ";
  CHECK_DIES(freed, { launch(s.other, increment, s.data), s.free_in_one(); });
  CHECK_DIES("a copy", { cudaMemcpyAsync(s.more, s.data, bytes, cudaMemcpyDeviceToDevice, s.other), s.free_in_one(); });
  CHECK_DIES("a copy", { cudaMemcpyAsync(s.data, s.more, bytes, cudaMemcpyDeviceToDevice, s.other), s.free_in_one(); });
  CHECK_DIES("a fill", { cudaMemsetAsync(s.data, 0, bytes, s.other), s.free_in_one(); });
  CHECK_DIES(freed, { launch(s.other, increment, s.data + 1), s.free_in_one(); });  // also in the middle
  CHECK_DIES("two_arrays", { launch(s.other, increment_both, two_arrays{2, {s.more, s.data}}), s.free_in_one(); });
  const auto in_order = [&](bool ordered) {
    cudaEvent_t done = nullptr;
    cudaEventCreate(&done);
    launch(s.other, increment, s.data);
    cudaEventRecord(done, s.other);
    if (ordered) cudaStreamWaitEvent(s.one, done, 0);
    s.free_in_one();
  };
  CHECK(death_message([&] { in_order(true); }) == "");
  CHECK(death_message([&] { in_order(false); }) != "");
  CHECK(death_message([&] { launch(s.other, increment, s.more), s.free_in_one(); }) == "");
}

TEST_CASE("cudaFree waits for operations that use the memory, and cudaFreeHost does not") {
  const two_streams s;
  CHECK(death_message([&] {
          int* p = nullptr;
          cudaMalloc(&p, bytes);
          launch(s.other, increment, p);
          cudaFree(p);
        }) == "");
  CHECK_DIES("cudaFreeHost frees 64 bytes that an operation in flight uses: a copy", {
    cudaMemcpyAsync(s.data, s.pinned, bytes, cudaMemcpyHostToDevice, s.other);
    cudaFreeHost(s.pinned);
  });
  CHECK_DIES("cudaFreeHost", { launch(s.other, increment, s.pinned), cudaFreeHost(s.pinned); });
  CHECK(death_message([&] {
          cudaMemcpyAsync(s.data, s.pinned, bytes, cudaMemcpyHostToDevice, s.other);
          cudaStreamSynchronize(s.other);
          cudaFreeHost(s.pinned);
        }) == "");
}

TEST_CASE("an operation queued after its memory was freed ends the program") {
  const two_streams s;
  const char* const gone = "is handed device memory that was freed, or never allocated";
  CHECK_DIES(gone, { s.free_in_one(), launch(s.one, increment, s.data); });
  CHECK_DIES(gone, { cudaFreeAsync(s.data, s.one), launch(s.other, increment, s.data); });  // before it has run
  CHECK_DIES(gone, { s.free_in_one(), cudaMemsetAsync(s.data, 0, bytes, s.one); });
  CHECK_DIES("a graph is launched whose memory was freed: a fill", {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cudaStreamBeginCapture(s.other, cudaStreamCaptureModeThreadLocal);
    cudaMemsetAsync(s.data, 0, bytes, s.other);
    cudaStreamEndCapture(s.other, &graph);
    cudaGraphInstantiate(&executable, graph);
    cudaGraphLaunch(executable, s.other);
    cudaStreamSynchronize(s.other);
    s.free_in_one();
    cudaGraphLaunch(executable, s.other);
  });
}
