#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/cpu/attention.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "support/attention_pieces.hpp"

/// Compares a GPU's attention and its gradients with the cpu's.
namespace plait::test {

/// The results of attention, in double: whole arrays, of which a piece's tokens are a part.
struct attention_arrays {
  std::vector<double> o, lse, dq, dk, dv, dsinks{};
};

/// The sinks of the heads of a piece.
template <class T>
std::vector<double> sinks_of(const attention_piece& piece) {
  return random_values<T>(piece.shape.heads, 10);
}

/// The cpu's attention and its gradients, for inputs of T. `start` has the initial values of the arrays.
template <class T = double>
attention_arrays attention_on_cpu(const attention_piece& piece, const std::vector<double>& q,
                                  const std::vector<double>& k, const std::vector<double>& v,
                                  const std::vector<double>& d_o, const attention_arrays& start) {
  cpu device;
  const kernels::attention_shape s = piece.shape.checked();
  attention_arrays made = start;
  const double *const q_at = q.data() + piece.q_lead * s.q_stride, *const k_at = k.data() + piece.k_lead * s.k_stride;
  const double *const v_at = v.data() + piece.k_lead * s.v_stride, *const d_o_at =
                                                                       d_o.data() + piece.q_lead * s.do_stride;
  double *const o_at = made.o.data() + piece.q_lead * s.o_stride, *const lse_at = made.lse.data() + piece.lse_lead;
  kernels::attention_forward(device, q_at, k_at, v_at, o_at, lse_at, s);
  if (piece.sinks) {
    const std::vector<double> sinks = sinks_of<T>(piece);
    std::vector<double> delta(made.lse.size());
    made.dsinks.resize(sinks.size());
    kernels::join_sinks(device, sinks.data(), o_at, lse_at, s);
    kernels::attention_delta(device, o_at, d_o_at, delta.data() + piece.lse_lead, s);
    kernels::sink_gradients(device, sinks.data(), lse_at, delta.data() + piece.lse_lead, made.dsinks.data(), s);
  }
  kernels::attention_backward(device, q_at, k_at, v_at, o_at, lse_at, d_o_at,
                              made.dq.data() + piece.q_lead * s.dq_stride, made.dk.data() + piece.k_lead * s.dk_stride,
                              made.dv.data() + piece.k_lead * s.dv_stride, s, piece.accumulate);
  return made;
}

using kernels::attention_shape;
using std::int64_t;

/// The positions of a piece's tokens in an array.
struct token_rows {
  int64_t lead, batch, len, stride, width;
  bool has(int64_t element) const {
    const int64_t token = element / stride % batch;
    return token >= lead && token < lead + len && element % stride < width;
  }
};

/// The norm of the difference over that of the expected values, for the elements of tokens; infinite if another element
/// changed.
inline double error_of(const values& got, const values& expected, const token_rows& rows) {
  double squares = 0, size = 0, count = 1;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!rows.has(static_cast<int64_t>(i))) {
      if (got[i] != expected[i]) return HUGE_VAL;
      continue;
    }
    squares += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
    count += 1;
  }
  return std::sqrt(squares) / std::fmax(std::sqrt(size), 0.1 * std::sqrt(count));
}

template <class T>
void check_lse(const values& got, const values& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const bool same = std::isinf(expected[i]) ? got[i] == expected[i]
                                              : std::abs(got[i] - expected[i]) <= 5 * std::fmin(tolerance<T>, 1e-5);
    if (!same) {
      CAPTURE(i);
      CHECK(got[i] == expected[i]);
      return;
    }
  }
}

