// The arrays of the conformance suite, in the host's memory or, under a `memory_scope`, in that of a device. The
// library's own memory is not this: device/device.hpp.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "plait/version.hpp"

namespace plait::testing::conformance_parts {

/// A device's memory. One for each rank's thread.
class test_memory {
 public:
  virtual ~test_memory() = default;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* data) noexcept = 0;
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
};

/// The memory of this thread's arrays; null: the host's.
inline test_memory*& memory_of_thread() {
  thread_local test_memory* current = nullptr;
  return current;
}

/// Uses `memory` for the arrays of this thread while it lives.
class memory_scope {
 public:
  explicit memory_scope(test_memory& memory) : before_(std::exchange(memory_of_thread(), &memory)) {}
  memory_scope(const memory_scope&) = delete;
  memory_scope& operator=(const memory_scope&) = delete;
  ~memory_scope() { memory_of_thread() = before_; }

 private:
  test_memory* before_;
};

template <class T>
std::vector<T> read(const T* from, std::size_t n) {
  std::vector<T> out(n);
  if (n == 0) return out;
  if (test_memory* memory = memory_of_thread()) {
    memory->download(out.data(), from, n * sizeof(T));
  } else {
    std::memcpy(out.data(), from, n * sizeof(T));
  }
  return out;
}

template <class T>
void write(T* to, const std::vector<T>& values) {
  if (values.empty()) return;
  if (test_memory* memory = memory_of_thread()) {
    memory->upload(to, values.data(), values.size() * sizeof(T));
  } else {
    std::memcpy(to, values.data(), values.size() * sizeof(T));
  }
}

/// `n` elements in the thread's memory.
template <class T>
class array {
 public:
  explicit array(std::size_t n) : array(std::vector<T>(n)) {}
  explicit array(std::vector<T> values) : host_(std::move(values)) {
    memory_ = memory_of_thread();
    if (memory_ == nullptr) return;
    device_ = static_cast<T*>(memory_->allocate(host_.size() * sizeof(T)));
    write(device_, host_);
  }
  array(array&& other) noexcept
      : host_(std::move(other.host_)), memory_(other.memory_), device_(std::exchange(other.device_, nullptr)) {}
  array& operator=(array&&) = delete;
  ~array() {
    if (device_ != nullptr) memory_->release(device_);
  }

  T* data() { return memory_ != nullptr ? device_ : host_.data(); }
  const T* data() const { return memory_ != nullptr ? device_ : host_.data(); }
  std::size_t size() const { return host_.size(); }
  /// Returns what is there now, by value.
  std::vector<T> values() const { return read(data(), size()); }

 private:
  std::vector<T> host_;
  test_memory* memory_ = nullptr;
  T* device_ = nullptr;
};

}  // namespace plait::testing::conformance_parts
