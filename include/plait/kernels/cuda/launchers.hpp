// Declarations of the CUDA kernels' launchers, which the other headers of this folder define. kernels/cpu/ documents
// what each computes. For bf16, statistics, factors and gradients of weights are float. Pointers are into the device's
// memory, and work goes to the main stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/cuda/attention_backend.hpp"
#include "plait/kernels/philox.hpp"
#include "plait/kernels/settings.hpp"
#include "plait/kernels/strided_copy.hpp"
#include "plait/kernels/sums.hpp"

namespace plait::kernels {

// ---- element by element (kernels/cpu/elementwise.hpp) ------------------------------------------------------------

template <class T>
void add(cuda& device, const T* a, const T* b, T* y, std::int64_t n);

/// y += a; in bf16 each call rounds the sum.
template <class T>
void accumulate(cuda& device, const T* a, T* y, std::int64_t n);

/// y *= factor, which is a double for every T. If parameter types were computed from T, g++, which compiles nvcc's
/// side, and clang would mangle the name differently, and not link.
template <class T>
void scale(cuda& device, T* y, std::int64_t n, double factor);

template <class T>
void axpy(cuda& device, const T* x, T* y, std::int64_t n, double factor);

template <class T>
void multiply(cuda& device, const T* a, const T* b, T* y, std::int64_t n);

template <class T, class Value>
void fill(cuda& device, T* y, std::int64_t n, Value value);

template <class From, class To>
void cast(cuda& device, const From* x, To* y, std::int64_t n);

template <class T>
void add_bias(cuda& device, const T* bias, T* y, std::int64_t rows, std::int64_t columns, std::int64_t stride = 0);

template <class T>
void bias_gradient(cuda& device, const T* dy, gradient_of<T>* dbias, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride = 0);

// ---- activations -------------------------------------------------------------------------------------------------

template <activation_function Function, class T>
void activation_forward(cuda& device, const T* x, T* y, std::int64_t n);

template <activation_function Function, class T>
void activation_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n);

template <class T>
void swiglu_forward(cuda& device, const T* gate_up, T* y, std::int64_t rows, std::int64_t ffn);

template <class T>
void swiglu_backward(cuda& device, const T* gate_up, const T* dy, T* dgate_up, std::int64_t rows, std::int64_t ffn);

// ---- strided copies ----------------------------------------------------------------------------------------------
//
// Each is one launch, or a copy by the device itself if nothing is strided.

void copy_3d(cuda& device, const void* from, void* to, std::int64_t planes, std::int64_t rows, std::int64_t row_bytes,
             std::int64_t from_plane_stride, std::int64_t from_row_stride, std::int64_t to_plane_stride,
             std::int64_t to_row_stride);

void copy_2d(cuda& device, const void* from, void* to, std::int64_t rows, std::int64_t row_bytes,
             std::int64_t from_stride, std::int64_t to_stride);

void copy_box(cuda& device, const void* in, const box& from, void* out, const box& to, const box& part,
              std::int64_t element_bytes);

// ---- rotary positions --------------------------------------------------------------------------------------------
//
// The tables are computed on the host and uploaded (kernels/settings.hpp).

/// cosine, sine [count, frequencies] in device memory: the rotations of the given positions. Positions and frequencies
/// are in host memory (see `rope_rotations`).
template <class S>
void rope_table(cuda& device, const std::int64_t* positions, std::int64_t count, std::span<const double> frequencies,
                S* cosine, S* sine);

template <class T>
void rope_forward(cuda& device, const T* from, std::int64_t from_stride, T* x, const statistic_of<T>* cosine,
                  const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                  std::int64_t row_stride, std::int64_t table_rows);

template <class T>
void rope_backward(cuda& device, const T* from, std::int64_t from_stride, T* dx, const statistic_of<T>* cosine,
                   const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                   std::int64_t row_stride, std::int64_t table_rows);

// ---- norms (kernels/cpu/norms.hpp) -------------------------------------------------------------------------------
//
// If `mean`, `sums`, `bias` and `dbias` are null, they compute RMS norm.

template <class T>
void row_sums(cuda& device, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns);

template <class T>
void row_squares(cuda& device, const T* x, const statistic_of<T>* sums, statistic_of<T>* out, std::int64_t rows,
                 std::int64_t columns, std::int64_t columns_global);

