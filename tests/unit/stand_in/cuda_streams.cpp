// The stand-in CUDA runtime: streams, events, graphs, memory, and their virtual times.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "stand_in/cuda/cuda_runtime.h"
#include "unit/stand_in/on_device.hpp"

namespace {

using plait::test::launch;

constexpr std::size_t capacity = 64 << 20;
const bool configured = setenv("PLAIT_STAND_IN_MEMORY", std::to_string(capacity).c_str(), 1) == 0 &&
                        setenv("PLAIT_STAND_IN_DEVICES", "2", 1) == 0;

__global__ void increment(int* p) { ++*p; }
__global__ void append(int* list, int value) { list[++list[0]] = value; }

struct stream {
  cudaStream_t handle = nullptr;
  explicit stream(unsigned flags = cudaStreamNonBlocking) {
    REQUIRE(cudaStreamCreateWithFlags(&handle, flags) == cudaSuccess);
  }
  stream(const stream&) = delete;
  ~stream() { cudaStreamDestroy(handle); }
  operator cudaStream_t() const { return handle; }
};
struct event {
  cudaEvent_t handle = nullptr;
  explicit event(unsigned flags = cudaEventDisableTiming) {
    REQUIRE(cudaEventCreateWithFlags(&handle, flags) == cudaSuccess);
  }
  event(const event&) = delete;
  ~event() { cudaEventDestroy(handle); }
  operator cudaEvent_t() const { return handle; }
};

int* zeros(int n) { return plait::test::on_device(std::vector<int>(static_cast<std::size_t>(n))); }
std::vector<int> list_of(const int* p, std::size_t n, cudaStream_t s) {
  std::vector<int> values(n);
  REQUIRE(cudaMemcpyAsync(values.data(), p, n * sizeof(int), cudaMemcpyDeviceToHost, s) == cudaSuccess);
  return values;
}

}  // namespace

TEST_CASE("stand-in: work runs only when the host waits for it") {
  stream s;
  int ran = 0;
  cudaLaunchHostFunc(
      s, [](void* p) { ++*static_cast<int*>(p); }, &ran);
  CHECK(ran == 0);
  CHECK(cudaStreamQuery(s) == cudaErrorNotReady);
  CHECK(cudaStreamSynchronize(s) == cudaSuccess);
  CHECK(ran == 1);
  CHECK(cudaStreamQuery(s) == cudaSuccess);

  event e;
  cudaLaunchHostFunc(
      s, [](void* p) { ++*static_cast<int*>(p); }, &ran);
  cudaEventRecord(e, s);
  cudaLaunchHostFunc(
      s, [](void* p) { *static_cast<int*>(p) = 100; }, &ran);
  int polls = 0;
  while (cudaEventQuery(e) == cudaErrorNotReady) ++polls;
  CHECK(polls > 0);
  CHECK(ran == 2);  // up to the event only
  cudaDeviceSynchronize();
  CHECK(ran == 100);
}

TEST_CASE("stand-in: streams may run at once, or at random times, in every valid order") {
  auto& order = stand_in::runtime::instance().order;
  stream a, b;
  int* pinned = nullptr;
  REQUIRE(cudaMallocHost(&pinned, sizeof(int)) == cudaSuccess);
  order = stand_in::stream_order::eager;
  *pinned = 0;
  launch(a, increment, pinned);
  CHECK(*pinned == 1);  // although the host did not wait
  order = stand_in::stream_order::random;
  int late = 0, early = 0, first = 0;
  for (int i = 0; i < 50; ++i) {
    int* list = zeros(4);
    event e;
    launch(a, append, list, 1);
    cudaEventRecord(e, a);
    cudaStreamWaitEvent(b, e, 0);
    launch(b, append, list, 2);
    launch(a, append, list, 3);
    *pinned = 0;
    launch(a, increment, pinned);
    (*pinned == 0 ? late : early)++;
    cudaDeviceSynchronize();
    const auto got = list_of(list, 4, a);
    CHECK(got[1] == 1);
    first += got[2] == 2;
    cudaFree(list);
  }
  order = stand_in::stream_order::late;
  CHECK(late > 0);
  CHECK(early > 0);
  CHECK(first > 0);
  CHECK(first < 50);
  cudaFreeHost(pinned);
}

