// Element types of arrays, the number types of a layer (weights, gradients, masters, statistics), and the numbers of
// leaves of deterministic sums.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "plait/version.hpp"

namespace plait {

/// Brain floating point: the upper half of an IEEE binary32. It is for storage only; arithmetic is done in float.
struct bf16 {
  std::uint16_t bits = 0;
};

/// Returns the value of a bf16 as a float.
constexpr float to_float(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

/// Returns the nearest bf16, ties to even; a NaN stays a (quiet) NaN.
constexpr bf16 to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return bf16{static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded)};
}

enum class dtype : std::uint8_t { f32, f64, bf16, i32, i64, u8 };

/// Size of one element in bytes.
constexpr std::size_t size_of(dtype type) {
  constexpr std::size_t sizes[] = {4, 8, 2, 4, 8, 1};
  return sizes[static_cast<std::size_t>(type)];
}

constexpr const char* name_of(dtype type) {
  constexpr const char* names[] = {"float", "double", "bf16", "int32", "int64", "uint8"};
  return names[static_cast<std::size_t>(type)];
}

/// The dtype of a C++ element type; an unsupported type has no specialisation.
template <class T>
inline constexpr dtype dtype_of = T::plait_has_no_dtype_for_this_type;
template <>
inline constexpr dtype dtype_of<float> = dtype::f32;
template <>
inline constexpr dtype dtype_of<double> = dtype::f64;
template <>
inline constexpr dtype dtype_of<bf16> = dtype::bf16;
template <>
inline constexpr dtype dtype_of<std::int32_t> = dtype::i32;
template <>
inline constexpr dtype dtype_of<std::int64_t> = dtype::i64;
template <>
inline constexpr dtype dtype_of<std::uint8_t> = dtype::u8;

/// The number types of a layer that computes in `T`. Layers, optimizers and parameters take all their types from here.
/// To add a precision, specialise it: a struct of the user's own may take the place of `T`.
///
///   activation   values between layers, and their gradients
///   weight       a parameter where layers use it
///   gradient     sums of a parameter's gradient, over microbatches and ranks
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

/// Mixed precision (Micikevicius et al. 2018): bf16 products with float sums, float master weights and gradients.
template <>
struct precision<bf16> {
  using activation = bf16;
  using weight = bf16;
  using gradient = float;
  using master = float;
  using statistic = float;
};

/// bf16 without masters: a parameter is kept in bf16 only, and every update is rounded stochastically (as in Zamirai et
/// al. 2020, arXiv 2010.06192). Rounding to nearest would lose small updates: the bf16 nearest to weight plus update is
/// often the old weight. A parameter and AdamW's two moments take 10 bytes per element, 6 with moments in bf16, 4 with
/// moments in int8 (with masters: 14, 10 and 8). Gradients are summed in float. bf16 has the exponents of float, so no
/// format here needs loss scaling.
struct bf16_no_masters {};
template <>
struct precision<bf16_no_masters> : precision<bf16> {
  using master = bf16;
};

/// bf16 with gradients in bf16 as well, and no masters. Each pass sums its terms in float, and rounds when it adds the
/// sum to the gradient. A gradient summed over many microbatches therefore loses terms below 2^-9 of its value. A
/// parameter, its gradient and AdamW's two moments in bf16 take 8 bytes per element. Ranks sum gradients in bf16, or,
/// with `gradient_wire::f32`, in float.
struct bf16_gradients {};
template <>
struct precision<bf16_gradients> : precision<bf16_no_masters> {
  using gradient = bf16;
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

/// The type in which arithmetic on T is done: float for bf16, T for the others.
template <class T>
using arithmetic = std::conditional_t<std::is_same_v<T, bf16>, float, T>;

/// Returns x in another type, on the host, rounded to nearest even. double converts to bf16 by way of float.
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

/// Returns x in the type in which arithmetic on it is done.
template <class T>
constexpr arithmetic<T> widened(T x) {
  return converted<arithmetic<T>>(x);
}

/// Whether `Other`, an external type, has the bit format of the element type T. CUDA's __nv_bfloat16 has the format of
/// `bf16` (device/cuda.hpp). Specialise it for your own type: layers then take pointers to it without a cast.
template <class Other, class T>
inline constexpr bool same_bits = false;

/// Converts a pointer to a type with T's bit format to a pointer to T, and keeps const. Returns any other argument
/// unchanged.
template <class T, class Argument>
decltype(auto) elements_of(Argument&& argument) {
  using Other = std::remove_pointer_t<std::remove_reference_t<Argument>>;
  if constexpr (same_bits<std::remove_const_t<Other>, T>)
    return reinterpret_cast<std::conditional_t<std::is_const_v<Other>, const T, T>*>(argument);
  else
    return std::forward<Argument>(argument);
}

/// The leaves of deterministic sums. Each sum that some layout may split is split into leaves, whose number and places
/// depend on no layout. The terms of a leaf are added in order, and leaves by a binary tree. A program then gives equal
/// bits on every mesh, schedule, number of microbatches and backend. Only runs with equal numbers here are comparable.
/// A context without leaves, the default, computes sums in the fastest way.
struct deterministic_leaves {
  /// Leaves of each feature dim that may be sharded: heads, kv_heads, ffn, vocab, and those that a policy shards. For a
  /// dim whose size this number does not divide, the greatest common divisor is used. 0: sums are not deterministic.
  std::int64_t features = 0;
  /// Leaves of a step's samples: at least the number of ranks along dp times the number of microbatches.
  std::int64_t samples = 0;
  /// Leaves of a sequence: at least the number of ranks along cp, and twice that in zigzag order. Attention reads keys
  /// leaf by leaf.
  std::int64_t sequence = 0;
  /// Ranks of a zigzag order, which `leaves_under<strategy>` knows. 0: unknown, or the sequence is in original order.
  std::int64_t zigzag = 0;
  /// Layers process a microbatch's tokens in `token_chunks` chunks, one after the other. A rank has `chunk_positions`
  /// neighbouring positions of each chunk. Chunk i of microbatch m counts as microbatch m * token_chunks + i of its
  /// step.
  std::int64_t token_chunks = 1, chunk_positions = 1;

  /// Whether sums are deterministic.
  constexpr explicit operator bool() const { return features > 0; }
  friend constexpr bool operator==(const deterministic_leaves&, const deterministic_leaves&) = default;
};

/// Deterministic sums as a policy: `context{device, world, sizes, seed, deterministic<8, 8, 2>{}}`.
template <std::int64_t Features, std::int64_t Samples = Features, std::int64_t Sequence = 1>
struct deterministic {
  static_assert(Features > 0 && Samples > 0 && Sequence > 0,
                "deterministic<Features, Samples, Sequence> are numbers of leaves: 1 or more each");
  constexpr operator deterministic_leaves() const { return {Features, Samples, Sequence}; }  // NOLINT: equal values
};

}  // namespace plait
