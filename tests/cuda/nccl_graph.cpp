// Collectives of the NCCL communicator recorded in a CUDA graph and replayed.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/launch/nccl.hpp"
#include "plait/device/cuda_graph.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
#include "support/nccl_devices.hpp"

using namespace plait;
using rank_comm = nccl::communicator;

namespace {

using plait::test::devices;

const cuda::options small{.workspace_bytes = 4096};
constexpr std::size_t n = 37;

template <class F>
std::string text_of(int ranks, const nccl::options& settings, const F& body) {
  if (devices(ranks).empty()) return "";
  try {
    nccl::run(devices(ranks), small, settings, body);
  } catch (const error& e) {
    return e.what();
  }
  return "";
}

/// Arrays of one rank, and a step that uses every kind of collective, direct and started.
struct step {
  cuda& device;
  rank_comm& comm;
  std::size_t ranks = static_cast<std::size_t>(comm.size());
  buffer<cuda> x = room(n), sum = room(n), all = room(n * ranks), part = room(n), turned = room(n * ranks),
               ring = room(n), beside = room(n);

  buffer<cuda> room(std::size_t count) { return make_buffer<float>(device, count); }

  void run() {
    comm.all_reduce(x.data(), sum.data(), n, dtype::f32, reduce_op::sum);
    request gathering = comm.start_all_gather(sum.data(), all.data(), n, dtype::f32);
    device.copy(beside.data(), x.data(), n * 4, device.main_stream());  // beside the gathering
    gathering.wait();
    comm.reduce_scatter(all.data(), part.data(), n, dtype::f32, reduce_op::max);
    comm.all_to_all(all.data(), turned.data(), n, dtype::f32);
    const int next = (comm.rank() + 1) % comm.size(), previous = (comm.rank() + comm.size() - 1) % comm.size();
    comm.begin_group();
    request sent = comm.start_send(x.data(), n, dtype::f32, next);
    request got = comm.start_receive(ring.data(), n, dtype::f32, previous);
    comm.end_group();
    sent.wait();
    got.wait();
    comm.broadcast(part.data(), n, dtype::f32, comm.size() - 1);
    kernels::accumulate(device, ring.data<float>(), x.data<float>(), static_cast<std::int64_t>(n));
  }
  void start(float value) { kernels::fill(device, x.data<float>(), static_cast<std::int64_t>(n), value); }
  std::vector<float> read() {
    std::vector<float> out;
    for (buffer<cuda>* b : {&x, &sum, &all, &part, &turned, &ring, &beside}) {
      const std::size_t at = out.size();
      out.resize(at + b->bytes() / 4);
      device.download(out.data() + at, b->data(), b->bytes(), device.main_stream());
    }
    return out;
  }
};

}  // namespace

TEST_CASE("nccl in a graph: a replay is what the calls are, as often as it is launched") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    CHECK(text_of(ranks, {.deadline = 60}, [](rank_comm& comm, cuda& device) {
            step s{device, comm};
            const auto first = static_cast<float>(comm.rank() + 1);
            std::vector<std::vector<float>> expected;
            s.start(first);
            for (int turn = 0; turn < 4; ++turn) {
              s.run();
              expected.push_back(s.read());
            }
            CHECK(expected[1] != expected[0]);
            cuda_graph graph(device);
            s.start(first);
            graph.record([&] { s.run(); });
            CHECK(s.read()[0] == first);  // recording it has not run it
            for (int turn = 0; turn < 3; ++turn) {
              graph.launch();
              CHECK(s.read() == expected[static_cast<std::size_t>(turn)]);
            }
            s.run();  // calls and replays in turn
            CHECK(s.read() == expected[3]);
            comm.barrier();
          }) == "");
  }
}

TEST_CASE("nccl in a graph: the watch over lost ranks neither disturbs a recording nor takes it for work") {
  const nccl::options quick{.deadline = 0.2};
  CHECK(text_of(2, quick, [](rank_comm& comm, cuda& device) {
          step s{device, comm};
          s.start(1.0f);
          s.run();
          for (int i = 0; i < 40; ++i) comm.all_reduce(s.x.data(), s.x.data(), n, dtype::f32, reduce_op::max);
          device.synchronize();
          // As a program of its own might, in the strictest mode.
          const cudaStream_t stream = device.main_stream().handle();
          cudaGraph_t graph = nullptr;
          REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
          for (int i = 0; i < 40; ++i) comm.all_reduce(s.x.data(), s.x.data(), n, dtype::f32, reduce_op::max);
          std::this_thread::sleep_for(std::chrono::milliseconds(500));
          REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          cudaGraphDestroy(graph);
          comm.barrier();
        }) == "");
}

TEST_CASE("nccl in a graph: what the host would have to wait for is refused") {
  const std::string barrier = text_of(2, {.deadline = 60}, [](rank_comm& comm, cuda& device) {
    cuda_graph graph(device);
    graph.record([&] { comm.barrier(); });
  });
  CHECK((devices(2).empty() || barrier.find("is part of a graph, which runs later") != std::string::npos));
  const std::string before = text_of(2, {.deadline = 60}, [](rank_comm& comm, cuda& device) {
    step s{device, comm};
    s.start(1.0f);
    request open = comm.start_all_reduce(s.x.data(), s.sum.data(), n, dtype::f32, reduce_op::sum);
    cuda_graph graph(device);
    graph.record([&] { comm.all_reduce(s.x.data(), s.sum.data(), n, dtype::f32, reduce_op::sum); });
  });
  CHECK((devices(2).empty() || before.find("was started before the stream was recorded") != std::string::npos));
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("nccl in a graph: a replay that is watched is an operation in flight") {
  const std::string text = text_of(2, {.deadline = 2}, [](rank_comm& comm, cuda& device) {
    step s{device, comm};
    s.start(1.0f);
    s.run();
    cuda_graph graph(device);
    graph.record([&] { s.run(); });
    device.synchronize();
    comm.barrier();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the other rank is past the barrier, too
    stand_in::lost_device = cudaErrorIllegalAddress;
    graph.launch();
    any_communicator(comm).watch("replayed step");
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    stand_in::lost_device = cudaSuccess;
    comm.all_gather(s.x.data(), s.all.data(), 0, dtype::f32);
  });
  CHECK(text.find("at replayed step #") != std::string::npos);
}
#endif
