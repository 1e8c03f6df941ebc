#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "plait/kernels/settings.hpp"

/// Calls of attention for tests, on the cpu and on a GPU.
namespace plait::test {

/// Arguments of attention for a piece of longer sequences. The piece begins some tokens after the sequence does.
struct attention_piece {
  kernels::attention_shape shape;
  std::int64_t q_lead = 0, k_lead = 0, lse_lead = 0;
  kernels::attention_accumulate accumulate{};
  bool given_delta = false;
  bool sinks = false;  ///< whether each head has a sink
};

/// The arrays of a piece's attention, in a device's memory: whole ones, of which the piece's tokens are a part. R is
/// the type of outputs and gradients, S of statistics.
template <class T, class R, class S>
struct piece_arrays {
  const T *q, *k, *v, *d_o, *sinks;
  R *o, *dq, *dk, *dv;
  S *lse, *delta, *dsinks;
};

/// Runs both passes. With a given delta, the backward pass gets no output, unless it `reads_output`.
template <class Device, class T, class R, class S>
void run_piece(Device& device, const attention_piece& p, piece_arrays<T, R, S> at, bool reads_output = false) {
  const kernels::attention_shape s = p.shape.checked();
  at.q += p.q_lead * s.q_stride, at.d_o += p.q_lead * s.do_stride;
  at.o += p.q_lead * s.o_stride, at.dq += p.q_lead * s.dq_stride;
  at.k += p.k_lead * s.k_stride, at.dk += p.k_lead * s.dk_stride;
  at.v += p.k_lead * s.v_stride, at.dv += p.k_lead * s.dv_stride;
  at.lse += p.lse_lead, at.delta += p.lse_lead;
  attention_forward(device, at.q, at.k, at.v, at.o, at.lse, p.shape);
  if (p.sinks) join_sinks(device, at.sinks, at.o, at.lse, p.shape);
  if (p.given_delta || p.sinks) attention_delta(device, at.o, at.d_o, at.delta, p.shape);
  if (p.sinks) sink_gradients(device, at.sinks, at.lse, at.delta, at.dsinks, p.shape);
  const R* const output = p.given_delta && !reads_output ? nullptr : at.o;
  attention_backward(device, at.q, at.k, at.v, output, at.lse, at.d_o, at.dq, at.dk, at.dv, p.shape, p.accumulate,
                     p.given_delta ? at.delta : nullptr);
}

inline kernels::attention_shape shape_of(std::int64_t batch, std::int64_t q_len, std::int64_t k_len, std::int64_t heads,
                                         std::int64_t kv_heads, std::int64_t head_dim, bool causal = true,
                                         std::int64_t q_offset = 0, std::int64_t k_offset = 0) {
  kernels::attention_shape s;
  s.batch = batch;
  s.q_len = q_len;
  s.k_len = k_len;
  s.heads = heads;
  s.kv_heads = kv_heads;
  s.head_dim = head_dim;
  s.scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  s.mask = causal ? kernels::attention_mask::causal() : kernels::attention_mask::full();
  s.q_offset = q_offset;
  s.k_offset = k_offset;
  return s;
}

/// Random choices that build test cases.
class picker {
 public:
  explicit picker(unsigned seed) : generator_(seed) {}
  std::int64_t pick(std::int64_t from, std::int64_t to) {
    return std::uniform_int_distribution<std::int64_t>(from, to)(generator_);
  }
  /// False once in `of` calls, on average.
  bool often(std::int64_t of) { return pick(0, of - 1) != 0; }

