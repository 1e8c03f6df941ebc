// The descriptors of standard input, output and errors, where a program was started without: a file that the program
// opens would take the place of one of them, and what is printed would go into that file.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// Opens /dev/null in the place of each of the descriptors 0 to 2 that is closed, as for a process that was detached
/// from its terminal. A program calls it before it opens anything. Throws `error` where /dev/null cannot be opened.
inline void open_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    if (::open("/dev/null", O_RDWR) != descriptor)  // the lowest that is free
      fail({"descriptor ", descriptor, " is closed, and /dev/null cannot be opened in its place"});
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
