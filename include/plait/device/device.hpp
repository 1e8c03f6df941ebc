// The concept of a device (memory, streams, events and products), and a class that owns a device's memory.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/core/types.hpp"
#include "plait/device/gemm_problem.hpp"

namespace plait {

class cpu;
class cuda;

class finished_event;

/// The stream of a device that computes at once or not at all. Its work is always finished.
class finished_stream {
 public:
  void synchronize() const {}
  void wait(const finished_event&) const {}
  bool operator==(const finished_stream&) const = default;
};

/// A point in such a stream; it is always reached.
class finished_event {
 public:
  void record(finished_stream) {}
  void synchronize() const {}
  bool done() const { return true; }
};

/// A processor that computes, with its memory. Layers are written against this concept, and kernels for each device.
/// `cpu` models it, and so does `cuda`, with real streams. A device object belongs to one rank; only that rank's thread
/// uses it (`allocate` and `release` may be called from any thread).
///
/// * `stream` is a small copyable handle that names an ordered queue of work. gemm and the kernels run in
/// `main_stream()`,
///   and communication that overlaps them runs in `side_stream()`. A device without queues returns handles whose
///   operations have already finished.
/// * `event` marks a point in a stream: `record(stream)`, `stream.wait(event)`, `event.synchronize()`, `event.done()`.
/// * `copy` and `zero` work on the device's memory; only `upload` and `download` move data in and out. When the call
///   returns, the source of an upload may be changed, and the target of a download is complete.
/// * memory is bound to the stream of its allocation: after `release(ptr, stream)` it is reused only on `stream`.
template <class D>
concept compute_device = requires(D& d, typename D::stream s, typename D::event e, void* to, const void* from,
                                  std::size_t bytes, std::int64_t n, const float* in, float* out) {
  { d.main_stream() } -> std::same_as<typename D::stream>;
  { d.side_stream() } -> std::same_as<typename D::stream>;
  { d.allocate(bytes, s) } -> std::same_as<void*>;
  d.release(to, s);
  d.copy(to, from, bytes, s);
  d.zero(to, bytes, s);
  d.upload(to, from, bytes, s);
  d.download(to, from, bytes, s);
  d.synchronize();
  d.gemm(false, true, n, n, n, 1.0f, in, n, in, n, 0.0f, out, n);
  { d.supports_bf16() } -> std::convertible_to<bool>;
  s.synchronize();
  s.wait(e);
  e.record(s);
  e.synchronize();
  { e.done() } -> std::convertible_to<bool>;
};

/// C = alpha * op(A) * op(B) + beta * C for each group, whose sizes may be zero. Devices with a library for groups use
/// one call (`cuda::gemm_groups`); others compute one group after the other. No two C may overlap.
template <compute_device Device, class In, class Out>
void gemm_groups(Device& device, double alpha, const std::vector<gemm_group<In, Out>>& groups, double beta) {
  if constexpr (requires { device.gemm_groups(alpha, groups, beta); }) {
    device.gemm_groups(alpha, groups, beta);
  } else {
    using scalar = arithmetic<In>;
    for (const auto& [p, a, b, c] : groups)
      device.gemm(p.trans_a, p.trans_b, p.m, p.n, p.k, static_cast<scalar>(alpha), a, p.lda, b, p.ldb,
                  static_cast<scalar>(beta), c, p.ldc);
  }
}

/// Whether the kernels of layers on a device are compiled here, or elsewhere in the program. For `cuda`,
/// device/cuda.hpp defines it, so that files without kernels may include it too.
template <class D>
inline constexpr bool has_kernels = true;

/// Whether a device computes nothing, and only serves dry runs (device/counting.hpp).
template <class D>
inline constexpr bool only_counts = requires { D::only_counts; };

/// Whether a device has products whose sums can have one order, as deterministic sums require.
template <class D>
concept has_deterministic_products = requires(const D& device) {
  { device.deterministic() } -> std::convertible_to<bool>;
};

/// Owns a piece of a device's memory: untyped bytes, move-only, released on the stream of the allocation. The device
/// must outlive it. Arrays with a spec are in tensor/tensor.hpp.
template <compute_device Device>
class buffer {
 public:
  buffer() = default;
  buffer(Device& device, std::size_t bytes) : buffer(device, bytes, device.main_stream()) {}
  buffer(Device& device, std::size_t bytes, typename Device::stream stream)
      : device_(&device), stream_(stream), data_(device.allocate(bytes, stream)), bytes_(bytes) {}
  /// Allocates memory for collectives, on the main stream: registered memory if the device has some.
  static buffer for_collectives(Device& device, std::size_t bytes) {
    if constexpr (requires { device.allocate_for_collectives(bytes); }) {
      return buffer(device, bytes, device.allocate_for_collectives(bytes));
    } else {
      return buffer(device, bytes);
    }
  }
  /// Allocates memory that only optimizers use, on the main stream: host memory if the device offloads them.
  static buffer for_optimizers(Device& device, std::size_t bytes) {
    if constexpr (requires { device.allocate_for_optimizers(bytes); }) {
      return buffer(device, bytes, device.allocate_for_optimizers(bytes));
    } else {
      return buffer(device, bytes);
    }
  }
  /// Allocates host memory for copies in the order of the main stream: the device's own memory if it has no separate
  /// host memory.
  static buffer on_host(Device& device, std::size_t bytes) {
    if constexpr (requires { device.allocate_on_host(bytes); }) {
      return buffer(device, bytes, device.allocate_on_host(bytes));
    } else {
      return buffer(device, bytes);
    }
  }
  buffer(buffer&& other) noexcept { swap(other); }
  buffer& operator=(buffer&& other) noexcept {
    buffer(std::move(other)).swap(*this);
    return *this;
  }
  ~buffer() {
    if (data_ != nullptr) device_->release(data_, stream_);
  }

  /// Returns the memory as elements of T (aligned for any T of up to 64 bytes); null if empty.
  template <class T = void>
  T* data() {
    return static_cast<T*>(data_);
  }
  template <class T = void>
  const T* data() const {
    return static_cast<const T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  bool empty() const { return bytes_ == 0; }
  /// Releases the memory now.
  void reset() { buffer().swap(*this); }

  void swap(buffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(stream_, other.stream_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

 private:
  buffer(Device& device, std::size_t bytes, void* data)
      : device_(&device), stream_(device.main_stream()), data_(data), bytes_(bytes) {}

  Device* device_ = nullptr;
  typename Device::stream stream_{};
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Makes a buffer for `count` elements of T on `device`, uninitialised.
template <class T, compute_device Device>
buffer<Device> make_buffer(Device& device, std::size_t count) {
  return buffer<Device>(device, count * sizeof(T));
}
/// Makes a buffer for `count` elements that collectives use (`buffer::for_collectives`).
template <class T, compute_device Device>
buffer<Device> make_collective_buffer(Device& device, std::size_t count) {
  return buffer<Device>::for_collectives(device, count * sizeof(T));
}
/// Makes a buffer for `count` elements that only optimizers use (`buffer::for_optimizers`).
template <class T, compute_device Device>
buffer<Device> make_optimizer_buffer(Device& device, std::size_t count) {
  return buffer<Device>::for_optimizers(device, count * sizeof(T));
}

}  // namespace plait
