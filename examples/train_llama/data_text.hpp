#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "options.hpp"

/// Returns a digest of bytes, and of those before them: any one word that differs gives another.
std::uint64_t digest_of(std::span<const std::byte> bytes, std::uint64_t digest);

/// Returns "4432803 bytes with digest 0123456789abcdef" for a file. Of one of more than 64 MiB the digest covers the
/// first MiB, with any header, the last, and 4096 pieces of 4 KiB in between: another data set is found, a changed
/// token here or there may not be.
std::string content_text(const std::string& path);

/// Returns the files that a --data names: itself, or Megatron's two.
std::vector<std::string> files_of(const std::string& path);

/// Returns in words what a place in the data depends on, beside --seed and --seq.
std::string data_text(const options& opt);
