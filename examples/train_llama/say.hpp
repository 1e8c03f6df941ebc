#pragma once

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <utility>

/// Returns the system's number of the first failure of standard output; 0: there was none.
inline int& output_failure() {
  static int failure = 0;
  return failure;
}

/// Prints to standard output. Where that is closed or full, training is worth more than what it says: the run goes on,
/// and complains when it has ended.
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = fmt::format(format, std::forward<Args>(args)...);
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() && output_failure() == 0)
    output_failure() = errno;
}

/// Flushes standard output; a failure is remembered, too.
inline void say_now() {
  errno = 0;
  if (std::fflush(stdout) != 0 && output_failure() == 0) output_failure() = errno;
}
