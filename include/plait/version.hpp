// The version of plait, and its short namespace name `pl`.
#pragma once

#if __cplusplus < 202002L
// Compilers stop at a missing file; after #error they would go on to report a thousand other errors.
#include "plait needs C++20: compile with -std=c++20"
#endif
#if !defined(__cpp_exceptions) && !defined(__CUDACC__)
#include "plait needs exceptions: compile without -fno-exceptions"
#endif

#define PLAIT_VERSION_MAJOR 0
#define PLAIT_VERSION_MINOR 1
#define PLAIT_VERSION_PATCH 0

namespace plait {}
namespace pl = plait;  // users' code reads best with this name
