// What a program whose ranks are processes of Open MPI tells its C library at the start. The library itself changes
// nothing of the process.
#pragma once

#include <malloc.h>

/// Has the C library keep memory that was freed, up to 1 GB, for what is allocated next. Open MPI takes the scratch
/// memory of each reduction from the heap; given back to the system in between, its pages are cleared and mapped anew
/// at each call, which takes as long as the reduction. Blocks above 32 MB still come from the system.
inline void keep_heap() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}
