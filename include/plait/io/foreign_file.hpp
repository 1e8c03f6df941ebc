// Recognises files of other programs by their first bytes, for errors that say what a file is instead of what is odd in
// it.
#pragma once

#include <string_view>

#include "plait/version.hpp"

namespace plait {

/// Returns what a file is that begins with `start`, to be put behind "this is"; nothing where it is none of those that
/// people take for text, tokens, JSON or weights.
inline std::string_view foreign_file(std::string_view start) {
  struct kind {
    std::string_view magic, what;
  };
  constexpr kind kinds[] = {
      {"version https://git-lfs.github.com/spec", "a pointer of Git LFS; fetch the file itself with `git lfs pull`"},
      {"\x93NUMPY", "an array of NumPy's (.npy), which has a header"},
      {"\x1f\x8b\x08", "compressed by gzip; unpack it first"},
      {"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it first"},
      {{"\xfd\x37zXZ\0", 6}, "compressed by xz; unpack it first"},
      {"PK\x03\x04", "a zip archive, as PyTorch and NumPy (.npz) write them, too"},
      {"PAR1", "a table of Parquet's"},
      {"ARROW1", "a table of Arrow's"},
  };
  for (const kind& k : kinds)
    if (start.starts_with(k.magic)) return k.what;
  return {};
}

}  // namespace plait
