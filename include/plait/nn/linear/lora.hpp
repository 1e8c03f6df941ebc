// Low-rank adapters of frozen linears, an option of linears. Their layouts are derived from the linear's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/tensor/chunked_collective.hpp"

namespace plait {

/// A low-rank adapter of a linear (LoRA, Hu et al. 2021): y = x W' + scale (x A') B', with W and the bias frozen.
/// `linear_options`, `attention_options` and `swiglu_mlp` take one. Parameters have peft's names, `NAME.lora_A.weight`
/// [rank, in] and `NAME.lora_B.weight` [out, rank].
///
///     const lora_options adapter{.rank = 8, .scale = 2};
///     llama<float, S> model(ctx, config, {.attention = {.lora = {.q = adapter, .v = adapter}}});
///     freeze_all_but_adapters(model);
struct lora_options {
  std::int64_t rank = 0;  ///< 0: no adapter
  double scale = 1;       ///< peft's lora_alpha / r
  initializer init{};     ///< of A; B begins as zero, so the adapter has no effect at first
};

/// Freezes all parameters of a layer or a model except its adapters' parameters.
template <class Model>
void freeze_all_but_adapters(Model& model) {
  model.visit([](auto& p) {
    if (!is_of_adapter(p.name())) p.freeze();
  });
}

/// The layouts of a linear's adapter: of A, B and x A', and of the adapter's product.
struct lora_derivation {
  layout a, b, hidden, product;
  plait::verdict verdict;
};

/// Derives an adapter's layouts. A has the placement of the weight's contracted dims, and B that of its own dims;
/// `rank_dim` is whole. The adapter takes the input that was gathered for the weight, and its product has the layout of
/// the weight's product. So one gather and one reduction serve both. If the contracted dims are sharded, x A' is
/// partial and stays so, because the product with B is linear. B's input is then partial and B is used replicated.
constexpr lora_derivation derive_lora(const layout& gathered, const linear_layouts& base) {
  lora_derivation d;
  dim_list rows;
  for (const dim_placement& p : gathered.dims)
    if (base.output.has(p.dim)) rows.push_back(p.dim);
  rows.push_back(dim_of<rank_dim>);
  // A is [batches, rank, contracted], B is [batches, own, rank].
  for (const dim_placement& p : base.placed.dims) {
    if (gathered.has(p.dim) && base.output.has(p.dim)) d.a.dims.push_back(p);
    if (base.output.has(p.dim)) d.b.dims.push_back(p);
  }
  d.a.dims.push_back({dim_of<rank_dim>, {}});
  d.b.dims.push_back({dim_of<rank_dim>, {}});
  for (const dim_placement& p : base.placed.dims)
    if (!base.output.has(p.dim)) d.a.dims.push_back(p);
  const derived_layout hidden = contract(gathered, use_of(d.a, gathered), rows);
  d.hidden = hidden.result;
  const derived_layout product = contract(d.hidden, use_of(d.b, d.hidden), base.product.dim_order());
  d.product = product.result;
  d.verdict.worsen(hidden.verdict);
  d.verdict.worsen(product.verdict);
  return d;
}

namespace detail {

/// This rank's part of a linear's product: `batches` times [rows, inner] x [inner, columns]. Its columns begin at `at`
/// in rows of `total` elements.
struct product_part {
  std::int64_t batches = 1, rows = 0, inner = 0, columns = 0, total = 0, at = 0;
};

/// The computation of one adapter. It shares arrays with its linear: x [rows, inner] as gathered, and the product and
/// its gradient with rows of `total` elements. Its own arrays are h = x A' and dh, [rows, rank]. If only some rows are
/// computed at a time, the product and the gradient of x hold only these rows; all other arrays hold all rows.
template <class Precision, compute_device Device>
class lora_adapter {
  using T = activation_of<Precision>;
  using W = weight_of<Precision>;
  using parameter = plait::parameter<Precision, Device>;

 public:
  /// `weight` and `stored` describe the frozen weight and its stored layout.
  lora_adapter(const context<Device>& ctx, const layout& gathered, const linear_layouts& base,
               const parameter_info& weight, const layout& stored, const lora_options& how, const product_part& part)
      : rank_(how.rank), scale_(static_cast<arithmetic<T>>(how.scale)), part_(part) {
    const std::string name = weight.name.substr(0, weight.name.rfind(".weight"));
    if (rank_ < 0) fail({name, ": the rank of an adapter is ", rank_, "; at least 1, or 0 for none"});
    if (base.inputs_first)
      fail({name, ": an adapter is for a weight whose contracted dims come last; this one's come first"});
    const lora_derivation d = derive_lora(gathered, base);
    enforce(d.verdict, name + ": adapter");
    if (!equivalent(d.product, base.product))
      fail({name, ": the product of the adapter lies as ", describe(d.product), ", that of the weight as ",
            describe(base.product)});
    context<Device> own{ctx.device, ctx.ranks, ctx.sizes, ctx.seed};
    own.sizes.set(dim_of<rank_dim>, rank_);
    const auto [a, b] = shapes(gathered, base, weight, name);
    a_ = std::make_shared<parameter>(own, parameter_info{name + ".lora_A.weight", a, how.init, true},
                                     stored_as(d.a, stored), d.a, gathered);
    parameter_info second{name + ".lora_B.weight", b, {0, 0}, true};
    second.adapter_scale = how.scale;
    b_ = std::make_shared<parameter>(own, std::move(second), stored_as(d.b, stored), d.b, d.hidden);
  }

