// program: comm_over_nccl
// The NCCL communicator: conformance, streams, memory, and how a lost rank ends the others. Runs with a stand-in for
// NCCL, whose ranks share a GPU, or with NCCL and one rank for each GPU. Faults: tests/cuda/comm/comm_nccl_faults.cpp.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/agreement.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/launch/nccl.hpp"
#include "plait/comm/nccl.hpp"
#include "plait/comm/world.hpp"
#include "plait/device/cuda.hpp"
#include "plait/parallel/world.hpp"
#include "plait/tensor/redistribution.hpp"
#include "support/conformance.hpp"
#include "support/device_memory.hpp"
#include "support/nccl_runs.hpp"
#include "support/texts.hpp"

using namespace plait;
using rank_comm = nccl::communicator;

namespace {

using plait::test::careful;
using plait::test::devices;
using plait::test::has;
using plait::test::on_ranks;
using plait::test::small;
using plait::test::text_of;

#ifdef PLAIT_CUDA_STAND_IN  // its streams run nothing until the host waits
const bool nothing_unasked = stand_in::runtime::instance().order == stand_in::stream_order::late;
#else
constexpr bool nothing_unasked = false;
#endif

}  // namespace

TEST_CASE("nccl: conformance on any number of ranks") {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    CAPTURE(ranks);
    on_ranks(ranks, [](rank_comm& comm, cuda& device) {
      test::device_memory memory(device);
      test::short_conformance(comm);
      comm.barrier();
      if (comm.size() != 4) return;
      any_communicator any(comm);
      test::check_types(any, {37});
    });
  }
}

TEST_CASE("nccl: a call runs in the main stream, a started operation in a side stream") {
  on_ranks(2, [](rank_comm& comm, cuda& device) {
    constexpr std::size_t n = 5000;
    test::device_memory memory(device);
    test::array<std::int32_t> x(n), y(n);
    test::write(y.data(), std::vector<std::int32_t>(n, 1));
    for (int turn = 0; turn < 4; ++turn) {
      device.copy(x.data(), y.data(), n * 4, device.main_stream());
      request r = comm.start_all_reduce(x.data(), x.data(), n, dtype::i32, reduce_op::sum);
      device.zero(y.data(), n * 4, device.main_stream());
      r.wait();
      comm.all_reduce(x.data(), y.data(), n, dtype::i32, reduce_op::max);
    }
    test::expect("doubled four times", y.data(), n, [](std::size_t) { return 16; });
  });
}

TEST_CASE("nccl: a call does not wait for messages of another communicator") {
  on_ranks(2, [](rank_comm& comm, cuda& device) {
    constexpr std::size_t n = 1000;
    rank_comm along = comm.split(0, comm.rank(), "pp"), across = comm.split(0, comm.rank(), "tp");
    test::device_memory memory(device);
    test::array<std::int32_t> message(n), x(n);
    test::write(message.data(), std::vector<std::int32_t>(n, comm.rank()));
    test::write(x.data(), std::vector<std::int32_t>(n, 1));
    request r = comm.rank() == 0 ? along.start_receive(message.data(), n, dtype::i32, 1)
                                 : along.start_send(message.data(), n, dtype::i32, 0);
    across.all_reduce(x.data(), x.data(), n, dtype::i32, reduce_op::sum);
    device.main_stream().synchronize();
    if (nothing_unasked && comm.rank() == 0)
      test::expect("not yet here", message.data(), n, [](std::size_t) { return 0; });
    test::expect("summed", x.data(), n, [](std::size_t) { return 2; });
    // The communicator's next operation is ordered after the message, whether the host waited for it or not.
    along.all_reduce(x.data(), x.data(), n, dtype::i32, reduce_op::sum);
    test::expect("here", message.data(), n, [](std::size_t) { return 1; });
    r.wait();
  });
}

