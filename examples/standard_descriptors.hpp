// Opens the descriptors of standard input, output and error, which may be closed in a detached program.
#pragma once

#include <fcntl.h>

#include <cerrno>

#include "plait/core/error.hpp"

namespace plait {

/// Opens /dev/null for each closed descriptor from 0 to 2; they may be closed after a detach from the terminal. Call it
/// before the program opens anything. Throws `error` if /dev/null cannot be opened.
inline void open_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    if (::open("/dev/null", O_RDWR) != descriptor)  // the lowest that is free
      fail({"descriptor ", descriptor, " is closed, and /dev/null cannot be opened in its place"});
  }
}

}  // namespace plait
