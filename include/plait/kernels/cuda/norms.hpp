// CUDA kernels of RMS norm and layer norm. Test: tests/cuda/kernels/kernel_norms.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "plait/kernels/cuda/arrays.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels::detail {

// y = n w + b with n = (x - mean) inverse. RMS norm has neither mean nor b (`Centred` is false). All arithmetic is in
// S = arithmetic<T>.
//
// ---- whole rows --------------------------------------------------------------------------------------------------

inline __host__ __device__ float inverse_root(float x) { return 1.0f / sqrtf(x); }
inline __host__ __device__ double inverse_root(double x) { return 1.0 / sqrt(x); }

/// Loads row r of x + addend, rounded to T, into registers and into `sum`. Chunks not in registers are read again from
/// `sum`.
template <class S, int Width, class T>
__device__ inline void load_sum(held_row<Width, T>& in, const T* x, const T* addend, T* sum, std::int64_t r,
                                std::int64_t rows, std::int64_t columns) {
  const auto add = [](chunk<Width, T>& to, const chunk<Width, T>& more) {
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) to.at[j] = number<T>(number<S>(to.at[j]) + number<S>(more.at[j]));
  };
  held_row<Width, T> more;
  in.load(x, r, rows, columns);
  more.load(addend, r, rows, columns);
  T* const to = sum + r * columns;
  each_held<Width, true>(
      columns,
      [&](std::int64_t c, int k, const chunk<Width, T>&, const chunk<Width, T>&) {
        add(in.held[k], more.held[k]);
        store_chunk(to + c, in.held[k]);
      },
      in, more);
  for (std::int64_t c = held_row<Width, T>::column_of(held_chunks); c < columns;
       c += static_cast<std::int64_t>(blockDim.x) * Width) {
    chunk<Width, T> both = load_chunk<Width>(in.row + c);
    add(both, load_chunk<Width>(more.row + c));
    store_chunk(to + c, both);
  }
  in.row = to;
}

/// Computes y and the statistics of whole rows of x or, with `Sum`, of x + addend, which is written to `sum`.
template <int Width, bool Centred, bool Sum, class T, class S>
static __global__ void __launch_bounds__(most_row_threads, Sum ? 1 : 0)
    norm_forward_kernel(const T* x, const T* weight, const T* bias, T* y, S* mean_out, S* inverse_out,
                        std::int64_t rows, std::int64_t columns, S eps, const T* addend, T* sum_out) {
  __shared__ S scratch[warp_lanes];
  const S count = static_cast<S>(columns);
  for (std::int64_t r = first_row(); r < rows; r += row_step()) {
    held_row<Width, T> in;
    if constexpr (Sum)
      load_sum<S>(in, x, addend, sum_out, r, rows, columns);
    else
      in.load(x, r, rows, columns);
    S mean = 0;
    if constexpr (Centred) {
      S sum = 0;
      each_held<Width, false>(
          columns,
          [&](std::int64_t, int, const chunk<Width, T>& v) {
            PLAIT_UNROLL
            for (int j = 0; j < Width; ++j) sum += number<S>(v.at[j]);
          },
          in);
      mean = row_sum(sum, scratch) / count;
    }
    S squares = 0;
    each_held<Width, false>(
        columns,
        [&](std::int64_t, int, const chunk<Width, T>& v) {
          PLAIT_UNROLL
          for (int j = 0; j < Width; ++j) {
            const S centred = number<S>(v.at[j]) - mean;
            squares += centred * centred;
          }
        },
        in);
    const S inverse = inverse_root(row_sum(squares, scratch) / count + eps);
    if (threadIdx.x == 0) {
      if constexpr (Centred) mean_out[r] = mean;
      inverse_out[r] = inverse;
    }
    each_held<Width, false>(
        columns,
        [&](std::int64_t c, int, const chunk<Width, T>& v) {
          const auto w = load_chunk<Width>(weight + c);
          chunk<Width, T> b{}, out;
          if constexpr (Centred) b = load_chunk<Width>(bias + c);
          PLAIT_UNROLL
          for (int j = 0; j < Width; ++j) {
            S value = (number<S>(v.at[j]) - mean) * inverse * number<S>(w.at[j]);
            if constexpr (Centred) value += number<S>(b.at[j]);
            out.at[j] = number<T>(value);
          }
          store_chunk(y + r * columns + c, out);
        },
        in);
  }
}