template <class S>
void norm_statistics(cuda& device, const std::type_identity_t<S>* sums, const S* squares, std::type_identity_t<S>* mean,
                     S* inverse, std::int64_t rows, std::int64_t columns_global, double eps);

template <class T>
void norm_apply(cuda& device, const T* x, const statistic_of<T>* mean, const statistic_of<T>* inverse, const T* weight,
                const std::type_identity_t<T>* bias, T* y, std::int64_t rows, std::int64_t columns);

/// It reads x once.
template <class T>
void norm_forward(cuda& device, const T* x, const T* weight, const std::type_identity_t<T>* bias, T* y,
                  statistic_of<T>* mean, statistic_of<T>* inverse, std::int64_t rows, std::int64_t columns, double eps,
                  const std::type_identity_t<T>* addend = nullptr, std::type_identity_t<T>* sum = nullptr);

template <class T>
void norm_backward_dots(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                        const statistic_of<T>* inverse, statistic_of<T>* dots, std::int64_t rows, std::int64_t columns);

template <class T>
void norm_backward_dx(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                      const statistic_of<T>* inverse, const statistic_of<T>* dots, T* dx, std::int64_t rows,
                      std::int64_t columns, std::int64_t columns_global,
                      const std::type_identity_t<T>* addend = nullptr);

/// It computes both in one pass.
template <class T>
void norm_backward_dweight(cuda& device, const T* x, const T* dy, const statistic_of<T>* mean,
                           const statistic_of<T>* inverse, gradient_of<T>* dweight, gradient_of<T>* dbias,
                           std::int64_t rows, std::int64_t columns);

template <class T>
void norm_backward(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                   const statistic_of<T>* inverse, T* dx, gradient_of<T>* dweight, gradient_of<T>* dbias,
                   std::int64_t rows, std::int64_t columns, const std::type_identity_t<T>* addend = nullptr);

// ---- attention ---------------------------------------------------------------------------------------------------

/// Attention in blocks, without scores in memory. bf16 uses tensor cores (head_dim and strides multiples of 8, arrays
/// on 16-byte boundaries); float and double use multiply-adds. Writes o (0 for queries that see nothing) and lse
/// [batch, heads, q_len]. lse is the natural logarithm of the sum of the exponentials of the scaled scores. The work is
/// proportional to the number of visible pairs. O is T or statistic_of<T>. head_dim is at most 256; throws
/// `plait::error` for an impossible shape. `choice` selects the kernels for bf16 (`attention_backend_for`).
template <class T, attention_result<T> O>
void attention_forward(cuda& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape, const attention_choice& choice);

/// This overload uses the device's choice.
template <class T, attention_result<T> O>
void attention_forward(cuda& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape) {
  attention_forward(device, q, k, v, o, lse, shape, attention_choice_of(device));
}

/// O is T or statistic_of<T>.
template <class T, attention_result<T> O>
void join_sinks(cuda& device, const T* sinks, O* o, statistic_of<T>* lse, const attention_shape& shape);

void document_ends(cuda& device, const std::int32_t* starts, std::int64_t length, std::int32_t* ends,
                   std::int64_t batch, std::int64_t first, std::int64_t count, std::int64_t stride);

template <class T>
void sink_gradients(cuda& device, const T* sinks, const statistic_of<T>* lse, const statistic_of<T>* delta,
                    statistic_of<T>* dsinks, const attention_shape& shape);

/// O is T or statistic_of<T>.
template <class T, attention_result<T> O>
void attention_delta(cuda& device, const O* o, const T* d_o, statistic_of<T>* delta, const attention_shape& shape);

/// If delta is given, plait's kernels do not read o, which may be null; a library reads it. Every sum has one order, so
/// equal inputs give equal bits. Requires the same of the shape as `attention_forward`.
template <class T, attention_result<T> O, attention_result<T> G>
void attention_backward(cuda& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate, const statistic_of<T>* delta, const attention_choice& choice);

/// This overload uses the device's choice.
template <class T, attention_result<T> O, attention_result<T> G>
void attention_backward(cuda& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate = {}, const statistic_of<T>* delta = nullptr) {
  attention_backward(device, q, k, v, o, lse, d_o, dq, dk, dv, shape, accumulate, delta, attention_choice_of(device));
}

/// The shared memory, in bytes per block, that plait's kernels of attention and its gradients need for `type`
/// activations. GPUs offer 99 KB (8.6, 8.9, 12.0), 163 KB (8.0) or 227 KB (9.0, 10.0).
std::size_t attention_shared_bytes(dtype type, std::int64_t head_dim);

