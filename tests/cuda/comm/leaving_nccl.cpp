// Destroys handles while operations are in flight: requests, buffers, registered memory, graphs and devices, in order
// or by an exception between the start of an operation and its wait. The stand-in ends the program if an operation in
// flight uses memory that is freed.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/launch/nccl.hpp"
#include "plait/comm/nccl.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "support/nccl_runs.hpp"
#include "support/texts.hpp"

using namespace plait;
using rank_comm = nccl::communicator;

namespace {

using plait::test::careful;
using plait::test::devices;
using plait::test::has;
using plait::test::small;
using plait::test::text_of;

constexpr std::size_t n = 5000;

void fill(cuda& device, void* to, float value) {
  kernels::fill(device, static_cast<float*>(to), static_cast<std::int64_t>(n), value);
}
buffer<cuda> filled(cuda& device, float value) {
  auto x = make_buffer<float>(device, n);
  fill(device, x.data(), value);
  return x;
}
bool holds(cuda& device, const void* from, float value) {
  std::vector<float> numbers(n);
  device.download(numbers.data(), from, n * sizeof(float), device.main_stream());
  return numbers == std::vector<float>(n, value);
}
request start(rank_comm& comm, void* x) { return comm.start_all_reduce(x, x, n, dtype::f32, reduce_op::sum); }

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  return free;
}

/// The text of the error that ends a run on two ranks. Afterwards all memory must be free again.
template <class Body>
std::string end_of(const nccl::options& settings, const Body& body) {
  [[maybe_unused]] const std::size_t before = free_bytes();
  const std::string text = text_of(2, settings, body);
#ifdef PLAIT_CUDA_STAND_IN
  CHECK(free_bytes() == before);
#endif
  return text;
}

}  // namespace

TEST_CASE("nccl: memory of a dropped request's buffer is not reused before the operation ends") {
  CHECK(end_of(careful, [](rank_comm& comm, cuda& device) {
          rank_comm apart = comm.split(0, comm.rank());
          for (rank_comm* one : {&comm, &apart}) {
            void* before = nullptr;
            {
              auto x = make_buffer<float>(device, n);
              before = x.data();
              fill(device, x.data(), 1);
              const request dropped = start(*one, x.data());
            }
            auto y = make_buffer<float>(device, n);
            if (y.data() != before) fail("another block serves the buffer: the test shows nothing");
            fill(device, y.data(), 5);
            device.main_stream().synchronize();
            one->shared_state().asynchronous_stream().synchronize();
            if (!holds(device, y.data(), 5)) fail("the collective has written to memory of another buffer");
          }
          comm.barrier();
        }) == "");
}

TEST_CASE("nccl: releasing registered memory waits for the collectives that use it") {
  CHECK(end_of(careful, [](rank_comm& comm, cuda& device) {
          rank_comm apart = comm.split(0, comm.rank());
          for (rank_comm* one : {&comm, &apart}) {
            {
              nccl::communication_memory shared(*one, n * sizeof(float));
              fill(device, shared.data(), 1);
              const request dropped = start(*one, shared.data());
            }
            {
              nccl::communication_memory shared(*one, n * sizeof(float));
              fill(device, shared.data(), 1);
              start(*one, shared.data()).wait();  // the main stream waits, not the host
              fill(device, shared.data(), 2);
            }
          }
          comm.barrier();
        }) == "");
  // The device frees the memory of the option, and the communicators end their windows.
  CHECK(end_of({.deadline = 60, .registered_bytes = 1 << 20}, [](rank_comm& comm, cuda& device) {
          auto x = buffer<cuda>::for_collectives(device, n * sizeof(float));
          fill(device, x.data(), 1);
          rank_comm apart = comm.split(0, comm.rank());
          start(apart, x.data()).wait();
          const request dropped = start(comm, x.data());
        }) == "");
}

TEST_CASE("nccl: buffers in flight that are released to the driver") {
  CHECK(end_of(careful, [](rank_comm& comm, cuda& device) {
          rank_comm apart = comm.split(0, comm.rank());
          for (int turn = 0; turn < 3; ++turn) {
            {
              auto x = filled(device, 1), y = filled(device, 1);
              const request one = start(comm, x.data()), other = start(apart, y.data());
            }
            turn == 0 ? device.release_cache() : turn == 1 ? device.release_unused() : static_cast<void>(0);
          }
        }) == "");
}