TEST_CASE("nccl: a call is ordered after what its communicator started, after any number of operations") {
  on_ranks(2, [](rank_comm& comm, cuda& device) {
    constexpr std::size_t n = 1000;
    rank_comm along = comm.split(0, comm.rank(), "pp");
    test::device_memory memory(device);
    test::array<std::int32_t> x(n), y(n);
    for (int i = 0; i < 200; ++i) {  // finished operations are kept for later ones
      along.start_all_reduce(x.data(), x.data(), n, dtype::i32, reduce_op::max).wait();
      if (i % 50 == 49) device.synchronize();
    }
    test::write(x.data(), std::vector<std::int32_t>(n, 1));
    request r = along.start_all_reduce(x.data(), x.data(), n, dtype::i32, reduce_op::sum);
    along.all_reduce(x.data(), y.data(), n, dtype::i32, reduce_op::sum);
    test::expect("the sum of sums", y.data(), n, [](std::size_t) { return 4; });
    r.wait();
  });
}

TEST_CASE("nccl: small parts of unequal sizes are padded, and large ones are not") {
  using parts = spec<batch, shard<seq, tp>, hidden>;
  using whole = spec<batch, seq, hidden, invariant<tp>>;
  using terms = spec<batch, seq, hidden, partial<tp>>;
  on_ranks(3, [](rank_comm& comm, cuda& device) {
    world ranks(mesh<axis<tp, 3>>().shape(), comm);
    test::device_memory memory(device);
    for (const std::int64_t outer : {1, 2})
      for (const std::int64_t width : {5, 10000}) {
        const dim_sizes sizes = sizes_of<batch, seq, hidden>(outer, 7, width);
        const ready_plan gather(layout_v<parts>, layout_v<whole>, ranks, sizes, "test"),
            scatter(layout_v<terms>, layout_v<parts>, ranks, sizes, "test");
        const box& own = gather.source();
        std::vector<std::int32_t> values;
        for (std::int64_t i = 0; i < own.local_size(); ++i) {
          const std::int64_t row = i / width % own.local[1] + own.offset[1], block = i / width / own.local[1];
          values.push_back(static_cast<std::int32_t>((block * 7 + row) * width + i % width));
        }
        const test::array<std::int32_t> in(values);
        const auto all = static_cast<std::size_t>(outer * 7 * width);
        test::array<std::int32_t> out(all), back(values.size());
        ranks.ledger().clear();
        gather.run(device, in.data(), out.data(), dtype::i32);
        scatter.run(device, out.data(), back.data(), dtype::i32);
        test::expect("gathered", out.data(), all, [](std::size_t i) { return static_cast<double>(i); });
        test::expect("scattered", back.data(), values.size(), [&](std::size_t i) { return 3.0 * values[i]; });
        const std::size_t largest = static_cast<std::size_t>(outer * 3 * width);
        const bool padded = width == 5;
        const auto gathered = ranks.ledger().total("tp", collective::all_gather),
                   scattered = ranks.ledger().total("tp", collective::reduce_scatter);
        test::expect(gathered.payload == 4 * (padded ? largest : values.size()), "payload of the gather");
        test::expect(gathered.wire == 4 * 2 * (padded ? 3 * largest : all), "bytes of the gather");
        test::expect(scattered.payload == 4 * (padded ? 3 * largest : all), "payload of the scatter");
        test::expect(scattered.wire == 2 * scattered.payload, "bytes of the scatter");
      }
  });
}

TEST_CASE("nccl: errors have the labels of a mesh's groups") {
  if (devices(4).empty()) return;
  const mesh_shape shape = mesh<axis<dp, 2>, axis<tp, 2>>().shape();
  const std::string text = text_of(4, careful, [&](rank_comm& comm, cuda& device) {
    world ranks(shape, comm);
    test::device_memory memory(device);
    test::array<float> x(std::vector<float>(8, static_cast<float>(comm.rank())));
    auto& group = ranks.group(axis_list(axis_of<tp>));
    group.all_reduce(x.data(), x.data(), 8, dtype::f32, reduce_op::sum);
    test::expect("sum over tp", x.data(), 8, [&](std::size_t) { return comm.rank() / 2 * 4 + 1; });
    group.all_reduce(x.data(), x.data(), comm.rank() == 3 ? 7 : 8, dtype::f32, reduce_op::sum);
    comm.barrier();
  });
#ifdef PLAIT_CUDA_STAND_IN
  CHECK(has(text, "all_reduce #1 on 'tp'"));
  CHECK(has(text, "all_reduce(7 float, sum)"));
#endif
}