TEST_CASE("stand-in: kernels and events are queued in streams of the current device only") {
  stream s;
  int* p = zeros(1);
  event here;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  event there;
  CHECK(launch(s, increment, p) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventRecord(there, s) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventRecord(here, s) == cudaSuccess);  // on the stream's device, for any current device
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(launch(s, increment, p) == cudaSuccess);
  cudaFree(p);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("stand-in: the host's memory is read late, pinned or not") {
  stream s;
  int* device = zeros(2);
  int* pinned = nullptr;
  REQUIRE(cudaMallocHost(&pinned, sizeof(int)) == cudaSuccess);
  int pageable = 1;
  *pinned = 1;
  cudaMemcpyAsync(device, &pageable, sizeof(int), cudaMemcpyHostToDevice, s);
  cudaMemcpyAsync(device + 1, pinned, sizeof(int), cudaMemcpyHostToDevice, s);
  pageable = 2;
  *pinned = 2;
  CHECK(list_of(device, 2, s) == std::vector<int>{2, 2});
  cudaMemcpyAsync(pinned, device, sizeof(int), cudaMemcpyDeviceToHost, s);
  *pinned = 3;
  CHECK(*pinned == 3);
  cudaStreamSynchronize(s);
  CHECK(*pinned == 2);
  CHECK(cudaMemcpyAsync(device, device + 1, sizeof(int), cudaMemcpyHostToDevice, s) == cudaErrorInvalidValue);
  cudaFreeHost(pinned);
  cudaFree(device);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("stand-in: only events order streams") {
  int* list = zeros(8);
  stream a, b;
  event e;
  launch(a, append, list, 1);
  cudaEventRecord(e, a);
  launch(a, append, list, 2);
  cudaStreamWaitEvent(b, e, 0);
  launch(b, append, list, 3);
  CHECK(list_of(list, 3, b) == std::vector<int>{2, 1, 3});  // b waits for the event, not for operations after it
  CHECK(list_of(list, 4, a) == std::vector<int>{3, 1, 3, 2});

  // The legacy stream waits for blocking streams, and these for it.
  stream blocking(cudaStreamDefault);
  launch(blocking, append, list, 4);
  launch(nullptr, append, list, 5);
  launch(blocking, append, list, 6);
  CHECK(list_of(list, 7, blocking) == std::vector<int>{6, 1, 3, 2, 4, 5, 6});
  cudaFree(list);
}

TEST_CASE("stand-in: a destroyed stream still runs its queued work") {
  int* list = zeros(4);
  {
    stream s;
    launch(s, append, list, 1);
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(list_of(list, 2, nullptr) == std::vector<int>{1, 1});
  cudaFree(list);
}

TEST_CASE("stand-in: many host threads") {
  int* counters = zeros(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([=] {
      stream s;
      for (int i = 0; i < 50; ++i) {
        launch(s, increment, counters + t);
        if (i % 10 == 0) cudaStreamSynchronize(s);
      }
      cudaStreamSynchronize(s);
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(list_of(counters, 8, nullptr) == std::vector<int>(8, 50));
  cudaFree(counters);
}

TEST_CASE("stand-in: graphs capture other streams through events, and are replayed") {
  int* list = zeros(16);
  stream a, b;
  event fork, join;
  REQUIRE(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  launch(a, append, list, 1);
  cudaEventRecord(fork, a);
  cudaStreamWaitEvent(b, fork, 0);
  cudaStreamCaptureStatus status{};
  CHECK(cudaStreamIsCapturing(b, &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusActive);
  launch(b, append, list, 2);
  cudaEventRecord(join, b);
  cudaStreamWaitEvent(a, join, 0);
  launch(a, append, list, 3);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(a, &graph) == cudaSuccess);
  CHECK(cudaStreamIsCapturing(b, &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusNone);
  CHECK(list_of(list, 1, a) == std::vector<int>{0});  // captured, not run
  cudaGraphExec_t executable = nullptr;
  CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaGraphLaunch(executable, a) == cudaSuccess);
  CHECK(cudaGraphLaunch(executable, a) == cudaSuccess);
  CHECK(list_of(list, 7, a) == std::vector<int>{6, 1, 2, 3, 1, 2, 3});
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  cudaFree(list);
}

TEST_CASE("stand-in: a forbidden call ends a capture") {
  int* device = zeros(1);
  stream a, b;
  event e;
  const auto local = cudaStreamCaptureModeThreadLocal, relaxed = cudaStreamCaptureModeRelaxed;
  const auto unsupported = cudaErrorStreamCaptureUnsupported;
  int host = 0;
  void* p = nullptr;
  const auto allocate = [&] { return cudaMalloc(&p, 4); };
  cudaEventRecord(e, b);
  struct attempt {
    cudaStreamCaptureMode mode;
    std::function<cudaError_t()> call;
    cudaError_t error;
  };
  const attempt attempts[] = {
      {local, [&] { return cudaStreamSynchronize(a); }, unsupported},
      {relaxed, [&] { return cudaStreamSynchronize(a); }, unsupported},
      {local, [&] { return cudaStreamSynchronize(b); }, cudaSuccess},
      {local, [&] { return cudaDeviceSynchronize(); }, unsupported},
      {local, [&] { return cudaStreamQuery(a); }, unsupported},
      {local, allocate, unsupported},
      {relaxed, allocate, cudaSuccess},
      {local, [&] { return cudaMemcpyAsync(&host, device, 4, cudaMemcpyDeviceToHost, a); }, unsupported},
      {local, [&] { return cudaStreamWaitEvent(a, e, 0); }, cudaErrorStreamCaptureIsolation},
  };
  for (const attempt& made : attempts) {
    REQUIRE(cudaStreamBeginCapture(a, made.mode) == cudaSuccess);
    launch(a, increment, device);
    CHECK(made.call() == made.error);
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(a, &graph);
    CHECK(ended == (made.error == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureInvalidated));
    if (graph) cudaGraphDestroy(graph);
  }
  cudaFree(p);

  REQUIRE(cudaStreamBeginCapture(a, local) == cudaSuccess);
  cudaEventRecord(e, a);
  cudaStreamWaitEvent(b, e, 0);
  launch(b, increment, device);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureUnjoined);
  CHECK(graph == nullptr);
  CHECK(list_of(device, 1, a) == std::vector<int>{0});
  cudaFree(device);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("stand-in: memory can run out, and freed memory is reused in stream order") {
  void *p = nullptr, *q = nullptr;
  CHECK(cudaMalloc(&p, capacity + 1) == cudaErrorMemoryAllocation);
  CHECK(p == nullptr);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  std::size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  CHECK(free_bytes == capacity);
  CHECK(total_bytes == capacity);

  stream s;
  REQUIRE(cudaMallocAsync(&p, capacity / 2, s) == cudaSuccess);
  REQUIRE(cudaMallocAsync(&q, capacity / 4, s) == cudaSuccess);
  void* r = nullptr;
  CHECK(cudaMallocAsync(&r, capacity / 2, s) == cudaErrorMemoryAllocation);
  CHECK(cudaFreeAsync(p, s) == cudaSuccess);
  CHECK(cudaFreeAsync(p, s) == cudaErrorInvalidValue);
  CHECK(cudaMallocAsync(&r, capacity / 2, s) == cudaSuccess);
  CHECK(list_of(static_cast<int*>(r), 1, s) == std::vector<int>{-1});  // new memory is NaN
  cudaFreeAsync(q, s);
  cudaFreeAsync(r, s);
  cudaStreamSynchronize(s);
  cudaMemGetInfo(&free_bytes, &total_bytes);
  CHECK(free_bytes == capacity);
  static_cast<void>(cudaGetLastError());
}

namespace {

constexpr std::size_t most = 64;

/// Streams, events and memory, with the clock on: a fill takes as long as its number of bytes.
struct timed {
  stream a, b;
  event first{cudaEventDefault}, second{cudaEventDefault};
  char *left = nullptr, *right = nullptr;

  timed() {
    stand_in::runtime::instance().set_clock(
        [](const stand_in::task& t) { return t.kind == stand_in::work::fill ? t.size : 0; });
    for (char** p : {&left, &right}) REQUIRE(cudaMalloc(p, most) == cudaSuccess);
  }
  timed(const timed&) = delete;
  ~timed() {
    cudaDeviceSynchronize();
    for (char* p : {left, right}) cudaFree(p);
    stand_in::runtime::instance().set_clock(nullptr);
  }
  void spend(cudaStream_t s, std::size_t time) {
    CHECK(cudaMemsetAsync(s == a ? left : right, 0, time, s) == cudaSuccess);
  }
  double at(cudaStream_t s) const { return stand_in::time_of(s); }
};

}  // namespace

TEST_CASE("stand-in clock: streams run in parallel, and after the events that they wait for") {
  timed t;
  t.spend(t.a, 10);
  t.spend(t.b, 4);
  CHECK(t.at(t.a) == 10);
  CHECK(t.at(t.b) == 4);
  cudaEventRecord(t.first, t.a);
  t.spend(t.a, 20);  // after the event
  cudaStreamWaitEvent(t.b, t.first);
  t.spend(t.b, 1);
  CHECK(t.at(t.b) == 11);
  cudaEventRecord(t.second, t.b);
  cudaStreamWaitEvent(t.a, t.second);  // it has already happened
  CHECK(t.at(t.a) == 30);
  cudaDeviceSynchronize();
  float between = 0;
  CHECK(cudaEventElapsedTime(&between, t.first, t.second) == cudaSuccess);
  CHECK(between == 1);
}

TEST_CASE("stand-in clock: work that the host queues after a wait starts no earlier than the wait's end") {
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

TEST_CASE("stand-in clock: polls see finished work by the host's time, and after a few polls in any case") {
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
  CHECK(t.at(t.b) == 26);  // after the 25 that the host has waited
}

TEST_CASE("stand-in clock: a replay takes the time of its streams in parallel") {
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

TEST_CASE("stand-in clock: no time passes while it is off") {
  stream s;
  char* p = nullptr;
  REQUIRE(cudaMalloc(&p, most) == cudaSuccess);
  cudaMemsetAsync(p, 0, most, s);
  cudaStreamSynchronize(s);
  CHECK(stand_in::time_of(s) == 0);
  cudaFree(p);
}
