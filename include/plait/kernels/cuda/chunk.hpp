// Loads and stores of a few neighbouring elements by one thread of a GPU, and maps element by element. For rows of a
// matrix see kernels/cuda/rows.hpp, for its columns kernels/cuda/column_sums.hpp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/cuda/unroll.hpp"

namespace plait::kernels::detail {

/// Consecutive elements that one thread moves together: a multiple of 16 bytes by 16-byte accesses, or a single one.
template <int Width, class T>
struct chunk {
  row_of<T, Width> at;
};

template <int Width, class T>
__device__ inline chunk<Width, T> load_chunk(const T* from) {
  chunk<Width, T> c;
  if constexpr (Width == 1) {
    c.at[0] = *from;
  } else {
    static_assert(Width % vector16<T>::size == 0);
    PLAIT_UNROLL
    for (int i = 0; i < Width; i += vector16<T>::size) {
      const vector16<T> v = load_vector(from + i);
      PLAIT_UNROLL
      for (int j = 0; j < vector16<T>::size; ++j) c.at[i + j] = v.at[j];
    }
  }
  return c;
}

template <int Width, class T>
__device__ inline void store_chunk(T* to, const chunk<Width, T>& c) {
  if constexpr (Width == 1) {
    *to = c.at[0];
  } else {
    PLAIT_UNROLL
    for (int i = 0; i < Width; i += vector16<T>::size) {
      vector16<T> v;
      PLAIT_UNROLL
      for (int j = 0; j < vector16<T>::size; ++j) v.at[j] = c.at[i + j];
      store_vector(to + i, v);
    }
  }
}

/// The elements of a chunk of which every type of an operation takes whole 16-byte accesses.
template <class... T>
constexpr int chunk_width() {
  int most = 1;
  ((most = vector16<T>::size > most ? vector16<T>::size : most), ...);
  return most;
}

/// Calls f with the number of elements of a chunk as an `integral_constant`: 1 unless 16-byte accesses are possible.
template <int Width, class F>
void with_chunk(bool vectors, F&& f) {
  if (vectors) {
    f(std::integral_constant<int, Width>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

// ---- element by element ------------------------------------------------------------------------------------------

template <int Width, class F, class Out, class... In>
__device__ inline void map_chunk(F f, Out* y, const chunk<Width, In>&... in) {
  chunk<Width, Out> out;
  PLAIT_UNROLL
  for (int j = 0; j < Width; ++j) out.at[j] = number<Out>(f(number<arithmetic<In>>(in.at[j])...));
  store_chunk(y, out);
}

template <int Width, class F, class Out, class... In>
static __global__ void map_kernel(std::int64_t n, F f, Out* y, const In*... in) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x * Width;
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * Width; i < n; i += step) {
    if (i + Width <= n) {
      map_chunk<Width>(f, y + i, load_chunk<Width>(in + i)...);
    } else {
      for (std::int64_t j = i; j < n; ++j) map_chunk<1>(f, y + j, load_chunk<1>(in + j)...);
    }
  }
}

/// y[i] = f(in_0[i], in_1[i], ...), computed in the `arithmetic` of the inputs; y may be one of the inputs. No call of
/// CUB's `DeviceTransform`: memory bounds both, and CUB belongs in no header (kernels/cuda/sort_pairs.hpp says why).
template <class F, class Out, class... In>
void map(cuda& device, std::int64_t n, F f, Out* y, const In*... in) {
  if (n <= 0) return;
  constexpr unsigned threads = 256;
  with_chunk<chunk_width<Out, In...>()>(aligned16(y, in...), [&](auto width) {
    void (*const kernel)(std::int64_t, F, Out*, const In*...) = map_kernel<decltype(width)::value, F, Out, In...>;
    plait::detail::launch(device, {plait::detail::blocks_for(n, threads * decltype(width)::value), threads}, kernel, n,
                          f, y, in...);
  });
}

}  // namespace plait::kernels::detail