TEST_CASE("nccl: messages of a group match by tag, and calls that a group cannot contain are refused") {
  on_ranks(2, [](rank_comm& comm, cuda& device) {
    test::device_memory memory(device);
    test::check_ring<float>(comm, 11, 1);
    test::array<float> x(8);
    comm.begin_group();
    test::expect_refused([&] { comm.barrier(); }, "only started messages can stand in a group");
    request r = comm.start_send(x.data(), 8, dtype::f32, 1 - comm.rank());
    test::expect_refused(
        [&] {
          nccl::detail::pending{comm.shared_state().home, comm.shared_state().group}.wait();
        },
        "before the end of its group");
    request q = comm.start_receive(x.data(), 8, dtype::f32, 1 - comm.rank());
    comm.end_group();
    r.wait();
    q.wait();
    test::expect_refused([&] { comm.end_group(); }, "without begin_group");
    test::expect_refused([&] { comm.send(x.data(), 8, dtype::f32, comm.rank()); }, "must stand in a comm_group");
    std::vector<float> host(8);
    test::expect_refused([&] { comm.broadcast(host.data(), 8, dtype::f32, 0); }, "a pointer to the host's memory");
  });
}

TEST_CASE("nccl: symmetric memory, and a communicator of the caller") {
  on_ranks(2, [](rank_comm& comm, cuda& device) {
    test::device_memory memory(device);
    {
      nccl::communication_memory shared(comm, 4096);
      CHECK(shared.bytes() == 4096);
      test::write(static_cast<float*>(shared.data()), std::vector<float>(1024, 2.0f));
      comm.all_reduce(shared.data(), shared.data(), 1024, dtype::f32, reduce_op::sum);
      test::expect("symmetric memory", static_cast<float*>(shared.data()), 1024, [](std::size_t) { return 4; });
    }
    {
      rank_comm mine = nccl::attach(comm.get(), device, careful);
      CHECK(mine.rank() == comm.rank());
      test::check_all_reduce<float>(mine, 100, reduce_op::sum, test::how::direct, 1);
      rank_comm part = mine.split(mine.rank(), 0);
      CHECK(part.size() == 1);
    }
    {
      rank_comm mine = nccl::attach(comm.get(), device, careful);
      mine.abort("for a test");
      test::expect_refused([&] { mine.barrier(); }, "called abort: for a test");
      test::expect_refused([&] { mine.watch("replayed step"); }, "called abort: for a test");
      bool called = false;  // NCCL's communicators have ended
      CHECK(mine.shared_state().home->guarded([&] { return called = true, ncclSuccess; }) == ncclRemoteError);
      CHECK_FALSE(called);
    }
    test::check_all_reduce<float>(comm, 100, reduce_op::sum, test::how::started, 1);  // the caller still owns it
  });
}

TEST_CASE("nccl: a rank that throws or aborts ends the others") {
  if (devices(3).empty()) return;
  std::atomic<int> stopped{0};
  const auto body = [&](rank_comm& comm, cuda& device, bool throws) {
    auto x = make_buffer<float>(device, 100);
    device.zero(x.data(), 400, device.main_stream());
    comm.all_reduce(x.data(), x.data(), 100, dtype::f32, reduce_op::sum);
    rank_comm part = comm.split(0, 0);
    request open = part.start_all_reduce(x.data(), x.data(), 100, dtype::f32, reduce_op::sum);
    if (comm.rank() == 1 && throws) throw std::runtime_error("the data ran out");
    if (comm.rank() == 1) comm.abort("enough");
    try {
      open.wait();
      for (;;) comm.barrier();
    } catch (const error&) {
      ++stopped;
      throw;
    }
  };
  CHECK(has(text_of(3, careful, [&](rank_comm& c, cuda& d) { body(c, d, false); }), "rank 1 called abort: enough"));
  CHECK(stopped == 3);
  const std::string text = text_of(3, careful, [&](rank_comm& c, cuda& d) { body(c, d, true); });
  CHECK(text.find("rank 1: the data ran out") == 0);
}

