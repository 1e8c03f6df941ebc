// The kernels and launches of kernels/cuda/swiglu.hpp, which includes this where CUDA is compiled.
#pragma once

#include "plait/kernels/cuda/rows.hpp"
#include "plait/kernels/cuda/sigmoid.hpp"

namespace plait::kernels {

namespace detail {

template <class T>
struct swiglu_rows {
  using S = arithmetic<T>;
  const T* gate_up;
  T* y;
  std::int64_t ffn;

  __device__ int row(std::int64_t) const { return 0; }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, int) const {
    const T* const gate = gate_up + r * 2 * ffn + c;
    const auto g = load_chunk<Width>(gate), u = load_chunk<Width>(gate + ffn);
    chunk<Width, T> out;
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      const S x = number<S>(g.at[j]);
      out.at[j] = number<T>(x * logistic<T>(x) * number<S>(u.at[j]));
    }
    store_chunk(y + r * ffn + c, out);
  }
};

template <class T>
struct swiglu_gradient_rows {
  using S = arithmetic<T>;
  const T *gate_up, *dy;
  T* dgate_up;
  std::int64_t ffn;

  __device__ int row(std::int64_t) const { return 0; }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, int) const {
    const std::int64_t at = r * 2 * ffn + c;
    const auto g = load_chunk<Width>(gate_up + at), u = load_chunk<Width>(gate_up + at + ffn);
    const auto d = load_chunk<Width>(dy + r * ffn + c);
    chunk<Width, T> dgate, dup;
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      const S x = number<S>(g.at[j]), up = number<S>(u.at[j]), gradient = number<S>(d.at[j]);
      const S s = logistic<T>(x);
      dup.at[j] = number<T>(gradient * x * s);
      dgate.at[j] = number<T>(gradient * up * s * (x * (S(1) - s) + S(1)));
    }
    store_chunk(dgate_up + at, dgate);
    store_chunk(dgate_up + at + ffn, dup);
  }
};

}  // namespace detail

template <class T>
void swiglu_forward(cuda& device, const T* gate_up, T* y, std::int64_t rows, std::int64_t ffn) {
  constexpr int width = vector16<T>::size;
  detail::row_map<width>(device, aligned16(gate_up, y) && ffn % width == 0, rows, ffn,
                         detail::swiglu_rows<T>{gate_up, y, ffn});
}

template <class T>
void swiglu_backward(cuda& device, const T* gate_up, const T* dy, T* dgate_up, std::int64_t rows, std::int64_t ffn) {
  constexpr int width = vector16<T>::size;
  detail::row_map<width>(device, aligned16(gate_up, dy, dgate_up) && ffn % width == 0, rows, ffn,
                         detail::swiglu_gradient_rows<T>{gate_up, dy, dgate_up, ffn});
}

}  // namespace plait::kernels
