// The version of plait, and `pl`, its short name.
#pragma once

#if __cplusplus < 202002L
// A missing file is the one error that ends a compilation at once; #error would be followed by a thousand others.
#include "plait needs C++20: compile with -std=c++20"
#endif
#if !defined(__cpp_exceptions) && !defined(__CUDACC__)
#include "plait needs exceptions: compile without -fno-exceptions"
#endif

#define PLAIT_VERSION_MAJOR 0
#define PLAIT_VERSION_MINOR 1
#define PLAIT_VERSION_PATCH 0

namespace plait {}
namespace pl = plait;  // the name that users' code reads best with
