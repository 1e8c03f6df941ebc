// Element-wise CUDA kernels: arithmetic, casts, biases, activations, SwiGLU, strided copies and rotary positions. Test:
// tests/cuda/kernels/kernel_elementwise.cpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <vector>

#include "plait/kernels/cuda/arrays.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels {

// ---- arithmetic, casts and biases --------------------------------------------------------------------------------

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
  const std::int64_t step = stride == 0 ? columns : stride;
  detail::row_map<T>(device, aligned16(bias, y) && step % vector16<T>::size == 0, rows, columns,
                     detail::bias_rows<T>{bias, y, step});
}

template <class T>
void bias_gradient(cuda& device, const T* dy, gradient_of<T>* dbias, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride) {
  const std::int64_t step = stride == 0 ? columns : stride;
  detail::add_column_sums_of<T>(device, aligned16(dy) && step % vector16<T>::size == 0, rows, columns,
                                detail::bias_term<T>{dy, step}, dbias);
}

}  // namespace plait::kernels

namespace plait::kernels::detail {

/// 1 / (1 + e^-x) for elements of type T, in the arithmetic of T. bf16 uses the hardware's exponential. Its error of 2
/// + |1.2 x| units of the 24th bit (CUDA programming guide) does not reach a bf16's 8 bits where e^-x matters.
template <class T>
__device__ inline arithmetic<T> logistic(arithmetic<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return 1.0f / (1.0f + __expf(-x));
  } else if constexpr (std::is_same_v<T, float>) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return 1.0 / (1.0 + exp(-x));
  }
}

}  // namespace plait::kernels::detail

namespace plait::kernels {

// ---- activations -------------------------------------------------------------------------------------------------

namespace detail {

__device__ inline float exponential(float x) { return ::expf(x); }
__device__ inline double exponential(double x) { return ::exp(x); }
__device__ inline float error_function(float x) { return ::erff(x); }
__device__ inline double error_function(double x) { return ::erf(x); }
__device__ inline float hyperbolic_tangent(float x) { return ::tanhf(x); }
__device__ inline double hyperbolic_tangent(double x) { return ::tanh(x); }

// Each function has two operators: f(x), and dy f'(x).

struct relu {
  template <class S>
  __device__ S operator()(S x) const {
    return x > S(0) ? x : S(0);
  }
  template <class S>
  __device__ S operator()(S x, S dy) const {
    return x > S(0) ? dy : S(0);
  }
};

template <class T>
struct silu {
  using S = arithmetic<T>;
  __device__ S operator()(S x) const { return x * logistic<T>(x); }
  __device__ S operator()(S x, S dy) const {
    const S s = logistic<T>(x);
    return dy * s * (x * (S(1) - s) + S(1));
  }
};

inline constexpr double root_half = 0.70710678118654752440;

struct gelu {
  template <class S>
  __device__ S operator()(S x) const {
    return S(0.5) * x * (S(1) + error_function(x * S(root_half)));
  }
  template <class S>
  __device__ S operator()(S x, S dy) const {
    constexpr S density_at_0 = S(0.39894228040143267794);
    const S distribution = S(0.5) * (S(1) + error_function(x * S(root_half)));
    return dy * (distribution + x * density_at_0 * exponential(S(-0.5) * x * x));
  }
};

/// u = slope (x + cubic x^3), whose tanh approximates 2 Phi(x) - 1.
template <class S>
struct gelu_curve {
  static constexpr S slope = S(0.79788456080286535588);  // sqrt(2 / pi)
  static constexpr S cubic = S(0.044715);
};

struct gelu_tanh {
  template <class S>
  __device__ S operator()(S x) const {
    using curve = gelu_curve<S>;
    return S(0.5) * x * (hyperbolic_tangent(curve::slope * (x + curve::cubic * x * x * x)) + S(1));
  }
  template <class S>
  __device__ S operator()(S x, S dy) const {
    using curve = gelu_curve<S>;
    const S t = hyperbolic_tangent(curve::slope * (x + curve::cubic * x * x * x));
    const S du = curve::slope * (S(3) * curve::cubic * x * x + S(1));
    return dy * (S(0.5) * (t + S(1)) + S(0.5) * x * (S(1) - t * t) * du);
  }
};

template <activation_function Function, class T>
using function_of =
    std::tuple_element_t<static_cast<std::size_t>(Function), std::tuple<relu, silu<T>, gelu, gelu_tanh>>;

}  // namespace detail

template <activation_function Function, class T>
void activation_forward(cuda& device, const T* x, T* y, std::int64_t n) {
  detail::map(device, n, detail::function_of<Function, T>{}, y, x);
}
template <activation_function Function, class T>
void activation_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n) {
  detail::map(device, n, detail::function_of<Function, T>{}, dx, x, dy);
}

// ---- SwiGLU ------------------------------------------------------------------------------------------------------

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
  detail::row_map<T>(device, aligned16(gate_up, y), rows, ffn, detail::swiglu_rows<T>{gate_up, y, ffn});
}