/// Refuses a model whose attention this GPU cannot run, when the model is made instead of in its first step. If plait's
/// kernels need too much shared memory, the device's library may run it, provided that it supports a plain shape of
/// this head_dim. The launch decides on masks and strides.
inline void require_attention(const cuda& device, dtype type, std::int64_t head_dim) {
  const attention_choice& choice = device.attention();
  const bool asks = type == dtype::bf16 && choice.library != nullptr && choice.backend != attention_backend::own;
  const bool forced = asks && choice.backend == attention_backend::cudnn;
  const std::size_t needed = attention_shared_bytes(type, head_dim), there = device.shared_bytes_per_block();
  if (asks && (forced || needed > there)) {
    attention_shape plain;
    plain.q_len = plain.k_len = 128;
    plain.head_dim = head_dim;
    if (choice.library->supports(plain.checked(), type)) return;
    if (forced)
      fail({"attention: cuDNN is chosen, but does not support head_dim = ", head_dim,
            "; choose attention_backend::automatic or own"});
  }
  if (needed > there)
    fail({"attention: head_dim = ", head_dim, " in ", name_of(type), " needs ", needed,
          " bytes of shared memory, of which a block on GPU ", device.index(), " (", device.name(), ") has ", there,
          asks ? ", and the device's attention_library does not support it" : "", "; use a smaller head_dim, ",
          asks ? "" : "an attention_library such as cuDNN's, ", "or a GPU with more"});
}

/// For merges of many sets, a float o avoids rounding in each merge.
template <class T, class Other>
void merge_lse(cuda& device, T* o, statistic_of<T>* lse, const Other* o_other, const statistic_of<T>* lse_other,
               std::int64_t other_stride, const attention_shape& shape);

// ---- cross entropy (kernels/cpu/cross_entropy.hpp) ---------------------------------------------------------------
//
// The vocabulary may be split over ranks and padded. The next `synchronize` reports a target outside the vocabulary;
// until then it is ignored.

template <class T>
void cross_entropy_max(cuda& device, const T* logits, statistic_of<T>* row_max, std::int64_t rows,
                       const vocabulary_range& range);

template <class T, class Id>
void cross_entropy_statistics(cuda& device, const T* logits, const Id* targets, const statistic_of<T>* row_max,
                              statistic_of<T>* sum_exp, statistic_of<T>* target_logit, statistic_of<T>* sum_logits,
                              std::int64_t rows, const vocabulary_range& range, const cross_entropy_settings& settings);

/// Computes `cross_entropy_max`, and `cross_entropy_statistics` relative to the local maximum, in one pass over the
/// logits. For a whole vocabulary these results are final.
template <class T, class Id>
void cross_entropy_local_statistics(cuda& device, const T* logits, const Id* targets, statistic_of<T>* row_max,
                                    statistic_of<T>* sum_exp, statistic_of<T>* target_logit,
                                    statistic_of<T>* sum_logits, std::int64_t rows, const vocabulary_range& range,
                                    const cross_entropy_settings& settings);

template <class S>
void cross_entropy_rescale(cuda& device, const S* local_max, const S* global_max, S* sum_exp, std::int64_t rows);

template <class S, class Id>
void cross_entropy_loss(cuda& device, const Id* targets, const S* row_max, const S* sum_exp, const S* target_logit,
                        const S* sum_logits, S* loss, std::int64_t rows, const vocabulary_range& range,
                        const cross_entropy_settings& s);

template <class T, class Id>
void cross_entropy_backward(cuda& device, const T* logits, const Id* targets, const statistic_of<T>* row_max,
                            const statistic_of<T>* sum_exp, const statistic_of<T>* scale, T* dlogits, std::int64_t rows,
                            const vocabulary_range& range, const cross_entropy_settings& s);

// ---- embedding (kernels/cpu/embedding.hpp) -----------------------------------------------------------------------
//
// `table` [rows_local, width] holds the rows first ... first + rows_local - 1. The next `synchronize` reports an id
// outside [0, vocab); until then its row is zeros. An id in another rank's range gives zeros.

template <class T, class Id>
void embedding_forward(cuda& device, const Id* ids, const T* table, T* y, std::int64_t tokens, std::int64_t width,
                       std::int64_t first, std::int64_t rows_local, std::int64_t vocab);

