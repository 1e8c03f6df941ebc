// The stand-in for NCCL with ranks that meet in streams: calls that return before other ranks have made them, in any
// valid order, and the errors for streams that wait for each other.
#include "nccl.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "support/death_message.hpp"
#include "unit/stand_in/on_device.hpp"

namespace {

const bool configured = setenv("PLAIT_STAND_IN_NCCL", "late", 1) == 0;

using plait::test::on_host;

constexpr std::size_t count = 4;

/// The state of a communicator whose last call is over.
ncclResult_t state_of(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress) CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
  return state;
}

/// One rank's communicators and streams, and an array in the device's memory.
struct place {
  int rank = 0;
  ncclComm_t first = nullptr, second = nullptr;
  cudaStream_t one = nullptr, other = nullptr;
  float* data = nullptr;

  void fill(float value) const {
    const std::vector<float> values(count, value);
    cudaMemcpy(data, values.data(), count * sizeof(float), cudaMemcpyHostToDevice);
  }
  std::vector<float> values() const { return on_host(data, count); }
  ncclResult_t sum(ncclComm_t comm, cudaStream_t stream) const {
    return ncclAllReduce(data, data, count, ncclFloat, ncclSum, comm, stream);
  }
};

/// Runs `body(place)` on two threads.
template <class Body>
void on_two(Body body) {
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      place p;
      p.rank = rank;
      CHECK(cudaSetDevice(0) == cudaSuccess);
      CHECK(ncclCommInitRank(&p.first, 2, id, rank) == ncclSuccess);
      CHECK(ncclCommSplit(p.first, 0, rank, &p.second, nullptr) == ncclSuccess);
      CHECK(cudaStreamCreateWithFlags(&p.one, cudaStreamNonBlocking) == cudaSuccess);
      CHECK(cudaStreamCreateWithFlags(&p.other, cudaStreamNonBlocking) == cudaSuccess);
      CHECK(cudaMalloc(&p.data, count * sizeof(float)) == cudaSuccess);
      body(p);
      CHECK(cudaStreamDestroy(p.one) == cudaSuccess);
      CHECK(cudaStreamDestroy(p.other) == cudaSuccess);
      ncclCommDestroy(p.second);
      ncclCommDestroy(p.first);
    });
  }
  for (std::thread& t : threads) t.join();
}

void wait_for(const std::atomic<int>& flag, int value) {
  while (flag < value) std::this_thread::yield();
}

}  // namespace

TEST_CASE("a call returns before the other rank has made it, and its result arrives after the last call") {
  REQUIRE(configured);
  std::atomic<int> made{0};
  on_two([&](const place& p) {
    p.fill(static_cast<float>(p.rank + 1));
    if (p.rank == 1) wait_for(made, 1);
    CHECK(p.sum(p.first, p.one) == ncclSuccess);
    if (p.rank == 0) {
      for (int i = 0; i < 20; ++i) CHECK(cudaStreamQuery(p.one) == cudaErrorNotReady);
      made = 1;
    }
    CHECK(cudaStreamSynchronize(p.one) == cudaSuccess);
    CHECK(p.values() == std::vector<float>(count, 3));
  });
}

TEST_CASE("a write between the parts of two ranks changes the result only if the stream orders it so") {
  std::atomic<int> made{0};
  on_two([&](const place& p) {
    float* result = nullptr;
    CHECK(cudaMalloc(&result, count * sizeof(float)) == cudaSuccess);
    p.fill(1);
    if (p.rank == 1) wait_for(made, 1);
    CHECK(ncclAllReduce(p.data, result, count, ncclFloat, ncclSum, p.first, p.one) == ncclSuccess);
    if (p.rank == 0) {
      // In the same stream it runs after the sum. In another nothing orders it: it runs before, as the sum has not
      // started.
      CHECK(cudaMemsetAsync(p.data + 1, 0, sizeof(float), p.one) == cudaSuccess);
      CHECK(cudaMemsetAsync(p.data, 0, sizeof(float), p.other) == cudaSuccess);
      CHECK(cudaStreamSynchronize(p.other) == cudaSuccess);
      made = 1;
    }
    CHECK(cudaStreamSynchronize(p.one) == cudaSuccess);
    CHECK(on_host(result, count) == std::vector<float>{1, 2, 2, 2});
  });
}

TEST_CASE("communicators in opposite orders: valid in two streams, an error that names it in one") {
  on_two([](const place& p) {
    p.fill(1);
    CHECK(p.sum(p.rank == 0 ? p.first : p.second, p.rank == 0 ? p.one : p.other) == ncclSuccess);
    CHECK(p.sum(p.rank == 0 ? p.second : p.first, p.rank == 0 ? p.other : p.one) == ncclSuccess);
    CHECK(cudaStreamSynchronize(p.one) == cudaSuccess);
    CHECK(cudaStreamSynchronize(p.other) == cudaSuccess);
    CHECK(p.values() == std::vector<float>(count, 4));
  });
  on_two([](const place& p) {
    CHECK(p.sum(p.rank == 0 ? p.first : p.second, p.one) == ncclSuccess);
    CHECK(p.sum(p.rank == 0 ? p.second : p.first, p.one) == ncclSuccess);
    CHECK(cudaStreamSynchronize(p.one) == cudaSuccess);
    CHECK(state_of(p.first) == ncclRemoteError);
    CHECK(std::string(ncclGetLastError(p.first)).find("streams wait for each other") != std::string::npos);
  });
}

