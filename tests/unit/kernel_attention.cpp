#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "plait/kernels/kernels.hpp"

namespace {

using plait::cpu;
using plait::kernels::attention_backward;
using plait::kernels::attention_forward;
using plait::kernels::attention_shape;
using std::int64_t;

template <class T>
std::vector<T> random_values(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(static_cast<std::size_t>(n));
  for (auto& v : values) v = static_cast<T>(normal(generator));
  return values;
}

struct reference {
  std::vector<double> o, lse, dq, dk, dv;
};

/// Attention and its gradients by the definition, with every probability in memory.
template <class T>
reference naive(const attention_shape& given, const std::vector<T>& q, const std::vector<T>& k, const std::vector<T>& v,
                const std::vector<T>& d_o) {
  const attention_shape s = given.checked();
  const auto at = [&](int64_t b, int64_t token, int64_t len, int64_t stride, int64_t head, int64_t c) {
    return static_cast<std::size_t>((b * len + token) * stride + head * s.head_dim + c);
  };
  reference r;
  r.o.assign(static_cast<std::size_t>(s.batch * s.q_len * s.o_stride), 0.0);
  r.lse.assign(static_cast<std::size_t>(s.batch * s.heads * s.q_len), -std::numeric_limits<double>::infinity());
  r.dq.assign(static_cast<std::size_t>(s.batch * s.q_len * s.q_stride), 0.0);
  r.dk.assign(static_cast<std::size_t>(s.batch * s.k_len * s.k_stride), 0.0);
  r.dv.assign(static_cast<std::size_t>(s.batch * s.k_len * s.v_stride), 0.0);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t kh = h / (s.heads / s.kv_heads);
      for (int64_t i = 0; i < s.q_len; ++i) {
        std::vector<double> p(static_cast<std::size_t>(s.k_len), 0.0);
        double sum = 0, largest = -1e300;
        std::vector<int64_t> seen;
        for (int64_t j = 0; j < s.k_len; ++j) {
          if (s.causal && s.k_offset + j > s.q_offset + i) continue;
          seen.push_back(j);
          double dot = 0;
          for (int64_t c = 0; c < s.head_dim; ++c) {
            dot += static_cast<double>(q[at(b, i, s.q_len, s.q_stride, h, c)]) *
                   static_cast<double>(k[at(b, j, s.k_len, s.k_stride, kh, c)]);
          }
          p[static_cast<std::size_t>(j)] = dot * s.scale;
          largest = std::max(largest, dot * s.scale);
        }
        if (seen.empty()) continue;
        for (const int64_t j : seen) {
          auto& x = p[static_cast<std::size_t>(j)];
          x = std::exp(x - largest);
          sum += x;
        }
        r.lse[static_cast<std::size_t>((b * s.heads + h) * s.q_len + i)] = largest + std::log(sum);
        double delta = 0;
        std::vector<double> dp(p.size(), 0.0);
        for (const int64_t j : seen) {
          const auto index = static_cast<std::size_t>(j);
          p[index] /= sum;
          for (int64_t c = 0; c < s.head_dim; ++c) {
            const double value = static_cast<double>(v[at(b, j, s.k_len, s.v_stride, kh, c)]);
            const double gradient = static_cast<double>(d_o[at(b, i, s.q_len, s.o_stride, h, c)]);
            r.o[at(b, i, s.q_len, s.o_stride, h, c)] += p[index] * value;
            r.dv[at(b, j, s.k_len, s.v_stride, kh, c)] += p[index] * gradient;
            dp[index] += gradient * value;
          }
          delta += p[index] * dp[index];
        }
        for (const int64_t j : seen) {
          const double ds = p[static_cast<std::size_t>(j)] * (dp[static_cast<std::size_t>(j)] - delta) * s.scale;
          for (int64_t c = 0; c < s.head_dim; ++c) {
            r.dq[at(b, i, s.q_len, s.q_stride, h, c)] +=
                ds * static_cast<double>(k[at(b, j, s.k_len, s.k_stride, kh, c)]);
            r.dk[at(b, j, s.k_len, s.k_stride, kh, c)] +=
                ds * static_cast<double>(q[at(b, i, s.q_len, s.q_stride, h, c)]);
          }
        }
      }
    }
  }
  return r;
}

