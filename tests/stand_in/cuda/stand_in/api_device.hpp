// The runtime's functions on devices, errors and kernels. The device has the limits of an H100.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "stream.hpp"

// ---- errors --------------------------------------------------------------------------------------------------------

inline const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define STAND_IN_ERROR(name, value, text) \
  case name:                              \
    return #name;
    STAND_IN_ERRORS(STAND_IN_ERROR)
#undef STAND_IN_ERROR
  }
  return "unrecognized error code";
}
inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define STAND_IN_ERROR(name, value, text) \
  case name:                              \
    return text;
    STAND_IN_ERRORS(STAND_IN_ERROR)
#undef STAND_IN_ERROR
  }
  return "unrecognized error code";
}
inline cudaError_t cudaGetLastError() { return std::exchange(stand_in::last_error, cudaSuccess); }

// ---- devices -------------------------------------------------------------------------------------------------------

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = stand_in::device_count();
  return *count ? cudaSuccess : stand_in::fail(cudaErrorNoDevice);
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= stand_in::device_count()) return stand_in::fail(cudaErrorInvalidDevice);
  if (stand_in::is_taken(device)) return stand_in::fail(cudaErrorDevicesUnavailable);
  stand_in::current_device = device;
  stand_in::device_chosen = true;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  if (stand_in::device_count() == 0) return stand_in::fail(cudaErrorNoDevice);
  *device = stand_in::current_device;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

namespace stand_in {

/// The largest shared memory of a kernel's block: 99, 163 or 227 KB, as on existing GPUs.
inline int shared_limit() {
  const char* const kilobytes = std::getenv("PLAIT_STAND_IN_SHARED_KB");
  return (kilobytes ? std::atoi(kilobytes) : 227) << 10;
}

}  // namespace stand_in

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= stand_in::device_count()) return stand_in::fail(cudaErrorInvalidDevice);
  if (attribute != cudaDevAttrMaxSharedMemoryPerBlockOptin) return stand_in::fail(cudaErrorInvalidValue);
  *value = stand_in::shared_limit();
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= stand_in::device_count()) return stand_in::fail(cudaErrorInvalidDevice);
  *p = {};
  std::snprintf(p->name, sizeof p->name, "stand-in");
  const char* const major = std::getenv("PLAIT_STAND_IN_MAJOR");
  p->major = major ? std::atoi(major) : 9;
  return cudaSuccess;
}

// ---- kernels -------------------------------------------------------------------------------------------------------

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > stand_in::shared_limit())
      return cudaErrorInvalidValue;
    r.dynamic_shared_limit[kernel] = value;
    r.loaded.insert(kernel);
    return cudaSuccess;
  });
}
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

namespace stand_in {

inline cudaError_t check_launch(runtime& r, const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3 g = config.gridDim, b = config.blockDim;
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  if (!g.x || !g.y || !g.z || g.x > 2147483647u || g.y > 65535 || g.z > 65535) return cudaErrorInvalidConfiguration;
  if (!b.x || !b.y || !b.z || b.z > 64 || std::uint64_t{b.x} * b.y * b.z > 1024) return cudaErrorInvalidConfiguration;
  const auto limit = r.dynamic_shared_limit.find(kernel);
  const int allowed = limit == r.dynamic_shared_limit.end() ? 48 << 10 : std::max(limit->second, 48 << 10);
  if (config.dynamicSmemBytes > static_cast<std::size_t>(allowed)) return cudaErrorInvalidValue;
  return cudaSuccess;
}

/// A pointer among a kernel's arguments must point to device memory or to pinned memory.
template <class T>
void check_argument(runtime& r, const T& value, std::string_view kernel) {
  if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>) {
    const void* p = value;
    if (p && !arena::instance().contains(p) && !r.is_pinned(p)) {
      die("a kernel is handed a pointer to host memory: " + std::string(kernel));
    }
    r.will_use(p, kernel);
  } else if constexpr (std::is_class_v<T> && std::is_trivially_copyable_v<T> && sizeof(T) >= sizeof(void*)) {
    for (std::size_t at = 0; at + sizeof(void*) <= sizeof(T); at += sizeof(void*)) {
      const void* p = nullptr;
      std::memcpy(&p, reinterpret_cast<const char*>(&value) + at, sizeof p);
      r.may_use(p, kernel);
    }
  }
}

/// For libraries: queues an operation on a stream of the current device, which uses the memory at these addresses.
inline cudaError_t enqueue_for(std::string_view library, cudaStream_t stream, const std::vector<const void*>& memory,
                               std::function<void()> run, const task& what = {}) {
  return call_on(stream, [&](runtime& r, const stream_ptr& s) {
    if (s->device != current_device) return cudaErrorInvalidResourceHandle;
    for (const void* p : memory) check_argument(r, p, library);
    return r.enqueue(s, std::move(run), what);
  });
}

template <class... Parameters>
cudaError_t launch(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...),
                   const std::tuple<std::remove_cv_t<Parameters>...>& arguments) {
  constexpr std::string_view name = __PRETTY_FUNCTION__;
  return call_on(config.stream, [&](runtime& r, const stream_ptr& s) {
    if (s->device != current_device) return cudaErrorInvalidResourceHandle;
    if (const auto error = check_launch(r, config, reinterpret_cast<const void*>(kernel))) return error;
    if (r.loaded.insert(reinterpret_cast<const void*>(kernel)).second && s->captured_by) {
      s->captured_by->invalid = true;  // the launch would load the kernel now, which may wait for the device
      return cudaErrorStreamCaptureUnsupported;
    }
    std::apply([&](const auto&... each) { (check_argument(r, each, name), ...); }, arguments);
    const executor::launch what{config.gridDim, config.blockDim, config.dynamicSmemBytes, name};
    const dim3 g = what.grid, b = what.block;
    const double threads = double{1} * g.x * g.y * g.z * b.x * b.y * b.z;
    const auto run = [what, kernel, arguments] {
      executor::instance().run(what, [&] { std::apply(kernel, arguments); });
    };
    return r.enqueue(s, run, {work::kernel, threads});
  });
}

}  // namespace stand_in

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return stand_in::launch(*config, kernel, {static_cast<Parameters>(std::forward<Arguments>(arguments))...});
}