TEST_CASE("messages: a circle is an error outside a group, and none inside") {
  const auto exchange = [](const place& p, float* to) {
    CHECK(ncclSend(p.data, count, ncclFloat, 1 - p.rank, p.first, p.one) == ncclSuccess);
    CHECK(ncclRecv(to, count, ncclFloat, 1 - p.rank, p.first, p.one) == ncclSuccess);
  };
  on_two([&](const place& p) {
    float* to = nullptr;
    CHECK(cudaMalloc(&to, count * sizeof(float)) == cudaSuccess);
    p.fill(static_cast<float>(p.rank));
    CHECK(ncclGroupStart() == ncclSuccess);
    exchange(p, to);
    CHECK(ncclGroupEnd() == ncclSuccess);
    CHECK(cudaStreamSynchronize(p.one) == cudaSuccess);
    CHECK(on_host(to, count) == std::vector<float>(count, static_cast<float>(1 - p.rank)));

    exchange(p, to);
    CHECK(cudaStreamSynchronize(p.one) == cudaSuccess);
    CHECK(state_of(p.first) == ncclRemoteError);
  });
}

TEST_CASE("ranks with different calls at one place get an error, and an abort frees the rank that waits") {
  on_two([](const place& p) {
    const ncclResult_t made =
        ncclAllReduce(p.data, p.data, count - static_cast<std::size_t>(p.rank), ncclFloat, ncclSum, p.first, p.one);
    if (made != ncclSuccess)
      CHECK(std::string(ncclGetLastError(p.first)).find("mismatched collective") != std::string::npos);
    CHECK(cudaStreamSynchronize(p.one) == cudaSuccess);
    CHECK(state_of(p.first) != ncclSuccess);
  });
  on_two([](const place& p) {
    if (p.rank == 1) CHECK(ncclCommAbort(p.first) == ncclSuccess);
    if (p.rank == 0) CHECK(p.sum(p.first, p.one) == ncclSuccess);
    CHECK(cudaStreamSynchronize(p.one) == cudaSuccess);
  });
}

#ifndef STAND_IN_THREAD_SANITIZER  // thread sanitizer does not follow a fork
TEST_CASE("freeing memory or a window of a collective in flight ends the program; a finalized one waits for it") {
  using plait::test::death_message;
  const auto alone = [](const auto& body) {
    return death_message([&] {
      ncclUniqueId id;
      ncclGetUniqueId(&id);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      place p;
      cudaSetDevice(0);
      ncclCommInitRankConfig(&p.first, 1, id, 0, &config);
      state_of(p.first);
      cudaStreamCreateWithFlags(&p.one, cudaStreamNonBlocking);
      ncclMemAlloc(reinterpret_cast<void**>(&p.data), count * sizeof(float));
      p.fill(1);
      body(p);
    });
  };
  const auto window_of = [](const place& p) {
    ncclWindow_t window = nullptr;
    if (ncclCommWindowRegister(p.first, p.data, count * sizeof(float), &window, 0) != ncclSuccess || window != nullptr)
      std::abort();  // the process ends before
    state_of(p.first);
    if (window == nullptr) std::abort();
    return window;
  };
  CHECK(alone([](const place& p) {
          p.sum(p.first, p.one), ncclMemFree(p.data);
        }).find("ncclMemFree frees 16 bytes that an operation in flight uses: an operation of NCCL's") !=
        std::string::npos);
  CHECK(alone([](const place& p) {
          p.sum(p.first, p.one);
          cudaStreamSynchronize(p.one);
          ncclMemFree(p.data);
        }) == "");
  CHECK(alone([&](const place& p) {
          const ncclWindow_t window = window_of(p);
          p.sum(p.first, p.one);
          ncclCommWindowDeregister(p.first, window);
        }).find("ncclCommWindowDeregister: an operation in flight uses the window") != std::string::npos);
  CHECK(alone([&](const place& p) {  // memory outside the window is not affected
          float* other = nullptr;
          cudaMalloc(&other, count * sizeof(float));
          cudaMemset(other, 0, count * sizeof(float));
          const ncclWindow_t window = window_of(p);
          ncclAllReduce(other, other, count, ncclFloat, ncclSum, p.first, p.one);
          ncclCommWindowDeregister(p.first, window);
        }) == "");
  CHECK(alone([](const place& p) {
          p.sum(p.first, p.one);
          if (ncclCommFinalize(p.first) != ncclInProgress) std::abort();
          if (state_of(p.first) != ncclSuccess || ncclMemFree(p.data) != ncclSuccess) std::abort();
        }) == "");
  CHECK(alone([&](const place& p) {  // an abort leaves no operation in flight, and no window
          window_of(p);
          p.sum(p.first, p.one);
          ncclCommAbort(p.first);
          if (ncclMemFree(p.data) != ncclSuccess) std::abort();
        }) == "");
}
#endif
