// The computation of linears that share an input, from a derivation that is a value. Typed layers check the specs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/deterministic/linear.hpp"
#include "plait/device/device.hpp"
#include "plait/device/range.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear/biases.hpp"
#include "plait/nn/linear/collectives.hpp"
#include "plait/nn/linear/lora.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/array.hpp"
#include "plait/nn/parameter/memory.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {

/// The values that linears keep of a forward pass, in addition to their input. These are the gathered input and the
/// adapters' hidden arrays. The gathered input is not kept if it is the input itself, if it will be gathered again, or
/// if no weight needs it.
template <compute_device Device>
struct linear_saved {
  buffer<Device> gathered, adapted;
  detail::saved_stamp stamp{};

  template <class F>
  void visit(F&& f) {
    f(gathered);
    f(adapted);
  }
};

namespace detail {

/// Whether a product on the device can add a row to each row of its result, and also a matrix, in its own pass.
template <class Device, class T>
concept fuses_additions = requires(Device& d, std::int64_t n, const T* in, T* out) {
  d.gemm(false, true, n, n, n, 1.0, in, n, in, n, 0.0, out, n, {in, in});
};

}  // namespace detail

/// The computation of linears that share an input, without specs as types; everything is derived from `shared_linears`.
/// The weights form one matrix, one below another, so there is one product. The outputs of several linears are side by
/// side in its rows.
template <class Precision, compute_device Device>
class linear_core : detail::linear_collectives {
 public:
  using T = activation_of<Precision>;
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using parameter = plait::parameter<Precision, Device>;
  /// `callers` holds the contiguous weights of all branches, and their contiguous biases. `shared` is another layer's
  /// weight to use, or null; only a single linear can have one. `overlap` is the number of chunks in which collectives
  /// are pipelined with products (nn/linear/policy.hpp); 1: none.
  linear_core(const context<Device>& ctx, const shared_linears& d, std::vector<linear_branch> info,
              const parameter_memory<Precision>& callers = {}, parameter_ptr<Precision, Device> shared = nullptr,
              std::int64_t overlap = 1);
  linear_core(const linear_core&);
  linear_core& operator=(const linear_core&);
  linear_core(linear_core&&) noexcept;
  linear_core& operator=(linear_core&&) noexcept;
  ~linear_core();

  std::int64_t columns() const { return total_; }
  /// Whether the product adds an addend of the output in its own pass.
  bool adds_in_product() const { return detail::fuses_additions<Device, T> && forward_output_.trivial(); }
  using linear_collectives::input_size;
  using linear_collectives::output_size;
  using linear_collectives::rows;

  /// Prepares the collectives for the sizes of the context, in the same world. Batches and lengths may change; the
  /// weights' dims may not. Values that an earlier forward pass kept become invalid.
  void resize(const context<Device>& ctx, const shared_linears& d);
  /// Binds all weights and biases to other memory that the caller owns, given as in the constructor.
  void rebind(const parameter_memory<Precision>& callers, detail::rebinding how = detail::rebinding::done);

  /// Throws if a call's context has other sizes or another mesh than the layer was made for.
  void require_context(const context<Device>& ctx) const;

  /// Adds `addend`, which has the output's size, to the output unless it is null. Throws if y overlaps x or addend.
  void forward(const microbatch<Device>& mb, const T* x, T* y, linear_saved<Device>* keep, const T* addend = nullptr);

  /// Overwrites dx with the gradient of x plus `addend`, unless that is null. Throws if dx overlaps x, dy or addend. If
  /// weight gradients are deferred, x must live until they are computed; dy need not.
  void backward(const microbatch<Device>& mb, const T* x, linear_saved<Device>& saved, const T* dy, T* dx,
                const T* addend = nullptr);

  const parameter_ptr<Precision, Device>& weight(std::size_t i) const { return names_.checked(weights_)[i]; }
  const parameter_ptr<Precision, Device>& bias(std::size_t i) const { return names_.checked(biases_)[i]; }
  template <class F>
  void visit(F&& f) {
    for (std::size_t i = 0; i < names_.checked(weights_).size(); ++i) {
      f(*weights_[i]);
      if (biases_[i]) f(*biases_[i]);
      adapters_.visit(i, f);
    }
  }

 private:
  using row_range = detail::row_range;

