// The biases of linears that share an input: their memory, their columns in the output's rows, and their gradients.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/nn/linear/lora.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/array.hpp"
#include "plait/nn/parameter/memory.hpp"

namespace plait {

/// One of the linears that share an input: the checkpoint names of its weight and bias, and their stored layouts.
struct linear_branch {
  parameter_info weight;
  layout stored_weight;
  bool bias = false;
  parameter_info bias_info;
  layout stored_bias;
  lora_options lora{};
};

namespace detail {

/// Whether a device can compute the gradients of a weight and of its bias in one product.
template <class Device, class T, class G>
concept fuses_bias_gradients = requires(Device& d, std::int64_t n, const T* in, G* out) {
  d.gemm_with_row_sums(true, false, n, n, n, 1.0, in, n, in, n, 0.0, out, n, out);
};

/// The biases of all branches that have one, contiguous in memory. An output is `batches` times rows, in which the
/// columns of the branches are side by side.
template <class Precision, compute_device Device>
class linear_biases {
  using T = activation_of<Precision>;
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using parameter = plait::parameter<Precision, Device>;

 public:
  linear_biases() = default;
  /// `columns` are the columns of each branch's product; `callers` is the caller's memory of all biases, if there is
  /// any.
  linear_biases(const context<Device>& ctx, const shared_linears& d, std::vector<linear_branch>& info,
                const parameter_memory<Precision>& callers, std::int64_t batches, std::vector<std::int64_t> columns)
      : batches_(batches), columns_(std::move(columns)), biases_(info.size()) {
    std::vector<std::int64_t> sizes(info.size());
    std::int64_t n = 0;
    for (std::size_t i = 0; i < info.size(); ++i) {
      total_ += columns_[i];
      all_ = all_ && info[i].bias;
      if (info[i].bias)
        n += sizes[i] = local_box(d.branches[i].bias, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank()).local_size();
    }
    if (n == 0) return;
    const auto array = std::make_shared<parameter_array<Precision, Device>>(ctx.device, n, callers.bias.pointer(),
                                                                            callers.bias_gradient.pointer());
    master_of<Precision>* master = callers.bias_master.pointer();
    gradient_of<Precision>* reduced = callers.bias_reduced.pointer();
    std::int64_t at = 0;
    for (std::size_t i = 0; i < info.size(); at += sizes[i++]) {
      if (!info[i].bias) continue;
      biases_[i] = std::make_shared<parameter>(ctx, std::move(info[i].bias_info), info[i].stored_bias,
                                               d.branches[i].bias_placed, d.branches[i].output,
                                               parameter_place<Precision, Device>{array, at, master, reduced});
      if (master) master += biases_[i]->size();
      if (reduced) reduced += biases_[i]->size();
    }
    if (trainable())
      terms_ = terms_of_layer(ctx, *array, without_dims(d.branches[0].output, d.branches[0].bias), token_grain::fine,
                              first_name());
  }

  bool any() const {
    return !biases_.empty() && std::any_of(biases_.begin(), biases_.end(), [](const auto& p) { return p != nullptr; });
  }
  /// Null for a branch without a bias.
  const parameter_ptr<Precision, Device>& operator[](std::size_t i) const { return biases_[i]; }
  const std::vector<parameter_ptr<Precision, Device>>& all() const { return biases_; }
  std::size_t size() const { return biases_.size(); }
  bool trainable() const {
    return std::any_of(biases_.begin(), biases_.end(), [](const auto& p) { return p && p->trainable(); });
  }
  void require_gathered() const {
    for (const auto& p : biases_)
      if (p) p->require_gathered();
  }
  /// The row that a product can add to each row of its result. Null unless every branch has a bias and there is one
  /// batch.
  const W* row() const { return all_ && batches_ == 1 && !biases_.empty() ? biases_[0]->used_value() : nullptr; }

