#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "../about.hpp"
#include "plait/checkpoint/manifest.hpp"

/// The directory that an argument of the command line names.
struct place {
  std::string path;      ///< without slashes at its end
  bool is_step = false;  ///< false: a folder, which may have steps
};

/// Throws `plait::error`, which begins with `argument`, unless the path is that of a directory.
place find_place(const std::string& argument, const std::string& path);

/// A step and its manifest.
struct opened_step {
  std::string path;
  plait::manifest saved;
};

/// Throws `plait::error`, which begins with `argument`, unless the path is that of a step with a good manifest.
opened_step open_step(const std::string& argument, const std::string& path);

/// Returns whether a directory, which need not exist, is `other` or is in it.
bool lies_in(const std::string& directory, const std::string& other);

/// Returns the kind of a tensor: "weights", or the part of an optimizer's state, as "exp_avg" for "optim.NAME.exp_avg".
std::string_view kind_of_tensor(std::string_view name);

/// The number of bytes of a tensor that are read at once.
inline constexpr std::uint64_t chunk_bytes = 8 << 20;

std::uint64_t bytes_of(const plait::stored_tensor& tensor);
/// Returns the bytes of all data files.
std::uint64_t bytes_of(const plait::manifest& saved);
/// Returns "2x3", or "scalar".
std::string shape_text(const std::vector<std::int64_t>& shape);
/// Returns "true", "7", "0.1" or a string in quotes.
std::string scalar_text(const plait::stored_scalar& value);
