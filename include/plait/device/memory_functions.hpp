// A program's own allocator as the source of a device's memory. What has been released is still kept for the next
// request, by device/allocator.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// The functions of a program's allocator: with them, every byte that a device hands out comes from the program, and
/// goes back to it. `Where` is what memory is bound to besides, as a CUDA stream is.
///
/// `allocate` returns null where memory is exhausted; it is asked once more after all blocks that nobody uses have gone
/// back, and then an error is thrown. It is asked for blocks, which are up to an eighth larger than what they serve
/// (`caching_allocator::rounded`), and which stay with the device when they are released, until `release_cache` or the
/// device's end. `release` is given the bytes that were asked for, and must not throw. Both run one at a time, in any
/// thread that uses the device, and must not use the device.
template <class... Where>
struct memory_functions {
  std::function<void*(std::size_t bytes, Where...)> allocate{};
  std::function<void(void* pointer, std::size_t bytes, Where...)> release{};

  explicit operator bool() const { return allocate != nullptr; }

  /// Throws if only one of the two is given.
  void require_both(std::string_view device) const {
    if ((allocate != nullptr) == (release != nullptr)) return;
    fail({device, ": options::memory has ", allocate ? "allocate and no release" : "release and no allocate",
          "; give both, or none for memory of the device's own"});
  }
  /// Returns what `allocate` returns, which must lie on a boundary of so many bytes: where it does not, it is released,
  /// and an error thrown.
  void* allocate_aligned(std::size_t boundary, std::string_view device, std::size_t bytes, Where... where) const {
    void* const pointer = allocate(bytes, where...);
    if (reinterpret_cast<std::uintptr_t>(pointer) % boundary == 0) return pointer;
    release(pointer, bytes, where...);
    fail({device, ": options::memory.allocate has returned memory that is not on a boundary of ", boundary, " bytes"});
  }
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