/// Writes dx of a chunk: inverse (dy w - shift - n pull) + addend, where shift and pull are the row's means of dy w and
/// dy w n.
template <int Width, class T, class S>
__device__ inline void store_norm_dx(const chunk<Width, T>& x, const chunk<Width, T>& w, const chunk<Width, T>& dy,
                                     S mean, S inverse, S shift, S pull, const T* addend, T* dx) {
  chunk<Width, T> out, add{};
  if (addend != nullptr) add = load_chunk<Width>(addend);
  PLAIT_UNROLL
  for (int j = 0; j < Width; ++j) {
    const S normalised = (number<S>(x.at[j]) - mean) * inverse;
    out.at[j] = number<T>(inverse * (number<S>(dy.at[j]) * number<S>(w.at[j]) - shift - normalised * pull) +
                          number<S>(add.at[j]));
  }
  store_chunk(dx, out);
}

/// Sums a thread's chunks over the warps of a block's second dimension, into row blockIdx.x of partial.
template <int Width, class S>
__device__ inline void store_partial(const row_of<S, Width> (&sums)[held_chunks], S* tile, S* partial,
                                     std::int64_t columns) {
  if (blockDim.y == 1) {
    PLAIT_UNROLL
    for (int k = 0; k < held_chunks; ++k) {
      const std::int64_t c = (static_cast<std::int64_t>(k) * blockDim.x + threadIdx.x) * Width;
      if (c >= columns) continue;
      chunk<Width, S> out;
      PLAIT_UNROLL
      for (int j = 0; j < Width; ++j) out.at[j] = sums[k][j];
      store_chunk(partial + blockIdx.x * columns + c, out);
    }
    return;
  }
  for (unsigned warp = 0; warp < blockDim.y; ++warp) {
    if (threadIdx.y == warp) {
      PLAIT_UNROLL
      for (int k = 0; k < held_chunks; ++k) {
        PLAIT_UNROLL
        for (int j = 0; j < Width; ++j) {
          S& to = tile[(k * warp_lanes + static_cast<int>(threadIdx.x)) * Width + j];
          to = warp == 0 ? sums[k][j] : to + sums[k][j];
        }
      }
    }
    __syncthreads();
  }
  for (std::int64_t c = threadIdx.y * warp_lanes + threadIdx.x; c < columns; c += blockDim.y * warp_lanes)
    partial[blockIdx.x * columns + c] = tile[c];
  __syncthreads();
}

/// The most threads per row if registers also hold the sums of the weights' gradients.
inline constexpr int norm_backward_threads = 256;

/// dx of whole rows. With `Weight` also partial[0, block, c] of dy n and, if `Centred`, partial[1, block, c] of dy;
/// registers must then hold a whole row.
template <int Width, bool Centred, bool Weight, class T, class S>
static __global__ void __launch_bounds__(Weight ? norm_backward_threads : most_row_threads, 1)
    norm_backward_kernel(const T* x, const T* weight, const T* dy, const S* mean_in, const S* inverse_in, T* dx,
                         S* partial, std::int64_t rows, std::int64_t columns, const T* addend) {
  __shared__ S scratch[warp_lanes];
  S dweight[held_chunks][Width] = {};
  S dbias[held_chunks][Width] = {};
  const S count = static_cast<S>(columns);
  // With weights few blocks loop over many rows: the next row is loaded while one is summed.
  held_row<Width, T> in, gradient, next_in, next_gradient;
  if constexpr (Weight) {
    next_in.load(x, first_row(), rows, columns);
    next_gradient.load(dy, first_row(), rows, columns);
  }
  for (std::int64_t r = first_row(); r < rows; r += row_step()) {
    if constexpr (Weight) {
      in = next_in;
      gradient = next_gradient;
      next_in.load(x, r + row_step(), rows, columns);
      next_gradient.load(dy, r + row_step(), rows, columns);
    } else {
      in.load(x, r, rows, columns);
      gradient.load(dy, r, rows, columns);
    }
    const S inverse = inverse_in[r];
    S mean = 0, shift = 0, pull = 0;
    if constexpr (Centred) mean = mean_in[r];
    each_held<Width, Weight>(
        columns,
        [&](std::int64_t c, int k, const chunk<Width, T>& v, const chunk<Width, T>& d) {
          const auto w = load_chunk<Width>(weight + c);
          PLAIT_UNROLL
          for (int j = 0; j < Width; ++j) {
            const S normalised = (number<S>(v.at[j]) - mean) * inverse, g = number<S>(d.at[j]);
            if constexpr (Centred) shift += g * number<S>(w.at[j]);
            pull += g * number<S>(w.at[j]) * normalised;
            if constexpr (Weight) {
              dweight[k][j] += g * normalised;
              if constexpr (Centred) dbias[k][j] += g;
            }
          }
        },
        in, gradient);
    if constexpr (Centred) shift = row_sum(shift, scratch) / count;
    pull = row_sum(pull, scratch) / count;
    each_held<Width, Weight>(
        columns,
        [&](std::int64_t c, int, const chunk<Width, T>& v, const chunk<Width, T>& d) {
          store_norm_dx(v, load_chunk<Width>(weight + c), d, mean, inverse, shift, pull,
                        addend == nullptr ? nullptr : addend + r * columns + c, dx + r * columns + c);
        },
        in, gradient);
  }
  if constexpr (Weight) {
    __shared__ S tile[held_chunks * warp_lanes * Width];
    store_partial<Width>(dweight, tile, partial, columns);
    if constexpr (Centred) store_partial<Width>(dbias, tile, partial + gridDim.x * columns, columns);
  }
}

