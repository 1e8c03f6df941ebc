// A cache of released blocks over a source of memory, which counts the bytes in use and their peak. The source may be
// the program's own allocator. Every device has one; other code owns memory by the classes of device/device.hpp. Test:
// tests/unit/device/cpu.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// Keeps released blocks for later requests. Fresh memory of the system costs a page fault per 4 KiB (or a device-wide
/// synchronisation on a GPU). A training step repeats requests of equal sizes, so blocks are not split. A request takes
/// the smallest cached block of its stream that is at most a quarter too large.
///
/// `Source` supplies the memory: `void* allocate(std::size_t, stream)` (throws or returns non-null) and `void
/// release(void*, std::size_t, stream) noexcept`. A source with several kinds of memory has `key_of(pointer, stream)`:
/// the stream that a block is kept for. Thread-safe.
template <class Source>
class caching_allocator {
 public:
  /// Names the stream that a block belongs to: the stream on which it was released last.
  using stream_key = std::uintptr_t;

  explicit caching_allocator(Source source = {}) : source_(source) {}
  caching_allocator(const caching_allocator&) = delete;
  caching_allocator& operator=(const caching_allocator&) = delete;
  ~caching_allocator();

  /// Blocks that only their owner may write, such as the scratch memory of a recorded graph. `release_scratch` returns
  /// them.
  class scratch {
   public:
    std::size_t bytes() const { return bytes_; }

   private:
    friend class caching_allocator;
    std::vector<std::pair<void*, std::size_t>> blocks_;
    std::size_t bytes_ = 0;
    bool open_ = true;  ///< whether new blocks may still join it
  };

  /// Makes every block that is allocated until `end_scratch` a part of the returned scratch memory. Its released blocks
  /// serve only later requests of this scratch memory, also after `end_scratch`. Only one can be open at a time.
  std::shared_ptr<scratch> begin_scratch();
  void end_scratch();
  /// Returns the released blocks of scratch memory to the cache, as blocks of `stream`, which must run after all work
  /// on them. The other blocks follow when they are released.
  void release_scratch(const std::shared_ptr<scratch>& owned, stream_key stream);

  /// Returns at least `bytes` bytes, uninitialised; null if `bytes` is 0.
  void* allocate(std::size_t bytes, stream_key stream = 0);

  /// Releases a block. Throws `plait::error` for a pointer that is not in use (released twice, or from elsewhere).
  void release(void* pointer, stream_key stream = 0);

  /// Whether `pointer` is the start of a block in use.
  bool owns(void* pointer) const {
    const std::lock_guard lock(mutex_);
    return live_.contains(pointer);
  }

  /// Returns every cached block to the source.
  void release_cache();

