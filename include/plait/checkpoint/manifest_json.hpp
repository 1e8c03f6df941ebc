// A manifest as JSON, and back: one array of numbers for all boxes of a tensor, so that millions of them take seconds.
// Which manifests are legal: checkpoint/manifest_check.hpp.
#pragma once

#include <string>
#include <string_view>

#include "plait/checkpoint/manifest.hpp"

namespace plait {

/// Returns the text of `m`. Throws `error` starting with `source` as `check_manifest` does.
std::string manifest_text(const manifest& m, const std::string& source = "manifest");

/// Reads the text of a manifest, strictly: the keys that `manifest_text` writes, each once, format and version first,
/// and nothing else; checked by `check_manifest`. Throws `error` starting with `source`.
manifest parse_manifest(std::string_view text, const std::string& source = "manifest");

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/checkpoint/manifest_json.ipp"  // IWYU pragma: keep
#endif
