// Copies, in the host's memory, of the values that a stage's unit keeps of one microbatch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"

namespace plait {

/// The stream that copies activations to the host's memory and back: the device's copy stream, or its side stream.
template <compute_device Device>
typename Device::stream copy_stream_of(const Device& device) {
  if constexpr (requires { device.copy_stream(); })
    return device.copy_stream();
  else
    return device.side_stream();
}

/// Copies, in the host's memory, of the values that a unit keeps of one microbatch. `visit(f)` calls f for each of the
/// unit's tensors and buffers, in the same order in all calls. Views and empty tensors are skipped. The calls must come
/// in the order that `verify` requires of their entries.
template <compute_device Device>
class offloaded_unit {
 public:
  explicit offloaded_unit(Device& device) : device_(&device), copies_(copy_stream_of(device)) {}
  offloaded_unit(const offloaded_unit&) = delete;
  offloaded_unit& operator=(const offloaded_unit&) = delete;
  /// Frees memory that a copy may still use, after a step has failed.
  ~offloaded_unit() {
    if (in_flight_) device_->main_stream().wait(copied_);
  }

  /// Starts the copies to the host's memory, after all current work of the main stream.
  template <class Visit>
  void offload(Visit&& visit) {
    begin_copies();
    each(visit, change::copy_out);
    end_copies();
  }
  /// Frees the device's memory. First the main stream waits for the copies, so no later work can overwrite the memory.
  template <class Visit>
  void drop(Visit&& visit) {
    wait();
    each(visit, change::free);
  }
  /// Allocates memory on the device and starts the copies back.
  template <class Visit>
  void reload(Visit&& visit) {
    std::vector<void*> to;
    each(visit, change::allocate, &to);
    begin_copies();
    for (std::size_t i = 0; i < to.size(); ++i) device_->copy(to[i], host_[i].data(), host_[i].bytes(), copies_);
    end_copies();
  }
  /// Makes later work of the main stream wait for the copies.
  void wait() {
    if (std::exchange(in_flight_, false)) device_->main_stream().wait(copied_);
  }

 private:
  enum class change : std::uint8_t { copy_out, free, allocate };

  /// One visitor serves all changes, so a model's `visit` is instantiated once. `to` receives the memory of `allocate`.
  template <class Visit>
  void each(Visit& visit, change what, std::vector<void*>* to = nullptr) {
    visit([&](auto& memory) {
      if (what == change::copy_out) {
        const buffer<Device>& host = host_.emplace_back(buffer<Device>::on_host(*device_, bytes_of(memory)));
        device_->copy(const_cast<void*>(host.data()), memory.data(), host.bytes(), copies_);
      } else if (what == change::free) {
        if (bytes_of(memory) > 0) static_cast<void>(taken_from(memory));
      } else {
        const std::size_t bytes = host_[to->size()].bytes();
        if (bytes > 0) give_to(memory, buffer<Device>(*device_, bytes));
        to->push_back(bytes > 0 ? static_cast<void*>(memory.data()) : nullptr);
      }
    });
  }
  void begin_copies() {
    typename Device::event ready;
    ready.record(device_->main_stream());
    copies_.wait(ready);
  }
  void end_copies() {
    copied_.record(copies_);
    in_flight_ = true;
  }
  template <class Memory>
  static std::size_t bytes_of(const Memory& memory) {
    if constexpr (requires { memory.owning(); })
      return memory.owning() ? static_cast<std::size_t>(memory.size()) * sizeof(*memory.data()) : 0;
    else
      return memory.bytes();
  }
  template <class Memory>
  static buffer<Device> taken_from(Memory& memory) {
    if constexpr (requires { memory.take_memory(); })
      return memory.take_memory();
    else
      return std::move(memory);
  }
  template <class Memory>
  static void give_to(Memory& memory, buffer<Device> bytes) {
    if constexpr (requires { memory.take_memory(); })
      memory.give_memory(std::move(bytes));
    else
      memory = std::move(bytes);
  }

  Device* device_;
  typename Device::stream copies_;
  std::vector<buffer<Device>> host_;
  typename Device::event copied_;
  bool in_flight_ = false;  ///< whether the main stream has not yet waited for copies
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