  /// Bytes in use: the requested sizes, without rounding.
  std::size_t bytes_in_use() const { return locked(in_use_); }
  /// The largest `bytes_in_use` since construction or `reset_peak`.
  std::size_t peak_bytes() const { return locked(peak_); }
  /// Bytes held in released blocks.
  std::size_t cached_bytes() const { return locked(cached_bytes_); }
  /// Bytes of blocks that belong to scratch memory, in use or not.
  std::size_t scratch_bytes() const { return locked(scratch_bytes_); }
  /// Bytes that the source holds for this cache, as rounded: blocks in use and released ones.
  std::size_t reserved_bytes() const { return locked(reserved_); }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = in_use_;
  }

  /// The block size for a request: multiples of 64 bytes up to 4 KiB, above that eight sizes per power of two. So
  /// nearly equal requests share blocks, and at most an eighth is wasted.
  static constexpr std::size_t rounded(std::size_t bytes) {
    if (bytes <= 4096) return (bytes + 63) / 64 * 64;
    const std::size_t step = std::bit_floor(bytes - 1) / 8;
    return (bytes + step - 1) / step * step;
  }

 private:
  static constexpr std::size_t most_bytes = ~std::size_t{0} / 4;  // rounding of larger sizes would overflow

  struct used_block {
    std::size_t block_bytes;
    std::size_t asked_bytes;
    stream_key stream;
    std::shared_ptr<scratch> owner;
  };
  using blocks_of_streams = std::unordered_map<stream_key, std::multimap<std::size_t, void*>>;

  /// Returns the bytes of the smallest cached block that serves a request; 0 if there is none.
  static std::size_t best_fit(const blocks_of_streams& blocks, std::size_t size, stream_key stream) {
    const auto of_stream = blocks.find(stream);
    if (of_stream == blocks.end()) return 0;
    const auto fit = of_stream->second.lower_bound(size);
    return fit == of_stream->second.end() || fit->first > size + size / 4 ? 0 : fit->first;
  }
  void* taken_from(blocks_of_streams& blocks, std::size_t bytes, stream_key stream) {
    auto& cached = blocks[stream];
    const auto fit = cached.find(bytes);
    void* const pointer = fit->second;
    cached.erase(fit);
    if (&blocks == &cached_) cached_bytes_ -= bytes;
    return pointer;
  }
  void close() {
    for (auto& [stream, blocks] : std::exchange(open_cached_, {})) {
      for (auto& [bytes, pointer] : blocks) open_->blocks_.emplace_back(pointer, bytes);
    }
    std::exchange(open_, nullptr)->open_ = false;
  }
  void belongs_to_open(std::size_t bytes) {
    if (open_ == nullptr) return;
    open_->bytes_ += bytes;
    scratch_bytes_ += bytes;
  }
  void cache(blocks_of_streams& blocks, void* pointer, std::size_t bytes, stream_key stream) {
    if constexpr (requires { source_.key_of(pointer, stream); }) stream = source_.key_of(pointer, stream);
    blocks[stream].emplace(bytes, pointer);
    if (&blocks == &cached_) cached_bytes_ += bytes;
  }

  /// Allocates from the source. If that fails, it returns all cached blocks to the source and tries again. A source
  /// that releases in stream order is then asked to wait for these streams, and tried once more.
  void* from_source(std::size_t size, stream_key stream);
  void to_source(void* pointer, std::size_t bytes, stream_key stream) {
    source_.release(pointer, bytes, stream);
    reserved_ -= bytes;
  }
  void empty_cache() {
    for (auto& [stream, blocks] : cached_) {
      for (auto& [bytes, pointer] : blocks) to_source(pointer, bytes, stream);
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
  blocks_of_streams cached_, open_cached_;  ///< `open_cached_` is for the open scratch memory
  std::shared_ptr<scratch> open_;
  std::unordered_map<void*, used_block> live_;
  std::size_t in_use_ = 0;
  std::size_t peak_ = 0;
  std::size_t cached_bytes_ = 0;
  std::size_t scratch_bytes_ = 0;
  std::size_t reserved_ = 0;
};

template <class Source>
caching_allocator<Source>::~caching_allocator() {
  release_cache();
  for (auto& [pointer, used] : live_) to_source(pointer, used.block_bytes, used.stream);
}

template <class Source>
void* caching_allocator<Source>::allocate(std::size_t bytes, stream_key stream) {
  if (bytes == 0) return nullptr;
  if (bytes > most_bytes) fail({"out of memory: ", bytes, " bytes were asked for, more than there are addresses"});
  const std::size_t size = rounded(bytes);
  const std::lock_guard lock(mutex_);
  const std::size_t of_scratch = best_fit(open_cached_, size, stream), of_all = best_fit(cached_, size, stream);
  void* pointer = nullptr;
  std::size_t block = size;
  if (of_scratch != 0 && (of_all == 0 || of_scratch <= of_all)) {
    pointer = taken_from(open_cached_, block = of_scratch, stream);
  } else {
    pointer = of_all != 0 ? taken_from(cached_, block = of_all, stream) : from_source(size, stream);
    belongs_to_open(block);
  }
  live_.emplace(pointer, used_block{block, bytes, stream, open_});
  in_use_ += bytes;
  peak_ = std::max(peak_, in_use_);
  return pointer;
}

template <class Source>
void caching_allocator<Source>::release(void* pointer, stream_key stream) {
  if (pointer == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto used = live_.find(pointer);
  require(used != live_.end(), "release: this pointer is not in use in this allocator (released twice?)");
  const auto& [block, asked, from, owner] = used->second;
  if (owner != nullptr && !owner->open_) {
    owner->blocks_.emplace_back(pointer, block);
  } else if (open_ == nullptr) {
    cache(cached_, pointer, block, stream);
  } else {  // also blocks from before, which the work being recorded may have used
    if (owner == nullptr) belongs_to_open(block);
    cache(open_cached_, pointer, block, stream);
  }
  in_use_ -= asked;
  live_.erase(used);
}

template <class Source>
void caching_allocator<Source>::release_cache() {
  const std::lock_guard lock(mutex_);
  empty_cache();
}

template <class Source>
void* caching_allocator<Source>::from_source(std::size_t size, stream_key stream) {
  void* pointer = nullptr;
  if constexpr (requires { source_.try_allocate(size, stream); }) {
    pointer = source_.try_allocate(size, stream);
    if (pointer == nullptr) {
      std::vector<stream_key> released{stream};
      for (const auto& [of, blocks] : cached_)
        if (of != stream && !blocks.empty()) released.push_back(of);
      empty_cache();
      pointer = source_.try_allocate(size, stream);
      if constexpr (requires { source_.await_releases(released); })
        if (pointer == nullptr) source_.await_releases(released);
    }
  }
  if (pointer == nullptr) pointer = source_.allocate(size, stream);
  reserved_ += size;
  return pointer;
}

template <class Source>
auto caching_allocator<Source>::begin_scratch() -> std::shared_ptr<scratch> {
  const std::lock_guard lock(mutex_);
  require(open_ == nullptr, "begin_scratch: there is scratch memory that has not been ended by end_scratch");
  return open_ = std::make_shared<scratch>();
}

template <class Source>
void caching_allocator<Source>::end_scratch() {
  const std::lock_guard lock(mutex_);
  if (open_ != nullptr) close();
}

template <class Source>
void caching_allocator<Source>::release_scratch(const std::shared_ptr<scratch>& owned, stream_key stream) {
  if (owned == nullptr) return;
  const std::lock_guard lock(mutex_);
  if (owned == open_) close();
  for (auto& [pointer, bytes] : std::exchange(owned->blocks_, {})) cache(cached_, pointer, bytes, stream);
  scratch_bytes_ -= owned->bytes_;
  owned->bytes_ = 0;
  for (auto& [pointer, used] : live_) {
    if (used.owner == owned) used.owner = nullptr;
  }
}

/// A program's own allocator for all memory that a device gives out. `Where` are further arguments, such as a CUDA
/// stream.
///
/// `allocate` returns null if memory is exhausted. It is then called once more after all unused blocks were released,
/// and a second null is an error. It is called for blocks, which are up to an eighth larger than requests
/// (`caching_allocator::rounded`). The device keeps released blocks until `release_cache` or its destructor. `release`
/// gets the bytes that `allocate` got, and must not throw. Only one call runs at a time, in any thread that uses the
/// device. Neither function may use the device.
template <class... Where>
struct memory_functions {
  std::function<void*(std::size_t bytes, Where...)> allocate{};
  std::function<void(void* pointer, std::size_t bytes, Where...)> release{};

  explicit operator bool() const { return allocate != nullptr; }

  /// Throws if only one of the two functions is set.
  void require_both(std::string_view device) const {
    if ((allocate != nullptr) == (release != nullptr)) return;
    fail({device, ": options::memory has ", allocate ? "allocate and no release" : "release and no allocate",
          "; give both, or none for memory of the device's own"});
  }
  /// Calls `allocate`, and checks that the result is aligned to `boundary` bytes. Otherwise releases it and throws.
  void* allocate_aligned(std::size_t boundary, std::string_view device, std::size_t bytes, Where... where) const {
    void* const pointer = allocate(bytes, where...);
    if (reinterpret_cast<std::uintptr_t>(pointer) % boundary == 0) return pointer;
    release(pointer, bytes, where...);
    fail({device, ": options::memory.allocate has returned memory that is not on a boundary of ", boundary, " bytes"});
  }
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
