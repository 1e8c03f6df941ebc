// A device that computes nothing and counts the memory it is asked for.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/allocator.hpp"
#include "plait/device/device.hpp"

namespace plait {
namespace detail {

/// Explains the fault of a program that touches the memory of a counting device, before the program ends by it.
class untouchable_memory {
 public:
  static void add(const void* place, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(place), end = begin + bytes;
    for (auto seen = begin_.load(); begin < seen && !begin_.compare_exchange_weak(seen, begin);) continue;
    for (auto seen = end_.load(); end > seen && !end_.compare_exchange_weak(seen, end);) continue;
    install();
  }

 private:
  /// Takes the signal, unless it has it: others may have taken it since.
  static void install() {
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    struct sigaction now = {};
    if (::sigaction(SIGSEGV, nullptr, &now) != 0 || now.sa_sigaction == explain) return;
    before_ = now;
    now = {};
    now.sa_sigaction = explain;
    now.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGSEGV, &now, nullptr);
  }
  /// Restores the handler before, which gets the signal next.
  static void explain(int, siginfo_t* fault, void*) {
    constexpr std::string_view words =
        "plait: a kernel of the program's own touched memory of a dry run, in which there are no numbers; call it by "
        "plait::kernel(ctx, cost, f), which a dry run counts (nn/layer.hpp)\n";
    const auto at = reinterpret_cast<std::uintptr_t>(fault->si_addr);
    if (at >= begin_.load() && at < end_.load() && ::write(2, words.data(), words.size()) < 0) ::_exit(1);
    ::sigaction(SIGSEGV, &before_, nullptr);
  }
  inline static std::atomic<std::uintptr_t> begin_{~std::uintptr_t{0}}, end_{0};
  inline static struct sigaction before_ = {};
};

}  // namespace detail

/// Observer of the work that a program asks a `counting_device` for; planner::work_clock (plan/machine_time.hpp) turns
/// it into seconds.
class work_meter {
 public:
  /// A product of m x k and k x n in numbers of type `of`. Its result is added to what was there (`adds`), or replaces
  /// it.
  virtual void product(dtype of, double m, double n, double k, bool adds) = 0;
  /// Attention over `keys` positions, by the operations of what is visible.
  virtual void attention(dtype of, double operations, std::int64_t keys, bool forward) = 0;
  /// A kernel that reads and writes `bytes`.
  virtual void moved(double bytes) = 0;
  /// A kernel of the program's own (nn/layer.hpp).
  virtual void kernel(dtype of, double operations, double bytes) = 0;
  /// An activation of `values` values, which reads and writes `bytes`.
  virtual void activation(double bytes, double values, bool backward) = 0;

 protected:
  ~work_meter() = default;
};

/// A device that computes nothing and counts the bytes that are asked for. A layer, a model or a whole step runs on it
/// in a `world::counting`. It shows what they allocate, keep and send, for sizes that no machine at hand could hold
/// (plan/dry_run.hpp). Its memory is address space without access: a program that touches it gets a text with the
/// reason, and a segmentation fault.
class counting_device {
 public:
  static constexpr bool only_counts = true;

  using stream = finished_stream;
  using event = finished_event;

  /// Where `offload_optimizer` is set, what optimizers alone use is the host's (`cuda::options::offload_optimizer`).
  explicit counting_device(bool offload_optimizer = false)
      : offloads_(offload_optimizer), has_host_memory_(offload_optimizer) {}
  counting_device(const counting_device&) = delete;
  counting_device& operator=(const counting_device&) = delete;

  stream main_stream() const { return {}; }
  stream side_stream() const { return {}; }
  void synchronize() const {}