/// sums[0] of dy n and sums[1] of dy over the rows.
template <bool Centred, class T>
struct norm_weight_term {
  using sum_type = arithmetic<T>;
  static constexpr int outputs = Centred ? 2 : 1;
  const T *x, *dy;
  const sum_type *mean, *inverse;
  std::int64_t columns;

  template <int Width>
  __device__ void add(std::int64_t r, std::int64_t c, row_of<row_of<sum_type, Width>, outputs>& sums) const {
    const auto v = load_chunk<Width>(x + r * columns + c), d = load_chunk<Width>(dy + r * columns + c);
    const sum_type scale = inverse[r];
    sum_type centre = 0;
    if constexpr (Centred) centre = mean[r];
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      const auto g = number<sum_type>(d.at[j]);
      sums[0][j] += g * ((number<sum_type>(v.at[j]) - centre) * scale);
      if constexpr (Centred) sums[1][j] += g;
    }
  }
};

// ---- rows divided over ranks, step by step -----------------------------------------------------------------------

/// The mean and the inverse of a row. Without a mean, the mean is the constant 0.
template <bool Centred, class S>
struct norm_moments {
  S mean, inverse;
  static __device__ norm_moments of(const S* mean, const S* inverse, std::int64_t r) {
    if constexpr (Centred) {
      return {mean[r], inverse[r]};
    } else {
      return {S(0), inverse[r]};
    }
  }
};

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

template <bool Centred, class T>
struct squares_term {
  static constexpr int outputs = 1;
  using S = arithmetic<T>;
  const T* x;
  const S* sums_in;
  std::int64_t columns;
  S columns_global;

  __device__ S row(std::int64_t r) const {
    if constexpr (Centred) {
      return sums_in[r] / columns_global;
    } else {
      return S(0);
    }
  }
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

template <class S>
static __global__ void norm_statistics_kernel(const S* sums, const S* squares, S* mean, S* inverse, std::int64_t rows,
                                              double columns, double eps) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  const double square = static_cast<double>(squares[r]);
  if (mean != nullptr) mean[r] = static_cast<S>(static_cast<double>(sums[r]) / columns);
  inverse[r] = static_cast<S>(inverse_root(square / columns + eps));
}

template <bool Centred, class T>
struct norm_apply_rows {
  using S = arithmetic<T>;
  const T *x, *weight, *bias;
  const S *mean, *inverse;
  T* y;
  std::int64_t columns;

  __device__ auto row(std::int64_t r) const { return norm_moments<Centred, S>::of(mean, inverse, r); }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, norm_moments<Centred, S> of) const {
    const auto v = load_chunk<Width>(x + r * columns + c), w = load_chunk<Width>(weight + c);
    chunk<Width, T> b{}, out;
    if constexpr (Centred) b = load_chunk<Width>(bias + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      S value = (number<S>(v.at[j]) - of.mean) * of.inverse * number<S>(w.at[j]);
      if constexpr (Centred) value += number<S>(b.at[j]);
      out.at[j] = number<T>(value);
    }
    store_chunk(y + r * columns + c, out);
  }
};

/// sums[0] of dy w n and, if `Centred`, sums[1] of dy w.
template <bool Centred, class T>
struct norm_dots_term {
  static constexpr int outputs = Centred ? 2 : 1;
  using S = arithmetic<T>;
  const T *x, *weight, *dy;
  const S *mean, *inverse;
  std::int64_t columns;

