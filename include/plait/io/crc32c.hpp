// CRC-32C (Castagnoli) of bytes: what a checkpoint knows its boxes by. It finds damage, not malice, and is no key:
// core/hash.hpp has one. Published vectors: RFC 3720, B.4. Next: checkpoint/verify.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plait/version.hpp"

namespace plait {

/// Returns the CRC-32C of `bytes`, or, where `before` is the checksum of some bytes, that of those followed by `bytes`.
inline std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

/// Returns the checksum of two ranges of bytes after each other, from `first` and `second`, theirs, and the length of
/// the second, in time logarithmic in the length: threads can share the checksum of one range.
inline std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t bytes_of_second);

}  // namespace plait
