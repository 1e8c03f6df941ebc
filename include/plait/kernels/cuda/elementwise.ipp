// The kernels and launches of kernels/cuda/elementwise.hpp, which includes this where CUDA is compiled.
#pragma once

#include "plait/kernels/cuda/chunk.hpp"
#include "plait/kernels/cuda/column_sums.hpp"
#include "plait/kernels/cuda/rows.hpp"

namespace plait::kernels {

namespace detail {

struct plus {
  template <class S>
  __device__ S operator()(S a, S b) const {
    return a + b;
  }
};
struct times {
  template <class S>
  __device__ S operator()(S a, S b) const {
    return a * b;
  }
};
struct unchanged {
  template <class S>
  __device__ S operator()(S x) const {
    return x;
  }
};
template <class S>
struct times_factor {
  S factor;
  __device__ S operator()(S x) const { return x * factor; }
};
template <class S>
struct plus_multiple {
  S factor;
  __device__ S operator()(S y, S x) const { return y + factor * x; }
};
template <class T>
struct constantly {
  T value;
  __device__ T operator()() const { return value; }
};

template <class T>
struct bias_rows {
  const T* bias;
  T* y;
  std::int64_t stride;

  __device__ int row(std::int64_t) const { return 0; }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, int) const {
    T* const to = y + r * stride + c;
    map_chunk<Width>(plus{}, to, load_chunk<Width>(static_cast<const T*>(to)), load_chunk<Width>(bias + c));
  }
};

template <class T>
struct bias_term {
  static constexpr int outputs = 1;
  using sum_type = arithmetic<T>;
  const T* dy;
  std::int64_t stride;

  template <int Width>
  __device__ void add(std::int64_t r, std::int64_t c, row_of<sum_type, Width> (&sums)[1]) const {
    const auto d = load_chunk<Width>(dy + r * stride + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) sums[0][j] += number<sum_type>(d.at[j]);
  }
};

}  // namespace detail

template <class T>
void add(cuda& device, const T* a, const T* b, T* y, std::int64_t n) {
  detail::map(device, n, detail::plus{}, y, a, b);
}

template <class T>
void accumulate(cuda& device, const T* a, T* y, std::int64_t n) {
  detail::map(device, n, detail::plus{}, y, static_cast<const T*>(y), a);
}

template <class T>
void scale(cuda& device, T* y, std::int64_t n, double factor) {
  detail::map(device, n, detail::times_factor<arithmetic<T>>{static_cast<arithmetic<T>>(factor)}, y,
              static_cast<const T*>(y));
}

template <class T>
void axpy(cuda& device, const T* x, T* y, std::int64_t n, double factor) {
  detail::map(device, n, detail::plus_multiple<arithmetic<T>>{static_cast<arithmetic<T>>(factor)}, y,
              static_cast<const T*>(y), x);
}

template <class T>
void multiply(cuda& device, const T* a, const T* b, T* y, std::int64_t n) {
  detail::map(device, n, detail::times{}, y, a, b);
}

template <class T, class Value>
void fill(cuda& device, T* y, std::int64_t n, Value value) {
  detail::map(device, n, detail::constantly<T>{number<T>(value)}, y);
}

template <class From, class To>
void cast(cuda& device, const From* x, To* y, std::int64_t n) {
  detail::map(device, n, detail::unchanged{}, y, x);
}

template <class T>
void add_bias(cuda& device, const T* bias, T* y, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  constexpr int width = vector16<T>::size;
  const std::int64_t step = stride == 0 ? columns : stride;
  detail::row_map<width>(device, aligned16(bias, y) && columns % width == 0 && step % width == 0, rows, columns,
                         detail::bias_rows<T>{bias, y, step});
}

template <class T>
void bias_gradient(cuda& device, const T* dy, gradient_of<T>* dbias, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride) {
  constexpr int width = vector16<T>::size;
  const std::int64_t step = stride == 0 ? columns : stride;
  detail::add_column_sums_of<width>(device, aligned16(dy) && columns % width == 0 && step % width == 0, rows, columns,
                                    detail::bias_term<T>{dy, step}, dbias);
}

}  // namespace plait::kernels