  /// Which additions the product of a pass has already made, and its chunks in flight.
  struct product_result {
    bool has_addend = false, has_biases = false;
    chunks_in_flight<Device> in_flight{};
  };
  // The stages of a pass, chosen at construction; deterministic sums replace some of them.
  using output_stage = product_result (linear_core::*)(const context<Device>&, const T* x, buffer<Device>& gathered,
                                                       buffer<Device>& adapted, T* y, const T* addend);
  using input_gradient_stage = product_result (linear_core::*)(const context<Device>&, const T* dy,
                                                               buffer<Device>& resolved, buffer<Device>& dadapted,
                                                               T* dx, const T* addend, const T*& d);
  using gradient_stage = void (linear_core::*)(const context<Device>&, std::int64_t index, std::int64_t count,
                                               const T* d, const T* in, const T* dy);

  void take_deterministic_stages(const context<Device>& ctx, const shared_linears& d, bool overlaps) {
    const std::string& name = names_.layer();
    if (batches_ != 1) require_any_order(ctx, name, "batches of products");
    if (adapters_.any()) require_any_order(ctx, name, "low-rank adapters");
    if (overlaps) require_any_order(ctx, name, "linears whose collectives go in chunks; leave overlap out");
    sums_ = {ctx, d, forward_output_.moves(), backward_input_.moves(), {rows_, inner_, total_, inputs_first_, columns_},
             name};
    if (weights_trainable()) terms_ = &weights_[0]->add_terms(sums_.tokens());
    if (sums_.sums_output()) output_ = &linear_core::sum_output;
    if (sums_.sums_input_gradient()) input_gradient_ = &linear_core::sum_input_gradient;
    gradients_ = &linear_core::sum_gradients;
  }

