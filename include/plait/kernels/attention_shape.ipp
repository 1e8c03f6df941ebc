// The definitions of attention_shape.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait::kernels {

PLAIT_INLINE attention_shape attention_shape::checked() const {
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
