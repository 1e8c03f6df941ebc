// The stand-in CUDA runtime: memory that goes while an operation in flight uses it, or that is used after it went, ends
// the program.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>

#include "stand_in/cuda/cublasLt.h"
#include "stand_in/cuda/cuda_runtime.h"
#include "support/last_words.hpp"

namespace {

using plait::test::last_words;
#define CHECK_DIES(text, ...) CHECK(last_words([&] __VA_ARGS__).find(text) != std::string::npos)

constexpr std::size_t bytes = 64;

__global__ void increment(int* p) { ++*p; }
struct two_arrays {
  int count;
  int* arrays[2];
};
__global__ void increment_both(two_arrays a) {
  for (int i = 0; i < a.count; ++i) ++*a.arrays[i];
}

template <class... Parameters, class... Arguments>
cudaError_t launch(cudaStream_t s, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.stream = s;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
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

TEST_CASE("a release in a stream ends the program where an operation of another stream still uses the memory") {
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
  CHECK(last_words([&] { in_order(true); }) == "");
  CHECK(last_words([&] { in_order(false); }) != "");
  CHECK(last_words([&] { launch(s.other, increment, s.more), s.free_in_one(); }) == "");
}

TEST_CASE("cudaFree waits for what uses the memory, and cudaFreeHost does not") {
  const two_streams s;
  CHECK(last_words([&] {
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
  CHECK(last_words([&] {
          cudaMemcpyAsync(s.data, s.pinned, bytes, cudaMemcpyHostToDevice, s.other);
          cudaStreamSynchronize(s.other);
          cudaFreeHost(s.pinned);
        }) == "");
}

TEST_CASE("what is put into a stream after its memory went ends the program") {
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
