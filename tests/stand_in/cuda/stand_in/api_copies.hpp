// The runtime's functions that copy and fill memory.
#pragma once

#include <cstddef>
#include <cstring>

#include "stream.hpp"

namespace stand_in {

struct copy_box {
  void* to;
  std::size_t to_pitch;
  const void* from;
  std::size_t from_pitch, width, height;
};

inline void copy_now(const copy_box& b) {
  for (std::size_t row = 0; row < b.height; ++row) {
    std::memmove(static_cast<char*>(b.to) + row * b.to_pitch, static_cast<const char*>(b.from) + row * b.from_pitch,
                 b.width);
  }
}

inline cudaError_t copy(runtime& r, copy_box b, cudaMemcpyKind kind, cudaStream_t stream) {
  const auto s = r.find(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (b.width == 0 || b.height == 0) return cudaSuccess;
  if (!b.to || !b.from || b.to_pitch < b.width || b.from_pitch < b.width) return cudaErrorInvalidValue;
  const bool to_device = arena::instance().contains(b.to), from_device = arena::instance().contains(b.from);
  const bool kind_is_right =
      kind == cudaMemcpyDefault || kind == (to_device ? from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice
                                            : from_device ? cudaMemcpyDeviceToHost
                                                          : cudaMemcpyHostToHost);
  if (!kind_is_right) return cudaErrorInvalidValue;
  const bool waits = !to_device && !r.is_pinned(b.to);
  if (waits) {
    if (const auto error = r.refuse_while_capturing(s.get())) return error;
  }
  for (const void* p : {static_cast<const void*>(b.to), b.from}) r.will_use(p, "a copy");
  // The stream reads host memory when it executes the copy, like a GPU that can read pageable memory.
  if (const auto error = r.enqueue(s, [b] { copy_now(b); }, {work::copy, static_cast<double>(b.width * b.height)}))
    return error;
  if (waits) r.await(s);
  return cudaSuccess;
}

}  // namespace stand_in

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
  return stand_in::call([&](stand_in::runtime& r) {
    return stand_in::copy(r, {to, bytes, from, bytes, bytes, 1}, kind, stream);
  });
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (const auto error = r.refuse_unsafe()) return error;
    if (const auto error = stand_in::copy(r, {to, bytes, from, bytes, bytes, 1}, kind, nullptr)) return error;
    r.await(r.find(cudaStream_t{nullptr}));
    return cudaSuccess;
  });
}

inline cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                                     cudaStream_t stream = nullptr) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (width == 0 || height == 0) return cudaSuccess;
    if (!stand_in::arena::instance().contains(to) && !r.is_pinned(to)) return cudaErrorInvalidValue;
    r.will_use(to, "a fill");
    const auto fill = [=] {
      for (std::size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(to) + row * pitch, value, width);
    };
    return r.enqueue(s, fill, {stand_in::work::fill, static_cast<double>(width * height)});
  });
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream = nullptr) {
  return cudaMemset2DAsync(to, bytes, value, bytes, 1, stream);
}
inline cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
