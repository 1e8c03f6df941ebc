// Attention on a GPU for callers: checks, the choice between plait's kernels and a library, launches, and the merge of
// attention over different keys. kernels/cuda/attention_kernels.hpp has the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/cuda/arrays.hpp"
#include "plait/kernels/cuda/attention_backend.hpp"
#include "plait/kernels/cuda/attention_kernels.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels::detail {

// ---- attention by a library, for results that libraries do not write ---------------------------------------------
//
// Libraries write no results in float, no sums of gradients, and no rows of lse with gaps. These need temporary arrays
// and moves of rows.

/// The memory layout of some batches' tokens: token i of batch b is at (b * batch + i) * stride.
struct token_rows {
  std::int64_t batch, stride;
};

/// y[b, i, c] = x[b, i, c], or += with `Add`.
template <class From, class To, bool Add>
struct moved_rows {
  const From* x;
  To* y;
  token_rows from, to;
  std::int64_t tokens;

  struct places {
    std::int64_t x, y;
  };
  __device__ places row(std::int64_t r) const {
    const std::int64_t b = r / tokens, i = r % tokens;
    return {(b * from.batch + i) * from.stride, (b * to.batch + i) * to.stride};
  }
  template <int Width>
  __device__ void at(std::int64_t, std::int64_t c, places place) const {
    const chunk<Width, From> in = load_chunk<Width>(x + place.x + c);
    To* const out = y + place.y + c;
    chunk<Width, To> sum;
    if constexpr (Add) sum = load_chunk<Width>(static_cast<const To*>(out));
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      const float value = number<float>(in.at[j]);
      sum.at[j] = number<To>(Add ? number<float>(sum.at[j]) + value : value);
    }
    store_chunk(out, sum);
  }
};

/// Moves `tokens` rows of `width` elements in each of `batches` batches.
template <bool Add, class From, class To>
void move_rows(cuda& device, const From* x, token_rows from, To* y, token_rows to, std::int64_t batches,
               std::int64_t tokens, std::int64_t width) {
  using narrower = std::conditional_t<(sizeof(From) < sizeof(To)), From, To>;
  constexpr int wide = vector16<narrower>::size;
  const bool aligned = aligned16(x, y) && from.stride % wide == 0 && to.stride % wide == 0;
  row_map<narrower>(device, aligned, batches * tokens, width, moved_rows<From, To, Add>{x, y, from, to, tokens});
}

/// A bf16 array that a library reads or writes instead of the caller's array. It is the caller's array if T is bf16 and
/// no sum is wanted; else a temporary array without gaps between tokens.
template <class T>
class library_array {
 public:
  library_array(cuda& device, T* data, token_rows rows, const attention_shape& s, bool keys, bool add)
      : device_(device),
        data_(data),
        rows_(rows),
        width_((keys ? s.kv_heads : s.heads) * s.head_dim),
        batches_(s.batch),
        tokens_(keys ? s.k_len : s.q_len),
        add_(add) {
    if (!direct()) memory_ = make_buffer<bf16>(device, static_cast<std::size_t>(batches_ * rows.batch * width_));
  }

  bf16* data() {
    if constexpr (in_bf16) {
      if (direct()) return const_cast<bf16*>(data_);
    }
    return memory_.template data<bf16>();
  }
  std::int64_t stride() const { return direct() ? rows_.stride : width_; }

  /// Copies the caller's numbers into it, rounded.
  void read() {
    if constexpr (!in_bf16) move_rows<false>(device_, data_, rows_, data(), inner(), batches_, tokens_, width_);
  }
  /// Copies its numbers to the caller's array, or adds them.
  void write() {
    if (direct()) return;
    const bf16* const made = data();
    if (add_) return move_rows<true>(device_, made, inner(), data_, rows_, batches_, tokens_, width_);
    if constexpr (!in_bf16) move_rows<false>(device_, made, inner(), data_, rows_, batches_, tokens_, width_);
  }

 private:
  static constexpr bool in_bf16 = std::is_same_v<std::remove_const_t<T>, bf16>;
  bool direct() const { return in_bf16 && !add_; }
  token_rows inner() const { return {rows_.batch, width_}; }

  cuda& device_;
  T* data_;
  token_rows rows_;
  std::int64_t width_, batches_, tokens_;
  bool add_;
  buffer<cuda> memory_;
};

