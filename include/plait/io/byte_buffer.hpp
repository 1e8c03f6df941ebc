// Large pieces of host memory that nobody has set: for bytes on their way to a file or from one. What devices compute
// with is in device/buffer.hpp.
#pragma once

#include <sys/mman.h>

#include <cstddef>
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
      memory_ = {from.allocate(bytes), release{from.release}};
      size_ = bytes;
      return;
    }
    constexpr std::size_t large = std::size_t{2} << 20;
    const std::size_t page = bytes >= 2 * large ? large : 4096, whole = (bytes + page - 1) / page * page;
    memory_ = {static_cast<std::byte*>(std::aligned_alloc(page, whole)), release{nullptr}};
    if (!memory_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (page == large) static_cast<void>(::madvise(memory_.get(), whole, MADV_HUGEPAGE));  // a hint
#endif
    size_ = bytes;
  }

  std::size_t size() const { return size_; }
  std::byte* data() { return memory_.get(); }
  const std::byte* data() const { return memory_.get(); }
  std::span<std::byte> first(std::size_t bytes) { return {data(), bytes}; }

 private:
  struct release {
    void (*elsewhere)(std::byte*);  ///< null: the memory is of std::aligned_alloc
    void operator()(std::byte* memory) const { elsewhere == nullptr ? std::free(memory) : elsewhere(memory); }
  };
  std::unique_ptr<std::byte[], release> memory_;
  std::size_t size_ = 0;
};

}  // namespace plait
