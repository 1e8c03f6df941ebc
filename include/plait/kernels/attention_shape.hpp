#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "plait/core/error.hpp"

namespace plait::kernels {

/// One grouped-query attention. Queries and outputs are [batch, q_len, heads, head_dim], keys and values
/// [batch, k_len, kv_heads, head_dim]; head h attends with key head h / (heads / kv_heads). Heads and their elements
/// lie side by side, tokens a stride apart (in elements), batches q_len or k_len tokens apart, so each may be a slice
/// of a fused projection. A stride of 0 means: without gaps.
///
/// With `causal`, token i of the queries sees token j of the keys if k_offset + j <= q_offset + i, the offsets being
/// the global positions of the first tokens. A query that sees nothing has output 0 and lse -infinity.
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

  std::int64_t group() const { return heads / kv_heads; }

  /// The same shape with every stride filled in. Throws `plait::error` for sizes that cannot be.
  attention_shape checked() const {
    const auto refuse = [](const char* name, std::int64_t value, const std::string& legal) {
      fail("attention: " + std::string(name) + " = " + std::to_string(value) + ", must be " + legal);
    };
    if (batch < 0) refuse("batch", batch, "at least 0");
    if (q_len < 0) refuse("q_len", q_len, "at least 0");
    if (k_len < 0) refuse("k_len", k_len, "at least 0");
    if (head_dim < 1) refuse("head_dim", head_dim, "at least 1");
    if (kv_heads < 1) refuse("kv_heads", kv_heads, "at least 1");
    if (heads < 1 || heads % kv_heads != 0)
      refuse("heads", heads, "a multiple of kv_heads = " + std::to_string(kv_heads));
    attention_shape s = *this;
    const auto settle = [&](const char* name, std::int64_t& stride, std::int64_t standard, std::int64_t least) {
      if (stride == 0) stride = standard;
      if (stride < least) refuse(name, stride, "at least " + std::to_string(least) + ", the elements of a token");
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
    return s;
  }

  /// How many keys, from the first on, query token i sees.
  std::int64_t visible(std::int64_t i) const {
    return causal ? std::clamp<std::int64_t>(q_offset + i - k_offset + 1, 0, k_len) : k_len;
  }
};

/// Whether `attention_backward` adds to its outputs or overwrites them.
struct attention_accumulate {
  bool queries = false;
  bool keys_and_values = false;
};

}  // namespace plait::kernels