/// lse [batch, heads, q_len] without gaps between rows, as libraries require.
class library_lse {
 public:
  library_lse(cuda& device, const attention_shape& s) : device_(device), s_(s) {
    if (s.lse_stride != s.q_len) memory_ = make_buffer<float>(device, static_cast<std::size_t>(rows() * s.q_len));
  }
  float* in_place_of(float* lse) { return memory_.empty() ? lse : memory_.data<float>(); }
  const float* filled_from(const float* lse) {
    if (memory_.empty()) return lse;
    copy_2d(device_, lse, memory_.data(), rows(), bytes(s_.q_len), bytes(s_.lse_stride), bytes(s_.q_len));
    return memory_.data<float>();
  }
  void write(float* lse) {
    if (memory_.empty()) return;
    copy_2d(device_, memory_.data(), lse, rows(), bytes(s_.q_len), bytes(s_.q_len), bytes(s_.lse_stride));
  }

 private:
  static std::int64_t bytes(std::int64_t n) { return n * static_cast<std::int64_t>(sizeof(float)); }
  std::int64_t rows() const { return s_.batch * s_.heads; }

  cuda& device_;
  attention_shape s_;
  buffer<cuda> memory_;
};

/// Runs `attention_forward` in a library, for a checked shape.
template <class O>
void library_forward(cuda& device, attention_library& library, const bf16* q, const bf16* k, const bf16* v, O* o,
                     float* lse, const attention_shape& s, const attention_request& request) {
  library_array<O> output(device, o, {s.q_batch, s.o_stride}, s, false, false);
  library_lse sums(device, s);
  library.forward(device, q, k, v, output.data(), sums.in_place_of(lse), library_shape(s, request));
  output.write();
  sums.write(lse);
}

/// Runs `attention_backward` in a library, for a checked shape.
template <class O, class G>
void library_backward(cuda& device, attention_library& library, const bf16* q, const bf16* k, const bf16* v, const O* o,
                      const float* lse, const bf16* d_o, G* dq, G* dk, G* dv, const attention_shape& s,
                      const attention_request& request) {
  const attention_accumulate add = request.accumulate;
  const attention_shape inner = library_shape(s, request);
  library_array<const O> output(device, o, {s.q_batch, s.o_stride}, s, false, false);
  library_array<G> queries(device, dq, {s.q_batch, s.dq_stride}, s, false, add.queries);
  library_array<G> keys(device, dk, {s.k_batch, s.dk_stride}, inner, true, add.keys_and_values);
  library_array<G> gradients_of_values(device, dv, {s.k_batch, s.dv_stride}, inner, true, add.keys_and_values);
  library_lse sums(device, s);
  output.read();
  library.backward(device, q, k, v, output.data(), sums.filled_from(lse), d_o, queries.data(), keys.data(),
                   gradients_of_values.data(), inner);
  queries.write();
  keys.write();
  gradients_of_values.write();
}

}  // namespace plait::kernels::detail

