// Attention and its gradient of the stand-in cuDNN: plain loops over bf16 arrays, with sums in float. Weights are
// rounded to bf16 before they are multiplied by values, as tensor cores require.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "gemm.hpp"

namespace stand_in {

struct attention {
  using number = std::int64_t;
  number batch = 0, heads = 0, kv_heads = 0, q_len = 0, k_len = 0, head_dim = 0;
  float scale = 1;
  bool causal = false;
  number shift = 0;                            ///< query i sees keys up to i + shift
  number window = 0;                           ///< and from i + 1 - window; 0: from the first key
  std::vector<std::array<number, 3>> strides;  ///< of batch, head and token, for each tensor

  /// `at`: q, k, v, o, lse.
  void forward(const std::vector<void*>& at) const {
    std::vector<float> weight(static_cast<std::size_t>(k_len)), sum(static_cast<std::size_t>(head_dim));
    for_each_row([&](number b, number h, number i) {
      const auto [first, last] = seen(i);
      float most = -INFINITY, total = 0;
      for (number j = first; j < last; ++j) most = std::max(most, weight[index(j)] = score(at, b, h, i, j));
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (number j = first; j < last; ++j) {
        const float p = std::exp(weight[index(j)] - most), rounded = round(p);
        total += p;
        for (number d = 0; d < head_dim; ++d) sum[index(d)] += rounded * get(at, 2, b, of_keys(h), j, d);
      }
      for (number d = 0; d < head_dim; ++d) put(at, 3, b, h, i, d, last > first ? sum[index(d)] / total : 0.0f);
      static_cast<float*>(at[4])[place(4, b, h, i)] = last > first ? most + std::log(total) : -INFINITY;
    });
  }

  /// `at`: q, k, v, o, lse, do, dq, dk, dv. Unless `fixed`, the order of the terms of dq varies.
  void backward(const std::vector<void*>& at, bool fixed) const {
    static std::minstd_rand random(1);
    const auto keys = static_cast<std::size_t>(batch * kv_heads * k_len * head_dim);
    std::vector<float> dk(keys), dv(keys), dq(static_cast<std::size_t>(head_dim));
    std::vector<number> order;
    for_each_row([&](number b, number h, number i) {
      const auto [first, last] = seen(i);
      float delta = 0;
      for (number d = 0; d < head_dim; ++d) delta += get(at, 5, b, h, i, d) * get(at, 3, b, h, i, d);
      const float lse = static_cast<const float*>(at[4])[place(4, b, h, i)];
      order.resize(static_cast<std::size_t>(std::max<number>(last - first, 0)));
      std::iota(order.begin(), order.end(), first);
      if (!fixed) std::shuffle(order.begin(), order.end(), random);
      std::fill(dq.begin(), dq.end(), 0.0f);
      for (const number j : order) {
        const float p = std::exp(score(at, b, h, i, j) - lse), rounded = round(p);
        float dp = 0;
        for (number d = 0; d < head_dim; ++d) dp += get(at, 5, b, h, i, d) * get(at, 2, b, of_keys(h), j, d);
        const float ds = round(p * (dp - delta));
        const std::size_t row = index(((b * kv_heads + of_keys(h)) * k_len + j) * head_dim);
        for (number d = 0; d < head_dim; ++d) {
          dq[index(d)] += ds * get(at, 1, b, of_keys(h), j, d);
          dk[row + index(d)] += ds * get(at, 0, b, h, i, d);
          dv[row + index(d)] += rounded * get(at, 5, b, h, i, d);
        }
      }
      for (number d = 0; d < head_dim; ++d) put(at, 6, b, h, i, d, scale * dq[index(d)]);
    });
    for (number b = 0, row = 0; b < batch; ++b)
      for (number h = 0; h < kv_heads; ++h)
        for (number j = 0; j < k_len; ++j, ++row)
          for (number d = 0; d < head_dim; ++d) {
            put(at, 7, b, h, j, d, scale * dk[index(row * head_dim + d)]);
            put(at, 8, b, h, j, d, dv[index(row * head_dim + d)]);
          }
  }

 private:
  static std::size_t index(number i) { return static_cast<std::size_t>(i); }
  static float round(float x) { return bf16_value(bf16_bits(x)); }
  number of_keys(number h) const { return h / (heads / kv_heads); }
  struct range {
    number first, last;
  };
  range seen(number i) const {
    return {window > 0 ? std::max<number>(0, i + 1 - window) : 0, causal ? std::min(k_len, i + shift + 1) : k_len};
  }
  std::size_t place(int which, number b, number h, number token) const {
    const auto& s = strides[static_cast<std::size_t>(which)];
    return index(b * s[0] + h * s[1] + token * s[2]);
  }
  float get(const std::vector<void*>& at, int which, number b, number h, number token, number d) const {
    const auto* const array = static_cast<const std::uint16_t*>(at[static_cast<std::size_t>(which)]);
    return bf16_value(array[place(which, b, h, token) + index(d)]);
  }
  void put(const std::vector<void*>& at, int which, number b, number h, number token, number d, float x) const {
    auto* const array = static_cast<std::uint16_t*>(at[static_cast<std::size_t>(which)]);
    array[place(which, b, h, token) + index(d)] = bf16_bits(x);
  }
  float score(const std::vector<void*>& at, number b, number h, number i, number j) const {
    float sum = 0;
    for (number d = 0; d < head_dim; ++d) sum += get(at, 0, b, h, i, d) * get(at, 1, b, of_keys(h), j, d);
    return scale * sum;
  }
  template <class F>
  void for_each_row(const F& f) const {
    for (number b = 0; b < batch; ++b)
      for (number h = 0; h < heads; ++h)
        for (number i = 0; i < q_len; ++i) f(b, h, i);
  }
};

}  // namespace stand_in