  /// Changes the number of rows in each batch.
  void resize(std::int64_t rows) { part_.rows = rows; }
  std::int64_t hidden_size() const { return part_.batches * part_.rows * rank_; }
  bool trainable() const { return a_->trainable() || b_->trainable(); }
  template <class F>
  void visit(F&& f) {
    f(*a_);
    f(*b_);
  }

  void hidden(Device& device, row_range rows, const T* x, T* h) const {
    const W* const a = a_->used_value();
    each_run(rows, [&](std::int64_t i, std::int64_t at, std::int64_t n) {
      device.gemm(false, true, n, rank_, part_.inner, 1.0, x + at * part_.inner, part_.inner,
                  a + i * rank_ * part_.inner, part_.inner, 0.0, h + at * rank_, rank_);
    });
  }
  /// Adds the adapter's product to `product`.
  void add_output(Device& device, row_range rows, const T* h, T* product) const {
    const W* const b = b_->used_value();
    each_run(rows, [&](std::int64_t i, std::int64_t at, std::int64_t n) {
      device.gemm(false, true, n, part_.columns, rank_, scale_, h + at * rank_, rank_, b + i * part_.columns * rank_,
                  rank_, 1.0, product + (at - rows.first) * part_.total + part_.at, part_.total);
    });
  }
  void hidden_gradient(Device& device, row_range rows, const T* d, T* dh) const {
    const W* const b = b_->used_value();
    each_run(rows, [&](std::int64_t i, std::int64_t at, std::int64_t n) {
      device.gemm(false, false, n, rank_, part_.columns, scale_, d + at * part_.total + part_.at, part_.total,
                  b + i * part_.columns * rank_, rank_, 0.0, dh + at * rank_, rank_);
    });
  }
  /// Adds the adapter's part to the gradient of the gathered input.
  void add_input_gradient(Device& device, row_range rows, const T* dh, T* dx) const {
    const W* const a = a_->used_value();
    each_run(rows, [&](std::int64_t i, std::int64_t at, std::int64_t n) {
      device.gemm(false, false, n, part_.inner, rank_, 1.0, dh + at * rank_, rank_, a + i * rank_ * part_.inner,
                  part_.inner, 1.0, dx + (at - rows.first) * part_.inner, part_.inner);
    });
  }
  void weight_gradients(Device& device, const T* x, const T* d, const T* h, const T* dh) const {
    auto* const a = a_->trainable() ? a_->used_gradient(device) : nullptr;
    auto* const b = b_->trainable() ? b_->used_gradient(device) : nullptr;
    const product_part& p = part_;
    for (std::int64_t i = 0; i < p.batches; ++i) {
      if (a)
        device.gemm(true, false, rank_, p.inner, p.rows, 1.0, dh + i * p.rows * rank_, rank_, x + i * p.rows * p.inner,
                    p.inner, 1.0, a + i * rank_ * p.inner, p.inner);
      if (b)
        device.gemm(true, false, p.columns, rank_, p.rows, scale_, d + i * p.rows * p.total + p.at, p.total,
                    h + i * p.rows * rank_, rank_, 1.0, b + i * p.columns * rank_, rank_);
    }
  }

