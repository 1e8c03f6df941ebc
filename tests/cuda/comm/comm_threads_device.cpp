// In-process ranks that share a GPU: the conformance suite on its memory, the order of streams, and errors.
#include <doctest/doctest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/threads/cuda.hpp"
#include "support/conformance.hpp"
#include "support/device_memory.hpp"
#include "support/texts.hpp"

using namespace plait;
using rank_comm = threads::communicator;

namespace {

using plait::test::has;

const cuda::options small{.workspace_bytes = 4096};

/// The text of the error that ends ranks which run body(communicator, x); `x` has 64 elements on the device.
template <class F>
std::string text_of(int ranks, const F& body) {
  return test::text_thrown_by([&] {
    threads::run(ranks, small, [&](rank_comm& comm, cuda& device) {
      auto x = make_buffer<float>(device, 64);
      body(comm, x.data());
    });
  });
}

}  // namespace

TEST_CASE("ranks on a GPU: conformance on any number of ranks") {
  for (const int ranks : {1, 2, 3, 8}) {
    CAPTURE(ranks);
    CHECK_NOTHROW(threads::run(ranks, small, [](rank_comm& comm, cuda& device) {
      test::device_memory memory(device);
      test::short_conformance(comm);
      test::check_nans(comm);
      if (comm.size() != 3) return;
      any_communicator any(comm);
      test::check_types(any, {37});
    }));
  }
}

TEST_CASE("ranks on a GPU: the same bits as ranks on the CPU") {
  constexpr std::size_t n = 10'007;
  const auto values = [](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank) + 1);
    std::vector<float> out(n);
    for (float& v : out) {  // each half is one bf16
      const auto half = std::bit_cast<std::uint32_t>(std::uniform_real_distribution<float>(-1, 1)(random)) >> 16;
      v = std::bit_cast<float>(half << 16 | (half ^ 0x55));
    }
    return out;
  };
  for (const dtype type : {dtype::f32, dtype::bf16}) {
    std::vector<float> on_cpu(n), on_gpu(n);
    threads::run(5, [&](rank_comm& comm) {
      std::vector<float> x = values(comm.rank());
      comm.all_reduce(x.data(), x.data(), type == dtype::f32 ? n : 2 * n, type, reduce_op::sum);
      if (comm.rank() == 3) on_cpu = x;
    });
    threads::run(5, small, [&](rank_comm& comm, cuda& device) {
      test::device_memory memory(device);
      test::array<float> x(values(comm.rank()));
      comm.all_reduce(x.data(), x.data(), type == dtype::f32 ? n : 2 * n, type, reduce_op::sum);
      if (comm.rank() == 4) on_gpu = x.values();
    });
    CHECK(std::memcmp(on_cpu.data(), on_gpu.data(), n * sizeof(float)) == 0);
  }
}

TEST_CASE("ranks on a GPU: operations follow the order of each rank's main stream, and the host does not wait") {
  CHECK_NOTHROW(threads::run(4, small, [](rank_comm& comm, cuda& device) {
    constexpr std::size_t n = 20'000;
    test::device_memory memory(device);
    test::array<std::int32_t> x(n), y(n), kept(n);
    const std::vector<std::int32_t> ones(n, 1);
    test::write(y.data(), ones);
    for (int turn = 1; turn <= 20; ++turn) {
      device.copy(x.data(), y.data(), n * 4, device.main_stream());  // the operation reads this
      request r = comm.start_all_reduce(x.data(), x.data(), n, dtype::i32, reduce_op::max);
      device.zero(y.data(), n * 4, device.main_stream());  // after the operation
      r.wait();
      comm.all_reduce(x.data(), y.data(), n, dtype::i32, reduce_op::sum);  // 4, 16, ...: reads the first copy
      device.copy(kept.data(), y.data(), n * 4, device.main_stream());     // reads the second
      if (turn % 5 == 0) test::write(y.data(), ones);
    }
    test::expect("the last of four sums", kept.data(), n, [](std::size_t) { return 1024; });
  }));
}

TEST_CASE("ranks on a GPU: memory of the host is refused, and ranks stay in step") {
  CHECK_NOTHROW(threads::run(2, small, [](rank_comm& comm, cuda& device) {
    test::device_memory memory(device);
    std::vector<float> host(8);
    test::expect_refused([&] { comm.all_reduce(host.data(), host.data(), 8, dtype::f32, reduce_op::sum); },
                         "a pointer to the host's memory");
    test::expect_refused([&] { comm.send(host.data(), 8, dtype::f32, 0); }, "a pointer to the host's memory");
    test::check_all_reduce<float>(comm, 100, reduce_op::sum, test::how::direct, 1);
  }));
}

TEST_CASE("ranks on a GPU: mismatches, deadlocks and exceptions end all ranks") {
  std::string text =
      text_of(3, [](rank_comm& c, void* x) { c.all_reduce(x, x, c.rank() == 1 ? 3 : 4, dtype::f32, reduce_op::sum); });
  CHECK(has(text, "mismatched collective #0 on 'world'"));
  text = text_of(2, [](rank_comm& c, void* x) {
    if (c.rank() == 0) c.send(x, 4, dtype::f32, 1);
  });
  CHECK(has(text, "deadlock: no rank can continue"));
  text = text_of(3, [](rank_comm& c, void* x) {
    request r = c.start_all_reduce(x, x, 4, dtype::f32, reduce_op::sum);
    if (c.rank() == 2) throw std::runtime_error("the data ran out");
    r.wait();
    c.barrier();
  });
  CHECK(has(text, "rank 2: the data ran out"));
  text = text_of(3, [](rank_comm& c, void* x) {
    if (c.rank() == 0) c.abort("enough");
    c.broadcast(x, 4, dtype::f32, 1);
    c.barrier();
  });
  CHECK(has(text, "rank 0 called abort: enough"));
}

TEST_CASE("a rank on a device and a rank without one cannot communicate") {
  const std::string text = test::text_thrown_by([] {
    threads::run(2, [](rank_comm& host) {
      cuda device(small);
      rank_comm mixed = host.rank() == 0 ? on(host, device) : host.split(0, host.rank(), "world");
      mixed.barrier();
    });
  });
  CHECK(has(text, "mismatched collective #0 on 'world'"));
}
