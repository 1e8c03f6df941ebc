// The kernels and launches of kernels/cuda/layer_norm.hpp, which includes this where CUDA is compiled.
#pragma once

#include "plait/kernels/cuda/norm.hpp"

namespace plait::kernels {

namespace detail {

template <class T>
struct sum_term {
  static constexpr int outputs = 1;
  using S = arithmetic<T>;
  const T* x;
  std::int64_t columns;

  __device__ int row(std::int64_t) const { return 0; }
  template <int Width>
  __device__ void add(std::int64_t r, std::int64_t c, int, S (&sums)[1]) const {
    const auto v = load_chunk<Width>(x + r * columns + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) sums[0] += number<S>(v.at[j]);
  }
};

template <class T>
struct centred_squares_term {
  static constexpr int outputs = 1;
  using S = arithmetic<T>;
  const T* x;
  const S* sums_in;
  std::int64_t columns;
  S columns_global;

  __device__ S row(std::int64_t r) const { return sums_in[r] / columns_global; }
  template <int Width>
  __device__ void add(std::int64_t r, std::int64_t c, S mean, S (&sums)[1]) const {
    const auto v = load_chunk<Width>(x + r * columns + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      const S centred = number<S>(v.at[j]) - mean;
      sums[0] += centred * centred;
    }
  }
};

/// sums[0] of dy w and sums[1] of dy w n.
template <class T>
struct layer_dots_term {
  static constexpr int outputs = 2;
  using S = arithmetic<T>;
  const T *x, *weight, *dy;
  const S *mean, *inverse;
  std::int64_t columns;

  __device__ row_moments<S> row(std::int64_t r) const { return {mean[r], inverse[r]}; }
  template <int Width>
  __device__ void add(std::int64_t r, std::int64_t c, row_moments<S> of, S (&sums)[2]) const {
    const auto v = load_chunk<Width>(x + r * columns + c), d = load_chunk<Width>(dy + r * columns + c);
    const auto w = load_chunk<Width>(weight + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      const S g = number<S>(d.at[j]) * number<S>(w.at[j]);
      sums[0] += g;
      sums[1] += g * ((number<S>(v.at[j]) - of.mean) * of.inverse);
    }
  }
};

template <class S>
static __global__ void layer_statistics_kernel(const S* sums, const S* centred_squares, S* mean, S* inv_std,
                                               std::int64_t rows, double columns, double eps) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  const double sum = static_cast<double>(sums[r]), squares = static_cast<double>(centred_squares[r]);
  mean[r] = static_cast<S>(sum / columns);
  inv_std[r] = static_cast<S>(inverse_root(squares / columns + eps));
}

template <class T>
struct layer_apply_rows {
  using S = arithmetic<T>;
  const T *x, *weight, *bias;
  const S *mean, *inverse;
  T* y;
  std::int64_t columns;

  __device__ row_moments<S> row(std::int64_t r) const { return {mean[r], inverse[r]}; }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, row_moments<S> of) const {
    const auto v = load_chunk<Width>(x + r * columns + c);
    const auto w = load_chunk<Width>(weight + c), b = load_chunk<Width>(bias + c);
    chunk<Width, T> out;
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      out.at[j] = number<T>((number<S>(v.at[j]) - of.mean) * of.inverse * number<S>(w.at[j]) + number<S>(b.at[j]));
    }
    store_chunk(y + r * columns + c, out);
  }
};

template <class T>
struct layer_dx_rows {
  using S = arithmetic<T>;
  struct numbers {
    S mean, inverse, shift, pull;
  };
  const T *x, *weight, *dy;
  const S *mean, *inverse, *dots;
  T* dx;
  std::int64_t columns;
  S columns_global;
  const T* addend;

  __device__ numbers row(std::int64_t r) const {
    return {mean[r], inverse[r], dots[2 * r] / columns_global, dots[2 * r + 1] / columns_global};
  }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, numbers of) const {
    const std::int64_t at = r * columns + c;
    store_norm_dx(load_chunk<Width>(x + at), load_chunk<Width>(weight + c), load_chunk<Width>(dy + at), of.mean,
                  of.inverse, of.shift, of.pull, addend == nullptr ? nullptr : addend + at, dx + at);
  }
};

}  // namespace detail

