// Reads a model.safetensors.index.json: any text gives an error, or names of files inside the folder.
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "plait/checkpoint/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    for (const auto& [tensor, file] : plait::parse_safetensors_index(text, "x")) {
      const std::string as_opened = file.c_str();  // up to the first zero byte
      if (!as_opened.ends_with(".safetensors")) std::abort();
      if ((std::filesystem::path("folder") / as_opened).parent_path() != "folder") std::abort();
    }
  } catch (const plait::error&) {
  }
  return 0;
}
