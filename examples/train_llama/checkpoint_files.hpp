#pragma once

#include <string>

#include "options.hpp"

namespace plait {
class file_system;
}

/// Returns the files that steps are written to, as --checkpoint-io says. Throws `plait::error`, naming it, where it
/// asks for what this program or machine has not.
plait::file_system& checkpoint_files(const options& opt);

/// Returns a line on how steps are written, and why not through io_uring; nothing where none is saved.
std::string checkpoint_io_text(const options& opt);
