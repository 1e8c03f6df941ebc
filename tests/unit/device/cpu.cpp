// program: devices
#include "plait/device/cpu.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

using plait::buffer;
using plait::cpu;

extern "C" {  // of libraries that the device uses; clang has no <omp.h>
void omp_set_num_threads(int);
int omp_get_max_threads();
void openblas_set_num_threads(int);
int openblas_get_num_threads();
}

namespace {

/// A source of memory for an allocator.
struct heap {
  void* allocate(std::size_t bytes, std::uintptr_t) const { return ::operator new(bytes); }
  void release(void* pointer, std::size_t, std::uintptr_t) const noexcept { ::operator delete(pointer); }
};

}  // namespace

TEST_CASE("the allocator counts used bytes, keeps a peak and reuses blocks") {
  cpu device;
  CHECK(device.bytes_in_use() == 0);
  void* const first = device.allocate(1000);
  CHECK(reinterpret_cast<std::uintptr_t>(first) % 64 == 0);
  CHECK(device.bytes_in_use() == 1000);
  void* const second = device.allocate(100000);
  CHECK(device.bytes_in_use() == 101000);
  device.release(second);
  CHECK(device.bytes_in_use() == 1000);
  CHECK(device.peak_bytes() == 101000);
  CHECK(device.cached_bytes() >= 100000);

  SUBCASE("an equal request gets the same block") {
    CHECK(device.allocate(100000) == second);
    CHECK(device.cached_bytes() == 0);
    device.release(second);
  }
  SUBCASE("a much smaller request does not take a large block") {
    void* const small = device.allocate(500);
    CHECK(small != second);
    device.release(small);
  }
  SUBCASE("the cache can be released") {
    device.release_cache();
    CHECK(device.cached_bytes() == 0);
    CHECK(device.bytes_in_use() == 1000);
  }
  SUBCASE("a pointer released twice is an error") {
    CHECK_THROWS_WITH_AS(device.release(second),
                         "release: this pointer is not in use in this allocator (released twice?)", plait::error);
  }
  device.reset_peak();
  CHECK(device.peak_bytes() == 1000);
  device.release(first);
}

TEST_CASE("blocks are at most an eighth too large, and cached blocks stay on their stream") {
  using allocator = plait::caching_allocator<heap>;
  for (std::size_t bytes = 1; bytes < 3000000; bytes += 1 + bytes / 7) {
    CHECK(allocator::rounded(bytes) >= bytes);
    if (bytes > 512) CHECK(allocator::rounded(bytes) <= bytes + bytes / 7);
    CHECK(allocator::rounded(allocator::rounded(bytes)) == allocator::rounded(bytes));
  }
  allocator memory;
  void* const a = memory.allocate(4096, 1);
  memory.release(a, 1);
  void* const b = memory.allocate(4096, 2);
  CHECK(a != b);
  CHECK(memory.allocate(4096, 1) == a);
  memory.release(a, 1);
  memory.release(b, 2);
  CHECK(memory.cached_bytes() == 8192);
}

TEST_CASE("a buffer owns its memory and moves") {
  cpu device;
  {
    buffer<cpu> a(device, 256);
    CHECK(device.bytes_in_use() == 256);
    std::memset(a.data(), 1, a.bytes());
    buffer<cpu> b = std::move(a);
    CHECK(a.data() == nullptr);  // NOLINT(bugprone-use-after-move): a moved-from buffer is empty
    CHECK(b.data<unsigned char>()[255] == 1);
    b = plait::make_buffer<double>(device, 4);
    CHECK(b.bytes() == 32);
    CHECK(device.bytes_in_use() == 32);
    b.reset();
    CHECK(b.empty());
    CHECK(buffer<cpu>(device, 0).data() == nullptr);
  }
  CHECK(device.bytes_in_use() == 0);
}

TEST_CASE("copy, zero, streams and events take effect at once") {
  cpu device;
  std::vector<int> from{1, 2, 3}, to(3);
  auto stream = device.main_stream();
  cpu::event event;
  device.copy(to.data(), from.data(), 12, stream);
  event.record(stream);
  device.side_stream().wait(event);
  CHECK(event.done());
  CHECK(to == from);
  device.zero(to.data(), 12);
  CHECK(to == std::vector<int>{0, 0, 0});
}

