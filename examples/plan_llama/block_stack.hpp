// Runs the kernels of a stack of transformer blocks in the order of a training step, and times each, for --calibrate.
// As in a step, operands were written some time before, and each result has its own memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/device/cpu.hpp"
#include "plait/kernels/kernels.hpp"

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Sizes of the blocks of a stack. Keys have half as many heads as queries.
struct stack_sizes {
  std::int64_t tokens = 0, seq = 0, hidden = 0, heads = 0;

  std::int64_t head_dim() const { return hidden / heads; }
  std::int64_t kv_heads() const { return std::max<std::int64_t>(1, heads / 2); }
  std::int64_t kv_width() const { return kv_heads() * head_dim(); }
  std::int64_t projected() const { return hidden + 2 * kv_width(); }
  std::int64_t ffn() const { return 3 * hidden; }
};

/// The work of one kernel of a block: a product of m x k and k x n, operations of attention, values of an activation,
/// or bytes that are read and written.
struct kernel_work {
  double m = 0, n = 0, k = 0, operations = 0, values = 0, bytes = 0;
  bool adds = false, backward = false;  ///< a product adds to its result; an activation is a backward pass
};

/// Blocks of one rank in numbers of type T. Each block has its own weights, gradients and activations.
template <class T>
class block_stack {
 public:
  /// Makes as many layers as take `bytes` together, at least two.
  block_stack(const stack_sizes& sizes, std::int64_t bytes) : z_(sizes) {
    const std::int64_t values = z_.tokens * (4 * z_.hidden + 2 * z_.projected() + 3 * z_.ffn());
    const auto each = values * static_cast<std::int64_t>(sizeof(T)) +
                      weights() * static_cast<std::int64_t>(sizeof(T) + sizeof(float));
    layers_.resize(static_cast<std::size_t>(std::max<std::int64_t>(2, bytes / each)));
    for (auto& l : layers_) make(l);
    const auto most = static_cast<std::size_t>(z_.tokens * std::max(2 * z_.ffn(), z_.projected()));
    for (auto* to : {&a_, &b_, &c_}) to->assign(most, number(0.25f));
    shape_.batch = z_.tokens / z_.seq, shape_.q_len = shape_.k_len = z_.seq;
    shape_.heads = z_.heads, shape_.kv_heads = z_.kv_heads(), shape_.head_dim = z_.head_dim();
    shape_.scale = 0.2, shape_.q_stride = shape_.k_stride = shape_.v_stride = z_.projected();
  }

  /// The work of the kernels, by their numbers.
  const std::vector<kernel_work>& works() const { return works_; }
  /// The seconds of each call so far, by kernel.
  const std::vector<std::vector<double>>& seconds() const { return seconds_; }
  void forget() {
    for (auto& s : seconds_) s.clear();
  }

  /// Runs a forward and a backward pass of all layers.
  void pass() {
    for (auto& l : layers_) next_ = 0, forward(l);
    const std::size_t first = next_;
    for (std::size_t i = layers_.size(); i-- > 0;) next_ = first, backward(layers_[i]);
  }

 private:
  using statistics = std::vector<float>;
  struct layer {
    std::vector<T> x, normed, qkv, attended, middle, wide, product;
    std::vector<T> w_qkv, w_out, w_up, w_down, w_norm;
    statistics g_qkv, g_out, g_up, g_down, g_norm, lse, inverse;
  };

