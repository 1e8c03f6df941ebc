// The launchers of CUDA kernels that plait::compiled_cuda provides, in bf16, float and double. Programs that link it
// define PLAIT_COMPILED_CUDA, and need nvcc for no file of their own; without it, each file that nvcc compiles compiles
// the kernels it launches, as it does for other types.
#pragma once

#include "plait/kernels/cuda/activations.hpp"
#include "plait/kernels/cuda/adamw.hpp"
#include "plait/kernels/cuda/adamw_rounded.hpp"
#include "plait/kernels/cuda/attention_backward.hpp"
#include "plait/kernels/cuda/attention_forward.hpp"
#include "plait/kernels/cuda/copy.hpp"
#include "plait/kernels/cuda/cross_entropy.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
#include "plait/kernels/cuda/embedding.hpp"
#include "plait/kernels/cuda/layer_norm.hpp"
#include "plait/kernels/cuda/merge_lse.hpp"
#include "plait/kernels/cuda/muon.hpp"
#include "plait/kernels/cuda/random.hpp"
#include "plait/kernels/cuda/reductions.hpp"
#include "plait/kernels/cuda/rms_norm.hpp"
#include "plait/kernels/cuda/rope.hpp"
#include "plait/kernels/cuda/swiglu.hpp"

// A launcher that is declared `extern` is not instantiated, and so neither are the kernels that it alone names. (nvcc
// cannot link a kernel that is itself `extern`.)
#if defined(PLAIT_COMPILING_CUDA) || defined(PLAIT_COMPILING_CUDA_DOUBLE)
#define PLAIT_KERNEL(...) template __VA_ARGS__;
#elif defined(PLAIT_COMPILED_CUDA)
#define PLAIT_KERNEL(...) extern template __VA_ARGS__;
#endif

#ifdef PLAIT_KERNEL