TEST_CASE("nccl: an exception between the start of an operation and its wait") {
  if (devices(2).empty()) return;
  const auto leaves = [](const nccl::options& settings, auto use) {
    return end_of(settings, [&](rank_comm& comm, cuda& device) {
      rank_comm apart = comm.split(0, comm.rank());
      use(comm, apart, device);
    });
  };
  const auto thrown = [](bool now) {
    if (now) throw std::runtime_error("the data ran out");
  };
  SUBCASE("all ranks have started it") {
    CHECK(has(leaves(careful,
                     [&](rank_comm& comm, rank_comm& apart, cuda& device) {
                       auto x = filled(device, 1), y = filled(device, 1);
                       request one = start(comm, x.data()), other = start(apart, y.data());
                       thrown(comm.rank() == 1);
                       one.wait();
                       other.wait();
                       comm.barrier();
                     }),
              "rank 1: the data ran out"));
  }
  SUBCASE("the other rank never starts it") {
    CHECK(has(leaves(careful,
                     [&](rank_comm& comm, rank_comm& apart, cuda& device) {
                       auto x = filled(device, 1);
                       thrown(comm.rank() == 0);
                       const request one = start(apart, x.data());
                       comm.barrier();
                     }),
              "rank 0: the data ran out"));
  }
  SUBCASE("in registered memory") {
    for (const bool both : {true, false}) {
      CAPTURE(both);
      const double begun = comm_clock();
      CHECK(has(leaves(careful,
                       [&](rank_comm& comm, rank_comm& apart, cuda& device) {
                         nccl::communication_memory shared(apart, n * sizeof(float));
                         fill(device, shared.data(), 1);
                         if (!both && comm.rank() == 1) comm.barrier();
                         const request one = start(apart, shared.data());
                         thrown(comm.rank() == 0);
                         comm.barrier();
                       }),
                "rank 0"));
      CHECK(comm_clock() - begun < 30);  // no rank has waited for the deadline
    }
    CHECK(has(leaves({.deadline = 60, .registered_bytes = 1 << 20},
                     [&](rank_comm& comm, rank_comm& apart, cuda& device) {
                       auto x = buffer<cuda>::for_collectives(device, n * sizeof(float));
                       fill(device, x.data(), 1);
                       const request one = start(apart, x.data());
                       thrown(comm.rank() == 0);
                       comm.barrier();
                     }),
              "rank 0: the data ran out"));
  }
  SUBCASE("in a group that is not ended") {
    CHECK(has(leaves(careful,
                     [&](rank_comm& comm, rank_comm& apart, cuda& device) {
                       auto x = filled(device, 1);
                       apart.begin_group();
                       const request one = apart.start_send(x.data(), n, dtype::f32, 1 - comm.rank());
                       thrown(comm.rank() == 0);
                       auto y = make_buffer<float>(device, n);
                       const request other = apart.start_receive(y.data(), n, dtype::f32, 1 - comm.rank());
                       apart.end_group();
                       comm.barrier();
                     }),
              "rank 0: the data ran out"));
  }
  SUBCASE("while it is recorded") {
    CHECK(has(leaves(careful,
                     [&](rank_comm& comm, rank_comm& apart, cuda& device) {
                       auto x = filled(device, 1);
                       const auto work = [&](bool fails) {
                         auto y = make_buffer<float>(device, n);
                         device.copy(y.data(), x.data(), n * sizeof(float), device.main_stream());
                         const request one = start(apart, y.data());
                         thrown(fails);
                       };
                       work(false);
                       cuda_graph graph(device);
                       graph.record([&] { work(comm.rank() == 1); });
                       graph.launch();
                       comm.barrier();
                     }),
              "rank 1: the data ran out"));
  }
}

TEST_CASE("nccl: after an exception is caught the communicator still works") {
  CHECK(end_of(careful, [](rank_comm& comm, cuda& device) {
          auto y = make_buffer<float>(device, n);
          for (int turn = 0; turn < 3; ++turn) {
            fill(device, y.data(), 2);
            try {
              auto x = make_buffer<float>(device, n);
              nccl::communication_memory idle(comm, 64);
              device.synchronize();
              comm.barrier();
              if (turn > 0) {
                fill(device, x.data(), 1);
                start(comm, x.data()).wait();
                device.synchronize();
              }
              throw std::runtime_error("a bad sample");
            } catch (const std::runtime_error&) {
              static_cast<void>(0);
            }
            comm.all_reduce(y.data(), y.data(), n, dtype::f32, reduce_op::sum);
            if (!holds(device, y.data(), 4)) fail("the sum is wrong");
          }
          comm.barrier();
        }) == "");
}

TEST_CASE("nccl: a group that cannot be started sends nothing") {
  CHECK(end_of(careful, [](rank_comm& comm, cuda& device) {
          auto x = filled(device, 1), y = filled(device, 0);
          std::vector<float> host(n);
          const int other = 1 - comm.rank();
          comm_group refused(comm);
          refused.send(x.data(), n, dtype::f32, other);
          refused.receive(host.data(), n, dtype::f32, other);
          CHECK_THROWS_WITH_AS(refused.start(), doctest::Contains("a pointer to the host's memory"), error);
          comm_group sent(comm);
          sent.send(x.data(), n, dtype::f32, other);
          sent.receive(y.data(), n, dtype::f32, other);
          sent.end();
          if (!holds(device, y.data(), 1)) fail("the message has not come");
          comm.barrier();
        }) == "");
}

