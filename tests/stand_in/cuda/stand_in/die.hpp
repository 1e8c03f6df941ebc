// Ends a program that makes an error of GPU programming; macros for the sanitizer of the build.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

// The build defines these macros for block.cpp, which is compiled without a sanitizer.
#if defined(__SANITIZE_ADDRESS__)
#define STAND_IN_ADDRESS_SANITIZER 1
#endif
#if defined(__SANITIZE_THREAD__)
#define STAND_IN_THREAD_SANITIZER 1
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define STAND_IN_ADDRESS_SANITIZER 1
#endif
#if __has_feature(thread_sanitizer)
#define STAND_IN_THREAD_SANITIZER 1
#endif
#endif

#ifdef STAND_IN_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef STAND_IN_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace stand_in {

/// Ends the process: on a GPU this is an error too, mostly without a message.
[[noreturn]] inline void die(const std::string& what) {
  std::fflush(stdout);
  std::fprintf(stderr, "stand-in CUDA runtime: %s\n", what.c_str());
  std::abort();
}

}  // namespace stand_in
