#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/kernels/kernels.hpp"

namespace bench {

/// The sizes of a block over all ranks; every rank has whole heads and a part of ffn and of the sequence.
struct block_sizes {
  std::int64_t batch, seq, hidden, heads, head_dim, ffn;
  double eps, theta;
};

/// A transformer block as written by hand, without plait's types: kernels, matrix products and collectives on raw
/// memory that is allocated before. It has tensor and sequence parallelism over the ranks of a communicator.
class raw_block {
  using cpu = plait::cpu;

 public:
  raw_block(cpu& device, plait::threads::communicator comm, const block_sizes& s)
      : device_(device), comm_(std::move(comm)), s_(s), ranks_(comm_.size()) {
    heads_ = s.heads / ranks_, ffn_ = s.ffn / ranks_;
    width_ = heads_ * s.head_dim;
    own_ = s.batch * s.seq / ranks_, rows_ = s.batch * s.seq;
    const std::int64_t h = s.hidden;
    const std::int64_t sizes[] = {h, 3 * width_ * h, h * width_, h, 2 * ffn_ * h, h * ffn_};
    for (const std::int64_t n : sizes) count_ += n;
    weights_ = space(count_), gradients_ = space(count_);
    float *w = weights_, *d = gradients_;
    for (std::size_t i = 0; i < 6; ++i) {
      w_[i] = w, d_[i] = d;
      w += sizes[i], d += sizes[i];
    }
    n1_ = space(own_ * h), n2_ = space(own_ * h), inner_ = space(own_ * h), y_ = space(own_ * h), dx_ = space(own_ * h);
    dn_ = space(own_ * h), dinner_ = space(own_ * h);
    inv1_ = space(own_), inv2_ = space(own_);
    qkv_ = space(rows_ * 3 * width_), dqkv_ = space(rows_ * 3 * width_);
    attended_ = space(rows_ * width_), dattended_ = space(rows_ * width_), lse_ = space(s.batch * heads_ * s.seq);
    gate_up_ = space(rows_ * 2 * ffn_), dgate_up_ = space(rows_ * 2 * ffn_);
    act_ = space(rows_ * ffn_), dact_ = space(rows_ * ffn_);
    if (ranks_ > 1) {
      g1_ = space(rows_ * h), g2_ = space(rows_ * h), product_ = space(rows_ * h), gathered_ = space(rows_ * h);
      parts_ = space(rows_ * h);
    }
    shape_.batch = s.batch;
    shape_.q_len = shape_.k_len = s.seq;
    shape_.heads = shape_.kv_heads = heads_;
    shape_.head_dim = s.head_dim;
    shape_.scale = 1.0 / std::sqrt(static_cast<double>(s.head_dim));
    shape_.q_stride = shape_.k_stride = shape_.v_stride = 3 * width_;
    cosine_ = space(s.seq * s.head_dim / 2), sine_ = space(s.seq * s.head_dim / 2);
    std::vector<std::int64_t> positions(static_cast<std::size_t>(s.seq));
    for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int64_t>(i);
    plait::kernels::rope_table(device, positions.data(), s.seq,
                               plait::kernels::rope_inverse_frequencies(s.head_dim, s.theta), cosine_, sine_);
  }

  /// The weights of norm, q, k, v, out, norm, gate, up and down, one after the other. Gradients have the same order.
  float* weights() { return weights_; }
  const float* gradients() const { return gradients_; }
  const float* output() const { return y_; }
  const float* input_gradient() const { return dx_; }

  void zero_gradients() { device_.zero(gradients_, static_cast<std::size_t>(count_) * sizeof(float)); }

  void forward(const float* x) {
    namespace k = plait::kernels;
    k::norm_forward(device_, x, w_[0], nullptr, n1_, nullptr, inv1_, own_, s_.hidden, s_.eps);
    const float* in = gather(n1_, g1_);
    times_transposed(in, w_[1], qkv_, 3 * width_, s_.hidden);
    k::rope_forward(device_, qkv_, 3 * width_, qkv_, cosine_, sine_, rows_, 2 * heads_, s_.head_dim, 3 * width_,
                    s_.seq);
    k::attention_forward(device_, qkv_, qkv_ + width_, qkv_ + 2 * width_, attended_, lse_, shape_);
    project(attended_, w_[2], inner_, width_);
    k::accumulate(device_, x, inner_, own_ * s_.hidden);

    k::norm_forward(device_, inner_, w_[3], nullptr, n2_, nullptr, inv2_, own_, s_.hidden, s_.eps);
    in = gather(n2_, g2_);
    times_transposed(in, w_[4], gate_up_, 2 * ffn_, s_.hidden);
    k::swiglu_forward(device_, gate_up_, act_, rows_, ffn_);
    project(act_, w_[5], y_, ffn_);
    k::accumulate(device_, inner_, y_, own_ * s_.hidden);
  }

