// The sizes, strides and masks of one call of attention, on any device. It describes one rank's arrays; how attention
// is split over ranks is in nn/attention/engine.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait::kernels {

/// One grouped-query attention. Queries and outputs are [batch, q_len, heads, head_dim], keys and values
/// [batch, k_len, kv_heads, head_dim]; head h attends with key head h / (heads / kv_heads). Heads and their elements
/// lie side by side, tokens a stride apart (in elements), batches `q_batch` or `k_batch` tokens apart. So each may be a
/// slice of a fused projection, and a piece of a longer sequence. A stride of 0 means: without gaps. The rows of
/// lse [batch, heads, q_len] are `lse_stride` elements apart.
///
/// With `causal`, token i of the queries sees token j of the keys if k_offset + j <= q_offset + i, the offsets being
/// the global positions of the first tokens. `window` and `first_visible` bound what is seen from below, causal or not.
/// A query that sees nothing has output 0, lse -infinity and gradient 0.
struct attention_shape {
  std::int64_t batch = 1;
  std::int64_t q_len = 0;
  std::int64_t k_len = 0;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t head_dim = 0;
  double scale = 1.0;  ///< multiplies the scores, usually 1 / sqrt(head_dim)
  bool causal = true;
  std::int64_t q_offset = 0;
  std::int64_t k_offset = 0;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, o_stride = 0;
  /// Strides of the gradients; 0 means as the value's.
  std::int64_t dq_stride = 0, dk_stride = 0, dv_stride = 0, do_stride = 0;
  /// Tokens between batches of queries, outputs and `first_visible`, and of keys and values; 0 means q_len and k_len.
  std::int64_t q_batch = 0, k_batch = 0;
  /// Elements between the heads' rows of lse and delta; 0 means q_len. Batches are heads * lse_stride apart.
  std::int64_t lse_stride = 0;
  /// The token at position p sees none before position p - window + 1; 0: no such bound.
  std::int64_t window = 0;
  /// [batch, q_len] in the device's memory, q_batch apart: the global position of the first token that a query may see,
  /// for instance where its document begins. Must not decrease along the queries of a batch. Null: no such bound.
  const std::int32_t* first_visible = nullptr;

  std::int64_t group() const { return heads / kv_heads; }

  /// Bytes of device memory that cuDNN's backward pass with sums in a fixed order takes for itself: the gradient of
  /// every score in bf16, with both lengths rounded up to its tiles (NVIDIA/cudnn-frontend, `use_dp_workspace` in
  /// scaled_dot_product_flash_attention.h). It grows with the square of the sequence; sums in any order need none of
  /// it.
  std::int64_t fixed_order_bytes() const {
    const auto up = [](std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile * tile; };
    return 2 * batch * heads * up(q_len, 64) * up(k_len, 128);
  }

  /// Returns this shape with every stride filled in. Throws `plait::error` for sizes that cannot be.
  attention_shape checked() const;

  /// How many keys, from the first on, query token i sees.
  std::int64_t visible(std::int64_t i) const {
    return causal ? std::clamp<std::int64_t>(q_offset + i - k_offset + 1, 0, k_len) : k_len;
  }

  /// The first key that query token i of batch b may see for `window` and `first_visible` (which is read): it sees
  /// those from this one on and before `visible(i)`, k_len if none. The shape must be checked.
  std::int64_t first_key(std::int64_t b, std::int64_t i) const {
    std::int64_t first = window > 0 ? q_offset + i - window + 1 : k_offset;
    if (first_visible != nullptr) first = std::max<std::int64_t>(first, first_visible[b * q_batch + i]);
    return std::clamp<std::int64_t>(first - k_offset, 0, k_len);
  }

 private:
  static constexpr std::int64_t most_window = std::int64_t{1} << 62;  // positions less it do not overflow
  static constexpr std::int64_t most_position = std::numeric_limits<std::int32_t>::max();
};

/// Whether `attention_backward` adds to its outputs or overwrites them.
struct attention_accumulate {
  bool queries = false;
  bool keys_and_values = false;
};

inline attention_shape attention_shape::checked() const {
  const auto refuse = [](const char* name, std::int64_t value, const std::string& legal) {
    fail({"attention: ", name, " = ", value, ", must be ", legal});
  };
  if (batch < 0) refuse("batch", batch, "at least 0");
  if (q_len < 0) refuse("q_len", q_len, "at least 0");
  if (k_len < 0) refuse("k_len", k_len, "at least 0");
  if (head_dim < 1) refuse("head_dim", head_dim, "at least 1");
  if (kv_heads < 1) refuse("kv_heads", kv_heads, "at least 1");
  if (heads < 1 || heads % kv_heads != 0) refuse("heads", heads, cat({"a multiple of kv_heads = ", kv_heads}));
  attention_shape s = *this;
  const auto settle = [&](const char* name, std::int64_t& stride, std::int64_t standard, std::int64_t least) {
    if (stride == 0) stride = standard;
    if (stride < least) refuse(name, stride, cat({"at least ", least, ", the elements of a token"}));
  };
  const std::int64_t q_token = heads * head_dim, k_token = kv_heads * head_dim;
  settle("q_stride", s.q_stride, q_token, q_token);
  settle("k_stride", s.k_stride, k_token, k_token);
  settle("v_stride", s.v_stride, k_token, k_token);
  settle("o_stride", s.o_stride, q_token, q_token);
  settle("dq_stride", s.dq_stride, s.q_stride, q_token);
  settle("dk_stride", s.dk_stride, s.k_stride, k_token);
  settle("dv_stride", s.dv_stride, s.v_stride, k_token);
  settle("do_stride", s.do_stride, s.o_stride, q_token);
  const auto settle_tokens = [&](const char* name, std::int64_t& stride, const char* tokens, std::int64_t least) {
    if (stride == 0) stride = least;
    if (stride < least) refuse(name, stride, cat({"0 or at least ", tokens, " = ", least}));
  };
  settle_tokens("q_batch", s.q_batch, "q_len", q_len);
  settle_tokens("k_batch", s.k_batch, "k_len", k_len);
  settle_tokens("lse_stride", s.lse_stride, "q_len", q_len);
  if (window < 0 || window > most_window) refuse("window", window, "from 1 to 2^62, or 0 for none");
  if (first_visible != nullptr && (k_offset < 0 || k_offset > most_position)) {
    refuse("k_offset", k_offset, cat({"from 0 to ", most_position, " where first_visible is given"}));
  }
  return s;
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
