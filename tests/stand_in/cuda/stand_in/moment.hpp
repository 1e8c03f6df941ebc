// What orders memory accesses of a kernel's threads, for thread sanitizer. For block.cpp alone.
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

/// Something that some threads come to and that others wait for.
struct moment {
  /// What this thread did until now lies before what anybody does `after` this.
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
  char place = 0;  ///< an address of its own
};

/// While it lives, thread sanitizer looks at nothing: what the executor does on a thread's fiber is not the thread's.
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
