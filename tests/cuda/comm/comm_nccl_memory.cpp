// program: comm_over_nccl
// Memory for collectives: a device allocates from it, and NCCL registers it with every communicator of the rank.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/comm/launch/nccl.hpp"
#include "plait/comm/world.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/nn/parameter.hpp"
#include "support/nccl_runs.hpp"
#include "support/texts.hpp"

using namespace plait;
using plait::test::devices;
using plait::test::has;
using plait::test::on_ranks;
using plait::test::small;
using plait::test::text_of;

namespace {

/// Ordinary memory in place of registered memory, for a device without a communicator.
registered_memory some(cuda& device, std::size_t bytes) {
  void* const data = device.allocate(bytes);
  device.synchronize();  // other streams will use it
  return {std::shared_ptr<void>(data, [&device](void* p) { device.release(p); }), bytes, "the test"};
}
bool lies_in(const registered_memory& memory, const void* p) {
  const char *const at = static_cast<const char*>(p), *const begin = static_cast<const char*>(memory.data.get());
  return at >= begin && at < begin + memory.bytes;
}

struct on_mesh {
  using axes = mesh<axis<dp, 2>, axis<tp, 2>>;
  using stored = spec<shard<ffn, tp, dp>, hidden>;  // as ZeRO-3 stores it
  using placed = spec<shard<ffn, tp>, hidden>;
  using met = spec<shard<batch, dp>, replicate<tp>>;
};

}  // namespace

TEST_CASE("a device takes memory for collectives, and nothing else, from the memory it was given") {
  cuda owner(small), device(small);
  const registered_memory memory = some(owner, 4096);
  CHECK_FALSE(lies_in(memory, buffer<cuda>::for_collectives(device, 64).data()));
  device.serve_collectives(memory);
  {
    auto a = buffer<cuda>::for_collectives(device, 1000), b = buffer<cuda>::for_collectives(device, 1000);
    CHECK(lies_in(memory, a.data()));
    CHECK(lies_in(memory, b.data()));
    CHECK(a.data() != b.data());
    CHECK_FALSE(lies_in(memory, buffer<cuda>(device, 1000).data()));
    CHECK_THROWS_WITH_AS(buffer<cuda>::for_collectives(device, 3000),
                         "cuda: the memory for collectives has no room for 3008 bytes: the test is 4096, of which 2048 "
                         "are in use; use a larger the test, or 0 for memory that is not registered",
                         error);
    CHECK_THROWS_WITH_AS(device.serve_collectives(memory),
                         "cuda: device 0 has memory for collectives already: its the test", error);
  }
  CHECK(lies_in(memory, buffer<cuda>::for_collectives(device, 4000).data()));  // released blocks are reused
  CHECK_FALSE(lies_in(memory, buffer<cuda>(device, 4000).data()));             // but not for ordinary buffers
}

TEST_CASE("a graph keeps the memory for collectives that it was recorded with") {
  cuda owner(small), device(small);
  const registered_memory memory = some(owner, 4096);
  device.serve_collectives(memory);
  buffer<cuda> out(device, 256);
  const auto work = [&] {
    auto between = buffer<cuda>::for_collectives(device, 256);
    device.zero(between.data(), 256, device.main_stream());
    device.copy(out.data(), between.data(), 256, device.main_stream());
  };
  work();
  cuda_graph graph(device);
  graph.record(work);
  CHECK(graph.scratch_bytes() == 256);
  const void* recorded = nullptr;
  {
    auto other = buffer<cuda>::for_collectives(device, 256), another = buffer<cuda>::for_collectives(device, 256);
    CHECK(other.data() != another.data());
    recorded = memory.data.get();
    CHECK(other.data() != recorded);  // the graph owns the first block
    CHECK(another.data() != recorded);
  }
  graph.launch();
  device.synchronize();
  graph.reset();
  std::vector<buffer<cuda>> all;
  for (int i = 0; i < 3; ++i) all.push_back(buffer<cuda>::for_collectives(device, 256));
  CHECK(std::count_if(all.begin(), all.end(), [&](auto& b) { return b.data() == recorded; }) == 1);
  CHECK_FALSE(lies_in(memory, buffer<cuda>(device, 256).data()));
}

TEST_CASE("a device releases its cached memory before NCCL makes a communicator") {
  on_ranks(2, {.deadline = 60}, [](nccl::communicator& comm, cuda& device) {
    const auto kept = [&] {
      { const auto used = make_buffer<std::byte>(device, 1 << 20); }
      return device.cached_bytes();
    };
    CHECK(kept() >= 1 << 20);
    nccl::communicator part = comm.split(0, comm.rank());
    CHECK(device.cached_bytes() == 0);
    CHECK(kept() >= 1 << 20);
    nccl::communicator attached = nccl::attach(part.get(), device, {.deadline = 60});
    nccl::communicator again = attached.split(0, comm.rank());
    CHECK(device.cached_bytes() == 0);
    again.barrier();
  });
}