 private:
  std::mt19937 generator_;
};

/// The start of the document of each of `count` tokens, counted from token `first`. The last tokens may belong to no
/// document and see nothing.
inline std::vector<std::int32_t> random_documents(picker& numbers, std::int64_t first, std::int64_t count) {
  const std::int64_t longest = numbers.pick(1, 200), padding = numbers.often(4) ? 0 : numbers.pick(0, count);
  std::int64_t begin = std::max<std::int64_t>(first - numbers.pick(0, 100), 0), end = first + numbers.pick(1, longest);
  std::vector<std::int32_t> result;
  for (std::int64_t i = 0; i < count; ++i) {
    if (first + i == end) {
      begin = end;
      end += numbers.pick(1, longest);
    }
    result.push_back(static_cast<std::int32_t>(i < count - padding ? begin : first + count + 1000));
  }
  return result;
}

/// Upper bounds for `random_piece`: most pieces have at most q_len and k_len tokens. Strides and head_dim are multiples
/// of `unit`.
struct piece_sizes {
  std::int64_t q_len = 80, k_len = 100, batch = 2, heads = 6, head_dim = 9, unit = 1;
};

/// A piece that uses every field of a shape. `documents` holds the values that its first_visible and end_visible point
/// to: starts of documents first, then their ends.
inline attention_piece random_piece(picker& numbers, const piece_sizes& most, std::vector<std::int32_t>& documents) {
  const auto units = [&](std::int64_t least, std::int64_t largest) {
    return most.unit * numbers.pick(least, std::max(largest / most.unit, least));
  };
  const std::int64_t kv_heads = numbers.pick(1, std::min<std::int64_t>(2, most.heads));
  attention_piece p{.shape =
                        shape_of(numbers.pick(1, most.batch), numbers.pick(1, most.q_len), numbers.pick(1, most.k_len),
                                 kv_heads * numbers.pick(1, most.heads / kv_heads), kv_heads, units(1, most.head_dim),
                                 numbers.often(5), numbers.pick(0, most.k_len), numbers.pick(0, most.q_len))};
  kernels::attention_shape& s = p.shape;
  if (numbers.often(2))
    s.mask.before = numbers.often(2) ? numbers.pick(0, 49) : numbers.pick(49, most.q_len + most.k_len);
  if (s.mask.after == 0 && numbers.often(4)) s.mask.after = numbers.pick(1, 60);
  if (s.mask.before == kernels::attention_mask::all && numbers.often(4)) s.mask.prefix = numbers.pick(1, most.k_len);
  const std::int64_t q_token = s.heads * s.head_dim, k_token = kv_heads * s.head_dim;
  for (std::int64_t* at : {&s.q_stride, &s.o_stride, &s.dq_stride, &s.do_stride})
    *at = q_token + units(0, 3 * most.unit);
  for (std::int64_t* at : {&s.k_stride, &s.v_stride, &s.dk_stride, &s.dv_stride})
    *at = k_token + units(0, 3 * most.unit);
  p.q_lead = numbers.pick(0, 20);
  p.k_lead = numbers.pick(0, 20);
  p.lse_lead = numbers.pick(0, 20);
  s.q_batch = p.q_lead + s.q_len + numbers.pick(0, 5);
  s.k_batch = p.k_lead + s.k_len + numbers.pick(0, 5);
  s.lse_stride = p.lse_lead + s.q_len + numbers.pick(0, 5);
  p.accumulate = {numbers.often(2), numbers.often(2)};
  p.given_delta = numbers.often(2);
  p.sinks = !numbers.often(3);
  documents.clear();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const auto of_batch = random_documents(numbers, s.q_offset, s.q_batch);
    documents.insert(documents.end(), of_batch.begin(), of_batch.end());
  }
  const std::int64_t tokens = s.batch * s.q_batch;
  for (std::int64_t i = 0; i < tokens; ++i) {
    std::int64_t next = i % s.q_batch;
    while (next < s.q_batch &&
           documents[static_cast<std::size_t>(i / s.q_batch * s.q_batch + next)] <= s.q_offset + i % s.q_batch)
      ++next;
    documents.push_back(static_cast<std::int32_t>(s.q_offset + next));
  }
  if (numbers.often(2)) s.first_visible = documents.data();
  if (numbers.often(3)) s.end_visible = documents.data() + tokens;
  if (!numbers.often(3)) s.score.cap = static_cast<double>(numbers.pick(1, 50)) / 10;
  s.score.alibi = !numbers.often(3);
  s.score.first_head = numbers.pick(0, 5);
  s.score.all_heads = s.score.first_head + s.heads + numbers.pick(0, 5);
  return p;
}

}  // namespace plait::test
