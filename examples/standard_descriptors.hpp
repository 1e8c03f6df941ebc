// The descriptors of standard input, output and error, which a program that is detached may lack.
#pragma once

#include <fcntl.h>

#include <cerrno>

#include "plait/core/error.hpp"

namespace plait {

/// Opens /dev/null for each of the descriptors 0 to 2 that is closed, as after a detach from the terminal. A program
/// calls it before it opens anything. Throws `error` where /dev/null cannot be opened.
inline void open_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    if (::open("/dev/null", O_RDWR) != descriptor)  // the lowest that is free
      fail({"descriptor ", descriptor, " is closed, and /dev/null cannot be opened in its place"});
  }
}

}  // namespace plait
