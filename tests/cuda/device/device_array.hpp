#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cuda.hpp"

/// Helpers of the tests of CUDA kernels. Numbers are doubles that T represents exactly; results are compared with those
/// of the cpu's kernels in double.
namespace plait::test {

using values = std::vector<double>;

template <class T>
T typed(double x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

using plait::widened;

/// Normally distributed numbers that T represents exactly.
template <class T>
values random_values(std::int64_t n, unsigned seed, double spread = 1.0) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0.0, spread);
  values result(static_cast<std::size_t>(n));
  for (double& x : result) x = widened(typed<T>(normal(generator)));
  return result;
}

/// Elements of any type in a device's memory, starting `lead` elements after the start of an allocation. Reading them
/// throws if a kernel has written to the elements around them.
template <class T, class Device = cuda>
class device_array {
 public:
  device_array(Device& device, const std::vector<T>& from, std::size_t lead = 0)
      : device_(&device),
        size_(from.size()),
        lead_(lead),
        memory_(make_buffer<T>(device, lead + from.size() + behind)) {
    std::vector<unsigned char> bytes(memory_.bytes(), pattern);
    if (size_ != 0) std::memcpy(bytes.data() + lead * sizeof(T), from.data(), size_ * sizeof(T));
    device.upload(memory_.data(), bytes.data(), bytes.size(), device.main_stream());
  }
  T* data() { return memory_.template data<T>() + lead_; }
  std::vector<T> read() {
    std::vector<unsigned char> bytes(memory_.bytes());
    device_->download(bytes.data(), memory_.data(), bytes.size(), device_->main_stream());
    const std::size_t begin = lead_ * sizeof(T), end = begin + size_ * sizeof(T);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if ((i < begin || i >= end) && bytes[i] != pattern) throw error("a kernel wrote outside its array");
    }
    std::vector<T> host(size_);
    if (size_ != 0) std::memcpy(host.data(), bytes.data() + begin, size_ * sizeof(T));
    return host;
  }

 private:
  static constexpr std::size_t behind = 16;
  static constexpr unsigned char pattern = 0xA5;
  Device* device_;
  std::size_t size_, lead_;
  buffer<Device> memory_;
};

/// The same for numbers, which are written and read as doubles.
template <class T, class Device = cuda>
class number_array {
 public:
  number_array(Device& device, const values& from, std::size_t lead = 0) : array_(device, rounded(from), lead) {}
  number_array(Device& device, std::int64_t n) : number_array(device, values(static_cast<std::size_t>(n))) {}
  T* data() { return array_.data(); }
  const T* view() { return array_.data(); }
  std::vector<T> raw() { return array_.read(); }
  values read() {
    values result;
    for (const T x : array_.read()) result.push_back(widened(x));
    return result;
  }

 private:
  static std::vector<T> rounded(const values& from) {
    std::vector<T> host;
    for (const double x : from) host.push_back(typed<T>(x));
    return host;
  }
  device_array<T, Device> array_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
constexpr double tolerance = std::is_same_v<T, bf16>    ? 1e-2
                             : std::is_same_v<T, float> ? 1e-5
                                                        : 1e-12;

/// The norm of the difference over the norm of the expected values; equal infinities do not differ.
inline double difference(const values& got, const values& expected) {
  if (got.size() != expected.size()) return HUGE_VAL;
  double squares = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i]) {
      if (!std::isinf(expected[i])) size += expected[i] * expected[i];
      continue;
    }
    squares += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  if (!std::isfinite(squares)) return HUGE_VAL;
  return squares == 0 ? 0.0 : std::sqrt(squares / std::fmax(size, 1e-12));
}

}  // namespace plait::test
