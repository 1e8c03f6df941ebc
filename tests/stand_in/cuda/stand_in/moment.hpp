// Orders memory accesses of a kernel's threads for thread sanitizer. For block.cpp only.
#pragma once

#include "die.hpp"

#ifdef STAND_IN_THREAD_SANITIZER
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace stand_in {

/// A point in time that some threads reach and others wait for.
struct moment {
  /// Orders this thread's accesses up to now before those of any thread `after` this.
  void happened() {
#ifdef STAND_IN_THREAD_SANITIZER
    __tsan_release(this);
#endif
  }
  void after() {
#ifdef STAND_IN_THREAD_SANITIZER
    __tsan_acquire(this);
#endif
  }
  char place = 0;  ///< its address identifies the moment
};

/// While it exists, thread sanitizer ignores this thread: the executor's code on a fiber is not part of the kernel.
class unseen {
 public:
#ifdef STAND_IN_THREAD_SANITIZER
  unseen() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__), AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~unseen() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
#else
  unseen() {}
#endif
  unseen(const unseen&) = delete;
};

}  // namespace stand_in
