#pragma once

// Memory registered with communicators, and the collectives that use it.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>

#include "groups.hpp"

namespace plait::nccl_stand_in {

/// Whether memory lies in a window of `comm` (null: any). Requires the registry's mutex.
inline bool lies_in_window(ncclComm_t comm, const void* data, std::size_t bytes) {
  for (const auto& [handle, w] : registry::get().windows) {
    const char* const at = static_cast<const char*>(data);
    if ((comm == nullptr || w.comm == comm) && at >= w.begin && at + bytes <= w.begin + w.bytes) return true;
  }
  return false;
}
inline bool in_window(ncclComm_t comm, const void* data, std::size_t bytes) {
  const std::lock_guard lock(registry::get().mutex);
  return lies_in_window(comm, data, bytes);
}
/// Counts a collective of a communicator that has a window.
inline void note_windows(ncclComm_t comm, std::size_t count, const void* in, const void* out) {
  auto& r = registry::get();
  const std::lock_guard lock(r.mutex);
  bool any = false;
  for (const auto& [handle, w] : r.windows) any = any || w.comm == comm;
  if (!any || count == 0) return;
  const bool inside =
      (in == nullptr || lies_in_window(comm, in, 1)) && (out == nullptr || lies_in_window(comm, out, 1));
  ++(inside ? r.calls_in_windows : r.calls_beside_windows);
}

/// Collective. Ranks that register different numbers of bytes, or make different calls meanwhile, end with an error.
inline ncclResult_t register_window(ncclComm_t comm, void* data, std::size_t bytes, ncclWindow_t* window, int) {
  *window = nullptr;
  if (const ncclResult_t ready = usable("ncclCommWindowRegister", comm); ready != ncclSuccess) return ready;
  const inside_library inside;
  try {
    comm->engine->set_streams(nullptr, nullptr);  // those of the last call may no longer exist
    comm->member->finish(run_when_last(comm, comm->member->join({.count = bytes}, -1, 0, 0, [](auto&) {})), -1);
  } catch (const std::exception& e) {
    return failed("ncclCommWindowRegister", comm, e);
  }
  auto& r = registry::get();
  ncclWindow_t made = nullptr;
  {
    const std::lock_guard lock(r.mutex);
    if (r.has_windows) {
      made = reinterpret_cast<ncclWindow_t>(static_cast<std::uintptr_t>(++r.registrations));
      r.windows.emplace(made, nccl_stand_in::window{comm, static_cast<const char*>(data), bytes});
    }
  }
  if (!comm->blocking) return written_late(comm, [made, window] { *window = made; });
  *window = made;
  return ncclSuccess;
}
/// Ends the process if an operation in flight uses the window.
inline ncclResult_t deregister_window(ncclComm_t comm, ncclWindow_t window) {
  if (const ncclResult_t ready = usable("ncclCommWindowDeregister", comm); ready != ncclSuccess) return ready;
  {
    auto& r = registry::get();
    const std::lock_guard lock(r.mutex);
    const auto found = r.windows.find(window);
    if (found == r.windows.end() || found->second.comm != comm) {
      thread_error() = "ncclCommWindowDeregister: this is no window of the communicator";
      return ncclInvalidArgument;
    }
#ifdef PLAIT_CUDA_STAND_IN
    if (is_in_flight(comm, found->second.begin, found->second.bytes))
      ::stand_in::die("ncclCommWindowDeregister: an operation in flight uses the window");
#endif
    r.windows.erase(found);
  }
  return outcome(comm);
}

/// Unmaps memory without waiting, unlike cudaFree.
inline ncclResult_t free_memory(void* data) {
#ifdef PLAIT_CUDA_STAND_IN
  const auto now = [&](::stand_in::runtime&) {
    if (data != nullptr && ::stand_in::arena::instance().find(data) == nullptr) return cudaErrorInvalidValue;
    if (data != nullptr) ::stand_in::release_now(data, "ncclMemFree");
    return cudaSuccess;
  };
  return ::stand_in::call(now) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
#else
  return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
#endif
}

}  // namespace plait::nccl_stand_in
