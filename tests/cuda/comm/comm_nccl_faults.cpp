// program: comm_over_nccl
// Faults with NCCL: queries that fail, aborted communicators, lost ranks, and calls that would hang. Runs as
// tests/cuda/comm/comm_nccl.cpp does.
#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>

#include "plait/comm/agreement.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/launch/nccl.hpp"
#include "plait/comm/nccl.hpp"
#include "plait/device/cuda.hpp"
#include "support/conformance.hpp"
#include "support/death_message.hpp"
#include "support/nccl_runs.hpp"
#include "support/texts.hpp"

using namespace plait;
using rank_comm = nccl::communicator;

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PLAIT_TEST_THREAD_SANITIZER
#endif
#endif
#ifdef __SANITIZE_THREAD__
#define PLAIT_TEST_THREAD_SANITIZER
#endif

namespace {

using plait::test::careful;
using plait::test::death_message;
using plait::test::devices;
using plait::test::has;
using plait::test::on_ranks;
using plait::test::small;
using plait::test::text_of;

}  // namespace

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("nccl: a query that fails ends the ranks, and does not count as a finished operation") {
  if (devices(2).empty()) return;
  std::barrier both(2);
  const std::string text = text_of(2, {.deadline = 2}, [&](rank_comm& comm, cuda& device) {
    auto x = make_buffer<float>(device, 100);
    comm.split(0, comm.rank());
    both.arrive_and_wait();
    stand_in::lost_device = cudaErrorIllegalAddress;
    request r = comm.start_all_reduce(x.data(), x.data(), 100, dtype::f32, reduce_op::sum);
    // Repeats until the watching thread has ended the ranks; then this call throws.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      comm.all_gather(x.data(), x.data(), 0, dtype::f32);
    }
  });
  stand_in::lost_device = cudaSuccess;
  CHECK(has(text, "CUDA reports: "));
  CHECK(has(text, cudaGetErrorString(cudaErrorIllegalAddress)));
  CHECK(has(text, "all_reduce #"));
}

TEST_CASE("nccl: only one thread at a time queries a communicator's state") {
  on_ranks(2, [](rank_comm& comm, cuda& device) {
    std::atomic<int> wrong{0};
    const auto ask = [&] {
      device.bind_thread();
      for (int i = 0; i < 2000; ++i) {
        ncclResult_t now = ncclSuccess;
        wrong += comm.shared_state().link.state(now) != ncclSuccess;
      }
    };
    std::thread other(ask);
    ask();
    other.join();
    CHECK(wrong == 0);
    comm.barrier();
  });
}

TEST_CASE("nccl: ranks get the cause while communicators are being aborted") {
  if (devices(2).empty()) return;
  std::atomic<double> waited{-1};
  std::atomic<bool> looking{false};
  stand_in::abort_seconds = 3;
  const std::string text = text_of(2, {.deadline = 60}, [&](rank_comm& comm, cuda&) {
    rank_comm more = comm.split(0, comm.rank());
    if (comm.rank() == 0) {
      while (!looking) std::this_thread::yield();
      comm.abort("for a test");
    } else {
      looking = true;
      while (!comm.shared_state().home->ranks().failed()) std::this_thread::yield();
      const double begun = comm_clock();
      static_cast<void>(comm.shared_state().home->ranks().cause());
      waited = comm_clock() - begun;
    }
    comm.barrier();
  });
  stand_in::abort_seconds = 0;
  CHECK(has(text, "called abort: for a test"));
  CHECK(waited >= 0);
  CHECK(waited < 2);
}

TEST_CASE("nccl: communicators are aborted in parallel, because one may wait for kernels of another") {
  if (devices(2).empty()) return;
  stand_in::aborts_begun = 0;
  stand_in::aborts_together = 6;  // two ranks with three communicators each
  const std::string text = text_of(2, {.deadline = 60, .grace = 30}, [&](rank_comm& comm, cuda&) {
    const rank_comm one = comm.split(0, comm.rank()), two = comm.split(0, comm.rank());
    comm.barrier();  // all six exist
    if (comm.rank() == 0) comm.abort("for a test");
    comm.barrier();
  });
  stand_in::aborts_together = 0;
  CHECK(has(text, "called abort: for a test"));
  CHECK(stand_in::aborts_begun == 6);
}

