// Device memory that NCCL allocates and registers for a communicator, which it moves without copies through buffers of
// its own where the hardware can. It is optional: collectives take any memory of the GPU. Test:
// tests/cuda/comm_nccl.cpp.
#pragma once

#include <cstddef>
#include <string>

#include "plait/comm/nccl.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl {

/// Device memory that NCCL moves without copies through its own buffers: allocated by NCCL, and from NCCL 2.27 on
/// registered as a window of the communicator's symmetric memory, where the hardware has it. Making it is collective;
/// every rank asks for the same number of bytes. The communicator must outlive it. Its end waits until the GPU has done
/// what this communicator was called for, and what is in the main stream.
class communication_memory {
 public:
  communication_memory(communicator& comm, std::size_t bytes) : comm_(comm), bytes_(bytes) {
    if (bytes == 0) return;
    detail::check(ncclMemAlloc(&data_, bytes), "ncclMemAlloc");
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    detail::state& s = comm_.shared_state();
    try {
      window_ = s.register_window(data_, bytes_, NCCL_WIN_COLL_SYMMETRIC);
    } catch (...) {
      if (s.finish()) ncclMemFree(data_);  // else it is left to what may still use it
      throw;
    }
#endif
  }
  communication_memory(const communication_memory&) = delete;
  communication_memory& operator=(const communication_memory&) = delete;
  ~communication_memory() {
    if (data_ == nullptr) return;
    detail::state& s = comm_.shared_state();
    if (!s.finish()) return;  // it is left to what still uses it
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (window_ != nullptr) s.deregister(window_);
#endif
    ncclMemFree(data_);
  }

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// Whether NCCL has taken it as symmetric memory.
  bool symmetric() const {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    return window_ != nullptr;
#else
    return false;
#endif
  }

 private:
  communicator comm_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  ncclWindow_t window_{};
#endif
};

}  // namespace plait::nccl

#include "plait/core/macros_on.hpp"
