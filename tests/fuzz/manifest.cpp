// Reads manifests: any text gives an error, or a manifest that is equal after it is written and read. Counting shows
// that each element of its small tensors is in exactly one box.
#include "plait/checkpoint/manifest.hpp"

#include <cstdlib>
#include <string_view>
#include <vector>

namespace {

void count_elements(const plait::stored_tensor& tensor) {
  const auto bytes = plait::safetensors_bytes(tensor.shape, tensor.dtype);
  if (!bytes) std::abort();
  const std::uint64_t elements = *bytes / size_of(tensor.dtype);
  if (elements > 4096) return;
  std::vector<int> count(elements, 0);
  for (const auto& part : tensor.boxes) {
    const plait::box b = tensor.box_of(part);
    for (std::int64_t i = 0; i < b.local_size(); ++i) {
      std::int64_t rest = i, stride = 1, index = 0;
      for (int d = b.dims; d-- > 0;) {
        index += (b.offset[d] + rest % b.local[d]) * stride;
        rest /= b.local[d];
        stride *= b.global[d];
      }
      ++count.at(static_cast<std::size_t>(index));
    }
  }
  for (const int n : count) {
    if (n != 1) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  plait::manifest found;
  try {
    found = plait::parse_manifest({reinterpret_cast<const char*>(data), size});
  } catch (const plait::error&) {
    return 0;
  }
  for (const auto& tensor : found.tensors) count_elements(tensor);
  const std::string text = plait::manifest_text(found);
  if (plait::manifest_text(plait::parse_manifest(text)) != text) std::abort();
  return 0;
}
