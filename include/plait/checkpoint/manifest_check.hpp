// Whether a manifest is consistent: every tensor covered exactly once, every byte of every file spoken for, no number
// that overflows, no path that leaves the directory. No file is opened: checkpoint/verify.hpp reads them.
#pragma once

#include <string>

#include "plait/checkpoint/manifest.hpp"

namespace plait {

/// Throws `error`, its text starting with `source`, unless `m` is what a step can be loaded from: names not empty,
/// UTF-8 and used once; files at different relative paths without "." or "..", boxes within their tensors, of as many
/// bytes as their extents say, covering each element exactly once; ranges of bytes that follow the header of their file
/// to its end without holes or overlaps. The text names the tensor and the first element that is missing or there
/// twice. Takes O(n log n) for n boxes.
inline void check_manifest(const manifest& m, const std::string& source);

}  // namespace plait