TEST_CASE("over NCCL parameters, gradients and activations in transit are in registered memory") {
  if (devices(4).empty()) return;
#ifdef PLAIT_CUDA_STAND_IN
  auto& known = nccl_stand_in::registry::get();
  known.registrations = known.calls_in_windows = known.calls_beside_windows = 0;
#endif
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1} << 20}) {
    CAPTURE(bytes);
    std::atomic<int> wrong{0};
    CHECK(text_of(4, {.deadline = 60, .registered_bytes = bytes}, [&](nccl::communicator& comm, cuda& device) {
            world ranks(on_mesh::axes().shape(), comm);
            ranks.checks().set(value_check::off);  // its calls would be counted
            dim_sizes sizes;
            sizes.set(dim_of<ffn>, 8);
            sizes.set(dim_of<hidden>, 6);
            sizes.set(dim_of<batch>, 4);
            const context<cuda> ctx{device, ranks, sizes, 7};
            parameter<float, cuda> weight(ctx, {"w", {8, 6}, {}}, layout_v<on_mesh::stored>, layout_v<on_mesh::placed>,
                                          layout_v<on_mesh::met>);
            kernels::fill(device, weight.value(), weight.size(), static_cast<float>(comm.rank()));
            weight.gather(ctx);
            std::vector<float> used(static_cast<std::size_t>(weight.used_size()));
            device.download(used.data(), weight.used_value(), used.size() * sizeof(float), device.main_stream());
            const auto tp_index = static_cast<float>(comm.rank() % 2);
            for (std::size_t i = 0; i < used.size(); ++i) wrong += used[i] != tp_index + (i < used.size() / 2 ? 0 : 2);
            weight.zero_gradient(ctx);
            kernels::fill(device, weight.used_gradient(device), weight.used_size(), static_cast<float>(comm.rank()));
            const auto reduced = weight.reduce(ctx);
            std::vector<float> sum(static_cast<std::size_t>(reduced.size()));
            device.download(sum.data(), reduced.data(), sum.size() * sizeof(float), device.main_stream());
            for (const float s : sum) wrong += s != 2 * tp_index + 2;
            wrong += all_reduce_scalar(ctx, 1.0, reduce_op::sum) != 4;
            wrong += lies_in(device.served_to_collectives(), weight.used_value()) != (bytes != 0);
          }) == "");
    CHECK(wrong == 0);
#ifdef PLAIT_CUDA_STAND_IN
    CHECK(known.registrations ==
          (bytes == 0 ? 0 : 4 * 2));  // on each rank: the root and dp, the only group that was used
    CHECK(known.calls_in_windows == (bytes == 0 ? 0 : 4 * 3));
    CHECK(known.calls_beside_windows == 0);
    CHECK(known.windows.empty());  // deregistered before the communicators ended
#endif
  }
}

TEST_CASE("over NCCL too little memory for collectives, and memory that cannot be registered, are refused by name") {
  if (devices(2).empty()) return;
  const std::string little =
      text_of(2, {.deadline = 60, .registered_bytes = 512},
              [](nccl::communicator&, cuda& device) { buffer<cuda>::for_collectives(device, 1024); });
  CHECK(has(little, "nccl::options::registered_bytes is 512, of which 0 are in use"));
  const std::string other =
      text_of(2, {.deadline = 60, .registered_bytes = 512},
              [](nccl::communicator& c, cuda& device) { nccl::attach(c.get(), device, {.registered_bytes = 1024}); });
  CHECK(has(other, "nccl::options::registered_bytes is 1024, but the device has 512 bytes for collectives"));
  const std::string bare = text_of(2, {.deadline = 60}, [](nccl::communicator& c, cuda& device) {
    nccl::attach(c.get(), device.main_stream().handle(), {.registered_bytes = 1024});
  });
  CHECK(has(bare, "nccl::attach: options::registered_bytes needs a device to serve from it"));
#ifdef PLAIT_CUDA_STAND_IN
  nccl_stand_in::registry::get().has_windows = false;
  const std::string none = text_of(2, {.deadline = 60, .registered_bytes = 512}, [](nccl::communicator&, cuda&) {});
  nccl_stand_in::registry::get().has_windows = true;
  CHECK(has(none, "nccl::options::registered_bytes is 512, but NCCL cannot register memory with 'world'"));
#endif
}