/// dtable[ids[t] - first] += dy[t] for the ids in range; dtable is [rows_local, width] of `gradient_of<T>`. The first
/// 128 tokens of a row are added to it in their order. Every further 128 are summed first, and these sums are added in
/// order. At most 2^31 - 1 tokens and rows; more throw `plait::error`. Links with compiled_cuda_sort.cu.
template <class T, class Id>
void embedding_backward(cuda& device, const Id* ids, const T* dy, gradient_of<T>* dtable, std::int64_t tokens,
                        std::int64_t width, std::int64_t first, std::int64_t rows_local, std::int64_t vocab);

}  // namespace plait::kernels

namespace plait::kernels::detail {

/// Keys with one value each, in one of two arrays of `count`. A sort moves them between the arrays.
struct key_values {
  std::uint32_t* keys[2];
  int* values[2];
  int now = 0;  ///< the index of the arrays that hold them
};

/// Sorts by the lowest `bits` of the keys on the main stream. Values of equal keys keep their order. Updates `now`. It
/// is defined in compiled_cuda_sort.cu, because including CUB takes long to compile.
void sort_pairs(cuda& device, key_values& pairs, int count, int bits);

}  // namespace plait::kernels::detail

namespace plait::kernels {

// ---- mixtures of experts (kernels/cpu/experts.hpp) ---------------------------------------------------------------

/// Chooses each token's experts `chosen` [tokens, k], of equal ones the lower first, and their weights.
template <class T, class B, class S>
void choose_experts(cuda& device, const T* scores, const B* bias, std::int32_t* chosen, S* weights, std::int64_t tokens,
                    std::int64_t experts, const router_settings& how, bool again = false);

template <class T, class S>
void choose_experts_backward(cuda& device, const T* scores, const std::int32_t* chosen, const S* dweights, T* dscores,
                             std::int64_t tokens, std::int64_t experts, const router_settings& how);

/// counts [groups, experts] += how often `chosen` [groups, size] has each expert.
void count_experts(cuda& device, const std::int32_t* chosen, std::int32_t* counts, std::int64_t groups,
                   std::int64_t size, std::int64_t experts);

/// *loss = the auxiliary losses of scores [groups, size, experts]: the terms of all tokens, added in order.
template <class T, class Count>
void router_loss(cuda& device, const T* scores, const Count* counts, double* loss, std::int64_t groups,
                 std::int64_t size, std::int64_t experts, expert_scores how, const router_loss_scales& by);

/// dscores += *seed times the gradient of `router_loss`.
template <class T, class Count>
void add_router_loss_gradient(cuda& device, const T* scores, const Count* counts, const double* seed, T* dscores,
                              std::int64_t groups, std::int64_t size, std::int64_t experts, expert_scores how,
                              const router_loss_scales& by);

/// Sets choices to -1 that exceed the `limit` of their expert in a sequence.
void drop_choices(cuda& device, const std::int32_t* whole, const std::int32_t* in_text, std::int64_t positions,
                  std::int32_t* choice, std::int64_t samples, std::int64_t first, std::int64_t length, std::int64_t k,
                  std::int64_t experts, std::int64_t limit);

/// Sorts n choices into rows by part, in the order of tokens. Links with compiled_cuda_sort.cu.
void sort_choices(cuda& device, const std::int32_t* choice, const std::int32_t* part_of, std::int64_t n, std::int64_t k,
                  std::int64_t parts, std::int32_t* counts, std::int32_t* places, std::int32_t* tokens,
                  padded_parts padded = {});

/// Computes the order by expert of rows that arrived by peer.
void sort_arrivals(cuda& device, const std::int32_t* counts, std::int64_t peers, std::int64_t experts,
                   std::int32_t* sorted, std::int32_t* unsorted);

/// Changes the value of each expert by a rule, unless `clipped` says that the step was skipped.
template <class M>
void update_router_state(cuda& device, M* values, const std::int32_t* counts, std::int64_t experts,
                         router_state_rule rule, const clip_numbers* clipped);

/// out[i] = in[from[i]], rows of `width`; zeros if from[i] is negative.
template <class T>
void gather_rows(cuda& device, const T* in, const std::int32_t* from, T* out, std::int64_t rows, std::int64_t width);

/// y[t] = the sum of weights[t, j] rows[at[t, j]], or without weights the sum of the rows. A negative index is another
/// rank's row.
template <class T, class S>
void sum_rows(cuda& device, const T* rows, const std::int32_t* at, const S* weights, T* y, std::int64_t tokens,
              std::int64_t k, std::int64_t width);

template <class T, class S>
void sum_rows_backward(cuda& device, const T* rows, const std::int32_t* at, const S* weights, const T* dy, T* drows,
                       S* dweights, std::int64_t tokens, std::int64_t k, std::int64_t width);

/// y[r] = x[r] times the sigmoid of gates[r].
template <class T>
void multiply_by_gates(cuda& device, const T* x, const T* gates, T* y, std::int64_t rows, std::int64_t width);

template <class T>
void multiply_by_gates_backward(cuda& device, const T* x, const T* gates, const T* dy, T* dx, T* dgates,
                                std::int64_t rows, std::int64_t width);

// ---- optimizers (kernels/cpu/optimizer.hpp) ----------------------------------------------------------------------
//
// Each takes a few launches for many tensors. `scalars` is in device memory.

/// One launch updates about 60 tensors. M, G, W: (float, float, float), (double, double, double), (float, float, bf16),
/// (float, bf16, bf16).
template <class M, class G, class W>
void adamw_update(cuda& device, std::span<const adamw_tensor<M, G, W>> tensors, const adamw_settings& settings,
                  const adamw_scalars* scalars);

/// The random bits equal the CPU's.
template <class M, class G, class W, class S>
void adamw_update(cuda& device, std::span<const adamw_rounded_tensor<M, G, W, S>> tensors,
                  const adamw_settings& settings, const adamw_scalars* scalars);

/// M, G: (float, float), (double, double), (float, bf16).
template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_momentum_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars);