namespace plait::kernels {

// ---- launches ----------------------------------------------------------------------------------------------------

template <class T, attention_result<T> O>
void attention_forward(cuda& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape, const attention_choice& choice) {
  const attention_shape s = shape.checked();
  const detail::attention_sizes sizes(s);
  if constexpr (std::is_same_v<T, bf16>) detail::require_vectors(s, q, k, v, o);
  if (sizes.batch == 0 || sizes.q_len == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    const attention_request request{.float_output = !std::is_same_v<O, T>};
    if (attention_backend_for(choice, s, request) == attention_backend::cudnn)
      return detail::library_forward(device, *choice.library, q, k, v, o, lse, s, request);
  }
  detail::attention_launchers_for<T>(s).forward(device, q, k, v, o, lse, s);
}

namespace detail {

/// delta[b, h, i] = sum of o * d_o over the head's elements. `lanes` neighbouring threads share a query of a head, and
/// each reads `Width` numbers at a time.
template <int Width, class T, class O>
static __global__ void attention_delta_rows(const O* o, const T* d_o, statistic_of<T>* delta, attention_sizes s,
                                            int lanes) {
  using A = arithmetic<T>;
  const std::int64_t rows = static_cast<std::int64_t>(s.batch) * s.q_len * s.heads;
  const int groups = static_cast<int>(blockDim.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * groups;
  for (std::int64_t start = first; start < rows; start += static_cast<std::int64_t>(gridDim.x) * groups) {
    const std::int64_t row = start + static_cast<int>(threadIdx.x) / lanes;
    const bool inside = row < rows;  // all lanes of a warp take part in the sum
    const int i = static_cast<int>(row / s.heads % s.q_len), b = static_cast<int>(row / s.heads / s.q_len);
    const int head = static_cast<int>(row % s.heads);
    A sum = A(0);
    if (inside) {
      const O* const output = s.query_head(o, b, head, s.o_stride) + i * s.o_stride;
      const T* const gradient = s.query_head(d_o, b, head, s.do_stride) + i * s.do_stride;
      for (int c = lane * Width; c < s.head_dim; c += lanes * Width) {
        const chunk<Width, O> y = load_chunk<Width>(output + c);
        const chunk<Width, T> dy = load_chunk<Width>(gradient + c);
        PLAIT_UNROLL
        for (int j = 0; j < Width; ++j) sum += number<A>(y.at[j]) * number<A>(dy.at[j]);
      }
    }
    sum = lane_sum(sum, lanes);
    if (inside && lane == 0) s.statistics(delta, b, head)[i] = sum;
  }
}

}  // namespace detail

template <class T, attention_result<T> O>
void attention_delta(cuda& device, const O* o, const T* d_o, statistic_of<T>* delta, const attention_shape& shape) {
  const detail::attention_sizes sizes(shape.checked());
  const std::int64_t rows = static_cast<std::int64_t>(sizes.batch) * sizes.q_len * sizes.heads;
  if (rows == 0) return;
  constexpr unsigned threads = 256;
  constexpr int widest = detail::chunk_width<T, O>();
  const bool vectors = aligned16(o, d_o) && sizes.head_dim % widest == 0 && sizes.o_stride % vector16<O>::size == 0 &&
                       sizes.do_stride % vector16<T>::size == 0;
  detail::with_chunk<widest>(vectors, [&](auto width) {
    constexpr int Width = decltype(width)::value;
    const int lanes = lanes_for(sizes.head_dim, Width);
    plait::detail::launch(device, {plait::detail::blocks_for(rows, threads / static_cast<unsigned>(lanes)), threads},
                          detail::attention_delta_rows<Width, T, O>, o, d_o, delta, sizes, lanes);
  });
}

template <class T, attention_result<T> O, attention_result<T> G>
void attention_backward(cuda& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate, const statistic_of<T>* delta, const attention_choice& choice) {
  const attention_shape s = shape.checked();
  const detail::attention_sizes sizes(s);
  if constexpr (std::is_same_v<T, bf16>) detail::require_vectors(s, q, k, v, o, d_o, dq, dk, dv);
  if (sizes.batch == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    const attention_request request{.gradients = true,
                                    .accumulate = accumulate,
                                    .float_output = !std::is_same_v<O, T>,
                                    .float_gradients = !std::is_same_v<G, T>,
                                    .has_output = o != nullptr};
    if (attention_backend_for(choice, s, request) == attention_backend::cudnn)
      return detail::library_backward(device, *choice.library, q, k, v, o, lse, d_o, dq, dk, dv, s, request);
  }
  buffer<cuda> made;
  if (delta == nullptr) {
    made = make_buffer<statistic_of<T>>(device, static_cast<std::size_t>(s.batch * s.heads * s.lse_stride));
    attention_delta(device, o, d_o, made.template data<statistic_of<T>>(), s);
    delta = made.template data<statistic_of<T>>();
  }
  detail::attention_launchers_for<T>(s).backward(device, q, k, v, lse, d_o, delta, dq, dk, dv, s, accumulate);
}

#ifndef PLAIT_COMPILING_CUDA_DOUBLE
PLAIT_CUDA_INLINE std::size_t attention_shared_bytes(dtype type, std::int64_t head_dim) {
  std::size_t most = 0;
  detail::with_head_width(static_cast<int>(head_dim), [&](auto width) {
    constexpr int w = decltype(width)::value;
    using detail::scalar_backward_tiles, detail::scalar_forward_tiles;
    switch (type) {
      case dtype::bf16:
        most = std::max(detail::forward_tiles<w>::shared_bytes, detail::backward_tiles<w>::key_shared_bytes);
        break;
      case dtype::f64:
        most = std::max(scalar_forward_tiles<double, w>::shared_bytes, scalar_backward_tiles<double, w>::shared_bytes);
        break;
      default:
        most = std::max(scalar_forward_tiles<float, w>::shared_bytes, scalar_backward_tiles<float, w>::shared_bytes);
    }
  });
  return most;
}
#endif

// ---- merge of attention over two disjoint sets of keys -----------------------------------------------------------

namespace detail {

/// `lanes` neighbouring threads share each (batch, query, head), and each reads `Width` numbers at a time.
template <int Width, class T, class Other>
__global__ static void merge_heads(T* o, statistic_of<T>* lse, const Other* o_other, const statistic_of<T>* lse_other,
                                   std::int64_t queries, std::int64_t q_len, std::int64_t heads, std::int64_t head_dim,
                                   std::int64_t o_stride, std::int64_t other_stride, std::int64_t q_batch,
                                   std::int64_t lse_stride, int lanes) {
  using S = statistic_of<T>;
  const std::int64_t group = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t query = group / heads, h = group % heads;
  const bool inside = query < queries;
  const std::int64_t at = inside ? (query / q_len * heads + h) * lse_stride + query % q_len : 0;
  const S before = inside ? lse[at] : S(0), other = inside ? lse_other[at] : S(0);
  __syncwarp();  // all lanes have read lse before one overwrites it
  const S larger = before > other ? before : other;
  if (!inside || larger == -infinite<S>) return;
  const S mine = exp(before - larger), others = exp(other - larger);
  const S keep = mine / (mine + others), take = others / (mine + others);
  const std::int64_t token = query / q_len * q_batch + query % q_len;
  T* const target = o + token * o_stride + h * head_dim;
  const Other* const source = o_other + token * other_stride + h * head_dim;
  for (std::int64_t c = std::int64_t{lane} * Width; c < head_dim; c += std::int64_t{lanes} * Width) {
    chunk<Width, T> merged = load_chunk<Width>(target + c);
    const chunk<Width, Other> added = load_chunk<Width>(source + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      merged.at[j] = number<T>(number<S>(merged.at[j]) * keep + number<S>(added.at[j]) * take);
    }
    store_chunk(target + c, merged);
  }
  if (lane == 0) lse[at] = larger + log(mine + others);
}

}  // namespace detail

template <class T, class Other>
void merge_lse(cuda& device, T* o, statistic_of<T>* lse, const Other* o_other, const statistic_of<T>* lse_other,
               std::int64_t other_stride, const attention_shape& shape) {
  const attention_shape s = shape.checked();
  const std::int64_t queries = s.batch * s.q_len;
  if (queries == 0) return;
  constexpr unsigned threads = 256;
  constexpr int widest = detail::chunk_width<T, Other>();
  const bool vectors = aligned16(o, o_other) && s.head_dim % widest == 0 && s.o_stride % vector16<T>::size == 0 &&
                       other_stride % vector16<Other>::size == 0;
  detail::with_chunk<widest>(vectors, [&](auto width) {
    constexpr int Width = decltype(width)::value;
    const int lanes = lanes_for(s.head_dim, Width);
    plait::detail::launch(
        device, {plait::detail::blocks_for(queries * s.heads, threads / static_cast<unsigned>(lanes)), threads},
        detail::merge_heads<Width, T, Other>, o, lse, o_other, lse_other, queries, s.q_len, s.heads, s.head_dim,
        s.o_stride, other_stride, s.q_batch, s.lse_stride, lanes);
  });
}

// ---- where documents end -----------------------------------------------------------------------------------------

namespace detail {

static __global__ void find_document_ends(const std::int32_t* starts, int length, std::int32_t* ends, std::int64_t rows,
                                          std::int64_t first, std::int64_t count, std::int64_t stride) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const std::int64_t b = row / count, i = row % count;
  const std::int32_t* const text = starts + b * length;
  int begin = 0, end = length;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (text[middle] <= first + i)
      begin = middle + 1;
    else
      end = middle;
  }
  ends[b * stride + i] = begin;
}

}  // namespace detail

