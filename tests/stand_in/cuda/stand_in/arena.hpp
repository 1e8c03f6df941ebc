// Device memory: one reserved range of addresses that is accessible only while operations of a stream run. Host code
// that reads or writes it ends the process with a message. New memory is filled with 0xff, which is NaN.
//
// Under address sanitizer every byte outside an allocation is poisoned; otherwise guards around each are checked when
// it is freed. PLAIT_STAND_IN_MEMORY is the capacity in bytes, 4 GiB by default.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <string>

#include "die.hpp"

namespace stand_in {

class arena {
 public:
  struct allocation {
    std::size_t bytes = 0;  // requested
    std::size_t block = 0;  // with guards
    int device = 0;
    void* pool = nullptr;
    bool freeing = false;      // its stream-ordered release is queued
    std::uint64_t number = 0;  // sequence number of the allocation in the process
  };

  static arena& instance() {
    static auto* one = new arena;
    return *one;
  }

  bool contains(const void* p) const {
    const auto* c = static_cast<const char*>(p);
    return c >= base_ && c < base_ + reserved_;
  }
  std::size_t capacity() const { return capacity_; }
  std::size_t used() const { return used_; }
  /// Adds bytes (or subtracts, if negative) that belong to no allocation to the used bytes.
  void keep(std::int64_t bytes) { used_ += static_cast<std::size_t>(bytes); }

  /// Null if there is no room. The memory is inaccessible until `make_usable`.
  void* allocate(std::size_t bytes, int device, void* pool) {
    if (bytes == 0 || bytes > capacity_ || used_ + bytes > capacity_) return nullptr;
    const std::size_t block = guard + round_up(bytes, 256) + guard;
    std::size_t offset = 0;
    auto hole = free_.begin();
    while (hole != free_.end() && hole->second < block) ++hole;
    if (hole != free_.end()) {
      offset = hole->first;
      const std::size_t rest = hole->second - block;
      free_.erase(hole);
      if (rest) free_.emplace(offset + block, rest);
    } else {
      if (top_ + block > reserved_) return nullptr;
      offset = top_;
      top_ += block;
      grow();
    }
    used_ += bytes;
    char* p = base_ + offset + guard;
    allocations_.emplace(p, allocation{bytes, block, device, pool, false, ++number_});
    return p;
  }

  /// Requires the arena to be open.
  void make_usable(void* p) {
    const allocation& a = allocations_.at(static_cast<char*>(p));
    unpoison(p, a.bytes);
#ifndef STAND_IN_ADDRESS_SANITIZER
    std::memset(static_cast<char*>(p) - guard, guard_byte, a.block);
#endif
    std::memset(p, 0xff, a.bytes);
  }

  /// Null if no allocation starts there.
  allocation* find(const void* p) {
    const auto it = allocations_.find(static_cast<char*>(const_cast<void*>(p)));
    return it == allocations_.end() ? nullptr : &it->second;
  }
  /// The allocation that contains the address, or that ends there, and its start; null if none does.
  const allocation* with_end(const void* p, const char** start) const {
    auto* c = static_cast<char*>(const_cast<void*>(p));
    auto it = allocations_.upper_bound(c);
    if (it == allocations_.begin()) return nullptr;
    --it;
    *start = it->first;
    return c <= it->first + it->second.bytes ? &it->second : nullptr;
  }
  /// The allocation that holds the address, or null.
  const allocation* around(const void* p, std::size_t* offset = nullptr) const {
    auto* c = static_cast<char*>(const_cast<void*>(p));
    auto it = allocations_.upper_bound(c);
    if (it == allocations_.begin()) return nullptr;
    --it;
    if (offset) *offset = static_cast<std::size_t>(c - it->first);
    return c < it->first + it->second.bytes ? &it->second : nullptr;
  }

  /// Requires the arena to be open.
  void release(void* p) {
    const auto it = allocations_.find(static_cast<char*>(p));
    const allocation a = it->second;
    check_guards(it->first, a);
    std::memset(p, 0xff, a.bytes);
    poison(p, a.bytes);
    used_ -= a.bytes;
    allocations_.erase(it);
    auto hole = free_.emplace(static_cast<std::size_t>(static_cast<char*>(p) - guard - base_), a.block).first;
    if (const auto after = std::next(hole); after != free_.end() && hole->first + hole->second == after->first) {
      hole->second += after->second;
      free_.erase(after);
    }
    if (hole != free_.begin()) {
      if (const auto before = std::prev(hole); before->first + before->second == hole->first) {
        before->second += hole->second;
        free_.erase(hole);
      }
    }
  }