  void make_adapters(const context<Device>& ctx, const shared_linears& d, const std::vector<linear_branch>& info) {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < info.size(); at += columns_[i++])
      if (info[i].lora.rank != 0)
        adapters_.emplace(i, ctx, d.gathered, d.branches[i], info[i].weight, info[i].stored_weight, info[i].lora,
                          detail::product_part{batches_, rows_, inner_, columns_[i], total_, at});
  }
  void make_weights(const context<Device>& ctx, const shared_linears& d, std::vector<linear_branch>& info,
                    const parameter_memory<Precision>& callers) {
    const std::int64_t n = batches_ * total_ * inner_;
    const auto array = std::make_shared<parameter_array<Precision, Device>>(ctx.device, n, callers.weight.pointer(),
                                                                            callers.gradient.pointer());
    master_of<Precision>* master = callers.master.pointer();
    G* reduced = callers.reduced.pointer();
    std::int64_t at = 0;
    for (std::size_t i = 0; i < info.size(); at += batches_ * columns_[i++] * inner_) {
      weights_[i] =
          std::make_shared<parameter>(ctx, std::move(info[i].weight), info[i].stored_weight, d.branches[i].placed,
                                      d.gathered, parameter_place<Precision, Device>{array, at, master, reduced});
      if (master) master += weights_[i]->size();
      if (reduced) reduced += weights_[i]->size();
    }
  }
  void share(parameter_ptr<Precision, Device> shared, const shared_linears& d, const std::string& name) {
    if (weights_.size() > 1) fail({name, ": linears that share an input cannot use the parameter of another layer"});
    if (!equivalent(shared->used(), d.branches[0].weight))
      fail({name, ": the parameter ", shared->name(), " is used in two layouts, ", describe(shared->used()), " and ",
            describe(d.branches[0].weight), "; its users must shard it alike"});
    weights_[0] = std::move(shared);
    tied_ = true;
  }

  /// Whether any weight, adapter or bias needs a gradient.
  bool weights_trainable() const {
    return adapters_.trainable() ||
           std::any_of(weights_.begin(), weights_.end(), [](const auto& p) { return p->trainable(); });
  }
  void require_gathered() const {
    for (const auto& p : weights_) p->require_gathered();
    biases_.require_gathered();
  }
  void check_backward(const microbatch<Device>& mb, const T* x, linear_saved<Device>& saved, const T* dy, const T* dx,
                      const T* addend) {
    require_gathered();
    const std::string& name = weights_[0]->name();
    require_context(mb.ctx);
    detail::require_array(name, "x", x, input_size());
    detail::require_array(name, "dy", dy, output_size());
    saved.stamp.use(name, weights_[0].get(), mb.index, x);
    detail::require_no_overlap(
        name, "backward", {dx, input_size(), "dx"},
        {{x, input_size(), "x"}, {dy, output_size(), "dy"}, {addend, input_size(), "addend"}, weights_read()});
  }
  const W* weights() const { return weights_[0]->used_value(); }
  detail::named_array weights_read() const { return {weights(), batches_ * total_ * inner_, "the weight"}; }

  row_range all_rows() const { return {0, rows()}; }

  /// Computes out = a [all rows, k] times the weight, or its transpose, for the rows `rows`. Adds `addend` unless it is
  /// null, and the biases if `biases`. `out` and `addend` are [these rows, n]. Returns whether the product has added
  /// the biases.
  bool multiply(const context<Device>& ctx, bool transposed, std::int64_t n, std::int64_t k, row_range rows, const T* a,
                T* out, const T* addend, bool biases) {
    // cuBLASLt has no bias type for double, and its kernels may read 16 bytes of a bias at a time.
    constexpr bool fuses_bias = std::is_same_v<W, T> && !std::is_same_v<T, double>;
    const bool with_bias =
        fuses_bias && biases && biases_.row() != nullptr && reinterpret_cast<std::uintptr_t>(biases_.row()) % 16 == 0;
    for (std::int64_t at = rows.first, end = at + rows.count, count = 0; at < end; at += count) {
      const std::int64_t b = at / rows_, before = at - rows.first;
      count = std::min(end, (b + 1) * rows_) - at;
      const T* const from = a + at * k;
      const W* const weight = weights() + b * total_ * inner_;
      T* const to = out + before * n;
      const auto [as_stored, row] = std::pair(transposed != inputs_first_, inputs_first_ ? total_ : inner_);
      if constexpr (detail::fuses_additions<Device, T>) {
        const T* bias = nullptr;
        if constexpr (fuses_bias) bias = with_bias ? biases_.row() : nullptr;
        ctx.device.gemm(false, as_stored, count, n, k, 1.0, from, k, weight, row, addend ? 1.0 : 0.0, to, n,
                        {bias, addend ? addend + before * n : nullptr});
      } else {
        ctx.device.gemm(false, as_stored, count, n, k, 1.0, from, k, weight, row, 0.0, to, n);
      }
    }
    if constexpr (detail::fuses_additions<Device, T>) {
      return with_bias;
    } else {
      if (addend) kernels::accumulate(ctx.device, addend, out, rows.count * n);
      return false;
    }
  }

  /// Computes y = x W' for all rows. The product adds the addend in its own pass, unless it is reduced over ranks
  /// first.
  product_result make_output(const context<Device>& ctx, const T* x, buffer<Device>& gathered, buffer<Device>& adapted,
                             T* y, const T* addend) {
    buffer<Device> room;
    const T* const input = forward_input_.gather(ctx.device, x, gathered);
    T* const out = forward_output_.product_room(ctx.device, y, room);
    product_result made = make_output_rows(ctx, all_rows(), input, adapted, out, addend);
    forward_output_.bring(ctx.device, out, y);
    return made;
  }
  product_result make_output_rows(const context<Device>& ctx, row_range rows, const T* input, buffer<Device>& adapted,
                                  T* out, const T* addend) {
    const bool alone = forward_output_.trivial();
    const bool has_biases = multiply(ctx, true, total_, inner_, rows, input, out,
                                     alone && addend ? addend + rows.first * total_ : nullptr, alone);
    adapters_.add_outputs(ctx.device, rows, input, adapted, out);
    return {alone, has_biases};
  }
  /// Like `make_output`, in chunks that overlap with the collectives.
  product_result make_output_in_chunks(const context<Device>& ctx, const T* x, buffer<Device>& gathered,
                                       buffer<Device>& adapted, T* y, const T* addend) {
    product_result made;
    forward_input_.gather(ctx.device, x, gathered, [&](row_range come, const T* input) {
      const auto product = [&](row_range rows, T* out) {
        made = make_output_rows(ctx, rows, input, adapted, out, addend);
      };
      forward_output_.reduce(ctx.device, y, come, product).wait();
    });
    return made;
  }
  /// Computes dx = d W for all rows; d is dy in the layout that the products need.
  product_result make_input_gradient(const context<Device>& ctx, const T* dy, buffer<Device>& resolved,
                                     buffer<Device>& dadapted, T* dx, const T* addend, const T*& d) {
    buffer<Device> room;
    d = backward_output_.gather(ctx.device, dy, resolved);
    T* const out = backward_input_.product_room(ctx.device, dx, room);
    make_gradient_rows(ctx, all_rows(), d, dadapted, out, addend);
    backward_input_.bring(ctx.device, out, dx);
    return {backward_input_.trivial()};
  }
  void make_gradient_rows(const context<Device>& ctx, row_range rows, const T* d, buffer<Device>& dadapted, T* out,
                          const T* addend) {
    multiply(ctx, false, inner_, total_, rows, d, out,
             backward_input_.trivial() && addend ? addend + rows.first * inner_ : nullptr, false);
    adapters_.add_input_gradients(ctx.device, rows, d, dadapted, out);
  }
  /// Like `make_input_gradient`, in chunks that overlap with the collectives.
  product_result make_input_gradient_in_chunks(const context<Device>& ctx, const T* dy, buffer<Device>& resolved,
                                               buffer<Device>& dadapted, T* dx, const T* addend, const T*& d) {
    product_result made{backward_input_.trivial()};
    backward_output_.gather(ctx.device, dy, resolved, [&](row_range come, const T* gradient) {
      d = gradient;
      made.in_flight = backward_input_.reduce(ctx.device, dx, come, [&](row_range rows, T* out) {
        make_gradient_rows(ctx, rows, gradient, dadapted, out, addend);
      });
    });
    return made;
  }
  /// Adds to the gradients of trainable weights, or overwrites them if they are empty. One product serves adjacent
  /// trainable branches. Then adds to the gradients of biases, which are sums of dy.
  void add_gradients(const context<Device>& ctx, std::int64_t, std::int64_t, const T* d, const T* in, const T* dy) {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < weights_.size();) {
      if (!weights_[i]->trainable()) {
        biases_.add_gradients(ctx.device, dy, output_size(), i, i + 1);
        at += columns_[i++];
        continue;
      }
      const std::int64_t first = at;
      const std::size_t begin = i;
      bool overwrites = rows_ > 0;
      for (; i < weights_.size() && weights_[i]->trainable(); at += columns_[i++])
        overwrites = overwrites && weights_[i]->gradient_is_empty();
      G* gradient = nullptr;
      for (std::size_t j = i; j-- > begin;)  // ends with the first branch, where the whole array begins
        gradient = overwrites ? weights_[j]->overwritten_gradient() : weights_[j]->used_gradient(ctx.device);
      const arithmetic<T> keep = overwrites ? 0 : 1;
      if constexpr (detail::fuses_bias_gradients<Device, T, G>) {
        // If a reduction follows the product, the bias is added to other rows than the product has.
        const auto product = [&](G* sums) {
          return ctx.device.gemm_with_row_sums(true, false, at - first, inner_, rows_, 1.0, d + first, total_, in,
                                               inner_, keep, gradient, inner_, sums);
        };
        if (!inputs_first_ && backward_output_.trivial() && rows_ > 0 &&
            biases_.add_gradients_by(ctx.device, begin, i, at - first, product))
          continue;
      }
      for (std::int64_t b = 0; b < batches_; ++b) {
        const T *a = d + b * rows_ * total_ + first, *c = in + b * rows_ * inner_;
        std::int64_t m = at - first, n = inner_, lda = total_;
        if (inputs_first_) std::swap(a, c), m = lda = inner_, n = total_;
        ctx.device.gemm(true, false, m, n, rows_, 1.0, a, lda, c, n, keep, gradient + b * total_ * inner_, n);
      }
      biases_.add_gradients(ctx.device, dy, output_size(), begin, i);
    }
  }

  product_result sum_output(const context<Device>& ctx, const T* x, buffer<Device>& gathered, buffer<Device>&, T* y,
                            const T* addend) {
    const bool adds = !biases_.any();  // biases must be added before the addend
    sums_.forward(ctx.device, forward_input_.gather(ctx.device, x, gathered), weights(), y, adds ? addend : nullptr,
                  output_size());
    return {adds};
  }
  product_result sum_input_gradient(const context<Device>& ctx, const T* dy, buffer<Device>& resolved, buffer<Device>&,
                                    T* dx, const T* addend, const T*& d) {
    d = backward_output_.gather(ctx.device, dy, resolved);
    sums_.backward(ctx.device, d, weights(), dx, addend, input_size());
    return {true};
  }
  void sum_gradients(const context<Device>& ctx, std::int64_t index, std::int64_t count, const T* d, const T* in,
                     const T* dy) {
    for (const auto& p : weights_)
      if (p->trainable()) p->begin_terms();
    if (terms_ && weights_trainable()) sums_.add_weights(ctx.device, *terms_, index, count, d, in);
    biases_.add_terms(ctx.device, index, count, dy);
  }

  detail::layer_names names_;
  bool tied_ = false;                                      ///< whether the weight belongs to another layer
  bool inputs_first_ = false;                              ///< whether the weight is stored as [in, out]
  std::vector<parameter_ptr<Precision, Device>> weights_;  ///< of all branches, contiguous in memory
  detail::linear_biases<Precision, Device> biases_;
  detail::lora_adapters<Precision, Device> adapters_;
  output_stage output_ = &linear_core::make_output;
  input_gradient_stage input_gradient_ = &linear_core::make_input_gradient;
  gradient_stage gradients_ = &linear_core::add_gradients;
  detail::deterministic_linear<Precision, Device> sums_;  ///< for stages with deterministic sums
  gradient_terms<Precision, Device>* terms_ = nullptr;    ///< of the weights, for these stages
};