#ifndef PLAIT_COMPILING_CUDA_DOUBLE
PLAIT_CUDA_INLINE void document_ends(cuda& device, const std::int32_t* starts, std::int64_t length, std::int32_t* ends,
                                     std::int64_t batch, std::int64_t first, std::int64_t count, std::int64_t stride) {
  const std::int64_t rows = batch * count;
  if (rows <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(rows, 256), 256}, detail::find_document_ends, starts,
                        static_cast<int>(length), ends, rows, first, count, stride);
}
#endif

// ---- attention sinks ---------------------------------------------------------------------------------------------

namespace detail {

/// `lanes` neighbouring threads share each (batch, query, head), and each reads `Width` numbers at a time.
template <int Width, class T, class O>
static __global__ void join_sinks_to_heads(const T* sinks, O* o, statistic_of<T>* lse, attention_sizes s, int lanes) {
  using A = arithmetic<T>;
  const std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes, head = static_cast<int>(row % s.heads);
  const std::int64_t query = row / s.heads;
  const int i = static_cast<int>(query % s.q_len), b = static_cast<int>(query / s.q_len);
  const bool inside = b < s.batch;
  const A before = inside ? s.statistics(lse, b, head)[i] : A(0);
  __syncwarp();  // all lanes have read lse before one overwrites it
  if (!inside) return;
  const A sink = number<A>(sinks[head]), larger = before > sink ? before : sink;
  if (larger == -infinite<A>) return;
  const A after = larger + precise_log(precise_exp(before - larger) + precise_exp(sink - larger));
  const A keep = precise_exp(before - after);
  O* const target = s.query_head(o, b, head, s.o_stride) + i * s.o_stride;
  for (int c = lane * Width; c < s.head_dim; c += lanes * Width) {
    chunk<Width, O> values = load_chunk<Width>(static_cast<const O*>(target + c));
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) values.at[j] = number<O>(number<A>(values.at[j]) * keep);
    store_chunk(target + c, values);
  }
  if (lane == 0) s.statistics(lse, b, head)[i] = after;
}

