// Reads a config.json: any text gives an error, or a model whose written text gives the same model again.
#include <cstddef>
#include <cstdlib>
#include <string_view>

#include "plait/models/llama_config_json.hpp"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  plait::llama_config found;
  try {
    found = plait::parse_llama_config(std::string_view(reinterpret_cast<const char*>(data), size), "x");
  } catch (const plait::error&) {
    return 0;
  }
  if (plait::parse_llama_config(plait::llama_config_text(found), "x") != found) std::abort();
  return 0;
}