/// Every launcher that takes activations or weights of T, with statistics and gradients of weights of S.
#define PLAIT_KERNELS_OF(T, S)                                                                                         \
  PLAIT_KERNEL(void relu_forward(cuda&, const T*, T*, std::int64_t))                                                   \
  PLAIT_KERNEL(void relu_backward(cuda&, const T*, const T*, T*, std::int64_t))                                        \
  PLAIT_KERNEL(void silu_forward(cuda&, const T*, T*, std::int64_t))                                                   \
  PLAIT_KERNEL(void silu_backward(cuda&, const T*, const T*, T*, std::int64_t))                                        \
  PLAIT_KERNEL(void gelu_forward(cuda&, const T*, T*, std::int64_t))                                                   \
  PLAIT_KERNEL(void gelu_backward(cuda&, const T*, const T*, T*, std::int64_t))                                        \
  PLAIT_KERNEL(void gelu_tanh_forward(cuda&, const T*, T*, std::int64_t))                                              \
  PLAIT_KERNEL(void gelu_tanh_backward(cuda&, const T*, const T*, T*, std::int64_t))                                   \
  PLAIT_KERNEL(                                                                                                        \
      void adamw_update(cuda&, std::span<const adamw_tensor<S, S, T>>, const adamw_settings&, const adamw_scalars*))   \
  PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<S, S, T, bf16>>, const adamw_settings&,   \
                                 const adamw_scalars*))                                                                \
  PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<S, S, T, std::uint8_t>>,                  \
                                 const adamw_settings&, const adamw_scalars*))                                         \
  PLAIT_KERNEL(void attention_forward(cuda&, const T*, const T*, const T*, T*, S*, const attention_shape&,             \
                                      const attention_choice&))                                                        \
  PLAIT_KERNEL(void attention_delta(cuda&, const T*, const T*, S*, const attention_shape&))                            \
  PLAIT_KERNEL(void attention_backward(cuda&, const T*, const T*, const T*, const T*, const S*, const T*, T*, T*, T*,  \
                                       const attention_shape&, attention_accumulate, const S*,                         \
                                       const attention_choice&))                                                       \
  PLAIT_KERNEL(void cross_entropy_max(cuda&, const T*, S*, std::int64_t, const vocabulary_range&))                     \
  PLAIT_KERNEL(void cross_entropy_statistics(cuda&, const T*, const std::int64_t*, const S*, S*, S*, S*, std::int64_t, \
                                             const vocabulary_range&, const cross_entropy_settings&))                  \
  PLAIT_KERNEL(void cross_entropy_statistics(cuda&, const T*, const std::int32_t*, const S*, S*, S*, S*, std::int64_t, \
                                             const vocabulary_range&, const cross_entropy_settings&))                  \
  PLAIT_KERNEL(void cross_entropy_local_statistics(cuda&, const T*, const std::int64_t*, S*, S*, S*, S*, std::int64_t, \
                                                   const vocabulary_range&, const cross_entropy_settings&))            \
  PLAIT_KERNEL(void cross_entropy_local_statistics(cuda&, const T*, const std::int32_t*, S*, S*, S*, S*, std::int64_t, \
                                                   const vocabulary_range&, const cross_entropy_settings&))            \
  PLAIT_KERNEL(void cross_entropy_backward(cuda&, const T*, const std::int64_t*, const S*, const S*, const S*, T*,     \
                                           std::int64_t, const vocabulary_range&, const cross_entropy_settings&))      \
  PLAIT_KERNEL(void cross_entropy_backward(cuda&, const T*, const std::int32_t*, const S*, const S*, const S*, T*,     \
                                           std::int64_t, const vocabulary_range&, const cross_entropy_settings&))      \
  PLAIT_KERNEL(void add(cuda&, const T*, const T*, T*, std::int64_t))                                                  \
  PLAIT_KERNEL(void accumulate(cuda&, const T*, T*, std::int64_t))                                                     \
  PLAIT_KERNEL(void scale(cuda&, T*, std::int64_t, double))                                                            \
  PLAIT_KERNEL(void axpy(cuda&, const T*, T*, std::int64_t, double))                                                   \
  PLAIT_KERNEL(void multiply(cuda&, const T*, const T*, T*, std::int64_t))                                             \
  PLAIT_KERNEL(void fill(cuda&, T*, std::int64_t, T))                                                                  \
  PLAIT_KERNEL(void add_bias(cuda&, const T*, T*, std::int64_t, std::int64_t, std::int64_t))                           \
  PLAIT_KERNEL(void bias_gradient(cuda&, const T*, S*, std::int64_t, std::int64_t, std::int64_t))                      \
  PLAIT_KERNEL(void embedding_forward(cuda&, const std::int64_t*, const T*, T*, std::int64_t, std::int64_t,            \
                                      std::int64_t, std::int64_t, std::int64_t))                                       \
  PLAIT_KERNEL(void embedding_forward(cuda&, const std::int32_t*, const T*, T*, std::int64_t, std::int64_t,            \
                                      std::int64_t, std::int64_t, std::int64_t))                                       \
  PLAIT_KERNEL(void embedding_backward(cuda&, const std::int64_t*, const T*, S*, std::int64_t, std::int64_t,           \
                                       std::int64_t, std::int64_t, std::int64_t))                                      \
  PLAIT_KERNEL(void embedding_backward(cuda&, const std::int32_t*, const T*, S*, std::int64_t, std::int64_t,           \
                                       std::int64_t, std::int64_t, std::int64_t))                                      \
  PLAIT_KERNEL(void row_sums(cuda&, const T*, S*, std::int64_t, std::int64_t))                                         \
  PLAIT_KERNEL(void row_centred_squares(cuda&, const T*, const S*, S*, std::int64_t, std::int64_t, std::int64_t))      \
  PLAIT_KERNEL(                                                                                                        \
      void layer_norm_apply(cuda&, const T*, const S*, const S*, const T*, const T*, T*, std::int64_t, std::int64_t))  \
  PLAIT_KERNEL(void layer_norm_forward(cuda&, const T*, const T*, const T*, T*, S*, S*, std::int64_t, std::int64_t,    \
                                       double, const T*, T*))                                                          \
  PLAIT_KERNEL(void layer_norm_backward_dots(cuda&, const T*, const T*, const T*, const S*, const S*, S*,              \
                                             std::int64_t, std::int64_t))                                              \
  PLAIT_KERNEL(void layer_norm_backward_dx(cuda&, const T*, const T*, const T*, const S*, const S*, const S*, T*,      \
                                           std::int64_t, std::int64_t, std::int64_t, const T*))                        \
  PLAIT_KERNEL(void layer_norm_backward_dweight(cuda&, const T*, const T*, const S*, const S*, S*, S*, std::int64_t,   \
                                                std::int64_t))                                                         \
  PLAIT_KERNEL(void layer_norm_backward(cuda&, const T*, const T*, const T*, const S*, const S*, T*, S*, S*,           \
                                        std::int64_t, std::int64_t, const T*))                                         \
  PLAIT_KERNEL(void row_sum_squares(cuda&, const T*, S*, std::int64_t, std::int64_t))                                  \
  PLAIT_KERNEL(                                                                                                        \
      void rms_apply(cuda&, const T*, const S*, const T*, T*, std::int64_t, std::int64_t, std::int64_t, double))       \
  PLAIT_KERNEL(                                                                                                        \
      void rms_norm_forward(cuda&, const T*, const T*, T*, S*, std::int64_t, std::int64_t, double, const T*, T*))      \
  PLAIT_KERNEL(void rms_norm_backward_dot(cuda&, const T*, const T*, const T*, S*, std::int64_t, std::int64_t))        \
  PLAIT_KERNEL(void rms_norm_backward_dx(cuda&, const T*, const T*, const T*, const S*, const S*, T*, std::int64_t,    \
                                         std::int64_t, std::int64_t, const T*))                                        \
  PLAIT_KERNEL(void rms_norm_backward_dweight(cuda&, const T*, const T*, const S*, S*, std::int64_t, std::int64_t))    \
  PLAIT_KERNEL(void rms_norm_backward_apply(cuda&, const T*, const T*, const T*, const S*, const S*, T*, S*,           \
                                            std::int64_t, std::int64_t, std::int64_t))                                 \
  PLAIT_KERNEL(void rms_norm_backward(cuda&, const T*, const T*, const T*, const S*, T*, S*, std::int64_t,             \
                                      std::int64_t, const T*))                                                         \
  PLAIT_KERNEL(void muon_update(cuda&, std::span<const muon_tensor<S, T>>, const adamw_scalars*))                      \
  PLAIT_KERNEL(void fill_normal(cuda&, T*, const box&, std::uint64_t, std::uint64_t, double, double))                  \
  PLAIT_KERNEL(void fill_uniform(cuda&, T*, const box&, std::uint64_t, std::uint64_t, double, double))                 \
  PLAIT_KERNEL(void dropout_forward(cuda&, const T*, T*, const box&, std::uint64_t, std::uint64_t, double))            \
  PLAIT_KERNEL(void dropout_backward(cuda&, const T*, T*, const box&, std::uint64_t, std::uint64_t, double))           \
  PLAIT_KERNEL(void fill_from(cuda&, T*, std::int64_t, const double*))                                                 \
  PLAIT_KERNEL(void rope_forward(cuda&, T*, const S*, const S*, std::int64_t, std::int64_t, std::int64_t,              \
                                 std::int64_t, std::int64_t))                                                          \
  PLAIT_KERNEL(void rope_backward(cuda&, T*, const S*, const S*, std::int64_t, std::int64_t, std::int64_t,             \
                                  std::int64_t, std::int64_t))                                                         \
  PLAIT_KERNEL(void rope_forward(cuda&, const T*, std::int64_t, T*, const S*, const S*, std::int64_t, std::int64_t,    \
                                 std::int64_t, std::int64_t, std::int64_t))                                            \
  PLAIT_KERNEL(void rope_backward(cuda&, const T*, std::int64_t, T*, const S*, const S*, std::int64_t, std::int64_t,   \
                                  std::int64_t, std::int64_t, std::int64_t))                                           \
  PLAIT_KERNEL(void sum_of_multiples(cuda&, const T*, std::int64_t, double, double*))                                  \
  PLAIT_KERNEL(void digest(cuda&, const T*, std::int64_t, value_digest*))                                              \
  PLAIT_KERNEL(void sum(cuda&, const T*, std::int64_t, double*))                                                       \
  PLAIT_KERNEL(void swiglu_forward(cuda&, const T*, T*, std::int64_t, std::int64_t))                                   \
  PLAIT_KERNEL(void swiglu_backward(cuda&, const T*, const T*, T*, std::int64_t, std::int64_t))