TEST_CASE("nccl: the deadline finds a lost rank, and the error names it and the operation") {
  if (devices(3).empty()) return;
  const nccl::options quick{.deadline = 0.4};
  const std::string text = text_of(3, quick, [](rank_comm& comm, cuda& device) {
    auto x = make_buffer<float>(device, 100);
    comm.all_reduce(x.data(), x.data(), 100, dtype::f32, reduce_op::sum);
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      return;
    }
    rank_comm copy = comm;
    comm.all_gather(x.data(), x.data(), 0, dtype::f32);
    comm.barrier();
  });
  CHECK(has(text, "did not finish within its deadline of 0.4"));
  CHECK(has(text, "on 'world'"));
  CHECK(has(text, "last operations: init #0 on 'world'"));
}

TEST_CASE("nccl: numbers of thread blocks out of range are refused before a communicator is made") {
  const auto nothing = [](rank_comm&, cuda&) { fail("a communicator was made"); };
  CHECK(has(text_of(1, {.max_ctas = 65}, nothing), "nccl::options::max_ctas is 65, must be 0 (NCCL chooses) to 64"));
  CHECK(has(text_of(1, {.min_ctas = -1}, nothing), "nccl::options::min_ctas is -1, must be 0 (NCCL chooses) to 64"));
  CHECK(
      has(text_of(1, {.min_ctas = 8, .max_ctas = 4}, nothing), "nccl::options::min_ctas is 8, more than max_ctas, 4"));
}

TEST_CASE("nccl: a communicator is split only if nothing is in flight on it and no graph is recorded") {
  if (devices(2).empty()) return;
  on_ranks(2, [](rank_comm& comm, cuda& device) {
    auto x = make_buffer<float>(device, 1000);
    device.zero(x.data(), x.bytes(), device.main_stream());
    request r = comm.start_all_reduce(x.data(), x.data(), 1000, dtype::f32, reduce_op::sum);
    rank_comm part = comm.split(0, comm.rank());
    CHECK(r.done());
    r.wait();
    part.barrier();
  });
  CHECK(has(text_of(2, careful,
                    [](rank_comm& comm, cuda& device) {
                      cuda_graph graph(device);
                      graph.record([&] { comm.split(0, comm.rank()); });
                    }),
            "split on 'world': NCCL makes no communicator while a graph is recorded"));
}

