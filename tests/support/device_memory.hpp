#pragma once

#include <cstddef>

#include "plait/device/cuda.hpp"
#include "plait/testing/conformance.hpp"

namespace plait::test {

/// While it lives, the conformance suite's arrays of this thread are on a CUDA device, in the order of its main stream.
class device_memory final : public testing::conformance_parts::test_memory {
 public:
  explicit device_memory(cuda& device) : device_(device) {}
  void* allocate(std::size_t bytes) override { return device_.allocate(bytes); }
  void release(void* data) noexcept override { device_.release(data); }
  void upload(void* to, const void* from, std::size_t bytes) override {
    device_.upload(to, from, bytes, device_.main_stream());
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    device_.download(to, from, bytes, device_.main_stream());
  }

 private:
  cuda& device_;
  const testing::conformance_parts::memory_scope scope_{*this};
};

}  // namespace plait::test