  /// Adds the biases to the output, which has `size` elements.
  void add(Device& device, T* y, std::int64_t size) const {
    each(0, biases_.size(), [&](parameter& p, std::int64_t at, std::int64_t n, std::int64_t stride) {
      const std::int64_t rows = size / stride / batches_;
      for (std::int64_t b = 0; b < batches_; ++b)
        kernels::add_bias(device, p.used_value() + b * n, y + b * rows * stride + at, rows, n, stride);
    });
  }
  /// Adds to the gradients of biases `begin` to `end - 1`, by a pass over the output's gradient.
  void add_gradients(Device& device, const T* dy, std::int64_t size, std::size_t begin, std::size_t end) const {
    each(begin, end, [&](parameter& p, std::int64_t at, std::int64_t n, std::int64_t stride) {
      if (!p.trainable()) return;
      const std::int64_t rows = size / stride / batches_;
      for (std::int64_t b = 0; b < batches_; ++b)
        with_kernel_sum<T>(device, p.used_gradient(device) + b * n, n, [&](auto* sums) {
          kernels::bias_gradient(device, dy + b * rows * stride + at, sums, rows, n, stride);
        });
    });
  }
  /// Adds a microbatch's gradients to `terms_`, if these exist; dy is the gradient of the microbatch's output.
  void add_terms(Device& device, std::int64_t index, std::int64_t count, const T* dy) const {
    if (terms_ == nullptr || !trainable()) return;
    for (const auto& p : biases_)
      if (p && p->trainable()) p->begin_terms();
    // If a product is scattered over its own features, its rows are wider than the output's.
    const std::int64_t stride = biases_.size() == 1 ? biases_[0]->used_size() / batches_ : total_;
    terms_->add(device, index, count, 0, [&](const token_leaves::leaf& leaf, G* out, bool) {
      buffer<Device> room;
      const T* const rows = rows_of_leaf(device, leaf, dy, stride, room);
      std::int64_t to = 0;
      each(0, biases_.size(), [&](parameter&, std::int64_t at, std::int64_t n, std::int64_t) {
        device.zero(out + to, static_cast<std::size_t>(n) * sizeof(G), device.main_stream());
        with_kernel_sum<T>(device, out + to, n, [&](auto* sums) {
          kernels::bias_gradient(device, rows + at, sums, leaf.count(), n, stride);
        });
        to += n;
      });
    });
  }
  /// Adds to these gradients the `columns` sums that product(sums) writes. It works in place if the gradients are
  /// empty, otherwise by a further pass over `columns` numbers. Returns false if product(sums) is false, or if not all
  /// of these biases are trainable.
  template <class F>
  bool add_gradients_by(Device& device, std::size_t begin, std::size_t end, std::int64_t columns, F&& product) const {
    if (batches_ != 1) return false;
    bool overwrites = true;
    for (std::size_t i = begin; i < end; ++i) {
      if (!biases_[i] || !biases_[i]->trainable()) return false;
      overwrites = overwrites && biases_[i]->gradient_is_empty();
    }
    const auto n = static_cast<std::size_t>(columns);
    G* gradient = nullptr;
    for (std::size_t i = end; i-- > begin;)  // ends with the first branch, where the whole array begins
      gradient = overwrites ? biases_[i]->overwritten_gradient() : biases_[i]->used_gradient(device);
    buffer<Device> terms;
    if (!overwrites) terms = make_buffer<G>(device, n);
    const bool done = product(overwrites ? gradient : terms.template data<G>());
    if (done && !overwrites) kernels::accumulate(device, terms.template data<G>(), gradient, columns);
    if (!done && overwrites) device.zero(gradient, n * sizeof(G), device.main_stream());
    return done;
  }

 private:
  std::string first_name() const {
    for (const auto& p : biases_)
      if (p) return p->name();
    return {};
  }
  /// Calls f(parameter, offset in a row, columns, row stride) for each of the biases `begin` to `end - 1`.
  template <class F>
  void each(std::size_t begin, std::size_t end, F&& f) const {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < end; ++i) {
      const std::int64_t n = biases_[i] ? biases_[i]->used_size() / batches_ : columns_[i];
      if (biases_[i] && i >= begin) f(*biases_[i], at, n, biases_.size() == 1 ? n : total_);
      at += n;
    }
  }

  std::int64_t batches_ = 1, total_ = 0;
  std::vector<std::int64_t> columns_;
  std::vector<parameter_ptr<Precision, Device>> biases_;
  gradient_terms<Precision, Device>* terms_ = nullptr;  ///< replaces a single running sum
  bool all_ = true;
};

PLAIT_COMPILED_TEMPLATE(class linear_biases<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class linear_biases<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class linear_biases<double, cpu>)

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
