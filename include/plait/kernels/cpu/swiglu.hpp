// SwiGLU (Shazeer 2020) on the CPU: y = silu(gate) * up. `gate_up` is [rows, 2, ffn]: a row holds its gate columns,
// then its up columns. y and dy are [rows, ffn]. The matrix products before and after it are the layer's, nn/mlp.hpp.
#pragma once

#include <cstdint>

#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/activations.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

template <class T>
void swiglu_forward(cpu&, const T* gate_up, T* y, std::int64_t rows, std::int64_t ffn) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const gate = gate_up + r * 2 * ffn;
    simd::transform(
        ffn, y + r * ffn, [](simd::pack<T> g, simd::pack<T> u) { return g * detail::sigmoid<T>(g) * u; }, gate,
        gate + ffn);
  }
}

/// dgate_up [rows, 2, ffn] from the forward input and dy; dgate_up may be the array of gate_up.
template <class T>
void swiglu_backward(cpu&, const T* gate_up, const T* dy, T* dgate_up, std::int64_t rows, std::int64_t ffn) {
  constexpr std::int64_t w = simd::lanes<T>;
  using A = arithmetic<T>;
  using pack = simd::pack<T>;
  const auto gradients = [](pack g, pack u, pack d, pack& dg, pack& du) {
    const pack s = detail::sigmoid<T>(g);
    du = d * g * s;
    dg = d * u * s * (g * (A(1) - s) + A(1));
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const gate = gate_up + r * 2 * ffn;
    const T* const up = gate + ffn;
    const T* const d = dy + r * ffn;
    T* const dgate = dgate_up + r * 2 * ffn;
    pack dg, du;
    std::int64_t c = 0;
    for (; c + w <= ffn; c += w) {
      gradients(simd::load(gate + c), simd::load(up + c), simd::load(d + c), dg, du);
      simd::store<T>(dg, dgate + c);
      simd::store<T>(du, dgate + ffn + c);
    }
    if (const std::int64_t rest = ffn - c; rest > 0) {
      gradients(simd::load_some(gate + c, rest, 0), simd::load_some(up + c, rest, 0), simd::load_some(d + c, rest, 0),
                dg, du);
      simd::store_some<T>(dg, dgate + c, rest);
      simd::store_some<T>(du, dgate + ffn + c, rest);
    }
  }
}

}  // namespace plait::kernels
