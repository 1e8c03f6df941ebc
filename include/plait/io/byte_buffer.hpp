// Large host memory without values, for bytes on their way to a file or from one, and the copy of such bytes.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "plait/version.hpp"

namespace plait {

/// Where host memory of a special kind comes from, such as the pinned memory that a GPU copies to. Both may be called
/// by any thread.
struct host_memory {
  std::byte* (*allocate)(std::size_t bytes) = nullptr;  ///< throws where there is none
  void (*release)(std::byte* memory) = nullptr;
};

/// Host memory that grows. It begins on a multiple of 4096 bytes, or of 2 MiB if it is large, so that the system can
/// use large pages. Its bytes have no values until they are written.
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
  /// Memory of a mapping of its own. The heap would give memory with small pages, which small objects have used. A disk
  /// takes 256 pages at once, so it would read a megabyte where it could read many.
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

/// Copies `bytes` bytes between ranges that do not overlap. Many of them are written past the processor's cache. It
/// would read every line of the destination before the write, which is a third of the traffic. Its speed does not
/// depend on the distance of the ranges. At 16 bytes more than a multiple of a page, std::memcpy takes five times as
/// long on an AMD EPYC.
inline void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t line = 64, many = std::size_t{64} << 10;
  if (bytes >= many) {
    const std::size_t before = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
    std::memcpy(to, from, before);
    std::size_t at = before;
    for (; at + line <= bytes; at += line) {
      const auto* const in = reinterpret_cast<const __m128i*>(from + at);
      auto* const out = reinterpret_cast<__m128i*>(to + at);
      const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
      const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    _mm_sfence();  // before another thread learns that they are there
    from += at, to += at, bytes -= at;
  }
#endif
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace plait
