#pragma once

#include <string>

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