TEST_CASE("nccl: a rank that fails while it owns a recorded graph throws at once, and the process continues") {
  if (devices(2).empty()) return;
  // The aborts wait for the graph, and only the thread that throws can destroy the graph.
  const auto ends = [](const auto& fails) {
    std::atomic<double> waited{-1};
    const std::string text = text_of(2, {.deadline = 60, .grace = 20}, [&](rank_comm& comm, cuda& device) {
      auto x = make_buffer<float>(device, 64);
      device.zero(x.data(), 256, device.main_stream());
      rank_comm apart = comm.split(0, comm.rank());
      const auto work = [&] {
        for (rank_comm* one : {&comm, &apart}) one->all_reduce(x.data(), x.data(), 64, dtype::f32, reduce_op::sum);
      };
      work();
      cuda_graph graph(device);
      graph.record(work);
      graph.launch();
      comm.barrier();
      const double begun = comm_clock();
      try {
        fails(comm, x.data());
        comm.barrier();
      } catch (const error&) {
        if (comm.rank() == 0) waited = comm_clock() - begun;
        throw;
      }
    });
    CHECK(waited >= 0);
    CHECK(waited < 10);
    return text;
  };
  CHECK(has(ends([](rank_comm& comm, void*) {
              if (comm.rank() == 0) comm.abort("for a test");
            }),
            "called abort: for a test"));
  CHECK(has(ends([](rank_comm& comm, void* x) {  // rank 0 arrives last, so NCCL reports the error in its call
              if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
              comm.all_reduce(x, x, 4, comm.rank() ? dtype::f32 : dtype::i32, reduce_op::sum);
            }),
            "mismatched collective"));
}

#ifndef PLAIT_TEST_THREAD_SANITIZER  // thread sanitizer does not follow a fork
TEST_CASE("nccl: a process ends with the reason if aborting takes longer than the grace") {
  if (devices(2).empty()) return;
  const auto aborts_for = [](double grace) {
    return death_message([=] {
      stand_in::abort_seconds = grace > 0 && grace < 1 ? 10 : 0.5;  // 10: even a busy machine sees that it is too long
      text_of(2, {.deadline = 60, .grace = grace}, [](rank_comm& comm, cuda&) {
        rank_comm more = comm.split(0, comm.rank());
        comm.barrier();  // all four exist
        if (comm.rank() == 1) comm.abort("for a test");
        comm.barrier();
      });
    });
  };
  const std::string words = aborts_for(0.05);
  CHECK(has(words, "plait: rank 1 called abort: for a test"));
  CHECK(has(words, "plait: NCCL did not abort 4 of 4 communicators within the grace of 0.05 s; the process ends"));
  CHECK(aborts_for(60) == "");
  CHECK(aborts_for(0) == "");  // no limit
}
#endif

TEST_CASE("nccl: no thread makes a context on another rank's GPU") {
  if (devices(2).empty()) return;
  stand_in::calls_without_device = 0;
  on_ranks(2, {.deadline = 5}, [](rank_comm& comm, cuda& device) {
    auto x = make_buffer<float>(device, 100);
    request r = comm.start_all_reduce(x.data(), x.data(), 100, dtype::f32, reduce_op::sum);
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));  // the watching thread queries it meanwhile
    r.wait();
    comm.barrier();
  });
  CHECK(stand_in::calls_without_device == 0);
  // Threads that abort communicators make no context either.
  CHECK(text_of(2, {.deadline = 60}, [](rank_comm& comm, cuda&) {
          rank_comm more = comm.split(0, comm.rank());
          if (comm.rank() == 0) comm.abort("for a test");
          comm.barrier();
        }) != "");
  CHECK(stand_in::calls_without_device == 0);
}
#endif