/// Every launcher that takes statistics alone.
#define PLAIT_KERNELS_OF_STATISTICS(S)                                                                            \
  PLAIT_KERNEL(void merge_lse(cuda&, S*, S*, const S*, const S*, std::int64_t, const attention_shape&))           \
  PLAIT_KERNEL(void cross_entropy_rescale(cuda&, const S*, const S*, S*, std::int64_t))                           \
  PLAIT_KERNEL(void cross_entropy_loss(cuda&, const std::int64_t*, const S*, const S*, const S*, const S*, S*,    \
                                       std::int64_t, const vocabulary_range&, const cross_entropy_settings&))     \
  PLAIT_KERNEL(void cross_entropy_loss(cuda&, const std::int32_t*, const S*, const S*, const S*, const S*, S*,    \
                                       std::int64_t, const vocabulary_range&, const cross_entropy_settings&))     \
  PLAIT_KERNEL(void layer_norm_statistics(cuda&, const S*, const S*, S*, S*, std::int64_t, std::int64_t, double)) \
  PLAIT_KERNEL(void rms_inverse(cuda&, const S*, S*, std::int64_t, std::int64_t, double))                         \
  PLAIT_KERNEL(void rope_table(cuda&, const std::int64_t*, std::int64_t, std::span<const double>, S*, S*))        \
  PLAIT_KERNEL(void muon_momentum(cuda&, std::span<const muon_momentum_tensor<S, S>>, const muon_settings&,       \
                                  const adamw_scalars*))                                                          \
  PLAIT_KERNEL(void muon_momentum(cuda&, std::span<const muon_rounded_tensor<S, S>>, const muon_settings&,        \
                                  const adamw_scalars*))                                                          \
  PLAIT_KERNEL(void divide_by_norm(cuda&, const S*, S*, std::int64_t, const double*, double))                     \
  PLAIT_KERNEL(void add_exact_squares(cuda&, std::span<const const_elements<S>>, std::int64_t*))                  \
  PLAIT_KERNEL(void add_sum_squares(cuda&, std::span<const const_elements<S>>, double*))

