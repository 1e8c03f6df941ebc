// The copies in the host's memory of what a unit of a stage keeps of one microbatch.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"

namespace plait {

/// The stream that copies activations to the host's memory and back: the device's own one for that, or its side stream.
template <compute_device Device>
typename Device::stream copy_stream_of(const Device& device) {
  if constexpr (requires { device.copy_stream(); })
    return device.copy_stream();
  else
    return device.side_stream();
}

/// The copies in the host's memory of what a unit keeps of one microbatch. `visit(f)` calls f for each of its tensors
/// and buffers, in one order in all calls; views, and what is empty, stay as they are. The calls follow each other as
/// `verify` demands of their entries in a step.
template <compute_device Device>
class offloaded_unit {
 public:
  explicit offloaded_unit(Device& device) : device_(&device), copies_(copy_stream_of(device)) {}
  offloaded_unit(const offloaded_unit&) = delete;
  offloaded_unit& operator=(const offloaded_unit&) = delete;
  /// Memory that a copy still uses goes, where a step has failed.
  ~offloaded_unit() {
    if (under_way_) device_->main_stream().wait(copied_);
  }

  /// Starts the copies to the host's memory, after all work in the main stream so far.
  template <class Visit>
  void offload(Visit&& visit) {
    begin_copies();
    visit([&](auto& memory) {
      const buffer<Device>& host = host_.emplace_back(buffer<Device>::on_host(*device_, bytes_of(memory)));
      device_->copy(const_cast<void*>(host.data()), memory.data(), host.bytes(), copies_);
    });
    end_copies();
  }
  /// Frees the device's memory: the main stream waits for the copies first, so that it cannot be used again before.
  template <class Visit>
  void drop(Visit&& visit) {
    wait();
    visit([&](auto& memory) {
      if (bytes_of(memory) > 0) static_cast<void>(taken_from(memory));
    });
  }
  /// Takes memory on the device and starts the copies back.
  template <class Visit>
  void reload(Visit&& visit) {
    std::vector<void*> to;
    visit([&](auto& memory) {
      const std::size_t bytes = host_[to.size()].bytes();
      if (bytes > 0) give_to(memory, buffer<Device>(*device_, bytes));
      to.push_back(bytes > 0 ? static_cast<void*>(memory.data()) : nullptr);
    });
    begin_copies();
    for (std::size_t i = 0; i < to.size(); ++i) device_->copy(to[i], host_[i].data(), host_[i].bytes(), copies_);
    end_copies();
  }
  /// Work that is put into the main stream from now on begins after the copies.
  void wait() {
    if (std::exchange(under_way_, false)) device_->main_stream().wait(copied_);
  }

 private:
  void begin_copies() {
    typename Device::event ready;
    ready.record(device_->main_stream());
    copies_.wait(ready);
  }
  void end_copies() {
    copied_.record(copies_);
    under_way_ = true;
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
  bool under_way_ = false;  ///< whether there are copies that the main stream has not waited for
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