template <class T>
void swiglu_backward(cuda& device, const T* gate_up, const T* dy, T* dgate_up, std::int64_t rows, std::int64_t ffn) {
  detail::row_map<T>(device, aligned16(gate_up, dy, dgate_up), rows, ffn,
                     detail::swiglu_gradient_rows<T>{gate_up, dy, dgate_up, ffn});
}

// ---- strided copies ----------------------------------------------------------------------------------------------

namespace detail {

template <int Bytes>
struct alignas(Bytes) copy_unit {
  row_of<unsigned char, Bytes> at;
};

/// Copies pieces of `units` units each, at the places that the outer dimensions of `copy` give.
template <class Unit, class Index>
static __global__ void copy_kernel(const unsigned char* from, unsigned char* to, strided_copy copy, Index pieces,
                                   std::int64_t units) {
  const int outer = copy.dims - 1;
  const auto step = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  for (std::int64_t p = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
       p < static_cast<std::int64_t>(pieces); p += step) {
    auto rest = static_cast<Index>(p);
    std::int64_t source = 0, target = 0;
    PLAIT_UNROLL
    for (int d = strided_copy::most_dims - 2; d >= 0; --d) {
      if (d >= outer) continue;
      const auto size = static_cast<Index>(copy.size[d]);
      const Index quotient = rest / size, index = rest - quotient * size;
      rest = quotient;
      source += static_cast<std::int64_t>(index) * copy.from_stride[d];
      target += static_cast<std::int64_t>(index) * copy.to_stride[d];
    }
    const auto* const read = reinterpret_cast<const Unit*>(from + source);
    auto* const write = reinterpret_cast<Unit*>(to + target);
    PLAIT_UNROLL_BY(4)
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; i < units;
         i += static_cast<std::int64_t>(gridDim.y) * blockDim.x)
      write[i] = read[i];
  }
}

template <int Bytes>
void launch_copy(cuda& device, const unsigned char* from, unsigned char* to, const strided_copy& copy) {
  constexpr std::int64_t threads = 256;
  const std::int64_t pieces = copy.pieces(), units = copy.piece_bytes() / Bytes;
  std::int64_t wide = 1;
  while (wide < units && wide < threads) wide *= 2;
  const dim3 block(static_cast<unsigned>(wide), static_cast<unsigned>(threads / wide));
  // Few long pieces are also divided among blocks.
  const dim3 grid(plait::detail::blocks_for(pieces, block.y), plait::detail::blocks_for(units, 4 * wide, 65535));
  if (pieces <= 0x7fffffff) {
    plait::detail::launch(device, {grid, block}, copy_kernel<copy_unit<Bytes>, std::uint32_t>, from, to, copy,
                          static_cast<std::uint32_t>(pieces), units);
  } else {
    plait::detail::launch(device, {grid, block}, copy_kernel<copy_unit<Bytes>, std::int64_t>, from, to, copy, pieces,
                          units);
  }
}

inline void copy_strided(cuda& device, const void* from, void* to, const strided_copy& copy) {
  if (copy.pieces() <= 0 || copy.piece_bytes() <= 0) return;
  if (copy.dims == 1) {
    device.copy(to, from, static_cast<std::size_t>(copy.piece_bytes()), device.main_stream());
    return;
  }
  auto bits = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
              static_cast<std::uintptr_t>(copy.piece_bytes());
  for (int d = 0; d + 1 < copy.dims; ++d) {
    const auto at = static_cast<std::size_t>(d);
    bits |= static_cast<std::uintptr_t>(copy.from_stride[at]) | static_cast<std::uintptr_t>(copy.to_stride[at]);
  }
  const auto* const source = static_cast<const unsigned char*>(from);
  auto* const target = static_cast<unsigned char*>(to);
  if (bits % 16 == 0) {
    launch_copy<16>(device, source, target, copy);
  } else if (bits % 8 == 0) {
    launch_copy<8>(device, source, target, copy);
  } else if (bits % 4 == 0) {
    launch_copy<4>(device, source, target, copy);
  } else if (bits % 2 == 0) {
    launch_copy<2>(device, source, target, copy);
  } else {
    launch_copy<1>(device, source, target, copy);
  }
}

}  // namespace detail

PLAIT_CUDA_INLINE void copy_3d(cuda& device, const void* from, void* to, std::int64_t planes, std::int64_t rows,
                               std::int64_t row_bytes, std::int64_t from_plane_stride, std::int64_t from_row_stride,
                               std::int64_t to_plane_stride, std::int64_t to_row_stride) {
  if (planes <= 0 || rows <= 0 || row_bytes <= 0) return;
  strided_copy copy;
  copy.push(planes, from_plane_stride, to_plane_stride);
  copy.push(rows, from_row_stride, to_row_stride);
  copy.push_bytes(row_bytes);
  detail::copy_strided(device, from, to, copy);
}

PLAIT_CUDA_INLINE void copy_2d(cuda& device, const void* from, void* to, std::int64_t rows, std::int64_t row_bytes,
                               std::int64_t from_stride, std::int64_t to_stride) {
  copy_3d(device, from, to, 1, rows, row_bytes, 0, from_stride, 0, to_stride);
}