namespace plait::kernels {

#ifndef PLAIT_COMPILING_CUDA  // a file of its own compiles these
PLAIT_KERNELS_OF(double, double)
PLAIT_KERNELS_OF_STATISTICS(double)
PLAIT_KERNEL(void fill(cuda&, float*, std::int64_t, double))
PLAIT_KERNEL(void fill(cuda&, bf16*, std::int64_t, double))
PLAIT_KERNEL(void cast(cuda&, const double*, float*, std::int64_t))
PLAIT_KERNEL(void cast(cuda&, const float*, double*, std::int64_t))
PLAIT_KERNEL(void cast(cuda&, const double*, bf16*, std::int64_t))
PLAIT_KERNEL(void cast(cuda&, const bf16*, double*, std::int64_t))
#endif

#ifndef PLAIT_COMPILING_CUDA_DOUBLE
PLAIT_KERNELS_OF(float, float)
PLAIT_KERNELS_OF(bf16, float)
PLAIT_KERNELS_OF_STATISTICS(float)

// Values in bf16 without masters.
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<bf16, float, bf16, float>>,
                               const adamw_settings&, const adamw_scalars*))
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<bf16, float, bf16, bf16>>,
                               const adamw_settings&, const adamw_scalars*))
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<bf16, float, bf16, std::uint8_t>>,
                               const adamw_settings&, const adamw_scalars*))

