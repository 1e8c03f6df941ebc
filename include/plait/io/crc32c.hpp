// CRC-32C (Castagnoli) of bytes, the checksum of boxes in checkpoints. It detects damage but not manipulation;
// core/text.hpp has the hash for keys. Published vectors: RFC 3720, B.4.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "plait/version.hpp"

namespace plait {

namespace detail {

// Polynomials over GF(2) of degree below 32. Bit 31 is the coefficient of x^0, as in CRCs that process the lowest bit
// first. n zero bytes multiply a CRC's state by x^(8n), modulo the Castagnoli polynomial.
inline constexpr std::uint32_t crc32c_polynomial = 0x82f63b78;

constexpr std::uint32_t crc32c_times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? crc32c_polynomial : 0); }

constexpr std::uint32_t crc32c_multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1, b = crc32c_times_x(b)) product ^= (a & 0x80000000u) != 0 ? b : 0;
  return product;
}

/// Returns x^(8 bytes), by repeated squaring.
constexpr std::uint32_t crc32c_power(std::uint64_t bytes) {
  std::uint32_t square = 0x00800000, power = 0x80000000;  // x^8 and 1
  for (; bytes != 0; bytes >>= 1, square = crc32c_multiply(square, square)) {
    if ((bytes & 1) != 0) power = crc32c_multiply(power, square);
  }
  return power;
}

/// Multiplies by a constant, as the sum of four table entries: one for each byte of the other factor.
struct crc32c_shift {
  std::array<std::array<std::uint32_t, 256>, 4> table{};

  constexpr explicit crc32c_shift(std::uint64_t bytes) {
    const std::uint32_t power = crc32c_power(bytes);
    for (unsigned byte = 0; byte < 4; ++byte) {
      for (unsigned i = 1; i < 256; ++i) {  // entries are linear: the lowest bit's plus the rest's
        const unsigned rest = i & (i - 1), bit = i ^ rest;
        table[byte][i] = rest == 0 ? crc32c_multiply(bit << 8 * byte, power) : table[byte][rest] ^ table[byte][bit];
      }
    }
  }
  constexpr std::uint32_t operator()(std::uint32_t state) const {
    return table[0][state & 255] ^ table[1][state >> 8 & 255] ^ table[2][state >> 16 & 255] ^ table[3][state >> 24];
  }
};

/// `tables[k][i]` is the state after the byte i and k zero bytes.
inline constexpr auto crc32c_tables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t state = i;
    for (int bit = 0; bit < 8; ++bit) state = crc32c_times_x(state);
    tables[0][i] = state;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t i = 0; i < 256; ++i) tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 255];
  }
  return tables;
}();

inline std::uint64_t load_word(const std::byte* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, 8);
  return word;
}

/// Returns the state after `bytes`, on any little-endian machine, with eight bytes at a time.
inline std::uint32_t crc32c_by_tables(std::uint32_t state, std::span<const std::byte> bytes) {
  static_assert(std::endian::native == std::endian::little);
  const auto& t = crc32c_tables;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    const std::uint64_t word = load_word(bytes.data()) ^ state;
    state = 0;
    for (unsigned byte = 0; byte < 8; ++byte) state ^= t[7 - byte][word >> 8 * byte & 255];
  }
  for (const std::byte byte : bytes) state = state >> 8 ^ t[0][(state ^ static_cast<unsigned char>(byte)) & 255];
  return state;
}

#if defined(__x86_64__)

/// Processes three streams of `Stream` bytes at a time, because the instruction takes three cycles and one can start in
/// each.
template <std::size_t Stream>
__attribute__((target("sse4.2"))) std::uint32_t crc32c_streams(std::uint32_t state, std::span<const std::byte>& bytes) {
  static constexpr crc32c_shift shift(Stream);
  for (; bytes.size() >= 3 * Stream; bytes = bytes.subspan(3 * Stream)) {
    std::uint64_t a = state, b = 0, c = 0;
    const std::byte* at = bytes.data();
    for (const std::byte* const end = at + Stream; at != end; at += 8) {
      a = __builtin_ia32_crc32di(a, load_word(at));
      b = __builtin_ia32_crc32di(b, load_word(at + Stream));
      c = __builtin_ia32_crc32di(c, load_word(at + 2 * Stream));
    }
    state = shift(shift(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^ static_cast<std::uint32_t>(c);
  }
  return state;
}

/// Returns the state after `bytes`, by the CRC instruction of SSE4.2. The processor must have it.
__attribute__((target("sse4.2"))) inline std::uint32_t crc32c_by_instruction(std::uint32_t state,
                                                                             std::span<const std::byte> bytes) {
  state = crc32c_streams<4096>(state, bytes);
  state = crc32c_streams<128>(state, bytes);
  std::uint64_t wide = state;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) wide = __builtin_ia32_crc32di(wide, load_word(bytes.data()));
  state = static_cast<std::uint32_t>(wide);
  for (const std::byte byte : bytes) state = __builtin_ia32_crc32qi(state, static_cast<unsigned char>(byte));
  return state;
}
inline bool crc32c_has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }

#else

inline std::uint32_t crc32c_by_instruction(std::uint32_t state, std::span<const std::byte> bytes) {
  return crc32c_by_tables(state, bytes);
}
inline bool crc32c_has_instruction() { return false; }

#endif

}  // namespace detail

/// Returns the CRC-32C of `bytes`. If `before` is the checksum of earlier bytes, returns the CRC-32C of those bytes
/// followed by `bytes`.
inline std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) {
  static const bool instruction = detail::crc32c_has_instruction();
  return ~(instruction ? detail::crc32c_by_instruction(~before, bytes) : detail::crc32c_by_tables(~before, bytes));
}

}  // namespace plait