  __device__ auto row(std::int64_t r) const { return norm_moments<Centred, S>::of(mean, inverse, r); }
  template <int Width>
  __device__ void add(std::int64_t r, std::int64_t c, norm_moments<Centred, S> of, S (&sums)[Centred ? 2U : 1U]) const {
    const auto v = load_chunk<Width>(x + r * columns + c), d = load_chunk<Width>(dy + r * columns + c);
    const auto w = load_chunk<Width>(weight + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      const S g = number<S>(d.at[j]) * number<S>(w.at[j]);
      sums[0] += g * ((number<S>(v.at[j]) - of.mean) * of.inverse);
      if constexpr (Centred) sums[1] += g;
    }
  }
};

template <bool Centred, class T>
struct norm_dx_rows {
  using S = arithmetic<T>;
  struct numbers {
    norm_moments<Centred, S> moments;
    S shift, pull;
  };
  const T *x, *weight, *dy;
  const S *mean, *inverse, *dots;
  T* dx;
  std::int64_t columns;
  S columns_global;
  const T* addend;

  __device__ numbers row(std::int64_t r) const {
    const auto moments = norm_moments<Centred, S>::of(mean, inverse, r);
    if constexpr (Centred) {
      return {moments, dots[2 * r + 1] / columns_global, dots[2 * r] / columns_global};
    } else {
      return {moments, S(0), dots[r] / columns_global};
    }
  }
  template <int Width>
  __device__ void at(std::int64_t r, std::int64_t c, numbers of) const {
    const std::int64_t at = r * columns + c;
    store_norm_dx(load_chunk<Width>(x + at), load_chunk<Width>(weight + c), load_chunk<Width>(dy + at), of.moments.mean,
                  of.moments.inverse, of.shift, of.pull, addend == nullptr ? nullptr : addend + at, dx + at);
  }
};

}  // namespace plait::kernels::detail