/// The largest difference in the given columns of each token, relative to the largest reference value.
template <class T>
double error_of(const std::vector<T>& got, const std::vector<double>& expected, int64_t stride, int64_t width) {
  double worst = 0, largest = 1e-30;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (static_cast<int64_t>(i) % stride >= width) continue;
    largest = std::max(largest, std::abs(expected[i]));
    const double error = std::abs(static_cast<double>(got[i]) - expected[i]);
    worst = error <= worst ? worst : error;
  }
  return worst / std::max(largest, 0.1);
}

template <class T>
void check(const attention_shape& given, double tolerance) {
  CAPTURE(given.batch);
  CAPTURE(given.q_len);
  CAPTURE(given.k_len);
  CAPTURE(given.heads);
  CAPTURE(given.kv_heads);
  CAPTURE(given.head_dim);
  CAPTURE(given.causal);
  CAPTURE(given.q_offset);
  CAPTURE(given.k_offset);
  const attention_shape s = given.checked();
  cpu device;
  const auto q = random_values<T>(s.batch * s.q_len * s.q_stride, 1),
             k = random_values<T>(s.batch * s.k_len * s.k_stride, 2);
  const auto v = random_values<T>(s.batch * s.k_len * s.v_stride, 3);
  const auto d_o = random_values<T>(s.batch * s.q_len * s.o_stride, 4);
  const reference expected = naive(given, q, k, v, d_o);
  const T mark = static_cast<T>(777);
  std::vector<T> o(d_o.size(), mark), lse(expected.lse.size(), mark), dq(q.size(), mark), dk(k.size(), mark),
      dv(v.size(), mark);
  attention_forward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), given);
  const int64_t q_width = s.heads * s.head_dim, k_width = s.kv_heads * s.head_dim;
  CHECK(error_of(o, expected.o, s.o_stride, q_width) < tolerance);
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      CHECK(static_cast<double>(lse[i]) == expected.lse[i]);
    } else {
      CHECK(std::abs(static_cast<double>(lse[i]) - expected.lse[i]) < 10 * tolerance);
    }
  }
  attention_backward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), d_o.data(), dq.data(), dk.data(),
                     dv.data(), given);
  CHECK(error_of(dq, expected.dq, s.q_stride, q_width) < tolerance);
  CHECK(error_of(dk, expected.dk, s.k_stride, k_width) < tolerance);
  CHECK(error_of(dv, expected.dv, s.v_stride, k_width) < tolerance);
  for (std::size_t i = 0; i < dq.size(); ++i) {
    if (static_cast<int64_t>(i) % s.q_stride >= q_width) CHECK(dq[i] == mark);
  }
  for (std::size_t i = 0; i < dk.size(); ++i) {
    if (static_cast<int64_t>(i) % s.k_stride >= k_width) CHECK(dk[i] == mark);
  }

  // Adding to what is there gives twice the result.
  attention_backward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), d_o.data(), dq.data(), dk.data(),
                     dv.data(), given, {true, true});
  for (auto& x : dq) x /= T(2);
  for (auto& x : dk) x /= T(2);
  for (auto& x : dv) x /= T(2);
  CHECK(error_of(dq, expected.dq, s.q_stride, q_width) < tolerance);
  CHECK(error_of(dk, expected.dk, s.k_stride, k_width) < tolerance);
  CHECK(error_of(dv, expected.dv, s.v_stride, k_width) < tolerance);
  CHECK(device.bytes_in_use() == 0);
}