  static T number(float x) {
    if constexpr (std::is_same_v<T, plait::bf16>)
      return plait::to_bf16(x);
    else
      return x;
  }
  std::int64_t weights() const { return z_.hidden * (z_.projected() + z_.hidden + 3 * z_.ffn()); }
  static std::size_t size(std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); }

  void make(layer& l) {
    const std::int64_t t = z_.tokens, h = z_.hidden, q = z_.projected(), f = z_.ffn();
    for (auto [to, values] : {std::pair{&l.x, size(t, h)},
                              {&l.normed, size(t, h)},
                              {&l.qkv, size(t, q)},
                              {&l.attended, size(t, h)},
                              {&l.middle, size(t, h)},
                              {&l.wide, size(t, 2 * f)},
                              {&l.product, size(t, f)},
                              {&l.w_qkv, size(q, h)},
                              {&l.w_out, size(h, h)},
                              {&l.w_up, size(2 * f, h)},
                              {&l.w_down, size(h, f)},
                              {&l.w_norm, size(h, 1)}})
      to->assign(values, number(0.01f));
    for (auto [to, values] : {std::pair{&l.g_qkv, size(q, h)},
                              {&l.g_out, size(h, h)},
                              {&l.g_up, size(2 * f, h)},
                              {&l.g_down, size(h, f)},
                              {&l.g_norm, size(h, 1)},
                              {&l.lse, size(t, z_.heads)},
                              {&l.inverse, size(t, 1)}})
      to->assign(values, 1.0f);
  }

  template <class F>
  void timed(const kernel_work& work, F&& call) {
    if (next_ == works_.size()) works_.push_back(work), seconds_.emplace_back();
    const double start = seconds_now();
    call();
    seconds_[next_++].push_back(seconds_now() - start);
  }

  /// Computes y[tokens, out] = x[tokens, in] w[out, in]^T.
  void product(const std::vector<T>& x, const std::vector<T>& w, std::vector<T>& y, std::int64_t in, std::int64_t out) {
    const auto t = z_.tokens;
    timed(product_work(t, out, in),
          [&] { d_.gemm(false, true, t, out, in, 1, x.data(), in, w.data(), in, 0, y.data(), out); });
  }
  /// Adds to the gradient of that product's weight, and computes the gradient of its input.
  void product_backward(const std::vector<T>& x, const std::vector<T>& w, const std::vector<T>& dy, std::vector<T>& dx,
                        statistics& dw, std::int64_t in, std::int64_t out) {
    const auto t = z_.tokens;
    timed(product_work(t, in, out),
          [&] { d_.gemm(false, false, t, in, out, 1, dy.data(), out, w.data(), in, 0, dx.data(), in); });
    timed(product_work(out, in, t, true),
          [&] { d_.gemm(true, false, out, in, t, 1, dy.data(), out, x.data(), in, 1, dw.data(), in); });
  }
  static kernel_work product_work(std::int64_t m, std::int64_t n, std::int64_t k, bool adds = false) {
    return {.m = static_cast<double>(m), .n = static_cast<double>(n), .k = static_cast<double>(k), .adds = adds};
  }
  /// Returns the work of a kernel that reads and writes `values` values of each token.
  kernel_work bytes_work(std::int64_t values) const {
    return {.bytes = static_cast<double>(values * z_.tokens) * sizeof(T)};
  }
  double pairs() const { return static_cast<double>(z_.tokens * z_.seq / 2) * static_cast<double>(z_.hidden); }

  void forward(layer& l) {
    const std::int64_t t = z_.tokens, h = z_.hidden, f = z_.ffn();
    const auto norm = [&](const std::vector<T>& x) {
      timed(bytes_work(2 * h), [&] {
        plait::kernels::norm_forward(d_, x.data(), l.w_norm.data(), nullptr, l.normed.data(), nullptr, l.inverse.data(),
                                     t, h, 1e-5);
      });
    };
    norm(l.x);
    product(l.normed, l.w_qkv, l.qkv, h, z_.projected());
    timed({.operations = 4 * pairs()}, [&] {
      plait::kernels::attention_forward(d_, l.qkv.data(), keys(l.qkv), values(l.qkv), l.attended.data(), l.lse.data(),
                                        shape_);
    });
    product(l.attended, l.w_out, a_, h, h);
    timed(bytes_work(3 * h), [&] { plait::kernels::add(d_, l.x.data(), a_.data(), l.middle.data(), t * h); });
    norm(l.middle);
    product(l.normed, l.w_up, l.wide, h, 2 * f);
    timed({.values = static_cast<double>(t * f)},
          [&] { plait::kernels::swiglu_forward(d_, l.wide.data(), l.product.data(), t, f); });
    product(l.product, l.w_down, a_, f, h);
  }

  void backward(layer& l) {
    const std::int64_t t = z_.tokens, h = z_.hidden, f = z_.ffn();
    product_backward(l.product, l.w_down, a_, b_, l.g_down, f, h);
    timed({.values = static_cast<double>(t * f), .backward = true},
          [&] { plait::kernels::swiglu_backward(d_, l.wide.data(), b_.data(), c_.data(), t, f); });
    product_backward(l.normed, l.w_up, c_, b_, l.g_up, h, 2 * f);
    timed(bytes_work(3 * h), [&] {
      plait::kernels::norm_backward(d_, l.middle.data(), l.w_norm.data(), b_.data(), nullptr, l.inverse.data(),
                                    a_.data(), l.g_norm.data(), nullptr, t, h);
    });
    product_backward(l.attended, l.w_out, a_, b_, l.g_out, h, h);
    auto shape = shape_;
    shape.dq_stride = shape.dk_stride = shape.dv_stride = z_.projected();
    timed({.operations = 10 * pairs()}, [&] {
      plait::kernels::attention_backward(d_, l.qkv.data(), keys(l.qkv), values(l.qkv), l.attended.data(), l.lse.data(),
                                         b_.data(), c_.data(), keys(c_), values(c_), shape);
    });
    product_backward(l.normed, l.w_qkv, c_, b_, l.g_qkv, h, z_.projected());
    timed(bytes_work(3 * h), [&] { plait::kernels::add(d_, a_.data(), b_.data(), l.middle.data(), t * h); });
  }
  template <class V>
  auto keys(V& qkv) const {
    return qkv.data() + z_.hidden;
  }
  template <class V>
  auto values(V& qkv) const {
    return qkv.data() + z_.hidden + z_.kv_width();
  }

  stack_sizes z_;
  plait::cpu d_;
  plait::kernels::attention_shape shape_;
  std::vector<layer> layers_;
  std::vector<T> a_, b_, c_;
  std::vector<kernel_work> works_;
  std::vector<std::vector<double>> seconds_;
  std::size_t next_ = 0;
};