/// Compares with the cpu; outputs and gradients have type R. A library, if given, must be used.
template <class T, class R = T>
void check(const attention_piece& given, attention_library* library = nullptr) {
  const attention_shape s = given.shape.checked();
  CAPTURE(sizeof(T));
  CAPTURE(s.batch);
  CAPTURE(s.q_len);
  CAPTURE(s.k_len);
  CAPTURE(s.heads);
  CAPTURE(s.kv_heads);
  CAPTURE(s.head_dim);
  CAPTURE(describe(s.mask));
  CAPTURE(s.q_offset);
  CAPTURE(s.k_offset);
  CAPTURE(s.first_visible);
  CAPTURE(s.end_visible);
  cuda device;
  if (library == nullptr &&
      kernels::attention_shared_bytes(dtype_of<T>, s.head_dim) > device.shared_bytes_per_block()) {
    MESSAGE("skipped: this GPU has too little shared memory for the head_dim");
    return;
  }
  const int64_t q_tokens = s.batch * s.q_batch, k_tokens = s.batch * s.k_batch;
  const values q = random_values<T>(q_tokens * s.q_stride, 1), k = random_values<T>(k_tokens * s.k_stride, 2);
  const values v = random_values<T>(k_tokens * s.v_stride, 3), d_o = random_values<T>(q_tokens * s.do_stride, 4);
  const attention_arrays start{random_values<T>(q_tokens * s.o_stride, 5),
                               random_values<T>(s.batch * s.heads * s.lse_stride, 9),
                               random_values<T>(q_tokens * s.dq_stride, 6), random_values<T>(k_tokens * s.dk_stride, 7),
                               random_values<T>(k_tokens * s.dv_stride, 8)};
  const attention_arrays expected = attention_on_cpu<T>(given, q, k, v, d_o, start);

  if (library != nullptr) device.use_attention({attention_backend::cudnn, library});
  number_array<T> q_(device, q), k_(device, k), v_(device, v), d_o_(device, d_o);
  number_array<R> o_(device, start.o), dq_(device, start.dq), dk_(device, start.dk), dv_(device, start.dv);
  number_array<statistic_of<T>> lse_(device, start.lse), delta_(device, start.lse);
  number_array<T> sinks_(device, sinks_of<T>(given));
  number_array<statistic_of<T>> dsinks_(device, values(expected.dsinks.size(), 9.0));
  std::vector<std::int32_t> documents;
  if (s.first_visible != nullptr) documents.assign(s.first_visible, s.first_visible + q_tokens - given.q_lead);
  device_array<std::int32_t> documents_(device, documents);
  attention_shape there = given.shape;
  if (s.first_visible != nullptr) there.first_visible = documents_.data();
  std::vector<std::int32_t> ends;
  if (s.end_visible != nullptr) ends.assign(s.end_visible, s.end_visible + q_tokens - given.q_lead);
  device_array<std::int32_t> ends_(device, ends);
  if (s.end_visible != nullptr) there.end_visible = ends_.data();
  const T *const q_at = q_.data() + given.q_lead * s.q_stride, *const k_at = k_.data() + given.k_lead * s.k_stride;
  const T *const v_at = v_.data() + given.k_lead * s.v_stride, *const d_o_at = d_o_.data() + given.q_lead * s.do_stride;
  R* const o_at = o_.data() + given.q_lead * s.o_stride;
  statistic_of<T>*const lse_at = lse_.data() + given.lse_lead, *const delta_at = delta_.data() + given.lse_lead;
  kernels::attention_forward<T>(device, q_at, k_at, v_at, o_at, lse_at, there);
  if (given.sinks) kernels::join_sinks<T>(device, sinks_.data(), o_at, lse_at, there);
  if (given.given_delta || given.sinks) kernels::attention_delta<T>(device, o_at, d_o_at, delta_at, there);
  if (given.sinks) kernels::sink_gradients<T>(device, sinks_.data(), lse_at, delta_at, dsinks_.data(), there);
  const R* const output = given.given_delta && library == nullptr
                              ? nullptr
                              : o_at;  // only plait's kernels work with delta instead of the output
  kernels::attention_backward<T>(device, q_at, k_at, v_at, output, lse_at, d_o_at,
                                 dq_.data() + given.q_lead * s.dq_stride, dk_.data() + given.k_lead * s.dk_stride,
                                 dv_.data() + given.k_lead * s.dv_stride, there, given.accumulate,
                                 given.given_delta ? delta_at : nullptr);
  device.synchronize();
  const int64_t q_width = s.heads * s.head_dim, k_width = s.kv_heads * s.head_dim;
  const auto queries = [&](int64_t stride) { return token_rows{given.q_lead, s.q_batch, s.q_len, stride, q_width}; };
  const auto keys = [&](int64_t stride) { return token_rows{given.k_lead, s.k_batch, s.k_len, stride, k_width}; };
  CHECK(error_of(o_.read(), expected.o, queries(s.o_stride)) < tolerance<T>);
  CHECK(error_of(dq_.read(), expected.dq, queries(s.dq_stride)) < tolerance<T>);
  CHECK(error_of(dk_.read(), expected.dk, keys(s.dk_stride)) < tolerance<T>);
  CHECK(error_of(dv_.read(), expected.dv, keys(s.dv_stride)) < tolerance<T>);
  check_lse<T>(lse_.read(), expected.lse);
  // Few numbers, each a sum whose terms nearly cancel.
  if (given.sinks) CHECK(difference(dsinks_.read(), expected.dsinks) < 3 * tolerance<T>);
}

}  // namespace plait::test
