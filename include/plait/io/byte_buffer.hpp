// Large pieces of host memory that nobody has set: for bytes on their way to a file or from one. What devices compute
// with is in device/device.hpp.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

#include "plait/version.hpp"

namespace plait {

/// Where host memory of a special kind comes from, such as the pinned memory that a GPU copies to. Both may be called
/// by any thread.
struct host_memory {
  std::byte* (*allocate)(std::size_t bytes) = nullptr;  ///< throws where there is none
  void (*release)(std::byte* memory) = nullptr;
};

/// Host memory that grows, on a multiple of 4096 bytes, or of 2 MiB where it is large, so that the system can back it
/// with large pages. Its bytes have no values until they are written.
class byte_buffer {
 public:
  byte_buffer() = default;
  explicit byte_buffer(std::size_t bytes) { grow(bytes); }

  /// Makes it at least so large; what was in it is lost if it is larger than before.
  void grow(std::size_t bytes) { grow(bytes, {}); }
  /// As `grow`, with memory from elsewhere, on whatever boundary that has.
  void grow(std::size_t bytes, const host_memory& from) {
    if (bytes == 0 || (bytes <= size_ && from.release == memory_.get_deleter().elsewhere)) return;
    memory_.reset();
    size_ = 0;
    if (from.allocate != nullptr) {
      memory_ = {from.allocate(bytes), release{from.release, 0}};
      size_ = bytes;
      return;
    }
    if (bytes >= 2 * large) {
      map((bytes + large - 1) / large * large);
    } else {
      constexpr std::size_t page = 4096;
      memory_ = {static_cast<std::byte*>(std::aligned_alloc(page, (bytes + page - 1) / page * page)),
                 release{nullptr, 0}};
      if (!memory_) throw std::bad_alloc();
    }
    size_ = bytes;
  }

  std::size_t size() const { return size_; }
  std::byte* data() { return memory_.get(); }
  const std::byte* data() const { return memory_.get(); }
  std::span<std::byte> first(std::size_t bytes) { return {data(), bytes}; }

 private:
  static constexpr std::size_t large = std::size_t{2} << 20;

  struct release {
    void (*elsewhere)(std::byte*);  ///< null: the memory is a mapping, or of std::aligned_alloc
    std::size_t mapped;             ///< bytes of it that are a mapping
    void operator()(std::byte* memory) const {
      if (elsewhere != nullptr)
        elsewhere(memory);
      else if (mapped > 0)
        ::munmap(memory, mapped);
      else
        std::free(memory);
    }
  };
  /// Memory of a mapping of its own. The heap would give some that small objects have used, whose pages are small: a
  /// disk that takes 256 of them at once then reads a megabyte where it could read many.
  void map(std::size_t bytes) {
    void* const all = ::mmap(nullptr, bytes + large, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    auto* const begin = static_cast<std::byte*>(all);
    const std::size_t before = (large - reinterpret_cast<std::uintptr_t>(all) % large) % large;
    if (before > 0) ::munmap(begin, before);
    if (before < large) ::munmap(begin + before + bytes, large - before);
    memory_ = {begin + before, release{nullptr, bytes}};
#ifdef MADV_HUGEPAGE
    static_cast<void>(::madvise(memory_.get(), bytes, MADV_HUGEPAGE));  // a hint
#endif
  }

  std::unique_ptr<std::byte[], release> memory_;
  std::size_t size_ = 0;
};

}  // namespace plait