TEST_CASE("nccl: a mesh makes a second communicator of all ranks only for messages that must not wait") {
  on_ranks(4, [](rank_comm& comm, cuda& device) {
    const auto of = [](any_communicator& one) { return one.get_if<rank_comm>()->get(); };
    pipeline_world whole(mesh<axis<dp, 2>, axis<pp, 1>, axis<tp, 2>>().shape(), any_communicator(comm));
    CHECK(of(whole.stage().root()) == comm.get());
    world& ranks = whole.stage();
    any_communicator& all = ranks.group(axis_list(axis_of<dp>, axis_of<tp>));
    CHECK(of(all) == comm.get());
    CHECK(of(ranks.group(axis_list(axis_of<tp>, axis_of<dp>))) != comm.get());  // its ranks have another order
    CHECK(of(ranks.group(axis_list(axis_of<dp>, axis_of<tp>), world::channel::reductions)) != comm.get());
    auto x = make_buffer<float>(device, 4);
    device.zero(x.data(), x.bytes(), device.main_stream());
    all.all_reduce(x.data(), x.data(), 4, dtype::f32, reduce_op::sum);
    CHECK(ranks.ledger().total("dp+tp", collective::all_reduce).calls == 1);
    // The world does not abort a communicator of the program, so nothing may wait in one.
    world attached(mesh<axis<dp, 4>>().shape(), any_communicator(nccl::attach(comm.get(), device, careful)));
    CHECK(of(attached.group(axis_list(axis_of<dp>))) != comm.get());
    attached.root().barrier();
  });
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("nccl: every communicator of a rank has the thread blocks of its options") {
  if (devices(2).empty()) return;
  std::atomic<int> made{0};
  on_ranks(2, {.min_ctas = 2, .max_ctas = 6}, [&](rank_comm& comm, cuda&) {
    rank_comm half = comm.split(0, comm.rank(), "half");
    comm.barrier();  // both ranks have made it
    if (comm.rank() == 0) {
      auto& known = nccl_stand_in::registry::get();
      const std::lock_guard lock(known.mutex);
      for (const auto& [key, one] : known.all) made += one->min_ctas == 2 && one->max_ctas == 6;
    }
    comm.barrier();
  });
  CHECK(made == 4);  // two ranks, each with the root and its split
}

TEST_CASE("nccl: a mesh's communicators share the first one's resources on request") {
  if (devices(4).empty()) return;
  const mesh_shape shape = mesh<axis<dp, 2>, axis<tp, 2>>().shape();
  for (const bool asked : {false, true}) {
    CAPTURE(asked);
    std::atomic<int> shared{0}, wrong{0};
    on_ranks(4, {.deadline = 60, .split_share = asked}, [&](rank_comm& comm, cuda& device) {
      world ranks(shape, comm);
      for (const auto& axes : {axis_list(axis_of<dp>), axis_list(axis_of<tp>)}) {
        rank_comm one = *ranks.group(axes).get_if<rank_comm>();
        shared += one.get()->shares_with == comm.get();
        rank_comm part = one.split(0, one.rank());
        shared += part.get()->shares_with == comm.get();  // not its parent's, which shares as well
      }
      auto x = make_buffer<float>(device, 1);
      device.zero(x.data(), 4, device.main_stream());
      ranks.group(axis_list(axis_of<dp>)).all_reduce(x.data(), x.data(), 1, dtype::f32, reduce_op::sum);
      comm.barrier();
      wrong += comm.get()->shares_with != nullptr;
    });
    CHECK(shared == (asked ? 4 * 4 : 0));
    CHECK(wrong == 0);
  }
}

TEST_CASE("nccl: started operations have priority over computing, and each split communicator its own stream") {
  on_ranks(2, [](rank_comm& comm, cuda& device) {
    const auto priority = [](const cuda::stream& s) {
      int of = 1;
      CHECK(cudaStreamGetPriority(s.handle(), &of) == cudaSuccess);
      return of;
    };
    int least = 0, greatest = 0;
    REQUIRE(cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess);
    REQUIRE(greatest < least);
    rank_comm along = comm.split(0, comm.rank()), back = along.split(0, comm.rank());  // as for messages of a pipeline
    const cuda::stream streams[] = {comm.shared_state().asynchronous_stream(),
                                    along.shared_state().asynchronous_stream(),
                                    back.shared_state().asynchronous_stream()};
    for (const cuda::stream& s : streams) {
      CHECK(priority(s) == greatest);
      CHECK_FALSE(s == device.main_stream());
    }
    CHECK_FALSE(streams[1] == streams[0]);
    CHECK_FALSE(streams[2] == streams[0]);
    CHECK_FALSE(streams[2] == streams[1]);
    CHECK(priority(device.main_stream()) == least);
    comm.barrier();
    // A program's communicator, attached on its own stream, also starts operations on a stream of high priority.
    rank_comm attached = nccl::attach(comm.get(), device.main_stream().handle(), careful);
    CHECK(priority(attached.shared_state().asynchronous_stream()) == greatest);
    CHECK_FALSE(attached.shared_state().asynchronous_stream() == device.main_stream());
    attached.barrier();
  });
}
#endif
