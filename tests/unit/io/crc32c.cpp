// program: io
#include "plait/io/crc32c.hpp"

#include <doctest/doctest.h>

#include <random>
#include <string_view>
#include <vector>

namespace {

using byte_vector = std::vector<std::byte>;

std::uint32_t of_text(std::string_view text) { return plait::crc32c(std::as_bytes(std::span(text))); }

/// Computes the checksum bit by bit, by the definition.
std::uint32_t bitwise(std::span<const std::byte> data) {
  std::uint32_t state = ~0u;
  for (const std::byte b : data) {
    state ^= static_cast<unsigned char>(b);
    for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ ((state & 1) != 0 ? 0x82f63b78u : 0u);
  }
  return ~state;
}

byte_vector random_bytes(std::size_t n) {
  std::mt19937_64 random(n);
  byte_vector out(n);
  for (std::byte& b : out) b = static_cast<std::byte>(random());
  return out;
}

/// The checksum of two consecutive ranges of bytes, from their checksums and the length of the second.
constexpr std::uint32_t combine(std::uint32_t first, std::uint32_t second, std::uint64_t bytes_of_second) {
  return plait::detail::crc32c_multiply(plait::detail::crc32c_power(bytes_of_second), first) ^ second;
}

}  // namespace

TEST_CASE("the vectors of RFC 3720 B.4, and the check value of CRC catalogues") {
  CHECK(plait::crc32c(byte_vector(32, std::byte{0})) == 0x8a9136aau);
  CHECK(plait::crc32c(byte_vector(32, std::byte{0xff})) == 0x62a8ab43u);
  byte_vector up(32), down(32);
  for (std::size_t i = 0; i < 32; ++i) {
    up[i] = static_cast<std::byte>(i);
    down[31 - i] = up[i];
  }
  CHECK(plait::crc32c(up) == 0x46dd794eu);
  CHECK(plait::crc32c(down) == 0x113fdb5cu);
  const std::vector<unsigned char> read_command{0x01, 0xc0, 0, 0, 0, 0, 0,    0, 0,    0, 0, 0,    0, 0, 0, 0,
                                                0x14, 0,    0, 0, 0, 0, 0x04, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                                                0x28, 0,    0, 0, 0, 0, 0,    0, 0x02, 0, 0, 0,    0, 0, 0, 0};
  CHECK(read_command.size() == 48);
  CHECK(plait::crc32c(std::as_bytes(std::span(read_command))) == 0xd9963a56u);
  CHECK(of_text("123456789") == 0xe3069283u);
  CHECK(of_text("") == 0);
}

TEST_CASE("the instruction and the tables agree with the definition at every length and alignment") {
  REQUIRE(plait::detail::crc32c_tables[0][1] == 0xf26b8303u);
  const byte_vector data = random_bytes(800 + 8);
  for (std::size_t start = 0; start < 8; ++start) {
    for (std::size_t length = 0; length <= 800; length += start == 0 ? 1 : 13) {
      const std::span<const std::byte> part = std::span(data).subspan(start, length);
      const std::uint32_t expected = bitwise(part);
      CHECK(~plait::detail::crc32c_by_tables(~0u, part) == expected);
      if (plait::detail::crc32c_has_instruction()) CHECK(~plait::detail::crc32c_by_instruction(~0u, part) == expected);
      CHECK(plait::crc32c(part) == expected);
    }
  }
  for (const std::size_t length : {3 * 4096 - 1, 3 * 4096, 3 * 4096 + 1, 6 * 4096 + 777, 100'003}) {
    const byte_vector large = random_bytes(length + 3);
    const std::span<const std::byte> part = std::span(large).subspan(3);
    CHECK(plait::crc32c(part) == bitwise(part));
  }
}

TEST_CASE("a checksum can be continued, and two combine into one") {
  const byte_vector data = random_bytes(20'011);
  const std::span<const std::byte> all(data);
  const std::uint32_t whole = plait::crc32c(all);
  for (const std::size_t cut : {0, 1, 7, 8, 4096, 12'345, 20'010, 20'011}) {
    const auto first = all.first(cut), second = all.subspan(cut);
    CHECK(plait::crc32c(second, plait::crc32c(first)) == whole);
    CHECK(combine(plait::crc32c(first), plait::crc32c(second), second.size()) == whole);
  }
  static_assert(combine(0, 0, 1ull << 40) == 0);
  // A terabyte of zeros, from 16 bytes doubled repeatedly.
  std::uint32_t zeros = plait::crc32c(byte_vector(16, std::byte{0}));
  for (std::uint64_t n = 16; n < 1ull << 40; n *= 2) zeros = combine(zeros, zeros, n);
  std::uint32_t thirds = 0;
  for (const std::uint64_t n : {1ull << 38, 1ull << 39, 1ull << 38}) {
    std::uint32_t part = plait::crc32c(byte_vector(16, std::byte{0}));
    for (std::uint64_t k = 16; k < n; k *= 2) part = combine(part, part, k);
    thirds = combine(thirds, part, n);
  }
  CHECK(zeros == thirds);
}