TEST_CASE("nccl: a request stays the one of its operation, after any number of later operations") {
  CHECK(end_of(careful, [](rank_comm& comm, cuda& device) {
          auto x = filled(device, 1);
          request first = start(comm, x.data());
          device.synchronize();
          std::vector<request> later;  // enough that finished operations are dropped and their places reused
          for (int i = 0; i < 50; ++i) later.push_back(start(comm, x.data()));
          if (!first.done()) fail("an operation that is over is in flight again");
          for (request& r : later) r.wait();
          comm.barrier();
        }) == "");
}

TEST_CASE("nccl: a barrier returns after every rank has called it and its GPU has finished earlier work") {
  std::atomic<int> came{0};
  CHECK(end_of(careful, [&](rank_comm& comm, cuda& device) {
          auto x = make_buffer<float>(device, n);
          float* pinned = nullptr;
          if (cudaMallocHost(&pinned, sizeof(float)) != cudaSuccess) fail("no pinned memory");
          *pinned = 0;
          fill(device, x.data(), 3);
          cudaMemcpyAsync(pinned, x.data(), sizeof(float), cudaMemcpyDeviceToHost, device.main_stream().handle());
          if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
          ++came;
          comm.barrier();
          const bool all = came == 2, copied = *pinned == 3;
          device.synchronize();
          cudaFreeHost(pinned);
          if (!all) fail("the other rank has not come yet");
          if (!copied) fail("the copy is not over yet");
        }) == "");
}

TEST_CASE("a graph and its device that end while a replay is in flight") {
  auto device = std::make_unique<cuda>(small);
  std::optional<cuda_graph> graph(*device);
  {
    auto source = make_buffer<float>(*device, n), result = make_buffer<float>(*device, n);
    fill(*device, source.data(), 3);
    const void* scratch_of_graph = nullptr;
    const auto work = [&] {
      auto scratch = make_buffer<float>(*device, n);
      scratch_of_graph = scratch.data();
      device->copy(scratch.data(), source.data(), n * sizeof(float), device->main_stream());
      device->copy(result.data(), scratch.data(), n * sizeof(float), device->main_stream());
    };
    work();
    graph->record(work);
    graph->launch();
    graph.reset();
    {
      auto y = make_buffer<float>(*device, n);
      CHECK(y.data() == scratch_of_graph);  // in the order of the stream, so after the replay
      fill(*device, y.data(), 5);
      CHECK(holds(*device, result.data(), 3));
      CHECK(holds(*device, y.data(), 5));
    }
    graph.emplace(*device);
    graph->record(work);
    graph->launch();
  }
  graph.reset();
  device.reset();
}

TEST_CASE("a device that ends while an upload is in flight, in any stream") {
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  void* data = nullptr;
  REQUIRE(cudaMalloc(&data, n * sizeof(float)) == cudaSuccess);
  const std::vector<float> numbers(n, 7);
  { cuda(small).upload(data, numbers.data(), n * sizeof(float), cuda::stream(stream)); }
  cuda device(small);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(holds(device, data, 7));
  cudaFree(data);
  cudaStreamDestroy(stream);
}

TEST_CASE("a device that ends while copies in both of its streams are in flight") {
  const auto device = std::make_unique<cuda>(small);
  auto a = make_buffer<float>(*device, n), b = make_buffer<float>(*device, n), c = make_buffer<float>(*device, n);
  fill(*device, a.data(), 1);
  device->copy(b.data(), a.data(), n * sizeof(float), device->main_stream());
  device->copy(c.data(), a.data(), n * sizeof(float), device->side_stream());
  for (buffer<cuda>* one : {&a, &b, &c}) one->reset();
}

TEST_CASE("an operation that cannot be started leaves nothing behind") {
  cuda device(small);
  const std::shared_ptr<cuda::scratch> open = device.begin_scratch();
  cuda_graph graph(device);
  CHECK_THROWS_WITH_AS(graph.record([] {}), doctest::Contains("begin_scratch: there is scratch memory"), error);
  CHECK_FALSE(cuda::capturing(device.main_stream()));
  device.release_scratch(open);
  cudaGraph_t own = nullptr;
  REQUIRE(cudaStreamBeginCapture(device.main_stream().handle(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK_THROWS_WITH_AS(graph.record([] {}), doctest::Contains("beginning a graph"), error);
  static_cast<void>(cudaStreamEndCapture(device.main_stream().handle(), &own));
  if (own != nullptr) cudaGraphDestroy(own);
  static_cast<void>(cudaGetLastError());
  CHECK_NOTHROW(graph.record([] {}));
#ifdef PLAIT_CUDA_STAND_IN
  const auto& runtime = stand_in::runtime::instance();
  const std::size_t before = free_bytes(), streams = runtime.streams.size(), pools = runtime.pools.size();
  CHECK_THROWS_WITH_AS(cuda({.workspace_bytes = std::size_t{1} << 40}), doctest::Contains("out of memory"), error);
  CHECK(free_bytes() == before);
  CHECK(runtime.streams.size() == streams);
  CHECK(runtime.pools.size() == pools);
#endif
}