template <class Precision, compute_device Device>
linear_core<Precision, Device>::linear_core(const context<Device>& ctx, const shared_linears& d,
                                            std::vector<linear_branch> info, const parameter_memory<Precision>& callers,
                                            parameter_ptr<Precision, Device> shared, std::int64_t overlap)
    : linear_collectives(ctx.ranks, ctx.sizes, d, info[0].weight.name),
      names_(std::string_view(info[0].weight.name).substr(0, info[0].weight.name.rfind(".weight"))),
      inputs_first_(d.branches[0].inputs_first),
      weights_(info.size()),
      adapters_(info.size()) {
  make_adapters(ctx, d, info);
  if (overlap != 1) {
    split_into_chunks(overlap, info[0].weight.name);
    output_ = &linear_core::make_output_in_chunks;
    input_gradient_ = &linear_core::make_input_gradient_in_chunks;
  }
  if (shared)
    share(std::move(shared), d, info[0].weight.name);
  else
    make_weights(ctx, d, info, callers);
  biases_ = detail::linear_biases<Precision, Device>(ctx, d, info, callers, batches_, columns_);
  detail::require_memory(names_.layer(), weights_, biases_.all(), callers, tied_);
  for (std::size_t i = 0; i < info.size(); ++i)
    for (const auto* base : {&weight(i), &bias(i)})
      if (info[i].lora.rank != 0 && *base) (*base)->freeze();
  if (ctx.deterministic) take_deterministic_stages(ctx, d, overlap != 1);
}

