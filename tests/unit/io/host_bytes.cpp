// program: io
// Memory for bytes that are read from or written to a file, and copies of it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "plait/io/byte_buffer.hpp"

namespace {

using plait::byte_buffer;

constexpr std::size_t mib = std::size_t{1} << 20;

std::uintptr_t behind(const byte_buffer& b, std::size_t page) {
  return reinterpret_cast<std::uintptr_t>(b.data()) % page;
}
void fill(byte_buffer& b) { std::fill_n(b.data(), b.size(), std::byte{7}); }

int released = 0;

}  // namespace

TEST_CASE("a byte buffer is page-aligned, a large one by large pages, and all of it can be written") {
  byte_buffer b;
  CHECK(b.size() == 0);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, 4 * mib - 1, 4 * mib, 9 * mib + 3}) {
    CAPTURE(bytes);
    b.grow(bytes);
    CHECK(b.size() == bytes);
    CHECK(behind(b, bytes < 4 * mib ? 4096 : 2 * mib) == 0);
    fill(b);
  }
}

TEST_CASE("a byte buffer that is large enough does not change") {
  byte_buffer b(5 * mib);
  fill(b);
  const std::byte* const before = b.data();
  b.grow(mib);
  CHECK(b.data() == before);
  CHECK(b.size() == 5 * mib);
  byte_buffer other = std::move(b);
  CHECK(other.data() == before);
  CHECK(other.data()[5 * mib - 1] == std::byte{7});
}

TEST_CASE("memory from another source is returned to it") {
  const plait::host_memory from{[](std::size_t bytes) { return static_cast<std::byte*>(std::malloc(bytes)); },
                                [](std::byte* memory) { ++released, std::free(memory); }};
  released = 0;
  {
    byte_buffer b(5 * mib);
    b.grow(6 * mib, from);
    fill(b);
    CHECK(released == 0);
    b.grow(4 * mib);  // again of a mapping
    CHECK(released == 1);
    CHECK(behind(b, 2 * mib) == 0);
    b.grow(100, from);
  }
  CHECK(released == 2);
}

TEST_CASE("a copy past the cache copies all bytes and no others, at any addresses") {
  std::vector<std::byte> from(200 << 10), to(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 2654435761u >> 13 & 127);
  constexpr std::byte outside{200};
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{65535}, std::size_t{65536},
                                  std::size_t{65537}, std::size_t{131072 + 63}})
    for (const std::size_t first : {0, 1, 16, 63, 64, 4080})
      for (const std::size_t second : {0, 1, 16, 63, 4095}) {
        CAPTURE(bytes);
        CAPTURE(first);
        CAPTURE(second);
        std::fill(to.begin(), to.end(), outside);
        plait::copy_past_cache(to.data() + second, from.data() + first, bytes);
        const auto begin = to.begin() + static_cast<std::ptrdiff_t>(second);
        const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
        const auto is_outside = [&](std::byte b) { return b == outside; };
        REQUIRE(std::equal(begin, end, from.begin() + static_cast<std::ptrdiff_t>(first)));
        REQUIRE(std::all_of(to.begin(), begin, is_outside));
        REQUIRE(std::all_of(end, to.end(), is_outside));
      }
}