TEST_CASE("a thread count below one is refused by name") {
  CHECK_THROWS_WITH_AS(cpu(cpu::options{0}), "cpu: options::threads = 0, must be at least 1", plait::error);
}

TEST_CASE("the program's numbers of threads do not change, and a product has the device's") {
  const int of_blas = openblas_get_num_threads(), of_openmp = omp_get_max_threads();
  openblas_set_num_threads(2), omp_set_num_threads(3);
  const auto multiply = [](cpu& device, auto zero) {
    using T = decltype(zero);
    const std::vector<T> a(64 * 64, T{1}), b(64 * 64, T{1});
    std::vector<T> c(64 * 64);
    device.gemm(false, false, 64, 64, 64, T{1}, a.data(), 64, b.data(), 64, T{0}, c.data(), 64);
    return c[5];
  };
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] {
      cpu device(cpu::options{1 + rank % 2});
      for (int i = 0; i < 20; ++i) multiply(device, 0.0), multiply(device, 0.0f);
    });
  cpu device;
  CHECK(multiply(device, 0.0) == 64.0);
  CHECK(multiply(device, 0.0f) == 64.0f);
  CHECK(omp_get_max_threads() == 3);
  for (std::thread& rank : ranks) rank.join();
  CHECK(openblas_get_num_threads() == 2);
  {
    const plait::detail::openblas_threads outer(1), inner(2);  // the number of the first one stays
    CHECK(openblas_get_num_threads() == 1);
  }
  CHECK(openblas_get_num_threads() == 2);
  openblas_set_num_threads(of_blas), omp_set_num_threads(of_openmp);
}

TEST_CASE("every rank's thread has its own device, and they run in parallel") {
  cpu::warm_up();
  std::vector<std::thread> ranks;
  std::vector<float> sums(4);
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([rank, &sums] {
      cpu device;
      const std::vector<float> a(32 * 32, static_cast<float>(rank)), b(32 * 32, 0.5f);
      std::vector<float> c(32 * 32);
      for (int i = 0; i < 50; ++i) {
        device.gemm(false, true, 32, 32, 32, 1.0f, a.data(), 32, b.data(), 32, 0.0f, c.data(), 32);
      }
      sums[static_cast<std::size_t>(rank)] = c[5];
    });
  }
  for (auto& rank : ranks) rank.join();
  for (int rank = 0; rank < 4; ++rank) CHECK(sums[static_cast<std::size_t>(rank)] == 16.0f * static_cast<float>(rank));
}

TEST_CASE("scratch memory serves only its owner, even if another one is made") {
  plait::caching_allocator<heap> memory;
  const auto first = memory.begin_scratch();
  void* const a = memory.allocate(1000);
  memory.release(a);
  CHECK(memory.allocate(1000) == a);  // a block of the scratch memory is reused
  memory.release(a);
  memory.end_scratch();
  CHECK(memory.allocate(1000) != a);
  const auto second = memory.begin_scratch();
  void* const b = memory.allocate(2000);
  memory.release(b);
  memory.release_scratch(first, 0);  // keeps the blocks of the second one
  CHECK(memory.cached_bytes() >= 1000);
  CHECK(memory.cached_bytes() < 2000);
  CHECK(memory.allocate(2000) == b);
  memory.end_scratch();
  memory.release(b);  // after the end: the block belongs to the second one
  CHECK(memory.allocate(2000) != b);
  memory.release_scratch(second, 0);
  CHECK(memory.scratch_bytes() == 0);
  CHECK(memory.allocate(2000) == b);

  // Blocks still in use when their scratch memory ends are reused as soon as they are released.
  const auto third = memory.begin_scratch();
  void* const c = memory.allocate(5000);
  memory.end_scratch();
  memory.release_scratch(third, 0);
  const std::size_t cached = memory.cached_bytes();
  memory.release(c);
  CHECK(memory.cached_bytes() > cached);
  CHECK(memory.allocate(5000) == c);

  // The same for older blocks released meanwhile: recorded work may have used them.
  void* const d = memory.allocate(7000);
  const auto fourth = memory.begin_scratch();
  memory.release(d);
  memory.end_scratch();
  CHECK(fourth->bytes() >= 7000);
  CHECK(memory.scratch_bytes() == fourth->bytes());
  CHECK(memory.allocate(7000) != d);
  memory.release_scratch(fourth, 0);
  CHECK(memory.scratch_bytes() == 0);
  CHECK(memory.allocate(7000) == d);
}
