// Reads a whole committed step and compares every checksum: what is bad is named by tensor, box, file and offset. It
// repairs nothing and loads nothing. Next: checkpoint/step_directory.hpp.
#pragma once

#include <string>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// Something wrong with a step, in words: "tensor 'a' box [0:2, 4:8]: bytes 4096 to 4160 of '/r/step-00000001/data/
/// w00000.safetensors' have CRC-32C 0x1, and 0x2 in the manifest".
struct verify_finding {
  std::string text;
};

/// Returns all that is wrong with a step; nothing if it is exactly what was saved. Reads every byte of it once.
inline std::vector<verify_finding> verify_step(file_system& files, const std::string& path);

/// Returns the checksum of a range of a file, read in pieces.
inline std::uint32_t crc32c_of(const file_handle& file, std::uint64_t position, std::uint64_t bytes);

}  // namespace plait
