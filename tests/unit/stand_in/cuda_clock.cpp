// The clock of the stand-in CUDA runtime: virtual times of streams, events, replays and the host.
#include <doctest/doctest.h>

#include <cstddef>

#include "stand_in/cuda/cuda_runtime.h"

namespace {

constexpr std::size_t most = 64;

/// Streams, events and memory, with the clock on: a fill takes as long as it has bytes.
struct timed {
  cudaStream_t a = nullptr, b = nullptr;
  cudaEvent_t first = nullptr, second = nullptr;
  char *left = nullptr, *right = nullptr;

  timed() {
    stand_in::runtime::instance().set_clock(
        [](const stand_in::task& t) { return t.kind == stand_in::work::fill ? t.size : 0; });
    for (cudaStream_t* s : {&a, &b}) REQUIRE(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking) == cudaSuccess);
    for (cudaEvent_t* e : {&first, &second}) REQUIRE(cudaEventCreate(e) == cudaSuccess);
    for (char** p : {&left, &right}) REQUIRE(cudaMalloc(p, most) == cudaSuccess);
  }
  timed(const timed&) = delete;
  ~timed() {
    cudaDeviceSynchronize();
    for (cudaStream_t s : {a, b}) cudaStreamDestroy(s);
    for (cudaEvent_t e : {first, second}) cudaEventDestroy(e);
    for (char* p : {left, right}) cudaFree(p);
    stand_in::runtime::instance().set_clock(nullptr);
  }
  void spend(cudaStream_t s, std::size_t time) {
    CHECK(cudaMemsetAsync(s == a ? left : right, 0, time, s) == cudaSuccess);
  }
  double at(cudaStream_t s) const { return stand_in::time_of(s); }
};

}  // namespace

TEST_CASE("stand-in clock: streams run side by side, and behind the events that they wait for") {
  timed t;
  t.spend(t.a, 10);
  t.spend(t.b, 4);
  CHECK(t.at(t.a) == 10);
  CHECK(t.at(t.b) == 4);
  cudaEventRecord(t.first, t.a);
  t.spend(t.a, 20);  // behind the event
  cudaStreamWaitEvent(t.b, t.first);
  t.spend(t.b, 1);
  CHECK(t.at(t.b) == 11);
  cudaEventRecord(t.second, t.b);
  cudaStreamWaitEvent(t.a, t.second);  // which is over
  CHECK(t.at(t.a) == 30);
  cudaDeviceSynchronize();
  float between = 0;
  CHECK(cudaEventElapsedTime(&between, t.first, t.second) == cudaSuccess);
  CHECK(between == 1);
}

TEST_CASE("stand-in clock: what the host puts into a stream after it has waited begins no earlier") {
  timed t;
  t.spend(t.a, 10);
  t.spend(t.b, 3);
  cudaStreamSynchronize(t.b);
  t.spend(t.b, 2);
  CHECK(t.at(t.b) == 5);
  cudaStreamSynchronize(t.a);
  t.spend(t.b, 2);
  CHECK(t.at(t.b) == 12);
}

TEST_CASE("stand-in clock: polls find what is over by the host's time, unless it does nothing but poll") {
  timed t;
  t.spend(t.a, 10);
  cudaEventRecord(t.first, t.a);
  for (int i = 0; i < 10; ++i) {
    CHECK(cudaEventQuery(t.first) == cudaErrorNotReady);
    t.spend(t.b, 1);
  }
  t.spend(t.b, 5);
  cudaStreamSynchronize(t.b);
  CHECK(cudaEventQuery(t.first) == cudaSuccess);
  t.spend(t.a, 10);
  int polls = 0;
  while (cudaStreamQuery(t.a) == cudaErrorNotReady) ++polls;
  CHECK(polls > 0);
  t.spend(t.b, 1);
  CHECK(t.at(t.b) == 26);  // behind the 25 that the host has waited for
}

TEST_CASE("stand-in clock: a replay takes as long as its streams beside each other") {
  timed t;
  t.spend(t.a, 5);
  REQUIRE(cudaStreamBeginCapture(t.a, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  cudaEventRecord(t.first, t.a);
  cudaStreamWaitEvent(t.b, t.first);
  t.spend(t.a, 10);
  t.spend(t.b, 30);
  cudaEventRecord(t.second, t.b);
  t.spend(t.a, 10);
  cudaStreamWaitEvent(t.a, t.second);
  t.spend(t.a, 1);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaStreamEndCapture(t.a, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&executable, graph) == cudaSuccess);
  CHECK(t.at(t.a) == 5);
  for (int replay = 1; replay <= 2; ++replay) {
    CHECK(cudaGraphLaunch(executable, t.a) == cudaSuccess);
    CHECK(t.at(t.a) == 5 + 31 * replay);
  }
  CHECK(t.at(t.b) == 0);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_CASE("stand-in clock: while it is off, there is no time") {
  cudaStream_t s = nullptr;
  char* p = nullptr;
  REQUIRE(cudaStreamCreate(&s) == cudaSuccess);
  REQUIRE(cudaMalloc(&p, most) == cudaSuccess);
  cudaMemsetAsync(p, 0, most, s);
  cudaStreamSynchronize(s);
  CHECK(stand_in::time_of(s) == 0);
  cudaFree(p);
  cudaStreamDestroy(s);
}