 private:
  /// Calls f(batch, first row over all batches, rows) for each batch that contains some of the rows.
  template <class F>
  void each_run(row_range rows, F&& f) const {
    for (std::int64_t at = rows.first, end = at + rows.count, n = 0; at < end; at += n) {
      const std::int64_t i = at / part_.rows;
      n = std::min(end, (i + 1) * part_.rows) - at;
      f(i, at, n);
    }
  }
  /// Returns `a`, with each dim that the stored weight has placed as in the stored weight.
  static layout stored_as(layout a, const layout& stored) {
    for (dim_placement& p : a.dims)
      if (stored.has(p.dim)) p.axes = stored.axes_of(p.dim);
    return a;
  }
  /// The logical shapes of A and B: the weight's shape, with the rank instead of the own dims or of the contracted
  /// dims.
  std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> shapes(const layout& gathered,
                                                                         const linear_layouts& base,
                                                                         const parameter_info& weight,
                                                                         const std::string& name) const {
    const std::vector<std::int64_t>& whole = weight.shape;
    if (whole.size() != base.placed.dims.size()) {
      if (whole.size() != 2) fail({name, ": an adapter needs the weight's shape as a matrix or dim by dim"});
      return {{rank_, whole[1]}, {whole[0], rank_}};
    }
    std::vector<std::int64_t> a, b, contracted;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const dim_id dim = base.placed.dims[i].dim;
      if (!gathered.has(dim)) {
        b.push_back(whole[i]);
      } else if (base.output.has(dim)) {
        a.push_back(whole[i]), b.push_back(whole[i]);
      } else {
        contracted.push_back(whole[i]);
      }
    }
    a.push_back(rank_), b.push_back(rank_);
    a.insert(a.end(), contracted.begin(), contracted.end());
    return {a, b};
  }

  std::int64_t rank_;
  arithmetic<T> scale_;
  product_part part_;
  parameter_ptr<Precision, Device> a_, b_;
};

/// The adapters of linears that share an input; some linears may have none. Their hidden arrays are contiguous, and
/// empty for linears without an adapter.
template <class Precision, compute_device Device>
class lora_adapters {
  using T = activation_of<Precision>;

 public:
  explicit lora_adapters(std::size_t linears) : adapters_(linears) {}
  template <class... Arguments>
  void emplace(std::size_t i, Arguments&&... arguments) {
    adapters_[i].emplace(std::forward<Arguments>(arguments)...);
    size_ += adapters_[i]->hidden_size();
  }
  /// Changes the number of rows in each batch for all adapters.
  void resize(std::int64_t rows) {
    size_ = 0;
    for (auto& adapter : adapters_) {
      if (!adapter) continue;
      adapter->resize(rows);
      size_ += adapter->hidden_size();
    }
  }
  bool any() const { return size_ > 0; }
  bool trainable() const {
    for (const auto& adapter : adapters_)
      if (adapter && adapter->trainable()) return true;
    return false;
  }
  template <class F>
  void visit(std::size_t i, F&& f) {
    if (adapters_[i]) adapters_[i]->visit(f);
  }

  /// Allocates memory for the hidden arrays or for their gradients.
  buffer<Device> room(Device& device) const {
    return any() ? make_buffer<T>(device, static_cast<std::size_t>(size_)) : buffer<Device>();
  }
  void hidden(Device& device, row_range rows, const T* x, buffer<Device>& hidden) const {
    each(
        [&](const auto& adapter, std::int64_t at) { adapter.hidden(device, rows, x, hidden.template data<T>() + at); });
  }
  /// Computes the hidden arrays of these rows, and adds the adapters' products to `product`.
  void add_outputs(Device& device, row_range rows, const T* x, buffer<Device>& hidden, T* product) const {
    each([&](const auto& adapter, std::int64_t at) {
      adapter.hidden(device, rows, x, hidden.template data<T>() + at);
      adapter.add_output(device, rows, hidden.template data<T>() + at, product);
    });
  }
  void hidden_gradients(Device& device, row_range rows, const T* d, buffer<Device>& dhidden) const {
    each([&](const auto& adapter, std::int64_t at) {
      adapter.hidden_gradient(device, rows, d, dhidden.template data<T>() + at);
    });
  }
  /// Computes the gradients of the hidden arrays of these rows, and adds the adapters' part to the input's gradient.
  void add_input_gradients(Device& device, row_range rows, const T* d, buffer<Device>& dhidden, T* dx) const {
    hidden_gradients(device, rows, d, dhidden);
    each([&](const auto& adapter, std::int64_t at) {
      adapter.add_input_gradient(device, rows, dhidden.template data<T>() + at, dx);
    });
  }
  void weight_gradients(Device& device, const T* x, const T* d, const buffer<Device>& hidden,
                        const buffer<Device>& dhidden) const {
    each([&](const auto& adapter, std::int64_t at) {
      adapter.weight_gradients(device, x, d, hidden.template data<T>() + at, dhidden.template data<T>() + at);
    });
  }

 private:
  /// Calls f(adapter, begin of its hidden array) for each adapter.
  template <class F>
  void each(F&& f) const {
    std::int64_t at = 0;
    for (const auto& adapter : adapters_) {
      if (!adapter) continue;
      f(*adapter, at);
      at += adapter->hidden_size();
    }
  }

  std::vector<std::optional<lora_adapter<Precision, Device>>> adapters_;
  std::int64_t size_ = 0;
};

}  // namespace detail

PLAIT_COMPILED_TEMPLATE(class detail::lora_adapter<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::lora_adapter<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::lora_adapter<double, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::lora_adapters<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::lora_adapters<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::lora_adapters<double, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
