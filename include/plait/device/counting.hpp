// A device that computes nothing and counts the memory that a program requests.
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

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/allocator.hpp"
#include "plait/device/device.hpp"

namespace plait {
namespace detail {

/// Explains the segmentation fault of a program that accesses a counting device's memory, before the fault ends it.
class inaccessible_memory {
 public:
  static void add(const void* place, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(place), end = begin + bytes;
    for (auto seen = begin_.load(); begin < seen && !begin_.compare_exchange_weak(seen, begin);) continue;
    for (auto seen = end_.load(); end > seen && !end_.compare_exchange_weak(seen, end);) continue;
    install();
  }

 private:
  /// Installs the signal handler, unless it is the current one. Other code may have replaced it.
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
  /// Restores the previous handler, which gets the signal next.
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
  /// A product of m x k and k x n in numbers of type `of`. It is added to its output (`adds`), or replaces it.
  virtual void product(dtype of, double m, double n, double k, bool adds) = 0;
  /// Attention over `keys` positions; `operations` counts visible positions only.
  virtual void attention(dtype of, double operations, std::int64_t keys, bool forward) = 0;
  /// A kernel that reads and writes `bytes` in total.
  virtual void moved(double bytes) = 0;
  /// A kernel of the program (nn/layer.hpp).
  virtual void kernel(dtype of, double operations, double bytes) = 0;
  /// An activation function on `values` values, which reads and writes `bytes` in total.
  virtual void activation(double bytes, double values, bool backward) = 0;

 protected:
  ~work_meter() = default;
};

/// A device that computes nothing and counts the requested bytes. A layer, a model or a whole step runs on it in a
/// `world::counting`. This shows what they allocate, keep and send, also for sizes that no available machine could hold
/// (plan/dry_run.hpp). Its memory is address space without access: a program that accesses it prints the reason and
/// ends by a segmentation fault.
class counting_device {
 public:
  static constexpr bool only_counts = true;

  using stream = finished_stream;
  using event = finished_event;

  /// If `offload_optimizer` is set, the optimizers' memory counts as host memory (`cuda::options::offload_optimizer`).
  explicit counting_device(bool offload_optimizer = false)
      : offloads_(offload_optimizer), has_host_memory_(offload_optimizer) {}
  counting_device(const counting_device&) = delete;
  counting_device& operator=(const counting_device&) = delete;

  stream main_stream() const { return {}; }
  stream side_stream() const { return {}; }
  void synchronize() const {}

  void* allocate(std::size_t bytes, stream = {}) { return allocator_.allocate(bytes); }
  void* allocate_for_optimizers(std::size_t bytes) { return (offloads_ ? on_host_ : allocator_).allocate(bytes); }
  /// Allocates host memory, for offloaded activations.
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
  /// Leaves `to_host` unchanged, because there are no numbers to read.
  void download(void*, const void*, std::size_t, stream = {}) const {}

  std::size_t bytes_in_use() const { return allocator_.bytes_in_use(); }
  std::size_t peak_bytes() const { return allocator_.peak_bytes(); }
  /// Bytes of blocks in use and of released ones: the requests that a device with the program's own allocator would
  /// make.
  std::size_t reserved_bytes() const { return allocator_.reserved_bytes(); }
  void reset_peak() { allocator_.reset_peak(); }
  void release_cache() { allocator_.release_cache(); }
  /// Bytes of host memory that hold offloaded data now.
  std::size_t host_bytes_in_use() const { return on_host_.bytes_in_use(); }
  /// The largest `host_bytes_in_use`.
  std::size_t host_peak_bytes() const { return on_host_.peak_bytes(); }
  /// Multiplications and additions so far, in matrix products and in attention's forward passes.
  double operations() const { return operations_; }
  void count_operations(double more) { operations_ += more; }

  /// The largest workspace of cuDNN for a backward pass of attention in bf16 with sums in a fixed order
  /// (`kernels::attention_shape::fixed_order_bytes`). This device's other counts do not include it.
  std::int64_t fixed_order_attention_bytes() const { return fixed_order_attention_; }
  void count_fixed_order_attention(std::int64_t bytes) {
    fixed_order_attention_ = std::max(fixed_order_attention_, bytes);
  }

  /// Reports all later work to `meter`, which must outlive that work. Null: to no meter.
  void report_to(work_meter* meter) { meter_ = meter; }
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
  /// True, because it computes no sums.
  static constexpr bool deterministic() { return true; }

 private:
  struct address_space {
    void* allocate(std::size_t bytes, std::uintptr_t) const {
      void* const place = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (place == MAP_FAILED) fail({"counting_device: no address space for ", bytes, " bytes"});
      detail::inaccessible_memory::add(place, bytes);
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

PLAIT_COMPILED_TEMPLATE(class caching_allocator<counting_device::address_space>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
