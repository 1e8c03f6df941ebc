// Low-rank adapters of the matrices of a mixture's experts: one pair of matrices per expert, on the ranks that hold the
// expert.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/nn/linear/lora.hpp"
#include "plait/nn/parameter.hpp"

namespace plait::detail {

/// Computes C = alpha product + beta C in one call for all experts that have rows. Expert e has the rows begin[e] to
/// begin[e + 1] - 1; group(expert, first row, rows) describes its product.
template <compute_device Device, class Group>
void multiply_groups(Device& on, const std::vector<std::int64_t>& begin, double alpha, double beta, Group&& group) {
  std::vector<std::invoke_result_t<Group, std::int64_t, std::int64_t, std::int64_t>> groups;
  for (std::size_t e = 0; e + 1 < begin.size(); ++e)
    if (begin[e + 1] > begin[e])
      groups.push_back(group(static_cast<std::int64_t>(e), begin[e], begin[e + 1] - begin[e]));
  gemm_groups(on, alpha, groups, beta);
}

/// Columns of an array of rows with `total` columns; they begin at `at`. The array is null on a rank without rows.
template <class T>
struct row_columns {
  T* rows = nullptr;
  std::int64_t total = 0, at = 0;
  T* from(std::int64_t row) const { return rows + row * total + at; }
};

/// The adapter of a stack of experts' matrices [experts, out, in]: A [experts, rank, in] and B [experts, out, rank].
/// Arrays hold the rows of all local experts, ordered by expert.
template <class Precision, compute_device Device>
class expert_adapter {
  using T = activation_of<Precision>;
  using parameter = plait::parameter<Precision, Device>;
  using group = gemm_group<T, T>;
  using group_of_sum = gemm_group<T, gradient_of<Precision>>;

 public:
  /// `rows` is the layout of the rows that the stack multiplies, `used` that of the stack, and `product` that of the
  /// result.
  expert_adapter(const context<Device>& ctx, const parameter_info& weight, const layout& rows, const layout& used,
                 const layout& product, const lora_options& how)
      : rank_(how.rank), scale_(how.scale) {
    const std::string name = weight.name.substr(0, weight.name.rfind(".weight"));
    if (rank_ < 0) fail({name, ": the rank of an adapter is ", rank_, "; at least 1, or 0 for none"});
    linear_layouts base;
    for (const dim_placement& p : used.dims) base.placed.dims.push_back(p);
    base.output = base.product = product;
    const lora_derivation d = derive_lora(rows, base);
    enforce(d.verdict, name + ": adapter");
    const box own = local_box(used, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    out_ = own.local[1], in_ = own.local[2];
    context<Device> sized{ctx.device, ctx.ranks, ctx.sizes, ctx.seed};
    sized.sizes.set(dim_of<rank_dim>, rank_);
    const std::int64_t all = weight.shape[0];
    parameter_info first{name + ".lora_A.weight", {all, rank_, weight.shape[2]}, how.init},
        second{name + ".lora_B.weight", {all, weight.shape[1], rank_}, {0, 0}};
    first.stack = second.stack = true;
    second.adapter_scale = scale_, second.adapter_matrices = all;
    a_ = std::make_shared<parameter>(sized, std::move(first), d.a, d.a, rows);
    b_ = std::make_shared<parameter>(sized, std::move(second), d.b, d.b, d.hidden);
  }

  template <class F>
  void visit(F&& f) {
    f(*a_), f(*b_);
  }
  buffer<Device> hidden_rows(Device& on, const std::vector<std::int64_t>& begin) const {
    return make_buffer<T>(on, static_cast<std::size_t>(begin.back() * rank_));
  }

  /// h = x A', and product += scale h B'.
  void forward(Device& on, const std::vector<std::int64_t>& begin, const T* x, T* h, row_columns<T> product) const {
    const auto *const a = a_->used_value(), *const b = b_->used_value();
    multiply_groups(on, begin, 1.0, 0.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
      return group{{false, true, n, rank_, in_, in_, in_, rank_}, x + at * in_, a + e * rank_ * in_, h + at * rank_};
    });
    multiply_groups(on, begin, scale_, 1.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
      return group{{false, true, n, out_, rank_, rank_, rank_, product.total},
                   h + at * rank_,
                   b + e * out_ * rank_,
                   product.from(at)};
    });
  }
  /// dh = scale d B, and dx += dh A.
  void backward(Device& on, const std::vector<std::int64_t>& begin, row_columns<const T> d, T* dh, T* dx) const {
    const auto *const a = a_->used_value(), *const b = b_->used_value();
    multiply_groups(on, begin, scale_, 0.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
      return group{
          {false, false, n, rank_, out_, d.total, rank_, rank_}, d.from(at), b + e * out_ * rank_, dh + at * rank_};
    });
    multiply_groups(on, begin, 1.0, 1.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
      return group{{false, false, n, in_, rank_, rank_, in_, in_}, dh + at * rank_, a + e * rank_ * in_, dx + at * in_};
    });
  }
  /// dA += dh' x, and dB += scale d' h.
  void add_gradients(Device& on, const std::vector<std::int64_t>& begin, const T* x, row_columns<const T> d, const T* h,
                     const T* dh) const {
    if (a_->trainable()) {
      auto* const sum = a_->used_gradient(on);
      multiply_groups(on, begin, 1.0, 1.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
        return group_of_sum{
            {true, false, rank_, in_, n, rank_, in_, in_}, dh + at * rank_, x + at * in_, sum + e * rank_ * in_};
      });
    }
    if (!b_->trainable()) return;
    auto* const sum = b_->used_gradient(on);
    multiply_groups(on, begin, scale_, 1.0, [&](std::int64_t e, std::int64_t at, std::int64_t n) {
      return group_of_sum{
          {true, false, out_, rank_, n, d.total, rank_, rank_}, d.from(at), h + at * rank_, sum + e * out_ * rank_};
    });
  }

 private:
  std::int64_t rank_;
  double scale_;
  std::int64_t out_ = 0, in_ = 0;  ///< on this rank
  parameter_ptr<Precision, Device> a_, b_;
};

