// plait's CUDA kernels, compiled once by nvcc for the architectures of a program that defines PLAIT_COMPILED_CUDA. The
// program links this file, compiled_cuda_double.cu and compiled_cuda_sort.cu; any compiler may then compile its own
// files. CMake's target is plait::compiled_cuda; without CMake, compile all three.
#undef PLAIT_COMPILED_CUDA  // a program may define it for all its files
#ifndef PLAIT_COMPILING_CUDA_DOUBLE
#define PLAIT_COMPILING_CUDA
#include "plait/comm/threads/cuda.hpp"
#endif
#include "plait/kernels/cuda/kernels.hpp"

/// Instantiates a launcher, and with it the kernels that it launches. Overloaded launchers are written out instead.
#define PLAIT_LAUNCHER(...) template decltype(__VA_ARGS__) __VA_ARGS__;

/// The launchers that read token ids.
#define PLAIT_LAUNCHERS_OF_IDS(T, S, Id)                \
  PLAIT_LAUNCHER(cross_entropy_statistics<T, Id>)       \
  PLAIT_LAUNCHER(cross_entropy_local_statistics<T, Id>) \
  PLAIT_LAUNCHER(cross_entropy_backward<T, Id>)         \
  PLAIT_LAUNCHER(embedding_forward<T, Id>)              \
  PLAIT_LAUNCHER(embedding_backward<T, Id>)

#define PLAIT_LAUNCHERS_OF_ACTIVATION(T, function)                     \
  PLAIT_LAUNCHER(activation_forward<activation_function::function, T>) \
  PLAIT_LAUNCHER(activation_backward<activation_function::function, T>)

/// The launchers of a balance loss by counts, or relative numbers, of this type.
#define PLAIT_ROUTER_LOSSES_OF(T, Count) \
  PLAIT_LAUNCHER(router_loss<T, Count>)  \
  PLAIT_LAUNCHER(add_router_loss_gradient<T, Count>)

/// The launchers for activations or weights of T, with statistics and gradients of weights of S.
#define PLAIT_LAUNCHERS_OF(T, S)                      \
  PLAIT_LAUNCHERS_OF_IDS(T, S, std::int64_t)          \
  PLAIT_LAUNCHERS_OF_IDS(T, S, std::int32_t)          \
  PLAIT_LAUNCHERS_OF_ACTIVATION(T, relu)              \
  PLAIT_LAUNCHERS_OF_ACTIVATION(T, silu)              \
  PLAIT_LAUNCHERS_OF_ACTIVATION(T, gelu)              \
  PLAIT_LAUNCHERS_OF_ACTIVATION(T, gelu_tanh)         \
  PLAIT_LAUNCHER(swiglu_forward<T>)                   \
  PLAIT_LAUNCHER(swiglu_backward<T>)                  \
  PLAIT_LAUNCHER(add<T>)                              \
  PLAIT_LAUNCHER(accumulate<T>)                       \
  PLAIT_LAUNCHER(scale<T>)                            \
  PLAIT_LAUNCHER(axpy<T>)                             \
  PLAIT_LAUNCHER(multiply<T>)                         \
  PLAIT_LAUNCHER(fill<T, T>)                          \
  PLAIT_LAUNCHER(add_bias<T>)                         \
  PLAIT_LAUNCHER(bias_gradient<T>)                    \
  PLAIT_LAUNCHER(row_sums<T>)                         \
  PLAIT_LAUNCHER(row_squares<T>)                      \
  PLAIT_LAUNCHER(norm_apply<T>)                       \
  PLAIT_LAUNCHER(norm_forward<T>)                     \
  PLAIT_LAUNCHER(norm_backward_dots<T>)               \
  PLAIT_LAUNCHER(norm_backward_dx<T>)                 \
  PLAIT_LAUNCHER(norm_backward_dweight<T>)            \
  PLAIT_LAUNCHER(norm_backward<T>)                    \
  PLAIT_LAUNCHER(attention_delta<T, T>)               \
  PLAIT_LAUNCHER(join_sinks<T, T>)                    \
  PLAIT_LAUNCHER(sink_gradients<T>)                   \
  PLAIT_LAUNCHER(cross_entropy_max<T>)                \
  PLAIT_LAUNCHER(choose_experts<T, S, S>)             \
  PLAIT_LAUNCHER(choose_experts_backward<T, S>)       \
  PLAIT_ROUTER_LOSSES_OF(T, std::int32_t)             \
  PLAIT_ROUTER_LOSSES_OF(T, S)                        \
  PLAIT_LAUNCHER(update_router_state<T>)              \
  PLAIT_LAUNCHER(gather_rows<T>)                      \
  PLAIT_LAUNCHER(sum_rows<T, S>)                      \
  PLAIT_LAUNCHER(sum_rows_backward<T, S>)             \
  PLAIT_LAUNCHER(multiply_by_gates<T>)                \
  PLAIT_LAUNCHER(multiply_by_gates_backward<T>)       \
  PLAIT_LAUNCHER(fill_normal<T>)                      \
  PLAIT_LAUNCHER(fill_uniform<T>)                     \
  PLAIT_LAUNCHER(dropout_forward<T>)                  \
  PLAIT_LAUNCHER(dropout_backward<T>)                 \
  PLAIT_LAUNCHER(fill_from<T>)                        \
  PLAIT_LAUNCHER(sum<T>)                              \
  PLAIT_LAUNCHER(sum_of_multiples<T>)                 \
  PLAIT_LAUNCHER(digest<T>)                           \
  PLAIT_LAUNCHER(muon_update<S, T>)                   \
  PLAIT_LAUNCHER(adamw_update<S, S, T>)               \
  PLAIT_LAUNCHER(adamw_update<S, S, T, bf16>)         \
  PLAIT_LAUNCHER(adamw_update<S, S, T, std::uint8_t>) \
  PLAIT_ATTENTION(T, T, T, S)                         \
  PLAIT_LAUNCHER(rope_forward<T>)                     \
  PLAIT_LAUNCHER(rope_backward<T>)

