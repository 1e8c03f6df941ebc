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
  attention_arrays made = start;
  const std::vector<double> sinks = sinks_of<T>(piece);
  std::vector<double> delta(made.lse.size());
  if (piece.sinks) made.dsinks.resize(sinks.size());
  run_piece(device, piece,
            piece_arrays<double, double, double>{q.data(), k.data(), v.data(), d_o.data(), sinks.data(), made.o.data(),
                                                 made.dq.data(), made.dk.data(), made.dv.data(), made.lse.data(),
                                                 delta.data(), made.dsinks.data()});
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
  const auto uploaded = [&](const std::int32_t* positions) {
    const int64_t count = positions == nullptr ? 0 : q_tokens - given.q_lead;
    return device_array<std::int32_t>(device, std::vector<std::int32_t>(positions, positions + count));
  };
  device_array<std::int32_t> starts = uploaded(s.first_visible), ends = uploaded(s.end_visible);
  attention_piece there = given;
  if (s.first_visible != nullptr) there.shape.first_visible = starts.data();
  if (s.end_visible != nullptr) there.shape.end_visible = ends.data();
  run_piece(device, there,
            piece_arrays<T, R, statistic_of<T>>{q_.data(), k_.data(), v_.data(), d_o_.data(), sinks_.data(), o_.data(),
                                                dq_.data(), dk_.data(), dv_.data(), lse_.data(), delta_.data(),
                                                dsinks_.data()},
            library != nullptr);  // only plait's kernels work with delta instead of the output
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
