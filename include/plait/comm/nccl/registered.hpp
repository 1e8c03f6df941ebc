// The memory that `nccl::options::registered_bytes` asks for: allocated by NCCL, given to the device for the buffers
// that collectives read and write, and registered with every communicator of the rank as it is made
// (comm/nccl/state.hpp). Memory for single arrays of the caller's is in comm/nccl/memory.hpp. Test:
// tests/cuda/comm_nccl_memory.cpp.
#pragma once

#include <cstddef>
#include <memory>

#include "plait/comm/nccl/options.hpp"
#include "plait/comm/nccl/types.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/registered_memory.hpp"

namespace plait::nccl::detail {

/// Allocates what `settings` ask for, none by default, and gives it to the device; a device that has it from an earlier
/// communicator keeps it. Throws `plait::error` where NCCL has no windows, or the device has another number of bytes.
inline registered_memory memory_for_collectives([[maybe_unused]] cuda& device, const options& settings) {
  if (settings.registered_bytes == 0) return {};
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  const registered_memory& there = device.served_to_collectives();
  if (there.data != nullptr && there.bytes != settings.registered_bytes)
    fail({"nccl::options::registered_bytes is ", settings.registered_bytes, ", but the device has ", there.bytes,
          " bytes for collectives, of an earlier communicator; use the same number for all of a device's"});
  if (there.data != nullptr) return there;
  void* data = nullptr;
  check(ncclMemAlloc(&data, settings.registered_bytes), "ncclMemAlloc for nccl::options::registered_bytes");
  registered_memory memory{std::shared_ptr<void>(data, [](void* p) { ncclMemFree(p); }), settings.registered_bytes,
                           "nccl::options::registered_bytes"};
  device.serve_collectives(memory);
  return memory;
#else
  fail({"nccl::options::registered_bytes is ", settings.registered_bytes,
        ", which needs NCCL 2.27 or later; this program is compiled with ", NCCL_MAJOR, ".", NCCL_MINOR,
        "; set it to 0"});
#endif
}

}  // namespace plait::nccl::detail

#include "plait/core/macros_on.hpp"
