// Large uninitialised host memory for bytes that are read from or written to files, and a fast copy of such bytes.
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

/// Functions that allocate a special kind of host memory, such as pinned memory. Any thread may call them.
struct host_memory {
  std::byte* (*allocate)(std::size_t bytes) = nullptr;  ///< throws if memory is exhausted
  void (*release)(std::byte* memory) = nullptr;
};

/// Uninitialised host memory that grows. It is aligned to 4096 bytes, or to 2 MiB if it is large, so that the system
/// can use large pages.
class byte_buffer {
 public:
  byte_buffer() = default;
  explicit byte_buffer(std::size_t bytes) { grow(bytes); }

  /// Grows to at least `bytes` bytes. Growing loses the contents.
  void grow(std::size_t bytes) { grow(bytes, {}); }
  /// As `grow`, with memory from the given functions and with their alignment.
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
    void (*elsewhere)(std::byte*);  ///< releases special memory; null: a mapping, or from std::aligned_alloc
    std::size_t mapped;             ///< bytes that are mapped
    void operator()(std::byte* memory) const {
      if (elsewhere != nullptr)
        elsewhere(memory);
      else if (mapped > 0)
        ::munmap(memory, mapped);
      else
        std::free(memory);
    }
  };
  /// Allocates memory by a separate mapping. Heap memory may consist of scattered small pages. A disk transfers at most
  /// 256 pages at once, so it would read a megabyte where it could read much more.
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

/// Copies `bytes` bytes between ranges that do not overlap. Large copies bypass the processor's cache. A write through
/// the cache first reads every line of the destination, which is a third of the traffic. The speed does not depend on
/// the distance of the ranges. If it is 16 bytes more than a multiple of a page, std::memcpy takes five times as long
/// on an AMD EPYC.
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
    _mm_sfence();  // completes the writes before other threads are notified
    from += at, to += at, bytes -= at;
  }
#endif
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace plait
