// A library's attention where its caller wants what libraries do not write: results in float, sums of gradients, rows
// of lse that lie apart. It makes the temporaries and moves the rows; whether a library runs is decided in
// kernels/cuda/attention_backend.hpp. Test: tests/cuda/attention.cpp, tests/cuda/attention_cp.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "plait/core/precision.hpp"
#include "plait/device/attention_choice.hpp"
#include "plait/device/buffer.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/attention_shape.hpp"
#include "plait/kernels/cuda/attention_backend.hpp"
#include "plait/kernels/cuda/copy.hpp"
#include "plait/kernels/cuda/rows.hpp"

namespace plait::kernels::detail {

/// Where the rows of the tokens of some batches lie: token i of batch b at (b * batch + i) * stride.
struct token_rows {
  std::int64_t batch, stride;
};

/// y[b, i, c] = x[b, i, c], or += it.
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

/// Moves `tokens` rows of `width` elements in each of `batches`.
template <bool Add, class From, class To>
void move_rows(cuda& device, const From* x, token_rows from, To* y, token_rows to, std::int64_t batches,
               std::int64_t tokens, std::int64_t width) {
  constexpr int wide = chunk_width<From, To>();
  const bool vectors = aligned16(x, y) && width % wide == 0 && from.stride % wide == 0 && to.stride % wide == 0;
  row_map<wide>(device, vectors, batches * tokens, width, moved_rows<From, To, Add>{x, y, from, to, tokens});
}

/// A bf16 array that a library writes or reads in the place of the caller's: the caller's own where T is bf16 and no
/// sum is wanted, else one without gaps between tokens.
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

  /// Rounds the caller's numbers into it.
  void read() {
    if constexpr (!in_bf16) move_rows<false>(device_, data_, rows_, data(), inner(), batches_, tokens_, width_);
  }
  /// Writes the caller's numbers from it, or adds to them.
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

/// lse [batch, heads, q_len] without gaps between its rows, as libraries want it.
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

/// `attention_forward` by a library, for a checked shape.
template <class O>
void library_forward(cuda& device, attention_library& library, const bf16* q, const bf16* k, const bf16* v, O* o,
                     float* lse, const attention_shape& s, const attention_request& request) {
  library_array<O> output(device, o, {s.q_batch, s.o_stride}, s, false, false);
  library_lse sums(device, s);
  library.forward(device, q, k, v, output.data(), sums.in_place_of(lse), library_shape(s, request));
  output.write();
  sums.write(lse);
}

/// `attention_backward` by a library, for a checked shape.
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