PLAIT_CUDA_INLINE void copy_box(cuda& device, const void* in, const box& from, void* out, const box& to,
                                const box& part, std::int64_t element_bytes) {
  const strided_copy copy = copy_of(from, to, part, element_bytes);
  if (copy.dims == 0) return;
  detail::copy_strided(device, static_cast<const unsigned char*>(in) + offset_of(from, part.offset) * element_bytes,
                       static_cast<unsigned char*>(out) + offset_of(to, part.offset) * element_bytes, copy);
}

// ---- rotary positions --------------------------------------------------------------------------------------------

template <class S>
void rope_table(cuda& device, const std::int64_t* positions, std::int64_t count, std::span<const double> frequencies,
                S* cosine, S* sine) {
  const std::size_t n = static_cast<std::size_t>(count) * frequencies.size();
  if (n == 0) return;
  std::vector<S> table(2 * n);
  rope_rotations(positions, count, frequencies, table.data(), table.data() + n);
  device.upload(cosine, table.data(), n * sizeof(S), device.main_stream());
  device.upload(sine, table.data() + n, n * sizeof(S), device.main_stream());
}

namespace detail {

/// direction is 1 to rotate and -1 to rotate back; `from` may be x. The threads of a block's first dimension share a
/// row.
template <int Width, class T, class S>
static __global__ void rope_kernel(const T* from, std::int64_t from_stride, T* x, const S* cosine, const S* sine,
                                   std::int64_t rows, int heads, int half, std::int64_t row_stride,
                                   std::int64_t table_rows, S direction) {
  const int per_head = half / Width;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; r < rows;
       r += static_cast<std::int64_t>(gridDim.x) * blockDim.y) {
    // A 32-bit division takes a fraction of the time of a 64-bit one.
    const std::int64_t table_row = rows <= 0x7fffffff && table_rows <= 0x7fffffff
                                       ? static_cast<unsigned>(r) % static_cast<unsigned>(table_rows)
                                       : r % table_rows;
    const std::int64_t table = table_row * half;
    for (int i = static_cast<int>(threadIdx.x); i < heads * per_head; i += static_cast<int>(blockDim.x)) {
      const int head = i / per_head, c = (i - head * per_head) * Width;
      const std::int64_t at = static_cast<std::int64_t>(head) * 2 * half + c;
      const T* const source = from + r * from_stride + at;
      T* const first = x + r * row_stride + at;
      auto a = load_chunk<Width>(source), b = load_chunk<Width>(source + half);
      const auto cosines = load_chunk<Width>(cosine + table + c), sines = load_chunk<Width>(sine + table + c);
      PLAIT_UNROLL
      for (int j = 0; j < Width; ++j) {
        const S u = number<S>(a.at[j]), v = number<S>(b.at[j]), turn = direction * sines.at[j];
        a.at[j] = number<T>(u * cosines.at[j] - v * turn);
        b.at[j] = number<T>(v * cosines.at[j] + u * turn);
      }
      store_chunk(first, a);
      store_chunk(first + half, b);
    }
  }
}

template <class T, class S>
void rope(cuda& device, const T* from, std::int64_t from_stride, T* x, const S* cosine, const S* sine,
          std::int64_t rows, std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride,
          std::int64_t table_rows, S direction) {
  const std::int64_t half = head_dim / 2;
  if (rows <= 0 || heads <= 0 || half <= 0) return;
  constexpr int width = chunk_width<T, S>();
  const bool vectors = aligned16(from, x, cosine, sine) && half % width == 0 && (row_stride | from_stride) % width == 0;
  with_chunk<width>(vectors, [&](auto chosen) {
    constexpr int n = decltype(chosen)::value;
    constexpr std::int64_t threads = 256;
    const std::int64_t chunks = heads * half / n;
    const std::int64_t warps = chunks < threads ? (chunks + 31) / 32 : threads / 32;
    const dim3 block(static_cast<unsigned>(32 * warps), static_cast<unsigned>(threads / (32 * warps)));
    plait::detail::launch(device, {plait::detail::blocks_for(rows, block.y), block}, rope_kernel<n, T, S>, from,
                          from_stride, x, cosine, sine, rows, static_cast<int>(heads), static_cast<int>(half),
                          row_stride, table_rows, direction);
  });
}

}  // namespace detail

template <class T>
void rope_forward(cuda& device, const T* from, std::int64_t from_stride, T* x, const statistic_of<T>* cosine,
                  const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                  std::int64_t row_stride, std::int64_t table_rows) {
  detail::rope<T>(device, from, from_stride, x, cosine, sine, rows, heads, head_dim, row_stride, table_rows,
                  statistic_of<T>(1));
}

template <class T>
void rope_backward(cuda& device, const T* from, std::int64_t from_stride, T* dx, const statistic_of<T>* cosine,
                   const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                   std::int64_t row_stride, std::int64_t table_rows) {
  detail::rope<T>(device, from, from_stride, dx, cosine, sine, rows, heads, head_dim, row_stride, table_rows,
                  statistic_of<T>(-1));
}

}  // namespace plait::kernels
