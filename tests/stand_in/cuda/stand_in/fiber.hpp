// Fibers: stacks that one operating-system thread switches between. Each thread of a CUDA block that must wait has one.
// Every switch is reported to sanitizers. For thread sanitizer each fiber is a thread, and a switch orders no memory
// accesses; `moment` orders them as CUDA does. For block.cpp only.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "die.hpp"

#ifndef __x86_64__
#include <ucontext.h>
#endif

#ifdef __x86_64__
// void stand_in_switch_stack(void** saved, void* next): saves the callee-saved registers and changes stacks.
asm(R"(
.pushsection .text
.globl stand_in_switch_stack
.type stand_in_switch_stack,@function
stand_in_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size stand_in_switch_stack, .-stand_in_switch_stack
.popsection
)");
extern "C" void stand_in_switch_stack(void** saved, void* next);
#endif

namespace stand_in {

class fiber {
 public:
  /// The stack of the calling thread.
  fiber() = default;
  /// A new stack, on which `entry` runs at the first switch. `entry` must not return.
  explicit fiber(void (*entry)()) : entry_(entry), size_(stack_bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    void* memory =
        mmap(nullptr, size_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) die("no memory for the stack of a device thread");
    mprotect(memory, page, PROT_NONE);  // an overflow of the stack faults at once
    bottom_ = static_cast<char*>(memory) + page;
#ifdef __x86_64__
    // Stacks start at different offsets in a page, so those of a warp do not use the same cache lines.
    static std::size_t made = 0;
    auto* top = reinterpret_cast<void**>(bottom_ + size_ - made++ % 31 * 128);
    *--top = nullptr;  // the return address of `start`
    *--top = reinterpret_cast<void*>(&fiber::start);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = bottom_;
    context_.uc_stack.ss_size = size_;
    context_.uc_link = nullptr;
    makecontext(&context_, &fiber::start, 0);
#endif
#ifdef STAND_IN_THREAD_SANITIZER
    thread_sanitizer_ = __tsan_create_fiber(0);
#endif
  }
  fiber(const fiber&) = delete;
  fiber& operator=(const fiber&) = delete;

  /// The thread must call this on its own stack before its first switch.
  void adopt() {
#ifdef STAND_IN_THREAD_SANITIZER
    thread_sanitizer_ = __tsan_get_current_fiber();
#endif
  }

  /// Continues `to`; returns when another fiber switches back to this one.
  void switch_to(fiber& to) {
    came_from() = this;
    entering() = &to;
#ifdef STAND_IN_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(&address_sanitizer_, to.bottom_, to.size_);
#endif
#ifdef STAND_IN_THREAD_SANITIZER
    __tsan_switch_to_fiber(to.thread_sanitizer_, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __x86_64__
    stand_in_switch_stack(&stack_pointer_, to.stack_pointer_);
#else
    swapcontext(&context_, &to.context_);
#endif
    arrived();
  }

 private:
#ifdef STAND_IN_ADDRESS_SANITIZER
  static constexpr std::size_t stack_bytes = 512 << 10;
#else
  static constexpr std::size_t stack_bytes = 256 << 10;
#endif

  static fiber*& came_from() {
    static fiber* from = nullptr;
    return from;
  }
  static fiber*& entering() {
    static fiber* to = nullptr;
    return to;
  }

  void arrived() {
#ifdef STAND_IN_ADDRESS_SANITIZER
    const void* bottom = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(address_sanitizer_, &bottom, &size);
    came_from()->bottom_ = static_cast<char*>(const_cast<void*>(bottom));
    came_from()->size_ = size;
#endif
  }

  static void start() {
    fiber* self = entering();
    self->arrived();
    self->entry_();
    die("a device thread ran off its stack");
  }

  void (*entry_)() = nullptr;
  char* bottom_ = nullptr;
  std::size_t size_ = 0;
  void* stack_pointer_ = nullptr;
  [[maybe_unused]] void* address_sanitizer_ = nullptr;
  [[maybe_unused]] void* thread_sanitizer_ = nullptr;
#ifndef __x86_64__
  ucontext_t context_{};
#endif
};

}  // namespace stand_in
