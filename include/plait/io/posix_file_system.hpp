// The file operations of io/file_system.hpp by the system's calls. Interrupted calls go on; everything else that fails
// is an error. Next: tests/unit/io/file_system.cpp.
#pragma once

#include "plait/io/file_system.hpp"

namespace plait {

/// The files of this machine. It has no state: any number of objects and threads may work at once. A lock is one of the
/// system (flock), so it goes with the process that holds it, however that ends.
class posix_file_system;

}  // namespace plait
