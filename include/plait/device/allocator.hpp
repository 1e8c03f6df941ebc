// A cache of released blocks over a source of memory, with the bytes in use and their peak. Every device has one;
// other code owns memory by device/buffer.hpp and does not call it. Test: tests/unit/device/cpu.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

#include "plait/core/error.hpp"

namespace plait {

/// Keeps released blocks and hands them out again, because memory fresh from the system costs a page fault per 4 KiB
/// (or a device-wide synchronisation on a GPU). A training step asks for the same sizes again and again, so blocks are
/// not split: a request takes the smallest cached block of its stream that is at most a quarter too large.
///
/// `Source` is where memory comes from: `void* allocate(std::size_t, stream)` (throws or returns non-null) and
/// `void release(void*, std::size_t, stream) noexcept`. Thread-safe.
template <class Source>
class caching_allocator {
 public:
  /// Names the stream that a block belongs to: the one that it was released on last.
  using stream_key = std::uintptr_t;

  explicit caching_allocator(Source source = {}) : source_(source) {}
  caching_allocator(const caching_allocator&) = delete;
  caching_allocator& operator=(const caching_allocator&) = delete;
  ~caching_allocator() {
    holds_ = 0;
    release_cache();
    for (auto& [pointer, used] : live_) source_.release(pointer, used.block_bytes, used.stream);
  }

  /// At least `bytes` bytes, or null for none. Uninitialised.
  void* allocate(std::size_t bytes, stream_key stream = 0) {
    if (bytes == 0) return nullptr;
    const std::size_t size = rounded(bytes);
    const std::lock_guard lock(mutex_);
    void* pointer = nullptr;
    std::size_t block = size;
    auto& cached = cached_[stream];
    if (auto fit = cached.lower_bound(size); fit != cached.end() && fit->first <= size + size / 4) {
      pointer = fit->second;
      block = fit->first;
      cached.erase(fit);
      cached_bytes_ -= block;
    } else {
      pointer = from_source(size, stream);
    }
    live_.emplace(pointer, used_block{block, bytes, stream});
    in_use_ += bytes;
    peak_ = std::max(peak_, in_use_);
    return pointer;
  }

  /// Gives a block back. Throws `plait::error` for a pointer that is not in use (released twice, or not from here).
  void release(void* pointer, stream_key stream = 0) {
    if (pointer == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto used = live_.find(pointer);
    require(used != live_.end(), "release: this pointer is not in use in this allocator (released twice?)");
    cached_[stream].emplace(used->second.block_bytes, pointer);
    cached_bytes_ += used->second.block_bytes;
    in_use_ -= used->second.asked_bytes;
    live_.erase(used);
  }

  /// While held, cached blocks stay here even when memory runs out: somebody, such as a recorded graph, will use their
  /// addresses again. Holds are counted.
  void hold_cache(bool hold) {
    const std::lock_guard lock(mutex_);
    holds_ += hold ? 1 : -1;
  }

  /// Returns every cached block to the source, unless they are held.
  void release_cache() {
    const std::lock_guard lock(mutex_);
    give_back();
  }

  /// Bytes asked for and not released yet (as asked, without rounding).
  std::size_t bytes_in_use() const { return locked(in_use_); }
  /// The largest `bytes_in_use` since construction or `reset_peak`.
  std::size_t peak_bytes() const { return locked(peak_); }
  /// Bytes held in released blocks.
  std::size_t cached_bytes() const { return locked(cached_bytes_); }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = in_use_;
  }

  /// The size of the block that serves a request: multiples of 64 bytes up to 4 KiB, above that eight sizes per power
  /// of two, so that nearly equal requests share blocks and at most an eighth is wasted.
  static constexpr std::size_t rounded(std::size_t bytes) {
    if (bytes <= 4096) return (bytes + 63) / 64 * 64;
    const std::size_t step = std::bit_floor(bytes - 1) / 8;
    return (bytes + step - 1) / step * step;
  }

 private:
  struct used_block {
    std::size_t block_bytes;
    std::size_t asked_bytes;
    stream_key stream;
  };

  /// A source that can say no is asked again after what is cached has been given back to it.
  void* from_source(std::size_t size, stream_key stream) {
    if constexpr (requires { source_.try_allocate(size, stream); }) {
      if (void* const pointer = source_.try_allocate(size, stream)) return pointer;
      give_back();
    }
    return source_.allocate(size, stream);
  }
  void give_back() {
    if (holds_ > 0) return;
    for (auto& [stream, blocks] : cached_) {
      for (auto& [bytes, pointer] : blocks) source_.release(pointer, bytes, stream);
    }
    cached_.clear();
    cached_bytes_ = 0;
  }

  std::size_t locked(const std::size_t& value) const {
    const std::lock_guard lock(mutex_);
    return value;
  }

  Source source_;
  mutable std::mutex mutex_;
  std::unordered_map<stream_key, std::multimap<std::size_t, void*>> cached_;
  std::unordered_map<void*, used_block> live_;
  std::size_t in_use_ = 0;
  std::size_t peak_ = 0;
  std::size_t cached_bytes_ = 0;
  int holds_ = 0;
};

}  // namespace plait
