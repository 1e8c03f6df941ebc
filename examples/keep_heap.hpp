// A setting of the C library's heap, for programs whose ranks are processes of Open MPI. plait itself never changes it.
#pragma once

#include <malloc.h>

/// Makes the C library keep up to 1 GB of freed memory for later allocations. Open MPI allocates scratch memory from
/// the heap in each reduction. Without this, the system clears and maps its pages at each call, which takes as long as
/// the reduction. Blocks above 32 MB still come from the system.
inline void keep_heap() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}
