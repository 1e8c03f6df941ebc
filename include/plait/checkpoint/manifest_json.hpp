// A manifest from and to JSON: one array of numbers for all boxes of a tensor, so that millions of them take seconds.
// What is consistent beyond that: checkpoint/manifest_check.hpp. Next: tests/unit/checkpoint/manifest.cpp.
#pragma once

#include <string>
#include <string_view>

#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/manifest_check.hpp"

namespace plait {

/// The version that this plait writes, and the only one that it reads.
inline constexpr std::uint64_t manifest_version = 1;

/// Returns the text of `m`. Throws `error` starting with `source` as `check_manifest` does.
inline std::string manifest_text(const manifest& m, const std::string& source = "manifest");

/// Reads the text of a manifest, strictly: the keys that `manifest_text` writes, each once, in any order, and nothing
/// else; checked by `check_manifest`. Throws `error` starting with `source`.
inline manifest parse_manifest(std::string_view text, const std::string& source = "manifest");

}  // namespace plait
