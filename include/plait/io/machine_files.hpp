// Chooses how the machine's files are written: through io_uring, or with ordinary calls by whichever thread writes.
// PLAIT_WITH_LIBURING, which the CMake target plait::uring defines, makes the first possible.
#pragma once

#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/posix_file_system.hpp"
#ifdef PLAIT_WITH_LIBURING
#include "plait/io/uring_file_system.hpp"
#endif

namespace plait {

/// How large writes reach the disk.
enum class file_io {
  automatic,  ///< by io_uring where it is there and allowed, else by threads
  uring,
  threads,  ///< by pwrite
};

/// Files, and how they are written.
struct chosen_files {
  file_system* files = nullptr;
  file_io io = file_io::threads;  ///< `uring` or `threads`
  std::string why{};              ///< why `automatic` did not become `uring`, or nothing
};

namespace detail {

/// Returns why there is no io_uring here, or nothing.
inline std::string uring_fault() {
#ifdef PLAIT_WITH_LIBURING
  return ring_fault(make_uring);
#else
  return "this program was built without liburing";
#endif
}

}  // namespace detail

/// Returns the machine's files, written as `io` says. They live as long as the program. Throws `error` where io_uring
/// is asked for and not there, naming `field`.
inline chosen_files choose_files(file_io io, std::string_view field = "file_io") {
  if (io == file_io::threads) return {&machine_files(), file_io::threads, {}};
  std::string fault = detail::uring_fault();
  if (!fault.empty() && io == file_io::uring)
    fail({field, " uring: ", fault, "; legal here are ", field, " auto and threads"});
  if (!fault.empty()) return {&machine_files(), file_io::threads, std::move(fault)};
#ifdef PLAIT_WITH_LIBURING
  static uring_file_system files;
  return {&files, file_io::uring, {}};
#else
  return {&machine_files(), file_io::threads, {}};
#endif
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
