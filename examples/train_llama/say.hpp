#pragma once

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <utility>

/// The system's number of what went wrong with standard output first; 0: nothing has.
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

/// Brings what was said to whoever listens.
inline void say_now() {
  errno = 0;
  if (std::fflush(stdout) != 0 && output_failure() == 0) output_failure() = errno;
}