/// Attention with operands of T, an output of O and gradients of G.
#define PLAIT_ATTENTION_FORWARD(T, O, S)                                                               \
  template void attention_forward(cuda&, const T*, const T*, const T*, O*, S*, const attention_shape&, \
                                  const attention_choice&);
#define PLAIT_ATTENTION_BACKWARD(T, O, G, S)                                                                      \
  template void attention_backward(cuda&, const T*, const T*, const T*, const O*, const S*, const T*, G*, G*, G*, \
                                   const attention_shape&, attention_accumulate, const S*, const attention_choice&);
#define PLAIT_ATTENTION(T, O, G, S) PLAIT_ATTENTION_FORWARD(T, O, S) PLAIT_ATTENTION_BACKWARD(T, O, G, S)

/// The launchers that read gradients of G and compute in S.
#define PLAIT_LAUNCHERS_OF_GRADIENTS(S, G)                                                              \
  PLAIT_LAUNCHER(add_exact_squares<G>)                                                                  \
  PLAIT_LAUNCHER(add_sum_squares<G>)                                                                    \
  template void muon_momentum(cuda&, std::span<const muon_momentum_tensor<S, G>>, const muon_settings&, \
                              const adamw_scalars*);                                                    \
  template void muon_momentum(cuda&, std::span<const muon_rounded_tensor<S, G>>, const muon_settings&,  \
                              const adamw_scalars*);

/// The launchers that read only statistics.
#define PLAIT_LAUNCHERS_OF_STATISTICS(S)              \
  PLAIT_LAUNCHERS_OF_GRADIENTS(S, S)                  \
  PLAIT_LAUNCHER(merge_lse<S, S>)                     \
  PLAIT_LAUNCHER(cross_entropy_rescale<S>)            \
  PLAIT_LAUNCHER(cross_entropy_loss<S, std::int64_t>) \
  PLAIT_LAUNCHER(cross_entropy_loss<S, std::int32_t>) \
  PLAIT_LAUNCHER(norm_statistics<S>)                  \
  PLAIT_LAUNCHER(rope_table<S>)                       \
  PLAIT_LAUNCHER(divide_by_norm<S>)

namespace plait::kernels {

#ifdef PLAIT_COMPILING_CUDA_DOUBLE
PLAIT_LAUNCHERS_OF(double, double)
PLAIT_LAUNCHERS_OF_STATISTICS(double)
PLAIT_LAUNCHER(fill<float, double>)
PLAIT_LAUNCHER(fill<bf16, double>)
PLAIT_LAUNCHER(cast<double, float>)
PLAIT_LAUNCHER(cast<float, double>)
PLAIT_LAUNCHER(cast<double, bf16>)
PLAIT_LAUNCHER(cast<bf16, double>)
#else
PLAIT_LAUNCHERS_OF(float, float)
PLAIT_LAUNCHERS_OF(bf16, float)
PLAIT_LAUNCHERS_OF_STATISTICS(float)
PLAIT_LAUNCHERS_OF_GRADIENTS(float, bf16)
PLAIT_LAUNCHER(fill<bf16, float>)
PLAIT_LAUNCHER(fill<std::int64_t, std::int64_t>)
PLAIT_LAUNCHER(cast<float, bf16>)
PLAIT_LAUNCHER(cast<bf16, float>)
PLAIT_LAUNCHER(digest<std::int64_t>)
PLAIT_LAUNCHER(digest<std::int32_t>)

// Values in bf16 without masters.
PLAIT_LAUNCHER(choose_experts<bf16, bf16, float>)
PLAIT_ROUTER_LOSSES_OF(bf16, bf16)
PLAIT_LAUNCHER(adamw_update<bf16, float, bf16, float>)
PLAIT_LAUNCHER(adamw_update<bf16, float, bf16, bf16>)
PLAIT_LAUNCHER(adamw_update<bf16, float, bf16, std::uint8_t>)

// Gradients in bf16, with masters and without.
PLAIT_LAUNCHER(adamw_update<float, bf16, bf16>)
PLAIT_LAUNCHER(adamw_update<float, bf16, bf16, bf16>)
PLAIT_LAUNCHER(adamw_update<float, bf16, bf16, std::uint8_t>)
PLAIT_LAUNCHER(adamw_update<bf16, bf16, bf16, float>)
PLAIT_LAUNCHER(adamw_update<bf16, bf16, bf16, bf16>)
PLAIT_LAUNCHER(adamw_update<bf16, bf16, bf16, std::uint8_t>)

// Context parallelism in bf16 merges attention in float.
PLAIT_ATTENTION_FORWARD(bf16, float, float)
PLAIT_LAUNCHER(attention_delta<bf16, float>)
PLAIT_LAUNCHER(join_sinks<bf16, float>)
PLAIT_ATTENTION_BACKWARD(bf16, bf16, float, float)
PLAIT_ATTENTION_BACKWARD(bf16, float, float, float)
PLAIT_LAUNCHER(merge_lse<float, bf16>)
PLAIT_LAUNCHER(merge_lse<bf16, bf16>)
#endif

}  // namespace plait::kernels
