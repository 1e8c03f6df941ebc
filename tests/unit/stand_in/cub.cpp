// The stand-in for CUB: what it sorts, when, and what it refuses.
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "stand_in/cuda/cub/device/device_radix_sort.cuh"
#include "stand_in/cuda/cub/device/device_reduce.cuh"
#include "stand_in/cuda/cub/device/device_transform.cuh"

namespace {

template <class T>
T* on_device(const std::vector<T>& values) {
  T* p = nullptr;
  REQUIRE(cudaMalloc(&p, values.size() * sizeof(T)) == cudaSuccess);
  REQUIRE(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  return p;
}
template <class T>
std::vector<T> on_host(const T* p, std::size_t n) {
  std::vector<T> values(n);
  REQUIRE(cudaMemcpy(values.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
  return values;
}

}  // namespace

TEST_CASE("the stand-in's radix sort is stable, sees some bits alone, and asks for scratch memory") {
  const std::vector<std::uint32_t> keys{0x105, 0x001, 0x305, 0x201, 0x000};
  const std::vector<int> order{0, 1, 2, 3, 4};
  for (const int bits : {8, 10}) {
    CAPTURE(bits);
    cub::DoubleBuffer<std::uint32_t> k(on_device(keys), on_device(keys));
    cub::DoubleBuffer<int> v(on_device(order), on_device(order));
    const auto sort = [&](void* scratch, std::size_t& bytes) {
      return cub::DeviceRadixSort::SortPairs(scratch, bytes, k, v, 5, 0, bits);
    };
    std::size_t bytes = 0;
    REQUIRE(sort(nullptr, bytes) == cudaSuccess);
    CHECK(k.selector == 0);
    void* scratch = nullptr;
    REQUIRE(cudaMalloc(&scratch, bytes) == cudaSuccess);
    std::size_t less = bytes - 1;
    CHECK(sort(scratch, less) == cudaErrorInvalidValue);
    REQUIRE(sort(scratch, bytes) == cudaSuccess);
    CHECK(k.selector == (bits == 8 ? 1 : 0));
    CHECK(v.selector == k.selector);
    if (bits == 8) {
      CHECK(on_host(k.Current(), 5) == std::vector<std::uint32_t>{0x000, 0x001, 0x201, 0x105, 0x305});
      CHECK(on_host(v.Current(), 5) == std::vector<int>{4, 1, 3, 0, 2});
    } else {
      CHECK(on_host(v.Current(), 5) == std::vector<int>{4, 1, 0, 3, 2});
    }
    CHECK(on_host(v.Alternate(), 5) == std::vector<int>(5, -1));
    for (void* p : {static_cast<void*>(k.Current()), static_cast<void*>(k.Alternate()), static_cast<void*>(v.Current()),
                    static_cast<void*>(v.Alternate()), scratch}) {
      CHECK(cudaFree(p) == cudaSuccess);
    }
  }
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("the stand-in's sums ask for scratch memory, and its maps for none") {
  const std::vector<float> numbers{1, 2, 3.5f, -4};
  float* const x = on_device(numbers);
  float* const total = on_device(std::vector<float>(1));
  int* const rounded = on_device(std::vector<int>(4));
  std::size_t bytes = 0;
  REQUIRE(cub::DeviceReduce::Sum(nullptr, bytes, x, total, 4) == cudaSuccess);
  CHECK(on_host(total, 1)[0] == 0);
  void* scratch = nullptr;
  REQUIRE(cudaMalloc(&scratch, bytes) == cudaSuccess);
  std::size_t less = bytes - 1;
  CHECK(cub::DeviceReduce::Sum(scratch, less, x, total, 4) == cudaErrorInvalidValue);
  REQUIRE(cub::DeviceReduce::Sum(scratch, bytes, x, total, 4) == cudaSuccess);
  CHECK(on_host(total, 1)[0] == 2.5f);
  const auto larger = [](float a, float b) { return a < b ? b : a; };
  const auto squared = [](float v) { return v * v; };
  REQUIRE(cub::DeviceReduce::TransformReduce(scratch, bytes, x, total, 4, larger, squared, 0.0f) == cudaSuccess);
  CHECK(on_host(total, 1)[0] == 16);
  REQUIRE(cub::DeviceTransform::Transform(x, rounded, 4, [](float v) { return static_cast<int>(v); }) == cudaSuccess);
  CHECK(on_host(rounded, 4) == std::vector<int>{1, 2, 3, -4});
  for (void* p : {static_cast<void*>(x), static_cast<void*>(total), static_cast<void*>(rounded), scratch})
    CHECK(cudaFree(p) == cudaSuccess);
  static_cast<void>(cudaGetLastError());
}