template <class T>
void row_sums(cuda& device, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns) {
  constexpr int width = vector16<T>::size;
  detail::row_sums_of<width>(device, aligned16(x) && columns % width == 0, rows, columns,
                             detail::sum_term<T>{x, columns}, out);
}

template <class T>
void row_centred_squares(cuda& device, const T* x, const statistic_of<T>* sums, statistic_of<T>* out, std::int64_t rows,
                         std::int64_t columns, std::int64_t columns_global) {
  constexpr int width = vector16<T>::size;
  detail::row_sums_of<width>(
      device, aligned16(x) && columns % width == 0, rows, columns,
      detail::centred_squares_term<T>{x, sums, columns, static_cast<statistic_of<T>>(columns_global)}, out);
}

template <class S>
void layer_norm_statistics(cuda& device, const S* sums, const S* centred_squares, S* mean, S* inv_std,
                           std::int64_t rows, std::int64_t columns_global, double eps) {
  if (rows <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(rows, 128), 128}, detail::layer_statistics_kernel<S>, sums,
                        centred_squares, mean, inv_std, rows, static_cast<double>(columns_global), eps);
}

template <class T>
void layer_norm_apply(cuda& device, const T* x, const statistic_of<T>* mean, const statistic_of<T>* inv_std,
                      const T* weight, const T* bias, T* y, std::int64_t rows, std::int64_t columns) {
  constexpr int width = vector16<T>::size;
  detail::row_map<width>(device, aligned16(x, weight, bias, y) && columns % width == 0, rows, columns,
                         detail::layer_apply_rows<T>{x, weight, bias, mean, inv_std, y, columns});
}

template <class T>
void layer_norm_forward(cuda& device, const T* x, const T* weight, const T* bias, T* y, statistic_of<T>* mean,
                        statistic_of<T>* inv_std, std::int64_t rows, std::int64_t columns, double eps,
                        const std::type_identity_t<T>* addend, std::type_identity_t<T>* sum) {
  detail::norm_forward<true>(device, x, weight, bias, y, mean, inv_std, rows, columns, eps,
                             static_cast<const T*>(addend), static_cast<T*>(sum));
}

template <class T>
void layer_norm_backward_dots(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                              const statistic_of<T>* inv_std, statistic_of<T>* dots, std::int64_t rows,
                              std::int64_t columns) {
  constexpr int width = vector16<T>::size;
  detail::row_sums_of<width>(device, aligned16(x, weight, dy) && columns % width == 0, rows, columns,
                             detail::layer_dots_term<T>{x, weight, dy, mean, inv_std, columns}, dots);
}

template <class T>
void layer_norm_backward_dx(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                            const statistic_of<T>* inv_std, const statistic_of<T>* dots, T* dx, std::int64_t rows,
                            std::int64_t columns, std::int64_t columns_global, const std::type_identity_t<T>* addend) {
  constexpr int width = vector16<T>::size;
  detail::row_map<width>(device, aligned16(x, weight, dy, dx, addend) && columns % width == 0, rows, columns,
                         detail::layer_dx_rows<T>{x, weight, dy, mean, inv_std, dots, dx, columns,
                                                  static_cast<statistic_of<T>>(columns_global), addend});
}

template <class T>
void layer_norm_backward_dweight(cuda& device, const T* x, const T* dy, const statistic_of<T>* mean,
                                 const statistic_of<T>* inv_std, gradient_of<T>* dweight, gradient_of<T>* dbias,
                                 std::int64_t rows, std::int64_t columns) {
  detail::norm_backward_weight<true>(device, x, dy, mean, inv_std, dweight, dbias, rows, columns);
}

template <class T>
void layer_norm_backward(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                         const statistic_of<T>* inv_std, T* dx, gradient_of<T>* dweight, gradient_of<T>* dbias,
                         std::int64_t rows, std::int64_t columns, const std::type_identity_t<T>* addend) {
  detail::norm_backward<true>(device, x, weight, dy, mean, inv_std, dx, dweight, dbias, rows, columns,
                              static_cast<const T*>(addend));
}

}  // namespace plait::kernels
