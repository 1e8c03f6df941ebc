// Owned memory of a device: bytes without shape or type, with one owner. Arrays that have a spec are in
// tensor/tensor.hpp, and the reuse of released memory is in device/allocator.hpp.
#pragma once

#include <cstddef>
#include <utility>

#include "plait/device/device.hpp"

namespace plait {

/// Owns a piece of a device's memory: bytes without a type, move-only, released on the stream it was allocated on. The
/// device must outlive it.
template <compute_device Device>
class buffer {
 public:
  buffer() = default;
  buffer(Device& device, std::size_t bytes) : buffer(device, bytes, device.main_stream()) {}
  buffer(Device& device, std::size_t bytes, typename Device::stream stream)
      : device_(&device), stream_(stream), data_(device.allocate(bytes, stream)), bytes_(bytes) {}
  /// Memory that collectives read or write, on the main stream: registered where the device has such memory.
  static buffer for_collectives(Device& device, std::size_t bytes) {
    if constexpr (requires { device.allocate_for_collectives(bytes); }) {
      return buffer(device, bytes, device.allocate_for_collectives(bytes));
    } else {
      return buffer(device, bytes);
    }
  }
  /// Memory that optimizers alone use, on the main stream: the host's where the device offloads them.
  static buffer for_optimizers(Device& device, std::size_t bytes) {
    if constexpr (requires { device.allocate_for_optimizers(bytes); }) {
      return buffer(device, bytes, device.allocate_for_optimizers(bytes));
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

  /// The memory as elements of T (suitably aligned for any T up to 64 bytes); null when empty.
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

/// Room for `count` elements of T on `device`, uninitialised.
template <class T, compute_device Device>
buffer<Device> make_buffer(Device& device, std::size_t count) {
  return buffer<Device>(device, count * sizeof(T));
}
/// Makes a buffer for `count` elements that collectives read or write (`buffer::for_collectives`).
template <class T, compute_device Device>
buffer<Device> make_collective_buffer(Device& device, std::size_t count) {
  return buffer<Device>::for_collectives(device, count * sizeof(T));
}
/// Makes a buffer for `count` elements that optimizers alone use (`buffer::for_optimizers`).
template <class T, compute_device Device>
buffer<Device> make_optimizer_buffer(Device& device, std::size_t count) {
  return buffer<Device>::for_optimizers(device, count * sizeof(T));
}

}  // namespace plait