inline constexpr unsigned sink_threads = 256;

/// Each head has one block, which adds its queries in one order.
template <class T>
static __global__ void __launch_bounds__(sink_threads)
    sum_sink_gradients(const T* sinks, const statistic_of<T>* lse, const statistic_of<T>* delta,
                       statistic_of<T>* dsinks, attention_sizes s) {
  using A = arithmetic<T>;
  __shared__ A scratch[warp_lanes];
  const int head = static_cast<int>(blockIdx.x);
  const A sink = number<A>(sinks[head]);
  A sum = A(0);
  for (int b = 0; b < s.batch; ++b) {
    for (int i = static_cast<int>(threadIdx.x); i < s.q_len; i += static_cast<int>(sink_threads)) {
      const A gradient = s.statistics(delta, b, head)[i];
      if (gradient != A(0)) sum -= precise_exp(sink - s.statistics(lse, b, head)[i]) * gradient;
    }
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) dsinks[head] = sum;
}

}  // namespace detail

template <class T, attention_result<T> O>
void join_sinks(cuda& device, const T* sinks, O* o, statistic_of<T>* lse, const attention_shape& shape) {
  const detail::attention_sizes sizes(shape.checked());
  const std::int64_t rows = static_cast<std::int64_t>(sizes.batch) * sizes.q_len * sizes.heads;
  if (rows == 0) return;
  constexpr unsigned threads = 256;
  constexpr int widest = vector16<O>::size;
  const bool vectors = aligned16(o) && sizes.head_dim % widest == 0 && sizes.o_stride % widest == 0;
  detail::with_chunk<widest>(vectors, [&](auto width) {
    constexpr int Width = decltype(width)::value;
    const int lanes = lanes_for(sizes.head_dim, Width);
    plait::detail::launch(device, {plait::detail::blocks_for(rows, threads / static_cast<unsigned>(lanes)), threads},
                          detail::join_sinks_to_heads<Width, T, O>, sinks, o, lse, sizes, lanes);
  });
}

template <class T>
void sink_gradients(cuda& device, const T* sinks, const statistic_of<T>* lse, const statistic_of<T>* delta,
                    statistic_of<T>* dsinks, const attention_shape& shape) {
  const detail::attention_sizes sizes(shape.checked());
  plait::detail::launch(device, {static_cast<unsigned>(sizes.heads), detail::sink_threads},
                        detail::sum_sink_gradients<T>, sinks, lse, delta, dsinks, sizes);
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