/// The random bits equal the CPU's.
template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_rounded_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars);

/// M, W: (float, float), (double, double), (float, bf16).
template <class M, class W>
void muon_update(cuda& device, std::span<const muon_tensor<M, W>> tensors, const adamw_scalars* scalars);

/// T: float, double.
template <class T>
void divide_by_norm(cuda& device, const T* x, T* y, std::int64_t n, const double* squares, double epsilon);

// ---- random numbers and dropout (kernels/cpu/random.hpp) ---------------------------------------------------------
//
// Every number is keyed by (seed, stream, global row-major index of the element), so a tensor's values do not depend on
// its division. A normal number may differ from the CPU's in its last place.

/// x = mean + std * normal, computed in double and rounded to T.
template <class T>
void fill_normal(cuda& device, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double mean,
                 double std);

template <class T>
void fill_uniform(cuda& device, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double low,
                  double high);

template <class T>
void dropout_forward(cuda& device, const T* x, T* y, const box& part, std::uint64_t seed, std::uint64_t stream,
                     double p);

template <class T>
void dropout_backward(cuda& device, const T* dy, T* dx, const box& part, std::uint64_t seed, std::uint64_t stream,
                      double p);

// ---- sums into a number in memory (kernels/cpu/reductions.hpp) ---------------------------------------------------
//
// Every sum has one partial sum for each chunk of elements, in double. One block then adds these in order. So the
// result depends neither on the device nor on the order of blocks.

/// *out = the sum of n elements. CUB's `DeviceReduce` is not used: its order of sums depends on the number of the GPU's
/// multiprocessors. It also takes one array per call, where gradients are hundreds.
template <class S>
void sum(cuda& device, const S* x, std::int64_t n, double* out);

/// *out = the digest of n elements: numbers, token ids or positions. Its sketches are summed in any order, which does
/// not affect its hash.
template <class T>
void digest(cuda& device, const T* x, std::int64_t n, value_digest* out);

template <class G>
void add_sum_squares(cuda& device, std::span<const const_elements<G>> parts, double* out);

template <class S>
void sum_of_multiples(cuda& device, const S* x, std::int64_t n, double quantum, double* out);

/// Adds the squares of all elements of all parts to `bins`, as integers (kernels/sums.hpp).
template <class G>
void add_exact_squares(cuda& device, std::span<const const_elements<G>> parts, std::int64_t* bins);
void sum_of_bins(cuda& device, const std::int64_t* bins, double* out);

void reciprocal(cuda& device, const double* x, double* y);

template <class T>
void fill_from(cuda& device, T* y, std::int64_t n, const double* value);

void clip(cuda& device, const double* squares, double limit, clip_numbers* out);

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
