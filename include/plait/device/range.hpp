// Names of layers and collectives for profilers that read NVTX, such as Nsight Systems. They exist only in programs
// that are wholly compiled with PLAIT_NVTX. Without a profiler, a range costs a call through a pointer that NVTX finds
// to be null. Times are measured by comm/metrics.hpp. Test: tests/cuda/device/layer_ranges.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "plait/device/device.hpp"

#ifdef PLAIT_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace plait {

#ifdef PLAIT_NVTX
inline constexpr bool ranges_enabled = true;
#else
inline constexpr bool ranges_enabled = false;
#endif

/// The names of a layer's ranges. They are made with the layer, so that a range allocates no string.
class range_names {
 public:
  range_names() = default;
  explicit range_names(std::string_view layer) {
    const char* const passes[] = {" forward", " backward", " weight gradients"};
    for (std::size_t i = 0; i < names_.size(); ++i) names_[i] = std::string(layer) + passes[i];
  }
  const char* forward() const { return name(0); }
  const char* backward() const { return name(1); }
  const char* weights() const { return name(2); }

 private:
  const char* name([[maybe_unused]] std::size_t i) const {
    if constexpr (ranges_enabled)
      return names_[i].c_str();
    else
      return "";
  }

  std::array<std::string, ranges_enabled ? 3 : 0> names_{};
};

/// Shows the work of a scope under `name` in a profile, inside the open ranges. The work is all that the calling thread
/// puts into a device's streams. On the cpu it does nothing.
class range {
 public:
  template <class Device>
  range(const Device&, const char* name) {
    if constexpr (!std::is_same_v<Device, cpu>) open(name);
  }
  /// A range with a number after its name, such as the bytes of a collective; on any device.
  range(const char* name, std::uint64_t number) { open(name, number); }
  range(const range&) = delete;
  range& operator=(const range&) = delete;
  ~range() { close(); }

 private:
#ifdef PLAIT_NVTX
  void open(const char* name) {
    nvtxRangePushA(name);
    open_ = true;
  }
  void open(const char* name, std::uint64_t number) {
    nvtxEventAttributes_t what{};
    what.version = NVTX_VERSION;
    what.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    what.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    what.payload.ullValue = number;
    what.messageType = NVTX_MESSAGE_TYPE_ASCII;
    what.message.ascii = name;
    nvtxRangePushEx(&what);
    open_ = true;
  }
  void close() {
    if (open_) nvtxRangePop();
  }
  bool open_ = false;
#else
  void open(const char*) {}
  void open(const char*, std::uint64_t) {}
  void close() {}
#endif
};

}  // namespace plait
