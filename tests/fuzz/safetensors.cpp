// Reads safetensors files: any bytes give an error, or entries that lie in the file with the size of their shapes. An
// odd first byte makes the rest a header: the test adds the length before it, and after it as many bytes of data as the
// second byte says. Without this, few inputs would reach the code after the length check.
#include "plait/checkpoint/safetensors.hpp"

#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  if (size < 2) return 0;
  std::vector<unsigned char> file(data + 1, data + size);
  if (data[0] % 2 == 1) {
    const std::uint64_t length = size - 2;
    file.assign(8, 0);
    std::memcpy(file.data(), &length, 8);
    file.insert(file.end(), data + 2, data + size);
    file.resize(file.size() + data[1]);
  }
  file.shrink_to_fit();
  try {
    const auto bytes = std::as_bytes(std::span(file));
    const auto found = plait::parse_safetensors(bytes, "x");
    const std::byte* next = nullptr;
    for (const auto& entry : found.entries) {
      if (plait::safetensors_bytes(entry.shape, entry.dtype) != entry.bytes.size()) std::abort();
      if (next != nullptr && entry.bytes.data() != next) std::abort();
      next = entry.bytes.data() + entry.bytes.size();
    }
    if (next != nullptr && next != bytes.data() + bytes.size()) std::abort();
  } catch (const plait::error&) {
  }
  return 0;
}
