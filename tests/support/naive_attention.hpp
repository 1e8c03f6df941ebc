#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "plait/kernels/settings.hpp"

namespace plait::test {

/// The inputs and results of attention, all in double.
struct attention_pointers {
  const double *q, *k, *v, *d_o;
  double *o, *lse, *dq, *dk, *dv;
  const double* sinks = nullptr;  ///< [heads]
  double* dsinks = nullptr;
};

/// Attention and its gradients by the definition: one query and one key at a time, with every probability in memory.
/// The positions of a query and a key decide whether the query sees the key.
inline void naive_attention(const kernels::attention_shape& given, const attention_pointers& at,
                            kernels::attention_accumulate accumulate = {}) {
  const kernels::attention_shape s = given.checked();
  const auto dot = [&](const double* a, const double* b) {
    double sum = 0;
    for (std::int64_t c = 0; c < s.head_dim; ++c) sum += a[c] * b[c];
    return sum;
  };
  const auto add = [&](double* to, double factor, const double* from) {
    for (std::int64_t c = 0; c < s.head_dim; ++c) to[c] += factor * from[c];
  };
  const auto element = [&](auto* array, std::int64_t token, std::int64_t stride, std::int64_t head) {
    return array + token * stride + head * s.head_dim;
  };
  if (at.sinks) std::fill_n(at.dsinks, s.heads, 0.0);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t j = 0; j < s.k_len && !accumulate.keys_and_values; ++j) {
      std::fill_n(element(at.dk, b * s.k_batch + j, s.dk_stride, 0), s.kv_heads * s.head_dim, 0.0);
      std::fill_n(element(at.dv, b * s.k_batch + j, s.dv_stride, 0), s.kv_heads * s.head_dim, 0.0);
    }
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t kv_head = h / s.group();
      for (std::int64_t i = 0; i < s.q_len; ++i) {
        const std::int64_t query = b * s.q_batch + i, position = s.q_offset + i;
        const double *const q = element(at.q, query, s.q_stride, h), *const d_o =
                                                                         element(at.d_o, query, s.do_stride, h);
        double *const o = element(at.o, query, s.o_stride, h), *const dq = element(at.dq, query, s.dq_stride, h);
        std::fill_n(o, s.head_dim, 0.0);
        if (!accumulate.queries) std::fill_n(dq, s.head_dim, 0.0);
        std::vector<std::int64_t> keys;
        std::vector<double> p, derivatives;
        double largest = -std::numeric_limits<double>::infinity(), sum = 0, delta = 0;
        for (std::int64_t j = 0; j < s.k_len; ++j) {
          const std::int64_t other = s.k_offset + j;
          if (other < s.mask.first(position) || other >= s.mask.end(position)) continue;
          if (s.mask.allows != nullptr && !s.mask.allows(position, other)) continue;
          if (s.first_visible != nullptr && other < s.first_visible[query]) continue;
          if (s.end_visible != nullptr && other >= s.end_visible[query]) continue;
          keys.push_back(b * s.k_batch + j);
          double score = s.scale * dot(q, element(at.k, keys.back(), s.k_stride, kv_head));
          const double t = s.score.cap > 0 ? std::tanh(score / s.score.cap) : 0;
          if (s.score.cap > 0) score = s.score.cap * t;
          derivatives.push_back(1 - t * t);
          p.push_back(score - s.score.slope(h) * std::abs(static_cast<double>(position - other)));
          largest = std::max(largest, p.back());
        }
        if (at.sinks) largest = std::max(largest, at.sinks[h]);
        for (double& x : p) sum += x = std::exp(x - largest);
        const double sink = at.sinks ? std::exp(at.sinks[h] - largest) : 0;
        sum += sink;
        at.lse[(b * s.heads + h) * s.lse_stride + i] = sum == 0 ? largest : largest + std::log(sum);
        for (std::size_t n = 0; n < keys.size(); ++n) {
          p[n] /= sum;
          const double* const value = element(at.v, keys[n], s.v_stride, kv_head);
          add(o, p[n], value);
          delta += p[n] * dot(d_o, value);
        }
        if (at.sinks) at.dsinks[h] -= sink / sum * delta;
        for (std::size_t n = 0; n < keys.size(); ++n) {
          const double ds =
              s.scale * derivatives[n] * p[n] * (dot(d_o, element(at.v, keys[n], s.v_stride, kv_head)) - delta);
          add(dq, ds, element(at.k, keys[n], s.k_stride, kv_head));
          add(element(at.dk, keys[n], s.dk_stride, kv_head), ds, q);
          add(element(at.dv, keys[n], s.dv_stride, kv_head), p[n], d_o);
        }
      }
    }
  }
}

}  // namespace plait::test
