// Reads token files: the first byte gives the share of the rest that is an index; the other bytes are tokens. Any two
// files give an error, or tokens below the vocabulary size, each in a document that starts at or before the token.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "train_llama/data/sampler.hpp"

namespace {

struct files {
  std::string stem = "/tmp/plait_fuzz_tokens." + std::to_string(::getpid());
  ~files() {
    for (const char* ending : {".idx", ".bin"}) ::unlink((stem + ending).c_str());
  }
  void write(const char* ending, std::string_view bytes) const {
    std::ofstream(stem + ending, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
};

void check(const plait::token_source& source) {
  constexpr std::int64_t most = 512;
  const std::int64_t count = std::min(source.size(), most);
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(count)), starts(static_cast<std::size_t>(count));
  source.document_starts(0, 0, count, starts.data());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t start = starts[static_cast<std::size_t>(i)];
    if (start < 0 || start > i || (i > 0 && start < starts[static_cast<std::size_t>(i - 1)])) std::abort();
  }
  source.read(0, count, tokens.data());
  for (const std::int64_t token : tokens)
    if (token < 0 || token >= source.vocab()) std::abort();
  const plait::sampler samples(source, {.seq = 3, .seed = 1, .documents = true});
  std::vector<std::int64_t> inputs(3), targets(3);
  samples.fill(samples.training(7), 0, 3, inputs.data(), targets.data());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  static const files on_disk;
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  if (all.empty()) return 0;
  const std::string_view rest = all.substr(1);
  const std::size_t cut = rest.size() * data[0] / 255;
  on_disk.write(".idx", rest.substr(0, cut));
  on_disk.write(".bin", rest.substr(cut));
  for (const std::int64_t end_of_document : {-1, 3}) {
    try {
      check(plait::token_source({.paths = {on_disk.stem}, .vocab = 300, .end_of_document = end_of_document}));
    } catch (const plait::error&) {
    }
  }
  return 0;
}
