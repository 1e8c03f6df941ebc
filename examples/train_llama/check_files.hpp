#pragma once

#include <filesystem>
#include <string>

#include "options.hpp"

/// The path without links, "." and ".."; there need not be a file.
std::filesystem::path plain(const std::string& path);

/// Refuses outputs that cannot be written, that are read or written twice, or that lie among saved states. Leaves no
/// trace.
void check_files(const options& opt, bool begins_from_step);
