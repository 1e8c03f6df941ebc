#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

/// The settings of one AdamW step (Loshchilov and Hutter 2019).
struct adamw_settings {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
  std::int64_t step = 1;        ///< number of this step, from 1: corrects the bias of the averages
  double gradient_scale = 1.0;  ///< multiplies the gradient first (clipping)
};

/// One step, in place, on n elements:
///   p *= 1 - lr * weight_decay;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
///   p -= lr / (1 - b1^step) * m / (sqrt(v / (1 - b2^step)) + epsilon).
/// Throws `plait::error` for step < 1.
template <class T>
void adamw(cpu&, T* parameter, const T* gradient, T* m, T* v, std::int64_t n, const adamw_settings& s) {
  if (s.step < 1) fail("adamw: step = " + std::to_string(s.step) + ", must be at least 1");
  using pack = simd::pack<T>;
  const auto step = static_cast<double>(s.step);
  const T decay = static_cast<T>(1.0 - s.learning_rate * s.weight_decay);
  const T rate = static_cast<T>(s.learning_rate / (1.0 - std::pow(s.beta1, step)));
  const T root_scale = static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(s.beta2, step)));
  const T one_minus_b1 = static_cast<T>(1.0 - s.beta1);
  const T b2 = static_cast<T>(s.beta2), one_minus_b2 = static_cast<T>(1.0 - s.beta2);
  const T epsilon = static_cast<T>(s.epsilon), g_scale = static_cast<T>(s.gradient_scale);
  const auto update = [=](pack& p, pack g, pack& mean, pack& square) {
    g *= g_scale;
    mean += (g - mean) * one_minus_b1;
    square = square * b2 + g * g * one_minus_b2;
    p = p * decay - rate * mean / (simd::sqrt<T>(square) * root_scale + epsilon);
  };
  constexpr std::int64_t w = simd::lanes<T>;
  std::int64_t i = 0;
  for (; i + w <= n; i += w) {
    pack p = simd::load(parameter + i), mean = simd::load(m + i), square = simd::load(v + i);
    update(p, simd::load(gradient + i), mean, square);
    simd::store<T>(p, parameter + i);
    simd::store<T>(mean, m + i);
    simd::store<T>(square, v + i);
  }
  if (const std::int64_t rest = n - i; rest > 0) {
    pack p = simd::load_some(parameter + i, rest, T(0)), mean = simd::load_some(m + i, rest, T(0));
    pack square = simd::load_some(v + i, rest, T(0));
    update(p, simd::load_some(gradient + i, rest, T(0)), mean, square);
    simd::store_some<T>(p, parameter + i, rest);
    simd::store_some<T>(mean, m + i, rest);
    simd::store_some<T>(square, v + i, rest);
  }
}

}  // namespace plait::kernels