  void check_guards() {
    for (const auto& [p, a] : allocations_) check_guards(p, a);
  }

  void open() {
    if (opened_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    if (--opened_ > 0) return;
    protect(PROT_NONE);
    watch();
  }

 private:
  static constexpr std::size_t guard = 256;
  static constexpr int guard_byte = 0xa5;

  arena() {
    const char* text = std::getenv("PLAIT_STAND_IN_MEMORY");
    capacity_ = text ? std::strtoull(text, nullptr, 10) : std::size_t{4} << 30;
    reserved_ = round_up(2 * capacity_ + (std::size_t{64} << 20), step);  // room for holes and guards
    void* memory = mmap(nullptr, reserved_ + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) die("no address space for device memory");
    base_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(memory), step));
    madvise(base_, reserved_, MADV_HUGEPAGE);  // changing the protection of large pages is much faster
    watch();
  }

  static constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

  // Opens and closes only the part that allocations have used so far, in large steps, so these calls are cheap.
  void grow() {
    const std::size_t wanted = std::min(round_up(top_, step), reserved_);
    if (wanted <= visible_) return;
    poison(base_ + visible_, wanted - visible_);
    if (opened_) mprotect(base_ + visible_, wanted - visible_, PROT_READ | PROT_WRITE);
    visible_ = wanted;
  }
  void protect(int how) {
    if (visible_ && mprotect(base_, visible_, how) != 0) die("cannot change the protection of device memory");
  }

  void check_guards([[maybe_unused]] const char* p, [[maybe_unused]] const allocation& a) const {
#ifndef STAND_IN_ADDRESS_SANITIZER
    const auto whole = [](const char* from, const char* to) {
      while (from != to && *from == static_cast<char>(guard_byte)) ++from;
      return from == to;
    };
    if (!whole(p + a.bytes, p + a.block - guard)) {
      die("device memory was written beyond the end of an allocation of " + std::to_string(a.bytes) + " bytes");
    }
    if (!whole(p - guard, p)) {
      die("device memory was written before the start of an allocation of " + std::to_string(a.bytes) + " bytes");
    }
#endif
  }

  static void poison([[maybe_unused]] void* p, [[maybe_unused]] std::size_t bytes) {
#ifdef STAND_IN_ADDRESS_SANITIZER
    ASAN_POISON_MEMORY_REGION(p, bytes);
#endif
  }
  static void unpoison([[maybe_unused]] void* p, [[maybe_unused]] std::size_t bytes) {
#ifdef STAND_IN_ADDRESS_SANITIZER
    ASAN_UNPOISON_MEMORY_REGION(p, bytes);
#endif
  }

  // Test frameworks set their own handlers for every test, so this must run after them.
  void watch() {
    struct sigaction now {};
    sigaction(SIGSEGV, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &arena::on_fault) return;
    previous_ = now;
    struct sigaction action {};
    action.sa_sigaction = &arena::on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
  }

  static void on_fault(int signal, siginfo_t* info, void* context) {
    arena& self = instance();
    if (self.contains(info->si_addr)) {
      char text[256];
      std::size_t offset = 0;
      const allocation* a = self.around(info->si_addr, &offset);
      const char* who = self.opened_ ? "a kernel or copy" : "host code";
      const int n =
          a ? std::snprintf(text, sizeof text,
                            "stand-in CUDA runtime: %s touched device memory at %p, byte %zu of an allocation of %zu\n",
                            who, info->si_addr, offset, a->bytes)
            : std::snprintf(text, sizeof text,
                            "stand-in CUDA runtime: %s touched device memory at %p, outside every allocation\n", who,
                            info->si_addr);
      if (write(2, text, static_cast<std::size_t>(n)) < 0) _exit(3);
      std::abort();
    }
    if ((self.previous_.sa_flags & SA_SIGINFO) && self.previous_.sa_sigaction) {
      self.previous_.sa_sigaction(signal, info, context);
      return;
    }
    if (self.previous_.sa_handler != SIG_DFL && self.previous_.sa_handler != SIG_IGN && self.previous_.sa_handler) {
      self.previous_.sa_handler(signal);
      return;
    }
    ::signal(signal, SIG_DFL);  // the instruction faults again
  }

  static constexpr std::size_t step = std::size_t{2} << 20;

  char* base_ = nullptr;
  std::size_t capacity_ = 0, reserved_ = 0, top_ = 0, visible_ = 0, used_ = 0;
  int opened_ = 0;
  std::uint64_t number_ = 0;
  std::map<std::size_t, std::size_t> free_;
  std::map<char*, allocation> allocations_;
  struct sigaction previous_ {};
};

}  // namespace stand_in