  void* allocate(std::size_t bytes, stream = {}) { return allocator_.allocate(bytes); }
  void* allocate_for_optimizers(std::size_t bytes) { return (offloads_ ? on_host_ : allocator_).allocate(bytes); }
  /// Memory of the host, for activations that are offloaded.
  void* allocate_on_host(std::size_t bytes) {
    has_host_memory_ = true;
    return on_host_.allocate(bytes);
  }
  void release(void* pointer, stream = {}) {
    (has_host_memory_ && on_host_.owns(pointer) ? on_host_ : allocator_).release(pointer);
  }
  void copy(void*, const void*, std::size_t, stream = {}) const {}
  void zero(void*, std::size_t, stream = {}) const {}
  void upload(void*, const void*, std::size_t, stream = {}) const {}
  /// Leaves `to_host` as it is: there is nothing to read.
  void download(void*, const void*, std::size_t, stream = {}) const {}

  std::size_t bytes_in_use() const { return allocator_.bytes_in_use(); }
  std::size_t peak_bytes() const { return allocator_.peak_bytes(); }
  /// Bytes of blocks in use and of released ones: what a device with an allocator of the program's asks it for.
  std::size_t reserved_bytes() const { return allocator_.reserved_bytes(); }
  void reset_peak() { allocator_.reset_peak(); }
  void release_cache() { allocator_.release_cache(); }
  /// Bytes of the host's memory that are offloaded to, and not released.
  std::size_t host_bytes_in_use() const { return on_host_.bytes_in_use(); }
  /// The largest such number.
  std::size_t host_peak_bytes() const { return on_host_.peak_bytes(); }
  /// The multiplications and additions of matrix products and of attention's forward passes so far.
  double operations() const { return operations_; }
  void count_operations(double more) { operations_ += more; }

  /// The most bytes that cuDNN would take for itself in a backward pass of attention in bf16 with sums in a fixed order
  /// (`kernels::attention_shape::fixed_order_bytes`). They are in no other count of this device.
  std::int64_t fixed_order_attention_bytes() const { return fixed_order_attention_; }
  void count_fixed_order_attention(std::int64_t bytes) {
    fixed_order_attention_ = std::max(fixed_order_attention_, bytes);
  }

  /// Reports all later work to `meter`, which must outlive that work; null: to none.
  void tell(work_meter* meter) { meter_ = meter; }
  void count_moved(double bytes) {
    if (meter_) meter_->moved(bytes);
  }
  void count_kernel(dtype of, double operations, double bytes) {
    count_operations(operations);
    if (meter_) meter_->kernel(of, operations, bytes);
  }
  void count_activation(double bytes, double values, bool backward) {
    if (meter_) meter_->activation(bytes, values, backward);
  }
  template <class T>
  void count_attention(double operations, std::int64_t keys, bool forward) {
    if (forward) count_operations(operations);
    if (meter_) meter_->attention(dtype_of<T>, operations, keys, forward);
  }

  template <class A, class T, class B, class Out>
  void gemm(bool, bool, std::int64_t m, std::int64_t n, std::int64_t k, A, const T*, std::int64_t, const T*,
            std::int64_t, B beta, Out*, std::int64_t) {
    const auto rows = static_cast<double>(m), columns = static_cast<double>(n), depth = static_cast<double>(k);
    count_operations(2 * rows * columns * depth);
    if (meter_) meter_->product(dtype_of<T>, rows, columns, depth, beta != B(0));
  }
  static constexpr bool supports_bf16() { return true; }
  /// It has any order of sums that is asked for.
  static constexpr bool deterministic() { return true; }

 private:
  struct address_space {
    void* allocate(std::size_t bytes, std::uintptr_t) const {
      void* const place = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (place == MAP_FAILED) fail({"counting_device: no address space for ", bytes, " bytes"});
      detail::untouchable_memory::add(place, bytes);
      return place;
    }
    void release(void* place, std::size_t bytes, std::uintptr_t) const noexcept { ::munmap(place, bytes); }
  };
  bool offloads_, has_host_memory_;
  caching_allocator<address_space> allocator_, on_host_;
  double operations_ = 0;
  std::int64_t fixed_order_attention_ = 0;
  work_meter* meter_ = nullptr;
};

static_assert(compute_device<counting_device>);

}  // namespace plait

#include "plait/core/macros_on.hpp"
