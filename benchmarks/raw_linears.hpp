#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "plait/device/cpu.hpp"
#include "plait/models/llama_config.hpp"

namespace bench {

/// The matrix products of all linears of a Llama as raw calls, y = x w', dx = dy w, dw += dy' x, each on its own
/// memory, as in the model. A rank has 1/tp of the heads, of ffn and of the vocabulary.
class raw_linears {
 public:
  raw_linears(const plait::llama_config& c, std::int64_t rows, std::int64_t tp = 1) : rows_(rows) {
    for (std::int64_t i = 0; i < c.layers; ++i) {
      add((c.heads + 2 * c.kv_heads) * c.head_dim / tp, c.hidden);
      add(c.hidden, c.heads * c.head_dim / tp);
      add(2 * (c.ffn / tp), c.hidden);
      add(c.hidden, c.ffn / tp);
    }
    add(c.vocab / tp, c.hidden);
  }

  /// Computes the products of a forward and a backward pass.
  void pass(plait::cpu& device) {
    for (linear& l : all_)
      device.gemm(false, true, rows_, l.out, l.in, 1.0f, l.x.data(), l.in, l.w.data(), l.in, 0.0f, l.y.data(), l.out);
    for (std::size_t i = all_.size(); i-- > 0;) {
      linear& l = all_[i];
      device.gemm(false, false, rows_, l.in, l.out, 1.0f, l.y.data(), l.out, l.w.data(), l.in, 0.0f, l.dx.data(), l.in);
      device.gemm(true, false, l.out, l.in, rows_, 1.0f, l.y.data(), l.out, l.x.data(), l.in, 1.0f, l.dw.data(), l.in);
    }
  }
  /// Returns the FLOPs of a pass.
  double flop() const {
    double sum = 0;
    for (const linear& l : all_) sum += 6.0 * static_cast<double>(rows_ * l.out * l.in);
    return sum;
  }

 private:
  struct linear {
    std::int64_t out, in;
    std::vector<float> x, w, y, dx, dw;
  };
  void add(std::int64_t out, std::int64_t in) {
    const auto size = [](std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); };
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto drawn = [&](std::size_t n) {
      std::vector<float> v(n);
      for (float& value : v) value = 0.1f * normal(random);
      return v;
    };
    linear& l = all_.emplace_back(linear{out, in, drawn(size(rows_, in)), drawn(size(out, in)), {}, {}, {}});
    l.y = drawn(size(rows_, out)), l.dx.resize(l.x.size()), l.dw.resize(l.w.size());
  }

  std::int64_t rows_;
  std::vector<linear> all_;
};

}  // namespace bench
