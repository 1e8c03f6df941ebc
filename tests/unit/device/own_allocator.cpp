// program: program_memory
// A program's allocator used by the cpu device: from creation to end, through all calls of layers, the device uses
// memory of this allocator only.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "support/small_layers.hpp"

namespace own_allocator {  // files of one program may have helpers of the same name

using namespace plait;
using namespace plait::test::small_layers;
using plait::test::begin;

namespace {

/// A program's allocator, which records its blocks and has a limit.
struct program {
  std::map<void*, std::size_t> blocks;
  std::size_t bytes = 0, calls = 0, limit = ~std::size_t{0};
  bool matched = true;
  std::size_t skew = 0;  ///< bytes by which pointers are misaligned

  memory_functions<> functions() {
    return {[this](std::size_t n) -> void* {
              ++calls;
              if (bytes + n > limit) return nullptr;
              void* const at = static_cast<char*>(std::aligned_alloc(64, (n + 127) / 64 * 64)) + skew;
              blocks[at] = n;
              bytes += n;
              return at;
            },
            [this](void* at, std::size_t n) {
              matched = matched && blocks.count(at) == 1 && blocks[at] == n;
              blocks.erase(at);
              bytes -= n;
              std::free(static_cast<char*>(at) - skew);
            }};
  }
};

}  // namespace

TEST_CASE("a program's allocator sees every byte of a device, until it ends") {
  program mine;
  {
    cpu device({.memory = mine.functions()});
    CHECK(mine.bytes == 0);
    threads::run(1, [&](threads::communicator c) {
      world w(two{1}.shape(), c);
      const context<cpu> ctx{device, w, sizes_of<seq, hidden, ffn>(32, 16, 64), 1};
      const auto sees_all = [&](const char* when) {
        if (mine.bytes != device.reserved_bytes()) fail({when, ": ", mine.bytes, ", not ", device.reserved_bytes()});
        // In this test all requests are whole blocks.
        if (mine.bytes != device.bytes_in_use() + device.cached_bytes())
          fail({when, ": ", mine.bytes, " in ", device.bytes_in_use(), " and ", device.cached_bytes()});
      };
      linear<float, up> layer(ctx, "up");
      rms_norm<float, rows> norm(ctx);
      sees_all("made");
      for (int turn = 0; turn < 2; ++turn) {
        begin(ctx, layer, norm);
        const tensor<float, rows> x(ctx);
        device.zero(const_cast<float*>(x.data()), static_cast<std::size_t>(x.size()) * sizeof(float));
        linear<float, up>::saved kept;
        rms_norm<float, rows>::saved kept_norm;
        const auto n = norm.forward(ctx, x, &kept_norm);
        sees_all("norm");
        const auto y = layer.forward(ctx, n, &kept);
        sees_all("forward");
        tensor<float, dual_t<up::output>> dy(ctx);
        device.zero(dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(float));
        const auto dn = layer.backward(ctx, n, kept, dy);
        norm.backward(ctx, x, kept_norm, dn);
        sees_all("backward");
      }
      if (mine.blocks.size() == 0) fail("the allocator was not asked");
      device.release_cache();
      if (device.cached_bytes() != 0) fail("a cache that was given back");
      sees_all("released");
    });
  }
  CHECK(mine.bytes == 0);
  CHECK(mine.blocks.empty());
  CHECK(mine.matched);
}

TEST_CASE("requests are rounded to whole blocks, which the allocator gets") {
  program mine;
  cpu device({.memory = mine.functions()});
  void* const a = device.allocate(100);
  CHECK(mine.bytes == 128);
  CHECK(device.bytes_in_use() == 100);
  CHECK(device.reserved_bytes() == 128);
  device.release(a);
  CHECK(device.cached_bytes() == 128);
  CHECK(device.allocate(120) == a);
  CHECK(mine.calls == 1);
  device.release(a);
}

TEST_CASE("a failed request is repeated after the cache is released, and then is an error by name") {
  program mine;
  mine.limit = 4096;
  cpu device({.memory = mine.functions()});
  device.release(device.allocate(3072));
  void* const second = device.allocate(2048);  // after the first block was released
  CHECK(mine.bytes == 2048);
  CHECK(test::text_thrown_by([&] {
          device.allocate(~std::size_t{0} - 31);
        }).starts_with("out of memory: 18446744073709551584 bytes"));
  CHECK(test::text_thrown_by([&] { device.allocate(4096); }) == "cpu: out of memory, 4096 bytes were asked for");
  device.release(second);
}

TEST_CASE("an allocator with a missing function, or with misaligned memory, is refused") {
  program mine;
  CHECK(test::text_thrown_by([&] { cpu device({.memory = {.allocate = mine.functions().allocate}}); }) ==
        "cpu: options::memory has allocate and no release; give both, or none for memory of the device's own");
  CHECK(test::text_thrown_by([&] { cpu device({.memory = {.release = mine.functions().release}}); }) ==
        "cpu: options::memory has release and no allocate; give both, or none for memory of the device's own");
  mine.skew = 8;
  cpu device({.memory = mine.functions()});
  CHECK(test::text_thrown_by([&] { device.allocate(64); }) ==
        "cpu: options::memory.allocate has returned memory that is not on a boundary of 64 bytes");
  CHECK(mine.bytes == 0);
}

}  // namespace own_allocator
