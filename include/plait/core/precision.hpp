// The table from the number type of a layer to those of its weights, gradients, master weights and statistics.
// Elements themselves, and their conversion, are in core/dtype.hpp. A user of most rows: nn/parameter.hpp.
#pragma once

#include <type_traits>

#include "plait/core/dtype.hpp"

namespace plait {

/// The number types of a layer that computes in `T`. Layers, optimizers and parameters take all their types from here,
/// so another precision is another specialisation: a struct of the user's own may stand where `T` stands.
///
///   activation   what flows between layers, and its gradient
///   weight       a parameter where layers use it
///   gradient     what a parameter's gradient is summed in, over microbatches and ranks
///   master       a parameter between steps, as the optimizer updates it
///   statistic    per-row numbers: norms, softmax, losses, rotary tables
template <class T>
struct precision {
  using activation = T;
  using weight = T;
  using gradient = T;
  using master = T;
  using statistic = T;
};

/// Mixed precision (Micikevicius et al. 2018): bf16 products summed in float, float master weights and gradients.
template <>
struct precision<bf16> {
  using activation = bf16;
  using weight = bf16;
  using gradient = float;
  using master = float;
  using statistic = float;
};

/// bf16 without masters: a parameter is kept in bf16 alone, and every update is rounded stochastically (as in Zamirai
/// et al. 2020, arXiv 2010.06192), because the nearest bf16 of a weight and a small step is the weight. A parameter and
/// AdamW's two moments take 10 bytes for each element, 6 with moments in bf16, 4 with those in int8 (beside 14, 10 and
/// 8 with masters). Gradients are summed in float. bf16 has the exponents of float, so that no format here needs the
/// loss to be scaled.
struct bf16_no_masters {};
template <>
struct precision<bf16_no_masters> {
  using activation = bf16;
  using weight = bf16;
  using gradient = float;
  using master = bf16;
  using statistic = float;
};

/// bf16 with gradients in bf16 as well, and no masters: each pass sums in float what it adds, and rounds when it adds
/// it, so that gradients of many microbatches lose what is below 2^-9 of them. A parameter, its gradient and AdamW's
/// two moments in bf16 take 8 bytes for each element. Ranks sum gradients in bf16, or, with `gradient_wire::f32`, in
/// float.
struct bf16_gradients {};
template <>
struct precision<bf16_gradients> {
  using activation = bf16;
  using weight = bf16;
  using gradient = bf16;
  using master = bf16;
  using statistic = float;
};

/// As `bf16_gradients`, with float masters: updates are exact, and only gradients are rounded to bf16.
struct bf16_gradients_float_masters {};
template <>
struct precision<bf16_gradients_float_masters> : precision<bf16_gradients> {
  using master = float;
};

template <class T>
using activation_of = typename precision<T>::activation;
template <class T>
using weight_of = typename precision<T>::weight;
template <class T>
using gradient_of = typename precision<T>::gradient;
template <class T>
using master_of = typename precision<T>::master;
template <class T>
using statistic_of = typename precision<T>::statistic;

/// The type in which arithmetic on T happens: float for bf16, T for the others.
template <class T>
using arithmetic = std::conditional_t<std::is_same_v<T, bf16>, float, T>;

/// Returns x in another type, on the host: rounded to nearest even, double to bf16 by way of float.
template <class To, class From>
constexpr To converted(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<To, bf16>) {
    return to_bf16(static_cast<float>(x));
  } else if constexpr (std::is_same_v<From, bf16>) {
    return static_cast<To>(to_float(x));
  } else {
    return static_cast<To>(x);
  }
}

/// Returns x in the type in which arithmetic on it happens.
template <class T>
constexpr arithmetic<T> widened(T x) {
  return converted<arithmetic<T>>(x);
}

}  // namespace plait
