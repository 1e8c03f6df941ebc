// A hash of bytes, one value on all ranks and machines; it is not cryptographic. It keys random streams in
// nn/parameter.hpp, finds ranks that disagree in comm/agreement.hpp, and sums up weights in
// parallel/parameter_hashes.hpp.
#pragma once

#include <cstdint>
#include <string_view>

#include "plait/version.hpp"

namespace plait {

/// FNV-1a, 64 bits, of some bytes; `hash` is that of the bytes before them.
constexpr std::uint64_t fnv1a(std::string_view bytes, std::uint64_t hash = 14695981039346656037ull) {
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace plait