namespace plait::kernels {

template <class T>
void norm_forward(cuda& device, const T* x, const T* weight, const std::type_identity_t<T>* bias, T* y,
                  statistic_of<T>* mean, statistic_of<T>* inverse, std::int64_t rows, std::int64_t columns, double eps,
                  const std::type_identity_t<T>* addend, std::type_identity_t<T>* sum) {
  using S = statistic_of<T>;
  if (rows <= 0) return;
  detail::with_row_chunk<T>(aligned16(x, weight, bias, y, addend, sum), columns, [&](auto chosen) {
    constexpr int n = decltype(chosen)::value;
    const dim3 block = detail::row_block<n>(columns);
    detail::with_centre(mean, [&](auto centred) {
      constexpr bool is_centred = decltype(centred)::value;
      plait::detail::launch(device, {plait::detail::blocks_for(rows, block.y), block},
                            addend == nullptr ? detail::norm_forward_kernel<n, is_centred, false, T, S>
                                              : detail::norm_forward_kernel<n, is_centred, true, T, S>,
                            x, weight, bias, y, mean, inverse, rows, columns, static_cast<S>(eps), addend, sum);
    });
  });
}

template <class T>
void norm_backward_dweight(cuda& device, const T* x, const T* dy, const statistic_of<T>* mean,
                           const statistic_of<T>* inverse, gradient_of<T>* dweight, gradient_of<T>* dbias,
                           std::int64_t rows, std::int64_t columns) {
  detail::with_centre(mean, [&](auto centred) {
    detail::add_column_sums_of<T>(device, aligned16(x, dy), rows, columns,
                                  detail::norm_weight_term<decltype(centred)::value, T>{x, dy, mean, inverse, columns},
                                  dweight, dbias);
  });
}

// If a row fits into the registers of a block, it takes one pass over x and dy.
template <class T>
void norm_backward(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                   const statistic_of<T>* inverse, T* dx, gradient_of<T>* dweight, gradient_of<T>* dbias,
                   std::int64_t rows, std::int64_t columns, const std::type_identity_t<T>* addend) {
  using S = statistic_of<T>;
  if (rows <= 0 || columns <= 0) return;
  const auto launch = [&](auto chosen, auto centred) {
    constexpr int n = decltype(chosen)::value;
    constexpr bool is_centred = decltype(centred)::value;
    if (dweight != nullptr && columns <= std::int64_t{detail::norm_backward_threads} * detail::held_chunks * n) {
      const dim3 block = detail::row_block<n>(columns, detail::norm_backward_threads);
      // Enough blocks for the largest GPUs. With more rows, at least four rows per block keep the scratch small.
      constexpr std::int64_t blocks = 512;
      const std::int64_t groups = std::clamp((rows + 4 * block.y - 1) / (4 * block.y), std::int64_t{1}, blocks);
      auto partial = make_buffer<S>(device, static_cast<std::size_t>((is_centred ? 2 : 1) * groups * columns));
      S* const sums = partial.template data<S>();
      plait::detail::launch(device, {static_cast<unsigned>(groups), block},
                            detail::norm_backward_kernel<n, is_centred, true, T, S>, x, weight, dy, mean, inverse, dx,
                            sums, rows, columns, addend);
      detail::finish_columns(device, static_cast<const S*>(sums), dweight, dbias, groups, columns);
      return;
    }
    if (dweight != nullptr) norm_backward_dweight(device, x, dy, mean, inverse, dweight, dbias, rows, columns);
    const dim3 block = detail::row_block<n>(columns);
    plait::detail::launch(device, {plait::detail::blocks_for(rows, block.y), block},
                          detail::norm_backward_kernel<n, is_centred, false, T, S>, x, weight, dy, mean, inverse, dx,
                          static_cast<S*>(nullptr), rows, columns, addend);
  };
  if (dx == nullptr) {
    if (dweight != nullptr) norm_backward_dweight(device, x, dy, mean, inverse, dweight, dbias, rows, columns);
    return;
  }
  detail::with_row_chunk<T>(aligned16(x, weight, dy, dx, addend), columns, [&](auto chosen) {
    detail::with_centre(mean, [&](auto centred) { launch(chosen, centred); });
  });
}

template <class T>
void row_sums(cuda& device, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns) {
  detail::row_sums_of<T>(device, aligned16(x), rows, columns, detail::sum_term<T>{x, columns}, out);
}

template <class T>
void row_squares(cuda& device, const T* x, const statistic_of<T>* sums, statistic_of<T>* out, std::int64_t rows,
                 std::int64_t columns, std::int64_t columns_global) {
  detail::with_centre(sums, [&](auto centred) {
    detail::row_sums_of<T>(device, aligned16(x), rows, columns,
                           detail::squares_term<decltype(centred)::value, T>{
                               x, sums, columns, static_cast<statistic_of<T>>(columns_global)},
                           out);
  });
}

template <class S>
void norm_statistics(cuda& device, const std::type_identity_t<S>* sums, const S* squares, std::type_identity_t<S>* mean,
                     S* inverse, std::int64_t rows, std::int64_t columns_global, double eps) {
  if (rows <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(rows, 128), 128}, detail::norm_statistics_kernel<S>, sums,
                        squares, mean, inverse, rows, static_cast<double>(columns_global), eps);
}

template <class T>
void norm_apply(cuda& device, const T* x, const statistic_of<T>* mean, const statistic_of<T>* inverse, const T* weight,
                const std::type_identity_t<T>* bias, T* y, std::int64_t rows, std::int64_t columns) {
  detail::with_centre(mean, [&](auto centred) {
    detail::row_map<T>(
        device, aligned16(x, weight, bias, y), rows, columns,
        detail::norm_apply_rows<decltype(centred)::value, T>{x, weight, bias, mean, inverse, y, columns});
  });
}

template <class T>
void norm_backward_dots(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                        const statistic_of<T>* inverse, statistic_of<T>* dots, std::int64_t rows,
                        std::int64_t columns) {
  detail::with_centre(mean, [&](auto centred) {
    detail::row_sums_of<T>(device, aligned16(x, weight, dy), rows, columns,
                           detail::norm_dots_term<decltype(centred)::value, T>{x, weight, dy, mean, inverse, columns},
                           dots);
  });
}

template <class T>
void norm_backward_dx(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                      const statistic_of<T>* inverse, const statistic_of<T>* dots, T* dx, std::int64_t rows,
                      std::int64_t columns, std::int64_t columns_global, const std::type_identity_t<T>* addend) {
  detail::with_centre(mean, [&](auto centred) {
    detail::row_map<T>(
        device, aligned16(x, weight, dy, dx, addend), rows, columns,
        detail::norm_dx_rows<decltype(centred)::value, T>{x, weight, dy, mean, inverse, dots, dx, columns,
                                                          static_cast<statistic_of<T>>(columns_global), addend});
  });
}

}  // namespace plait::kernels
