// For thread sanitizer each thread of a block is a thread: it reports accesses without a barrier between them, and no
// others.
#include <doctest/doctest.h>

#include <cstddef>

#include "stand_in/cuda/cuda_runtime.h"
#include "unit/stand_in/on_device.hpp"

namespace {

int reports = 0;

}  // namespace

// Thread sanitizer calls these at each report and for its options: reports are counted and are no failures.
extern "C" void __tsan_on_report(void*) { ++reports; }
extern "C" const char* __tsan_default_options() { return "exitcode=0"; }

namespace {

enum class between { nothing, barrier, warp_barrier, shuffle };

/// Each thread writes a word and reads the word of the thread `distance` after it.
template <between What>
__global__ void exchange(int* out, int distance) {
  auto* words = static_cast<int*>(__stand_in_dynamic_shared());
  const auto n = static_cast<int>(blockDim.x), i = static_cast<int>(threadIdx.x);
  __syncthreads();  // so that all threads have started
  for (int round = 0; round < 3; ++round) {
    words[i] = i + round;
    if (What == between::barrier) __syncthreads();
    if (What == between::warp_barrier) __syncwarp();
    if (What == between::shuffle) static_cast<void>(__shfl_sync(0xffffffffu, i, 0));
    out[i] = words[(i + n - distance) % n];
    __syncthreads();
  }
}

/// A barrier is missing only at the end of each round.
__global__ void write_again(int* out) {
  auto* words = static_cast<int*>(__stand_in_dynamic_shared());
  const auto n = static_cast<int>(blockDim.x), i = static_cast<int>(threadIdx.x);
  for (int round = 0; round < 3; ++round) {
    words[i] = i + round;
    __syncthreads();
    out[i] = words[(i + 1) % n];
  }
}

__global__ void count(int* sum) {
  __syncthreads();
  atomicAdd(sum, 1);
}

template <class... Parameters, class... Arguments>
int reports_of(unsigned threads, void (*kernel)(Parameters...), Arguments... arguments) {
  const int before = reports;
  // A block shares its memory with the next one, which is no race.
  REQUIRE(plait::test::launch(2, threads, 1024, kernel, arguments...) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  return reports - before;
}

}  // namespace

TEST_CASE("stand-in: thread sanitizer reports accesses without a barrier between them") {
  int* out = nullptr;
  REQUIRE(cudaMalloc(&out, 1024) == cudaSuccess);
  CHECK(reports_of(64, exchange<between::barrier>, out, 33) == 0);
  CHECK(reports_of(32, exchange<between::warp_barrier>, out, 5) == 0);
  CHECK(reports_of(32, count, out) == 0);
  CHECK(reports_of(64, exchange<between::nothing>, out, 33) > 0);
  CHECK(reports_of(64, exchange<between::warp_barrier>, out, 33) > 0);  // of another warp
  CHECK(reports_of(32, exchange<between::shuffle>, out, 5) > 0);        // a shuffle does not order memory
  CHECK(reports_of(64, write_again, out) > 0);
  cudaFree(out);
}
