// Uploads: the host's source may be freed or changed at once, even if the stream has not copied it. And memory that is
// released for other programs on the GPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "plait/device/cuda.hpp"
#include "plait/device/device.hpp"

using namespace plait;

namespace {

const cuda::options small{.workspace_bytes = 4096};

std::vector<std::int32_t> read(cuda& device, const buffer<cuda>& from) {
  std::vector<std::int32_t> out(from.bytes() / sizeof(std::int32_t));
  device.download(out.data(), from.data(), from.bytes(), device.main_stream());
  return out;
}

}  // namespace

TEST_CASE("an upload's source may change as soon as it returns") {
  cuda device(small);
  constexpr std::size_t n = 5000;
  auto there = make_buffer<std::int32_t>(device, n);
  std::int32_t number = 0;
  for (std::size_t i = 0; i < n; ++i) {
    number = static_cast<std::int32_t>(i);
    device.upload(there.data<std::int32_t>() + i, &number, sizeof number, device.main_stream());
  }
  number = -1;
  std::vector<std::int32_t> expected(n);
  std::iota(expected.begin(), expected.end(), 0);
  CHECK(read(device, there) == expected);
}

TEST_CASE("uploads of every size pass through the ring, also around its end") {
  cuda device(small);
  std::mt19937 random(1);
  std::vector<buffer<cuda>> there;
  std::vector<std::vector<std::int32_t>> expected;
  for (int turn = 0; turn < 60; ++turn) {
    const std::size_t n = turn % 10 == 9 ? 3'000'000 : 1 + random() % 200'000;  // of 4-byte numbers; the ring has 4 MiB
    auto source = std::make_unique<std::vector<std::int32_t>>(n);
    std::iota(source->begin(), source->end(), static_cast<std::int32_t>(turn * 1000));
    expected.push_back(*source);
    there.push_back(make_buffer<std::int32_t>(device, n));
    device.upload(there.back().data(), source->data(), n * sizeof(std::int32_t), device.main_stream());
    std::fill(source->begin(), source->end(), -1);
    source.reset();
  }
  for (std::size_t i = 0; i < there.size(); ++i) CHECK((read(device, there[i]) == expected[i]));
}

TEST_CASE("a download is complete when it returns, into pinned memory as well") {
  cuda device(small);
  constexpr std::size_t n = 5000;
  const std::vector<std::int32_t> numbers(n, 7);
  auto there = make_buffer<std::int32_t>(device, n);
  std::int32_t* pinned = nullptr;
  REQUIRE(cudaMallocHost(&pinned, n * sizeof(std::int32_t)) == cudaSuccess);
  std::fill_n(pinned, n, 0);
  device.upload(there.data(), numbers.data(), there.bytes(), device.main_stream());
  device.download(pinned, there.data(), there.bytes(), device.main_stream());
  CHECK(std::equal(numbers.begin(), numbers.end(), pinned));
  cudaFreeHost(pinned);
}

TEST_CASE("unused memory stays cached until it is released to the driver") {
  const auto free_bytes = [] {
    std::size_t free = 0, total = 0;
    REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
    return free;
  };
  constexpr std::size_t bytes = 48 << 20, slack = 8 << 20;  // of other programs and the driver
  cuda device(small);
  device.synchronize();
  const std::size_t before = free_bytes();
  { const auto used = make_buffer<std::byte>(device, bytes); }
  device.synchronize();
  CHECK(device.bytes_in_use() == 0);
  CHECK(free_bytes() + bytes <= before + slack);
  device.release_cache();
  CHECK(device.cached_bytes() == 0);
  CHECK(free_bytes() + slack >= before);
}

TEST_CASE("small cached blocks can become a large one, even before streams have finished with them") {
  cuda device(small);
  std::size_t free = 0, total = 0;
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  const std::size_t part = free / 16 / 256 * 256;
  {
    std::vector<buffer<cuda>> parts;
    for (int i = 0; i < 14; ++i) {
      const cuda::stream stream = i % 2 == 0 ? device.main_stream() : device.side_stream();
      device.zero(parts.emplace_back(device, part, stream).data(), part / 2, stream);
    }
  }
  const buffer<cuda> large(device, 12 * part);
  CHECK(large.data() != nullptr);
}

TEST_CASE("a program's allocator sees every byte of a device, with its stream, until the device ends") {
  struct block {
    std::size_t bytes;
    cudaStream_t stream;
  };
  std::map<void*, block> blocks;
  std::size_t bytes = 0, refused = 0;
  std::size_t limit = std::size_t{1} << 30;
  bool matched = true;
  {
    cuda device({.workspace_bytes = 4096,
                 .memory = {[&](std::size_t n, cudaStream_t stream) -> void* {
                              if (bytes + n > limit) return ++refused, nullptr;
                              void* at = nullptr;
                              if (cudaMallocAsync(&at, n, stream) != cudaSuccess) return nullptr;
                              blocks[at] = {n, stream};
                              bytes += n;
                              return at;
                            },
                            [&](void* at, std::size_t n, cudaStream_t stream) {
                              matched = matched && blocks.count(at) == 1 && blocks[at].bytes == n;
                              bytes -= n;
                              blocks.erase(at);
                              cudaFreeAsync(at, stream);
                            }}});
    CHECK(bytes == device.reserved_bytes());
    CHECK(bytes >= 4096);  // the workspace
    const cudaStream_t main = device.main_stream().handle();
    for (const auto& [at, b] : blocks) CHECK(b.stream == main);
    {
      auto numbers = make_buffer<std::int32_t>(device, 5000);
      const std::vector<std::int32_t> ones(5000, 1);
      device.upload(numbers.data(), ones.data(), numbers.bytes(), device.main_stream());
      CHECK(read(device, numbers) == ones);
      buffer<cuda> beside(device, 1000, device.side_stream());
      CHECK(blocks.at(beside.data()).stream == device.side_stream().handle());
      CHECK(bytes == device.reserved_bytes());
    }
    CHECK(bytes == device.reserved_bytes());  // all in the cache
    CHECK(device.cached_bytes() > 0);
    limit = bytes + 10000;
    void* const large = device.allocate(12000);  // after the cached memory was released
    CHECK(refused == 1);
    CHECK(bytes == device.reserved_bytes());
    CHECK_THROWS_AS(device.allocate(1 << 20), error);
    device.release(large);
    device.release_cache();
    device.allow_access_from({0});  // the program opens its own memory to other GPUs
    CHECK(device.cached_bytes() == 0);
    CHECK(bytes == device.reserved_bytes());
  }
  CHECK(bytes == 0);
  CHECK(blocks.empty());
  CHECK(matched);
  CHECK_THROWS_WITH_AS(
      cuda({.memory = {.release = [](void*, std::size_t, cudaStream_t) {}}}),
      "cuda: options::memory has release and no allocate; give both, or none for memory of the device's own", error);
}