template <class Precision, compute_device Device>
linear_core<Precision, Device>::linear_core(const linear_core&) = default;
template <class Precision, compute_device Device>
linear_core<Precision, Device>& linear_core<Precision, Device>::operator=(const linear_core&) = default;
template <class Precision, compute_device Device>
linear_core<Precision, Device>::linear_core(linear_core&&) noexcept = default;
template <class Precision, compute_device Device>
linear_core<Precision, Device>& linear_core<Precision, Device>::operator=(linear_core&&) noexcept = default;
template <class Precision, compute_device Device>
linear_core<Precision, Device>::~linear_core() = default;

template <class Precision, compute_device Device>
void linear_core<Precision, Device>::resize(const context<Device>& ctx, const shared_linears& d) {
  detail::require_resizable(weight(0)->name(), static_cast<bool>(sums_));
  detail::arm_checks(ctx);
  take_sizes(ctx.ranks, ctx.sizes, d, weights_[0]->name());
  adapters_.resize(rows_);
}

template <class Precision, compute_device Device>
void linear_core<Precision, Device>::rebind(const parameter_memory<Precision>& callers, detail::rebinding how) {
  detail::rebind_parameters(names_.layer(), weights_, biases_.all(), callers, tied_, how);
}

template <class Precision, compute_device Device>
void linear_core<Precision, Device>::require_context(const context<Device>& ctx) const {
  made_for_.require(weight(0)->name(), ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
}

template <class Precision, compute_device Device>
void linear_core<Precision, Device>::forward(const microbatch<Device>& mb, const T* x, T* y, linear_saved<Device>* keep,
                                             const T* addend) {
  const context<Device>& ctx = mb.ctx;
  const range profiled(ctx.device, names_.forward());
  require_gathered();
  const std::string& name = weights_[0]->name();
  require_context(ctx);
  detail::require_array(name, "x", x, input_size());
  detail::require_array(name, "y", y, output_size());
  detail::require_no_overlap(name, "forward", {y, output_size(), "y"},
                             {{x, input_size(), "x"}, {addend, output_size(), "addend"}, weights_read()});
  buffer<Device> gathered, adapted = adapters_.room(ctx.device);
  const product_result made = (this->*output_)(ctx, x, gathered, adapted, y, addend);
  if (!made.has_biases) biases_.add(ctx.device, y, output_size());
  if (addend && !made.has_addend) kernels::accumulate(ctx.device, addend, y, output_size());
  if (keep) {
    detail::saved_stamp stamp = keep->stamp;
    stamp.make(weights_[0].get(), mb.index, x);
    *keep = {};  // drops the values of an earlier pass
    keep->stamp = stamp;
  }
  if (!keep || mb.policy != recompute::none) return;
  if (weights_trainable()) keep->gathered = std::move(gathered);
  if (adapters_.trainable()) keep->adapted = std::move(adapted);
}

template <class Precision, compute_device Device>
void linear_core<Precision, Device>::backward(const microbatch<Device>& mb, const T* x, linear_saved<Device>& saved,
                                              const T* dy, T* dx, const T* addend) {
  const context<Device>& ctx = mb.ctx;
  const range profiled(ctx.device, names_.backward());
  check_backward(mb, x, saved, dy, dx, addend);
  const bool weights = weights_trainable(), trains = weights || biases_.trainable();
  buffer<Device> resolved, kept_dy;
  if (mb.deferred && trains && (biases_.trainable() || backward_output_.trivial())) {
    kept_dy = make_buffer<T>(ctx.device, static_cast<std::size_t>(output_size()));
    ctx.device.copy(kept_dy.data(), dy, kept_dy.bytes(), ctx.device.main_stream());
    dy = kept_dy.template data<T>();
  }
  whole_gather<Device> again;  // the gather of an input that was not kept
  if (weights && saved.gathered.empty())
    again = forward_input_.gather_concurrently(ctx.device, x, saved.gathered, dx != nullptr);
  buffer<Device> dadapted = adapters_.room(ctx.device);
  product_result made;
  const T* d = dy;
  if (dx) {
    made = (this->*input_gradient_)(ctx, dy, resolved, dadapted, dx, addend, d);
  } else {
    d = backward_output_.gather(ctx.device, dy, resolved);
    adapters_.hidden_gradients(ctx.device, all_rows(), d, dadapted);
  }
  again.finish(ctx.device);
  if (adapters_.trainable() && saved.adapted.empty()) {
    saved.adapted = adapters_.room(ctx.device);
    const T* const in = saved.gathered.empty() ? x : saved.gathered.template data<T>();
    adapters_.hidden(ctx.device, all_rows(), in, saved.adapted);
  }
  if (trains)
    mb.on_weights([this, &ctx, x, dy, d, index = mb.index, count = mb.count, resolved = std::move(resolved),
                   kept_dy = std::move(kept_dy), gathered = std::move(saved.gathered),
                   adapted = std::move(saved.adapted), dadapted = std::move(dadapted)] {
      const range weights_shown(ctx.device, names_.weights());
      const T* const input = gathered.empty() ? x : gathered.template data<T>();
      (this->*gradients_)(ctx, index, count, d, input, dy);
      adapters_.weight_gradients(ctx.device, input, d, adapted, dadapted);
    });
  if (!dx) return;
  made.in_flight.wait();
  if (addend && !made.has_addend) kernels::accumulate(ctx.device, addend, dx, input_size());
}

PLAIT_COMPILED_TEMPLATE(class linear_core<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class linear_core<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class linear_core<double, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