TEST_CASE("nccl: a rank that never arrives") {
  if (devices(2).empty()) return;
  const std::string text = test::text_thrown_by([] {
    cuda device(small);
    nccl::connect(device, nccl::new_id(), 0, 2, {.deadline = 0.3});
  });
  CHECK(has(text, "making a communicator) did not finish within its deadline of 0.3"));
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("nccl: calls on which NCCL would hang or corrupt data end all ranks") {
  if (devices(2).empty()) return;
  const auto with = [&](const auto& odd) {
    return text_of(2, careful, [&](rank_comm& comm, cuda& device) {
      auto x = make_buffer<float>(device, 64);
      device.zero(x.data(), 256, device.main_stream());
      odd(comm, x.data());
      comm.barrier();
    });
  };
  using T = rank_comm&;
  CHECK(has(with([](T c, void* x) { c.all_reduce(x, x, 4, c.rank() ? dtype::f32 : dtype::i32, reduce_op::sum); }),
            "mismatched collective"));
  CHECK(has(with([](T c, void* x) { c.all_reduce(x, x, 4, dtype::f32, c.rank() ? reduce_op::sum : reduce_op::max); }),
            "mismatched collective"));
  CHECK(has(with([](T c, void* x) { c.broadcast(x, 4, dtype::f32, c.rank()); }), "mismatched collective"));
  CHECK(has(with([](T c, void* x) { c.rank() == 0 ? c.send(x, 4, dtype::f32, 1) : c.receive(x, 5, dtype::f32, 0); }),
            "mismatched message"));
  CHECK(has(with([](T c, void* x) {
              if (c.rank() == 0) c.send(x, 4, dtype::f32, 1);
            }),
            "deadlock"));
  CHECK(has(with([](T c, void* x) {
              c.send(x, 4, dtype::f32, 1 - c.rank());
              c.receive(x, 4, dtype::f32, 1 - c.rank());
            }),
            "deadlock"));
  CHECK(has(with([](T c, void* x) {
              rank_comm a = c.split(0, 0, "a"), b = c.split(0, 0, "b");
              for (rank_comm* one : {c.rank() ? &a : &b, c.rank() ? &b : &a}) {
                one->all_reduce(x, x, 4, dtype::f32, reduce_op::sum);
              }
            }),
            "deadlock"));
}

TEST_CASE("nccl's stand-in refuses communicators that have ended or are not ready") {
  ncclComm_t comm = nullptr;
  const ncclUniqueId id = nccl::new_id();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  CHECK(ncclCommInitRankConfig(&comm, 2, id, 0, &config) == ncclInProgress);
  ncclResult_t state = ncclSuccess;
  CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
  CHECK(state == ncclInProgress);
  int count = 0;
  CHECK(ncclCommCount(comm, &count) == ncclInvalidUsage);
  CHECK(ncclCommAbort(comm) == ncclSuccess);
  CHECK(ncclCommCount(comm, &count) == ncclInvalidUsage);
  CHECK(ncclCommDestroy(comm) == ncclInvalidUsage);
  CHECK(std::string(ncclGetLastError(comm)).find("destroyed or aborted") != std::string::npos);
  ncclGroupStart();
  ncclComm_t other = nullptr;
  CHECK(ncclCommInitRank(&other, 1, nccl::new_id(), 0) == ncclInvalidUsage);
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
}
#endif

TEST_CASE("nccl: ranks started with different settings find this through their devices' memory") {
  for (const int odd : {-1, 2}) {
    on_ranks(3, [&](rank_comm& comm, cuda& device) {
      any_communicator all(comm);
      const setting settings[] = {{"--lr", comm.rank() == odd ? "0.01" : "0.001"}};
      std::string message;
      try {
        require_agreement(device, all, settings);
      } catch (const disagreement& e) {
        message = e.what();
      }
      const std::string expected =
          "rank 2 was started with --lr 0.01, ranks 0, 1 with --lr 0.001; every rank needs the "
          "same options";
      test::expect(message == (odd < 0 ? "" : expected), "what a rank is told");
      comm.barrier();
    });
  }
}