// Gradients in bf16, with masters and without.
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_tensor<float, bf16, bf16>>, const adamw_settings&,
                               const adamw_scalars*))
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<float, bf16, bf16, bf16>>,
                               const adamw_settings&, const adamw_scalars*))
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<float, bf16, bf16, std::uint8_t>>,
                               const adamw_settings&, const adamw_scalars*))
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<bf16, bf16, bf16, float>>,
                               const adamw_settings&, const adamw_scalars*))
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<bf16, bf16, bf16, bf16>>,
                               const adamw_settings&, const adamw_scalars*))
PLAIT_KERNEL(void adamw_update(cuda&, std::span<const adamw_rounded_tensor<bf16, bf16, bf16, std::uint8_t>>,
                               const adamw_settings&, const adamw_scalars*))
PLAIT_KERNEL(void muon_momentum(cuda&, std::span<const muon_momentum_tensor<float, bf16>>, const muon_settings&,
                                const adamw_scalars*))
PLAIT_KERNEL(void muon_momentum(cuda&, std::span<const muon_rounded_tensor<float, bf16>>, const muon_settings&,
                                const adamw_scalars*))
PLAIT_KERNEL(void add_exact_squares(cuda&, std::span<const const_elements<bf16>>, std::int64_t*))
PLAIT_KERNEL(void add_sum_squares(cuda&, std::span<const const_elements<bf16>>, double*))
PLAIT_KERNEL(void digest(cuda&, const std::int64_t*, std::int64_t, value_digest*))
PLAIT_KERNEL(void digest(cuda&, const std::int32_t*, std::int64_t, value_digest*))

// Context parallelism in bf16 merges attention in float.
PLAIT_KERNEL(void attention_forward(cuda&, const bf16*, const bf16*, const bf16*, float*, float*,
                                    const attention_shape&, const attention_choice&))
PLAIT_KERNEL(void attention_delta(cuda&, const float*, const bf16*, float*, const attention_shape&))
PLAIT_KERNEL(void attention_backward(cuda&, const bf16*, const bf16*, const bf16*, const bf16*, const float*,
                                     const bf16*, float*, float*, float*, const attention_shape&, attention_accumulate,
                                     const float*, const attention_choice&))
PLAIT_KERNEL(void attention_backward(cuda&, const bf16*, const bf16*, const bf16*, const float*, const float*,
                                     const bf16*, float*, float*, float*, const attention_shape&, attention_accumulate,
                                     const float*, const attention_choice&))
PLAIT_KERNEL(void merge_lse(cuda&, float*, float*, const bf16*, const float*, std::int64_t, const attention_shape&))
PLAIT_KERNEL(void merge_lse(cuda&, bf16*, float*, const bf16*, const float*, std::int64_t, const attention_shape&))
PLAIT_KERNEL(void fill(cuda&, bf16*, std::int64_t, float))
PLAIT_KERNEL(void cast(cuda&, const float*, bf16*, std::int64_t))
PLAIT_KERNEL(void cast(cuda&, const bf16*, float*, std::int64_t))
#endif

}  // namespace plait::kernels

#undef PLAIT_KERNELS_OF
#undef PLAIT_KERNELS_OF_STATISTICS
#undef PLAIT_KERNEL
#endif
