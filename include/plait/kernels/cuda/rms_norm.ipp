// The kernels and launches of kernels/cuda/rms_norm.hpp, which includes this where CUDA is compiled.
#pragma once

#include "plait/kernels/cuda/norm.hpp"

namespace plait::kernels {

namespace detail {

template <class T>
struct squares_term {
  static constexpr int outputs = 1;
  using S = arithmetic<T>;
  const T* x;
  std::int64_t columns;

  __device__ int row(std::int64_t) const { return 0; }
  template <int Width>
  __device__ void add(std::int64_t r, std::int64_t c, int, S (&sums)[1]) const {
    const auto v = load_chunk<Width>(x + r * columns + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) sums[0] += number<S>(v.at[j]) * number<S>(v.at[j]);
  }
};

template <class T>
struct rms_dot_term {
  static constexpr int outputs = 1;
  using S = arithmetic<T>;
  const T *x, *weight, *dy;
  std::int64_t columns;

  __device__ int row(std::int64_t) const { return 0; }
  template <int Width>
  __device__ void add(std::int64_t r, std::int64_t c, int, S (&sums)[1]) const {
    const auto v = load_chunk<Width>(x + r * columns + c), d = load_chunk<Width>(dy + r * columns + c);
    const auto w = load_chunk<Width>(weight + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) sums[0] += number<S>(d.at[j]) * number<S>(w.at[j]) * number<S>(v.at[j]);
  }
};

template <class T>
struct rms_apply_rows {
  using S = arithmetic<T>;
  const T *x, *weight;
  const S* sum_squares;
  T* y;
  std::int64_t columns;
  S columns_global, eps;

  __device__ S row(std::int64_t r) const { return inverse_root(sum_squares[r] / columns_global + eps); }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, S inverse) const {
    const auto v = load_chunk<Width>(x + r * columns + c), w = load_chunk<Width>(weight + c);
    chunk<Width, T> out;
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) out.at[j] = number<T>(number<S>(v.at[j]) * inverse * number<S>(w.at[j]));
    store_chunk(y + r * columns + c, out);
  }
};

template <class T>
struct rms_dx_rows {
  using S = arithmetic<T>;
  struct numbers {
    S inverse, pull;
  };
  const T *x, *weight, *dy;
  const S *inverse, *dot;
  T* dx;
  std::int64_t columns;
  S columns_global;
  const T* addend;

  __device__ numbers row(std::int64_t r) const { return {inverse[r], dot[r] * inverse[r] / columns_global}; }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, numbers of) const {
    const std::int64_t at = r * columns + c;
    store_norm_dx(load_chunk<Width>(x + at), load_chunk<Width>(weight + c), load_chunk<Width>(dy + at), S(0),
                  of.inverse, S(0), of.pull, addend == nullptr ? nullptr : addend + at, dx + at);
  }
};

template <class S>
struct mean_to_inverse {
  double columns_global, eps;
  __device__ S operator()(S sum) const {
    return static_cast<S>(inverse_root(static_cast<double>(sum) / columns_global + eps));
  }
};

}  // namespace detail

template <class T>
void row_sum_squares(cuda& device, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns) {
  constexpr int width = vector16<T>::size;
  detail::row_sums_of<width>(device, aligned16(x) && columns % width == 0, rows, columns,
                             detail::squares_term<T>{x, columns}, out);
}

template <class S>
void rms_inverse(cuda& device, const S* sum_squares, S* inv_rms, std::int64_t rows, std::int64_t columns_global,
                 double eps) {
  detail::map(device, rows, detail::mean_to_inverse<S>{static_cast<double>(columns_global), eps}, inv_rms, sum_squares);
}

template <class T>
void rms_apply(cuda& device, const T* x, const statistic_of<T>* sum_squares, const T* weight, T* y, std::int64_t rows,
               std::int64_t columns, std::int64_t columns_global, double eps) {
  constexpr int width = vector16<T>::size;
  using S = statistic_of<T>;
  detail::row_map<width>(device, aligned16(x, weight, y) && columns % width == 0, rows, columns,
                         detail::rms_apply_rows<T>{x, weight, sum_squares, y, columns, static_cast<S>(columns_global),
                                                   static_cast<S>(eps)});
}

template <class T>
void rms_norm_forward(cuda& device, const T* x, const T* weight, T* y, statistic_of<T>* inv_rms, std::int64_t rows,
                      std::int64_t columns, double eps, const std::type_identity_t<T>* addend,
                      std::type_identity_t<T>* sum) {
  detail::norm_forward<false>(device, x, weight, static_cast<const T*>(nullptr), y,
                              static_cast<statistic_of<T>*>(nullptr), inv_rms, rows, columns, eps,
                              static_cast<const T*>(addend), static_cast<T*>(sum));
}

template <class T>
void rms_norm_backward_dot(cuda& device, const T* x, const T* weight, const T* dy, statistic_of<T>* dot,
                           std::int64_t rows, std::int64_t columns) {
  constexpr int width = vector16<T>::size;
  detail::row_sums_of<width>(device, aligned16(x, weight, dy) && columns % width == 0, rows, columns,
                             detail::rms_dot_term<T>{x, weight, dy, columns}, dot);
}

template <class T>
void rms_norm_backward_dx(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* inv_rms,
                          const statistic_of<T>* dot, T* dx, std::int64_t rows, std::int64_t columns,
                          std::int64_t columns_global, const std::type_identity_t<T>* addend) {
  constexpr int width = vector16<T>::size;
  detail::row_map<width>(device, aligned16(x, weight, dy, dx, addend) && columns % width == 0, rows, columns,
                         detail::rms_dx_rows<T>{x, weight, dy, inv_rms, dot, dx, columns,
                                                static_cast<statistic_of<T>>(columns_global), addend});
}

template <class T>
void rms_norm_backward_dweight(cuda& device, const T* x, const T* dy, const statistic_of<T>* inv_rms,
                               gradient_of<T>* dweight, std::int64_t rows, std::int64_t columns) {
  detail::norm_backward_weight<false>(device, x, dy, static_cast<const statistic_of<T>*>(nullptr), inv_rms, dweight,
                                      static_cast<gradient_of<T>*>(nullptr), rows, columns);
}

template <class T>
void rms_norm_backward_apply(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* inv_rms,
                             const statistic_of<T>* dot, T* dx, gradient_of<T>* dweight, std::int64_t rows,
                             std::int64_t columns, std::int64_t columns_global) {
  rms_norm_backward_dx(device, x, weight, dy, inv_rms, dot, dx, rows, columns, columns_global);
  rms_norm_backward_dweight(device, x, dy, inv_rms, dweight, rows, columns);
}

template <class T>
void rms_norm_backward(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* inv_rms, T* dx,
                       gradient_of<T>* dweight, std::int64_t rows, std::int64_t columns,
                       const std::type_identity_t<T>* addend) {
  detail::norm_backward<false>(device, x, weight, dy, static_cast<const statistic_of<T>*>(nullptr), inv_rms, dx,
                               dweight, static_cast<gradient_of<T>*>(nullptr), rows, columns,
                               static_cast<const T*>(addend));
}

}  // namespace plait::kernels
