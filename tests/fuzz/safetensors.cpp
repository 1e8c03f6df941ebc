// The reader of safetensors files: any bytes give entries that lie in the file and take what their shapes say, or an
// error. A first byte that is odd makes the rest a header: the length before it and data after it, as many bytes as the
// second byte says, are put there, so that inputs reach what is behind them.
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