attention_shape shape_of(int64_t batch, int64_t q_len, int64_t k_len, int64_t heads, int64_t kv_heads,
                         int64_t head_dim) {
  attention_shape s;
  s.batch = batch;
  s.q_len = q_len;
  s.k_len = k_len;
  s.heads = heads;
  s.kv_heads = kv_heads;
  s.head_dim = head_dim;
  s.scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  return s;
}

std::vector<attention_shape> shapes() {
  std::vector<attention_shape> all{
      shape_of(1, 1, 1, 1, 1, 1),      shape_of(2, 5, 5, 2, 1, 3),     shape_of(1, 64, 64, 1, 1, 16),
      shape_of(2, 65, 65, 4, 2, 8),    shape_of(1, 127, 127, 3, 3, 5), shape_of(1, 129, 300, 2, 1, 16),
      shape_of(1, 300, 129, 2, 1, 16), shape_of(1, 257, 257, 8, 1, 4), shape_of(1, 33, 513, 4, 4, 7),
      shape_of(1, 4, 0, 2, 2, 4),      shape_of(1, 0, 4, 2, 2, 4),     shape_of(1, 20, 20, 24, 1, 8)};
  const std::size_t plain = all.size();
  for (std::size_t i = 0; i < plain; ++i) {
    attention_shape s = all[i];
    s.causal = false;
    all.push_back(s);
    s.causal = true;
    s.q_offset = s.k_len / 2;  // some queries see everything
    all.push_back(s);
    s.q_offset = 0;
    s.k_offset = s.q_len / 3;  // some queries see nothing
    all.push_back(s);
    s.k_offset = s.q_len + 10;  // no query sees anything
    all.push_back(s);
    s.k_offset = 0;
    s.q_offset = s.k_len + 10;  // every query sees everything
    all.push_back(s);
  }
  return all;
}

}  // namespace

TEST_CASE("attention in double equals the definition, forward and backward") {
  for (const auto& s : shapes()) check<double>(s, 1e-12);
}

TEST_CASE("attention in float equals the definition to float accuracy") {
  for (const auto& s : shapes()) check<float>(s, 3e-6);
}

TEST_CASE("attention inside fused projections leaves the other columns alone") {
  attention_shape s = shape_of(2, 70, 70, 4, 2, 8);
  s.q_stride = s.k_stride = s.v_stride = 4 * 8 + 2 * 2 * 8;
  s.o_stride = 40;
  check<double>(s, 1e-12);
  check<float>(s, 3e-6);
}

TEST_CASE("gradients may have strides of their own") {
  attention_shape s = shape_of(1, 40, 50, 2, 1, 4);
  s.causal = false;
  cpu device;
  const auto q = random_values<double>(40 * 8, 1), k = random_values<double>(50 * 4, 2),
             v = random_values<double>(50 * 4, 3);
  const auto d_o = random_values<double>(40 * 8, 4);
  std::vector<double> o(40 * 8), lse(80), dq(40 * 8), dk(200), dv(200), dq2(40 * 11), dk2(50 * 9), dv2(50 * 5);
  attention_forward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), s);
  attention_backward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), d_o.data(), dq.data(), dk.data(),
                     dv.data(), s);
  s.dq_stride = 11;
  s.dk_stride = 9;
  s.dv_stride = 5;
  attention_backward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), d_o.data(), dq2.data(), dk2.data(),
                     dv2.data(), s);
  for (std::size_t t = 0; t < 40; ++t) CHECK(dq2[t * 11 + 3] == dq[t * 8 + 3]);
  for (std::size_t t = 0; t < 50; ++t) {
    CHECK(dk2[t * 9 + 3] == doctest::Approx(dk[t * 4 + 3]));
    CHECK(dv2[t * 5 + 1] == doctest::Approx(dv[t * 4 + 1]));
  }
}

