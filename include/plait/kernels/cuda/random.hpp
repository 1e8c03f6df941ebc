// CUDA kernels of random numbers and dropout. Test: tests/cuda/kernels/kernel_random.cpp.
#pragma once

#include <cmath>
#include <numbers>
#include <string>

#include "plait/core/error.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/arrays.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/philox.hpp"

namespace plait::kernels {

namespace detail {

/// Calls f(local, words, lane, count) for a thread's range of elements, which share one Philox block: element local + i
/// has word words[lane + i].
template <class F>
__device__ inline void for_my_words(const run_map& map, std::uint64_t seed, std::uint64_t stream, F f) {
  const std::int64_t groups = (map.length + 6) / 4;  // Philox blocks that a run of this length may overlap
  const std::int64_t total = map.runs * groups, step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    const std::int64_t run = map.runs == 1 ? 0 : i / groups;
    const std::int64_t begin = map.global_of(run), end = begin + map.length;
    const std::int64_t block = begin / 4 + (i - run * groups);
    const std::int64_t from = block * 4 > begin ? block * 4 : begin;
    const std::int64_t to = block * 4 + 4 < end ? block * 4 + 4 : end;
    if (from >= to) continue;
    const four_words words = random_words(seed, stream, static_cast<std::uint64_t>(block));
    f(run * map.length + (from - begin), words, static_cast<int>(from - block * 4), static_cast<int>(to - from));
  }
}

template <class T>
__global__ static void put_normal(T* x, const __grid_constant__ run_map map, std::uint64_t seed, std::uint64_t stream,
                                  double mean, double std) {
  for_my_words(map, seed, stream, [=](std::int64_t local, const four_words& words, int lane, int count) {
    T four[4];  // Box and Muller 1958, as `normal_pair`
    for (int pair = 0; pair < 4; pair += 2) {
      const double radius = sqrt(-2.0 * log(to_unit(words[pair])));
      const double angle = 2.0 * std::numbers::pi * to_unit(words[pair + 1]);
      four[pair] = number<T>(mean + std * (radius * cos(angle)));
      four[pair + 1] = number<T>(mean + std * (radius * sin(angle)));
    }
    for (int j = 0; j < 4; ++j) {
      if (j >= lane && j < lane + count) x[local + j - lane] = four[j];
    }
  });
}

template <class T>
__global__ static void put_uniform(T* x, const __grid_constant__ run_map map, std::uint64_t seed, std::uint64_t stream,
                                   double low, double high) {
  for_my_words(map, seed, stream, [=](std::int64_t local, const four_words& words, int lane, int count) {
    for (int j = 0; j < 4; ++j) {
      if (j < lane || j >= lane + count) continue;
      x[local + j - lane] = number<T>(low + (high - low) * to_unit(words[j]));
    }
  });
}

template <class T>
__global__ static void drop(const T* x, T* y, const __grid_constant__ run_map map, std::uint64_t seed,
                            std::uint64_t stream, std::uint32_t threshold, arithmetic<T> keep) {
  using S = arithmetic<T>;
  using four = element_pack<T, 4>;
  for_my_words(map, seed, stream, [=](std::int64_t local, const four_words& words, int lane, int count) {
    const auto kept = [&](T value, int j) {
      return number<T>(number<S>(value) * (words[j] >= threshold ? keep : S(0)));
    };
    if (count == 4 && holds_packs<4>(x + local) && holds_packs<4>(y + local)) {
      four v = *reinterpret_cast<const four*>(x + local);
      for (int j = 0; j < 4; ++j) v.at[j] = kept(v.at[j], j);
      *reinterpret_cast<four*>(y + local) = v;
      return;
    }
    for (int j = 0; j < 4; ++j) {
      if (j >= lane && j < lane + count) y[local + j - lane] = kept(x[local + j - lane], j);
    }
  });
}

/// Does the same by 16-byte accesses, for runs that begin and end at whole vectors.
template <class T>
__global__ static void drop_vectors(const T* x, T* y, const __grid_constant__ run_map map, std::uint64_t seed,
                                    std::uint64_t stream, std::uint32_t threshold, arithmetic<T> keep) {
  using S = arithmetic<T>;
  constexpr int n = vector16<T>::size;
  static_assert(n % 4 == 0);
  const std::int64_t per_run = map.length / n, total = map.runs * per_run;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    vector16<T> v = load_vector(x + i * n);
    const std::int64_t run = map.runs == 1 ? 0 : i / per_run;
    const std::int64_t block = (map.global_of(run) + (i - run * per_run) * n) / 4;
    PLAIT_UNROLL
    for (int k = 0; k < n; k += 4) {
      const four_words words = random_words(seed, stream, static_cast<std::uint64_t>(block + k / 4));
      PLAIT_UNROLL
      for (int j = 0; j < 4; ++j)
        v.at[k + j] =
            number<T>(number<S>(v.at[k + j]) * (words[static_cast<std::size_t>(j)] >= threshold ? keep : S(0)));
    }
    store_vector(y + i * n, v);
  }
}

/// Whether every run begins and ends at a multiple of `n` elements, here and globally.
inline bool runs_of(const run_map& map, std::int64_t n) {
  bool whole = map.base % n == 0 && map.length % n == 0;
  for (int d = 0; d < map.dims; ++d) whole = whole && map.stride[d] % n == 0;
  return whole;
}

inline plait::detail::launch_shape threads_for(const run_map& map) {
  constexpr unsigned threads = 256;
  return {plait::detail::blocks_for(map.runs * ((map.length + 6) / 4), threads, 1 << 20), threads};
}

}  // namespace detail

template <class T>
void fill_normal(cuda& device, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double mean,
                 double std) {
  if (part.local_size() == 0) return;
  const auto map = run_map::of(part);
  plait::detail::launch(device, detail::threads_for(map), detail::put_normal<T>, x, map, seed, stream, mean, std);
}

template <class T>
void fill_uniform(cuda& device, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double low,
                  double high) {
  if (part.local_size() == 0) return;
  const auto map = run_map::of(part);
  plait::detail::launch(device, detail::threads_for(map), detail::put_uniform<T>, x, map, seed, stream, low, high);
}

template <class T>
void dropout_forward(cuda& device, const T* x, T* y, const box& part, std::uint64_t seed, std::uint64_t stream,
                     double p) {
  check_dropout(p);
  if (part.local_size() == 0) return;
  const auto map = run_map::of(part);
  const double scaled = p * 0x1p32;
  const auto threshold = static_cast<std::uint32_t>(scaled < 4294967295.0 ? scaled : 4294967295.0);
  const auto keep = static_cast<arithmetic<T>>(1.0 / (1.0 - p));
  constexpr int n = vector16<T>::size;
  if constexpr (n % 4 == 0) {
    if (aligned16(x, y) && detail::runs_of(map, n)) {
      const plait::detail::launch_shape shape{plait::detail::blocks_for(map.runs * map.length / n, 256), 256};
      return plait::detail::launch(device, shape, detail::drop_vectors<T>, x, y, map, seed, stream, threshold, keep);
    }
  }
  plait::detail::launch(device, detail::threads_for(map), detail::drop<T>, x, y, map, seed, stream, threshold, keep);
}

template <class T>
void dropout_backward(cuda& device, const T* dy, T* dx, const box& part, std::uint64_t seed, std::uint64_t stream,
                      double p) {
  dropout_forward(device, dy, dx, part, seed, stream, p);
}

}  // namespace plait::kernels