/// The adapters of gate, up and down; each may be absent.
template <class Precision, compute_device Device>
class expert_adapters {
  using T = activation_of<Precision>;

 public:
  enum which : std::size_t { gate, up, down };
  using arrays = std::array<buffer<Device>, 3>;  ///< hidden rows, or their gradients

  template <class... Arguments>
  void emplace(which i, Arguments&&... arguments) {
    all_[i].emplace(std::forward<Arguments>(arguments)...);
  }
  explicit operator bool() const { return all_[gate] || all_[up] || all_[down]; }
  template <class F>
  void visit(F&& f) {
    for (auto& adapter : all_)
      if (adapter) adapter->visit(f);
  }

  void forward(which i, Device& on, const std::vector<std::int64_t>& begin, const T* x, arrays& hidden,
               row_columns<T> product) const {
    if (!all_[i]) return;
    hidden[i] = all_[i]->hidden_rows(on, begin);
    all_[i]->forward(on, begin, x, hidden[i].template data<T>(), product);
  }
  void backward(which i, Device& on, const std::vector<std::int64_t>& begin, row_columns<const T> d, arrays& dhidden,
                T* dx) const {
    if (!all_[i]) return;
    dhidden[i] = all_[i]->hidden_rows(on, begin);
    all_[i]->backward(on, begin, d, dhidden[i].template data<T>(), dx);
  }
  void add_gradients(which i, Device& on, const std::vector<std::int64_t>& begin, const T* x, row_columns<const T> d,
                     const arrays& hidden, const arrays& dhidden) const {
    if (all_[i]) all_[i]->add_gradients(on, begin, x, d, hidden[i].template data<T>(), dhidden[i].template data<T>());
  }

 private:
  std::array<std::optional<expert_adapter<Precision, Device>>, 3> all_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