TEST_CASE("attention over keys in parts, merged by lse, equals attention over all keys, and so do its gradients") {
  const attention_shape whole = shape_of(2, 50, 90, 4, 2, 8);
  attention_shape shape = whole;
  shape.q_offset = 25;
  cpu device;
  const auto q = random_values<double>(2 * 50 * 32, 1), k = random_values<double>(2 * 90 * 16, 2);
  const auto v = random_values<double>(2 * 90 * 16, 3), d_o = random_values<double>(2 * 50 * 32, 4);
  const reference expected = naive(shape, q, k, v, d_o);
  const int64_t part = 30;
  std::vector<double> o(q.size()), lse(2 * 4 * 50), dq(q.size()), dk(k.size()), dv(v.size());
  const auto slice = [&](const std::vector<double>& from, int64_t first) {
    std::vector<double> to(2 * 30 * 16);
    plait::kernels::copy_3d(device, from.data() + first * 16, to.data(), 2, part, 16 * 8, 90 * 16 * 8, 16 * 8,
                            part * 16 * 8, 16 * 8);
    return to;
  };
  shape.k_len = part;
  for (int64_t first : {int64_t{0}, part, 2 * part}) {
    const auto k_part = slice(k, first), v_part = slice(v, first);
    std::vector<double> o_part(q.size()), lse_part(lse.size());
    shape.k_offset = first;
    attention_forward(device, q.data(), k_part.data(), v_part.data(), o_part.data(), lse_part.data(), shape);
    if (first == 0) {
      o = o_part;
      lse = lse_part;
    } else {
      plait::kernels::merge_lse(device, o.data(), lse.data(), o_part.data(), lse_part.data(), 32, shape);
    }
  }
  CHECK(error_of(o, expected.o, 32, 32) < 1e-13);
  CHECK(error_of(lse, expected.lse, 1, 1) < 1e-13);
  for (int64_t first : {int64_t{0}, part, 2 * part}) {
    const auto k_part = slice(k, first), v_part = slice(v, first);
    std::vector<double> dk_part(k_part.size()), dv_part(v_part.size());
    shape.k_offset = first;
    attention_backward(device, q.data(), k_part.data(), v_part.data(), o.data(), lse.data(), d_o.data(), dq.data(),
                       dk_part.data(), dv_part.data(), shape, {first != 0, false});
    CHECK(error_of(dk_part, slice(expected.dk, first), 16, 16) < 1e-12);
    CHECK(error_of(dv_part, slice(expected.dv, first), 16, 16) < 1e-12);
  }
  CHECK(error_of(dq, expected.dq, 32, 32) < 1e-12);
}

TEST_CASE("scratch does not grow with the sequence") {
  std::size_t peak[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t len = i == 0 ? 300 : 900;
    cpu device;
    const attention_shape s = shape_of(1, len, len, 2, 1, 8);
    const auto q = random_values<float>(len * 16, 1), k = random_values<float>(len * 8, 2);
    std::vector<float> o(q.size()), lse(static_cast<std::size_t>(2 * len)), dq(q.size()), dk(k.size()), dv(k.size());
    attention_forward(device, q.data(), k.data(), k.data(), o.data(), lse.data(), s);
    attention_backward(device, q.data(), k.data(), k.data(), o.data(), lse.data(), q.data(), dq.data(), dk.data(),
                       dv.data(), s);
    peak[i] = device.peak_bytes();
  }
  CHECK(peak[0] == peak[1]);
}

TEST_CASE("impossible shapes are refused by name") {
  attention_shape s = shape_of(1, 4, 4, 3, 2, 4);
  CHECK_THROWS_WITH_AS(s.checked(), "attention: heads = 3, must be a multiple of kv_heads = 2", plait::error);
  s = shape_of(1, 4, 4, 2, 2, 4);
  s.q_stride = 7;
  CHECK_THROWS_WITH_AS(s.checked(), "attention: q_stride = 7, must be at least 8, the elements of a token",
                       plait::error);
}
