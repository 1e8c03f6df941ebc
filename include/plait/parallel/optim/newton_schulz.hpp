// The Newton-Schulz iteration that makes a matrix nearly orthogonal, in products of the device. It knows no mesh and no
// parameter: the matrix is whole.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// The polynomial of a step, a s + b s^3 + c s^5 for each singular value s, and how many steps there are. The default
/// (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") brings values between 0.002 and 1 to
/// 0.7 to 1.2 in five steps.
struct newton_schulz_options {
  int steps = 5;
  double a = 3.4445, b = -4.7750, c = 2.0315;
  double epsilon = 1e-7;  ///< is added to the norm that the matrix is divided by at first
};

/// Replaces the row-major `x` [rows, columns] by U V' nearly, where U S V' is its singular value decomposition:
///   X = x / (|x| + epsilon);  in each step: A = X X';  B = b A + c A^2;  X = a X + B X,
/// with the Frobenius norm. Where there are more rows than columns, A = X' X and X = a X + X B, which is equal and has
/// the smaller A. T is float or double; products take factors of type `Factor`, T or, for float, bf16, and sum in T. A
/// matrix of zeros stays so. Nothing waits on the host.
template <class Factor, class T, compute_device Device>
void newton_schulz(Device& device, T* x, std::int64_t rows, std::int64_t columns,
                   const newton_schulz_options& how = {}) {
  const std::int64_t n = rows * columns, k = std::min(rows, columns);
  if (n == 0) return;
  const bool tall = rows > columns;
  auto sum = make_buffer<double>(device, 1);
  auto* const squares = sum.template data<double>();
  device.zero(squares, sizeof(double), device.main_stream());
  const kernels::const_elements<T> all{x, n};
  kernels::add_sum_squares(device, std::span<const kernels::const_elements<T>>(&all, 1), squares);
  kernels::divide_by_norm(device, static_cast<const T*>(x), x, n, squares, how.epsilon);

  auto products = make_buffer<T>(device, static_cast<std::size_t>(k * k));
  auto x_factors = make_buffer<Factor>(device, static_cast<std::size_t>(n)),
       a_factors = make_buffer<Factor>(device, static_cast<std::size_t>(k * k));
  T* const a = products.template data<T>();
  auto* const xf = x_factors.template data<Factor>();
  auto* const af = a_factors.template data<Factor>();
  const auto as_factors = [&](const T* from, Factor* to, std::int64_t count) {
    if constexpr (std::is_same_v<T, Factor>) {
      device.copy(to, from, static_cast<std::size_t>(count) * sizeof(T), device.main_stream());
    } else {
      kernels::cast(device, from, to, count);
    }
  };
  const T one = 1, zero = 0, scale = static_cast<T>(how.a), linear = static_cast<T>(how.b),
          square = static_cast<T>(how.c);
  for (int step = 0; step < how.steps; ++step) {
    as_factors(x, xf, n);
    device.gemm(tall, !tall, k, k, tall ? rows : columns, one, static_cast<const Factor*>(xf), columns,
                static_cast<const Factor*>(xf), columns, zero, a, k);
    as_factors(a, af, k * k);
    device.gemm(false, false, k, k, k, square, static_cast<const Factor*>(af), k, static_cast<const Factor*>(af), k,
                linear, a, k);
    as_factors(a, af, k * k);
    if (tall) {
      device.gemm(false, false, rows, columns, k, one, static_cast<const Factor*>(xf), columns,
                  static_cast<const Factor*>(af), k, scale, x, columns);
    } else {
      device.gemm(false, false, rows, columns, k, one, static_cast<const Factor*>(af), k,
                  static_cast<const Factor*>(xf), columns, scale, x, columns);
    }
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