  void backward(const float* x, const float* dy) {
    namespace k = plait::kernels;
    const float* d = gather(dy, gathered_);
    times(d, w_[5], dact_, ffn_, s_.hidden);
    add_weight_gradient(d, act_, d_[5], s_.hidden, ffn_);
    k::swiglu_backward(device_, gate_up_, dact_, dgate_up_, rows_, ffn_);
    unproject(dgate_up_, w_[4], 2 * ffn_);
    add_weight_gradient(dgate_up_, ranks_ > 1 ? g2_ : n2_, d_[4], 2 * ffn_, s_.hidden);
    k::norm_backward(device_, inner_, w_[3], dn_, nullptr, inv2_, dinner_, d_[3], nullptr, own_, s_.hidden, dy);

    d = gather(dinner_, gathered_);
    times(d, w_[2], dattended_, width_, s_.hidden);
    add_weight_gradient(d, attended_, d_[2], s_.hidden, width_);
    k::attention_backward(device_, qkv_, qkv_ + width_, qkv_ + 2 * width_, attended_, lse_, dattended_, dqkv_,
                          dqkv_ + width_, dqkv_ + 2 * width_, shape_);
    k::rope_backward(device_, dqkv_, 3 * width_, dqkv_, cosine_, sine_, rows_, 2 * heads_, s_.head_dim, 3 * width_,
                     s_.seq);
    unproject(dqkv_, w_[1], 3 * width_);
    add_weight_gradient(dqkv_, ranks_ > 1 ? g1_ : n1_, d_[1], 3 * width_, s_.hidden);
    k::norm_backward(device_, x, w_[0], dn_, nullptr, inv1_, dx_, d_[0], nullptr, own_, s_.hidden,
                     static_cast<const float*>(dinner_));
  }

  /// Sums the gradients of the norms' weights over ranks, because each rank has a part of the sequence.
  void reduce_gradients() {
    if (ranks_ == 1) return;
    for (const std::size_t i : {std::size_t{0}, std::size_t{3}})
      comm_.all_reduce(d_[i], d_[i], static_cast<std::size_t>(s_.hidden), plait::dtype::f32, plait::reduce_op::sum);
  }

 private:
  float* space(std::int64_t n) {
    memory_.push_back(plait::make_buffer<float>(device_, static_cast<std::size_t>(n)));
    return memory_.back().template data<float>();
  }

  /// y = a b' over all rows; `n` is the width of y, and `k` the number of summed terms.
  void times_transposed(const float* a, const float* b, float* y, std::int64_t n, std::int64_t k) {
    device_.gemm(false, true, rows_, n, k, 1.0f, a, k, b, k, 0.0f, y, n);
  }
  void times(const float* a, const float* b, float* y, std::int64_t n, std::int64_t k) {
    device_.gemm(false, false, rows_, n, k, 1.0f, a, k, b, n, 0.0f, y, n);
  }
  void add_weight_gradient(const float* dy, const float* x, float* dw, std::int64_t out, std::int64_t in) {
    device_.gemm(true, false, out, in, rows_, 1.0f, dy, out, x, in, 1.0f, dw, in);
  }

  /// Computes out[own rows] = a w', summed over the ranks.
  void project(const float* a, const float* w, float* out, std::int64_t k) {
    times_transposed(a, w, ranks_ > 1 ? product_ : out, s_.hidden, k);
    if (ranks_ > 1) scatter(product_, out);
  }
  /// Computes dn[own rows] = d w, summed over the ranks.
  void unproject(const float* d, const float* w, std::int64_t n) {
    times(d, w, ranks_ > 1 ? product_ : dn_, s_.hidden, n);
    if (ranks_ > 1) scatter(product_, dn_);
  }

  /// Gathers the whole sequence from the ranks' parts [batch, seq / ranks, hidden], and puts each sample in order.
  const float* gather(const float* part, float* whole) {
    if (ranks_ == 1) return part;
    const auto n = static_cast<std::size_t>(own_ * s_.hidden);
    comm_.all_gather(part, s_.batch > 1 ? parts_ : whole, n, plait::dtype::f32);
    if (s_.batch > 1)
      each_piece([&](float* piece, std::int64_t at, std::int64_t count) { std::copy_n(piece, count, whole + at); });
    return whole;
  }
  void scatter(float* whole, float* part) {
    if (s_.batch > 1)
      each_piece([&](float* piece, std::int64_t at, std::int64_t count) { std::copy_n(whole + at, count, piece); });
    comm_.reduce_scatter(s_.batch > 1 ? parts_ : whole, part, static_cast<std::size_t>(own_ * s_.hidden),
                         plait::dtype::f32, plait::reduce_op::sum);
  }
  template <class F>
  void each_piece(F&& f) {
    const std::int64_t count = s_.seq / ranks_ * s_.hidden;
    for (std::int64_t r = 0; r < ranks_; ++r)
      for (std::int64_t b = 0; b < s_.batch; ++b)
        f(parts_ + (r * s_.batch + b) * count, (b * ranks_ + r) * count, count);
  }

  cpu& device_;
  plait::threads::communicator comm_;
  block_sizes s_;
  std::int64_t ranks_, heads_ = 0, ffn_ = 0, width_ = 0, own_ = 0, rows_ = 0, count_ = 0;
  plait::kernels::attention_shape shape_;
  std::vector<plait::buffer<cpu>> memory_;
  float *weights_, *gradients_, *w_[6], *d_[6];
  float *n1_, *n2_, *inner_, *y_, *dx_, *dn_, *dinner_, *inv1_, *inv2_, *qkv_, *dqkv_, *attended_, *dattended_, *lse_;
  float *gate_up_, *dgate_up_, *act_, *dact_, *cosine_, *sine_;
  float *g1_ = nullptr, *g2_ = nullptr, *product_ = nullptr, *gathered_ = nullptr, *parts_ = nullptr;
};

}  // namespace bench
