// Losses: the mean over counted tokens, which determines the scale of every gradient, and softmax cross-entropy over a
// vocabulary that may be sharded.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/deterministic/loss.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/rules.hpp"
#include "plait/nn/layer.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {

// The scale of a loss and of its gradients: the mean over counted tokens, and the gradient that starts the backward
// pass.

namespace detail {

constexpr layout sum_of_all_dims(layout a) {
  while (!a.dims.empty()) a = reduce_sum(a, a.dims.back().dim).result;
  return a;
}
template <class Spec>
struct sum_of_all_dims_value {
  static constexpr layout value = sum_of_all_dims(layout_v<Spec>);
};
/// Requires the loss and the token count to be partial over equal axes, since both are sums over the rows of one batch.
template <class LossSum, class Count>
struct same_rows_value {
  static constexpr verdict value = [] {
    const layout sum = layout_v<LossSum>, count = layout_v<Count>;
    verdict v;
    for (axis_id axis : union_of(sum.partial, count.partial))
      if (sum.partial.contains(axis) != count.partial.contains(axis))
        v.worsen({layout_error::wrong_dual, axis, {}, sum.state_of(axis), count.state_of(axis)});
    return v;
  }();
};

}  // namespace detail

template <spec_like LossSum, spec_like Labels, compute_device Device>
class token_mean;

/// The gradient of a summed loss with spec `LossSum`: 1 / (counted tokens of the global batch), one number on the
/// device. Only `token_mean` and `weighted` make one.
template <spec_like LossSum, compute_device Device = cpu>
class loss_seed {
 public:
  using spec = dual_t<LossSum>;
  /// For losses other than the mean: `weight` is the gradient of the sum, equal on every rank.
  static loss_seed weighted(const context<Device>& ctx, double weight) {
    loss_seed seed(ctx);
    ctx.device.upload(seed.value_.data(), &weight, sizeof weight, ctx.device.main_stream());
    return seed;
  }
  const double* data() const { return value_.data(); }

 private:
  template <spec_like, spec_like, compute_device>
  friend class token_mean;
  explicit loss_seed(const context<Device>& ctx) : value_(ctx) {}
  tensor<double, spec, Device> value_;
};

/// The mean of a loss over the counted tokens of the global batch. It alone defines the scale of a loss and of its
/// gradients, for every layout and number of microbatches. `LossSum` is the spec of the summed loss, `Labels` the spec
/// of the labels; the axes of all reductions are derived from them. All numbers stay in the device's memory, so the
/// host does not wait for them.
///
///     mean.count(ctx, own_counted_tokens);     // of all microbatches of the step, on this rank
///     mean.begin(ctx);                         // collective; seed() is then valid; or
///     mean.begin_late(ctx);                    // then the first of seed(ctx) and finish(ctx) is collective
///     mean.add(ctx, loss_of_a_microbatch);     // any number of times
///     mean.finish(ctx);                        // collective; then loss_sum() and tokens() are complete
///
/// Layers add their auxiliary losses to `auxiliary()`; `finish` sums these over the whole mesh. They have their own
/// scales and are not part of the mean.
template <spec_like LossSum, spec_like Labels, compute_device Device = cpu>
class token_mean {
 public:
  using seed_type = loss_seed<LossSum, Device>;
  /// The spec of the number of counted tokens, a sum over the rows of the loss.
  using count_spec = spec_from<detail::sum_of_all_dims_value<Labels>, Labels>;
  static_assert(enforced<detail::same_rows_value<LossSum, count_spec>, among<LossSum, Labels>, LossSum, Labels>);

  explicit token_mean(const context<Device>& ctx)
      : own_(ctx),
        all_(ctx),
        sums_(make_buffer<double>(ctx.device, 4)),
        seed_(ctx),
        complete_count_(layout_v<count_spec>, layout_v<dual_t<LossSum>>, ctx.ranks, ctx.sizes, "counted tokens"),
        complete_sum_(layout_v<LossSum>, completed(layout_v<LossSum>), ctx.ranks, ctx.sizes, "loss") {}

  void count(const context<Device>& ctx, std::int64_t own) {
    const auto number = static_cast<double>(own);
    ctx.device.upload(own_.data(), &number, sizeof number, ctx.device.main_stream());
  }
  void begin(const context<Device>& ctx) {
    begin_late(ctx);
    complete_count(ctx);
  }
  /// Like `begin`, but ranks sum their counts when the seed is first needed. If ranks share one connection, as with
  /// TCP, counts would otherwise wait for the parameter gathers that overlap the forward pass.
  void begin_late(const context<Device>& ctx) {
    counted_ = false;
    ctx.device.zero(sums_.data(), sums_.bytes(), ctx.device.main_stream());
    auxiliary_ = {pending_sum() + 1};
  }
  const seed_type& seed() const { return seed_; }
  const seed_type& seed(const context<Device>& ctx) {
    complete_count(ctx);
    return seed_;
  }
  void add(const context<Device>& ctx, const tensor<double, LossSum, Device>& sum) {
    kernels::accumulate(ctx.device, sum.data(), pending_sum(), 1);
  }
  /// The summed loss on this rank so far, for a sum over the stages of a pipeline.
  double* pending_sum() { return sums_.template data<double>(); }
  /// Where the layers of a step add their auxiliary losses (`microbatch::auxiliary`).
  auxiliary_sum* auxiliary() { return &auxiliary_; }
  void finish(const context<Device>& ctx) {
    complete_count(ctx);
    complete_sum_.run(ctx.device, pending_sum(), loss_sum(), dtype::f64);
    if (!auxiliary_.used) return;
    if (!complete_auxiliary_) complete_auxiliary_.emplace(over_all_axes(ctx));
    complete_auxiliary_->run(ctx.device, auxiliary_.value, loss_sum() + 1, dtype::f64);
  }

  /// Two numbers in the device's memory: the loss summed over all tokens, and the auxiliary losses (0 if no layer has
  /// any).
  const double* loss_sum() const { return sums_.template data<double>() + 2; }
  double* loss_sum() { return sums_.template data<double>() + 2; }
  /// The number of all counted tokens, in the device's memory.
  const double* tokens() const { return all_.data(); }

 private:
  static ready_plan over_all_axes(const context<Device>& ctx) {
    layout pending;
    for (axis_id axis : ctx.ranks.shape().axes) pending.set(axis, state::partial);
    return ready_plan(pending, completed(pending), ctx.ranks, ctx.sizes, "auxiliary losses");
  }
  void complete_count(const context<Device>& ctx) {
    if (counted_) return;
    counted_ = true;
    complete_count_.run(ctx.device, own_.data(), all_.data(), dtype::f64);
    kernels::reciprocal(ctx.device, all_.data(), seed_.value_.data());  // zero if no token is counted, so gradients are
                                                                        // zero
  }

  tensor<double, count_spec, Device> own_;
  tensor<double, dual_t<LossSum>, Device> all_;
  buffer<Device> sums_;  ///< the loss and the auxiliary losses: this rank's, then the complete ones
  seed_type seed_;
  ready_plan complete_count_, complete_sum_;
  std::optional<ready_plan> complete_auxiliary_;
  auxiliary_sum auxiliary_;
  bool counted_ = false;  ///< whether ranks have summed their counts
};

using kernels::cross_entropy_settings;

namespace detail {

struct loss_derivation {
  layout rows, sum;  ///< one loss for each row; their sum, a scalar
  plait::verdict verdict;
};
constexpr loss_derivation derive_loss(const layout& logits, const layout& labels) {
  loss_derivation d;
  const derived_layout r = cross_entropy(logits, labels, logits.dims.back().dim);
  d.rows = d.sum = r.result;
  d.verdict = r.verdict;
  while (!d.sum.dims.empty()) d.sum = reduce_sum(d.sum, d.sum.dims.back().dim).result;
  return d;
}

template <class Logits, class Labels>
struct loss_value {
  static constexpr loss_derivation derivation = derive_loss(layout_v<Logits>, layout_v<Labels>);
  static constexpr verdict value = derivation.verdict;
};
template <class Logits, class Labels>
struct loss_sum {
  static constexpr layout value = loss_value<Logits, Labels>::derivation.sum;
};

}  // namespace detail

/// Softmax cross-entropy over the last dim of `Logits` against integer labels. That dim may be padded, and sharded
/// (vocabulary-parallel): this costs two small reductions of statistics, and the vocabulary is never gathered. The
/// value is the *sum* over the counted tokens, a scalar that is partial over every axis that shards the rows. No rank
/// averages locally, so every layout weighs tokens equally. `token_mean` makes the seed of the backward pass.
template <class Precision, spec_like Logits, spec_like Labels, compute_device Device = cpu>
class cross_entropy_loss
    : public other_arrays<cross_entropy_loss<Precision, Logits, Labels, Device>, activation_of<Precision>, Logits,
                          spec_from<detail::loss_sum<Logits, Labels>, Logits, Labels>, Device, double> {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;
  using value = detail::loss_value<Logits, Labels>;

 public:
  using precision_type = Precision;
  using input = Logits;
  using labels_spec = Labels;
  using output = spec_from<detail::loss_sum<Logits, Labels>, Logits, Labels>;
  using label = std::int64_t;
  static_assert(detail::kernels_there<Device>::checked);
  static_assert(enforced<value, among<Logits, Labels>, Logits, Labels>);
  using other_arrays<cross_entropy_loss, T, Logits, output, Device, double>::forward;
  using other_arrays<cross_entropy_loss, T, Logits, output, Device, double>::backward;

  struct saved {
    buffer<Device> statistics;  ///< row_max [rows], sum_exp [rows]
    detail::saved_stamp stamp{};
  };

  /// `vocab` is the true number of classes; logits beyond it are padding.
  cross_entropy_loss(const context<Device>& ctx, std::int64_t vocab, cross_entropy_settings settings = {})
      : settings_(settings) {
    enforce_boundary<Logits>(ctx, "cross_entropy: logits");
    enforce_boundary<Labels>(ctx, "cross_entropy: labels");
    detail::agree_on_context(ctx);
    range_.vocab = vocab;
    take_sizes(ctx);
    const axis_list sharing = ctx.ranks.pruned(layout_v<Logits>.dims.back().axes);
    if (!sharing.empty()) group_ = &ctx.ranks.group(sharing);
    if (ctx.deterministic) sums_.emplace(ctx, layout_v<Logits>, "cross_entropy");
  }

  tensor<double, output, Device> forward(const microbatch<Device>& mb, const tensor<T, Logits, Device>& logits,
                                         const tensor<label, Labels, Device>& labels, saved* keep = nullptr) {
    detail::require_size("cross_entropy", "labels", labels.size(), rows_);
    return run(mb, logits.data(), labels.data(), keep);
  }
  /// This overload reads the caller's memory; labels have 32 or 64 bits.
  template <class Id>
    requires std::integral<std::remove_const_t<Id>>
  tensor<double, output, Device> forward(const microbatch<Device>& mb, const part<const T, Logits>& logits,
                                         const part<Id, Labels>& labels, saved* keep = nullptr) {
    made_for_.require(names_.layer(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    detail::require_part(names_.layer(), "logits", logits, rows_ * range_.columns);
    detail::require_part(names_.layer(), "labels", labels, rows_);
    return run<std::remove_const_t<Id>>(mb, logits.unchecked(), labels.unchecked(), keep);
  }

  /// Overwrites the logits with their gradient and returns it. `seed` is the gradient of the sum.
  template <spec_like Sum>
  tensor<T, dual_t<Logits>, Device> backward(const microbatch<Device>& mb, tensor<T, Logits, Device>&& logits,
                                             const tensor<label, Labels, Device>& labels, saved& kept,
                                             const loss_seed<Sum, Device>& seed) {
    run_back(mb, logits.data(), labels.data(), kept, seed);
    return std::move(logits).into_dual();
  }
  /// This overload works on the caller's memory, where the gradient replaces the logits.
  template <class Id, spec_like Sum>
    requires std::integral<std::remove_const_t<Id>>
  part<T, dual_t<Logits>> backward(const microbatch<Device>& mb, const part<T, Logits>& logits,
                                   const part<Id, Labels>& labels, saved& kept, const loss_seed<Sum, Device>& seed) {
    made_for_.require(names_.layer(), mb.ctx.ranks.shape(), mb.ctx.ranks.rank(), mb.ctx.sizes);
    detail::require_part(names_.layer(), "logits", logits, rows_ * range_.columns);
    detail::require_part(names_.layer(), "labels", labels, rows_);
    run_back<std::remove_const_t<Id>>(mb, logits.unchecked(), labels.unchecked(), kept, seed);
    return logits.dual();
  }

  /// Forward and backward in one call on the caller's memory, for a seed that is known in advance. Returns the sum; the
  /// logits become their gradient, `logits.dual()`.
  template <class Id, spec_like Sum>
    requires std::integral<std::remove_const_t<Id>>
  tensor<double, output, Device> forward_backward(const microbatch<Device>& mb, const part<T, Logits>& logits,
                                                  const part<Id, Labels>& labels, const loss_seed<Sum, Device>& seed) {
    saved kept;
    auto sum = forward(mb, logits, labels, &kept);
    backward(mb, logits, labels, kept, seed);
    return sum;
  }

  /// Prepares the loss for the batches and lengths of this context, in the world of its construction.
  void resize(const context<Device>& ctx) {
    detail::require_resizable(names_.layer(), sums_.has_value());
    detail::arm_checks(ctx);
    take_sizes(ctx);
  }
  const cross_entropy_settings& settings() const { return settings_; }

 private:
  template <std::integral Id>
  tensor<double, output, Device> run(const microbatch<Device>& mb, const T* logits, const Id* labels, saved* keep) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.forward());
    made_for_.require("cross_entropy", ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
    const std::int64_t n = rows_;
    detail::require_array("cross_entropy", "logits", logits, n * range_.columns);
    detail::require_array("cross_entropy", "labels", labels, n);
    auto statistics = make_buffer<S>(ctx.device, static_cast<std::size_t>(2 * n));
    auto more = make_buffer<S>(ctx.device, static_cast<std::size_t>(5 * n));
    S* const global_max = statistics.template data<S>();
    S* const local_max = more.template data<S>();
    S* const sums = local_max + n;  // sum_exp, target logit and sum of logits; one reduction for all
    S* const sum_logits = settings_.label_smoothing != 0 ? sums + 2 * n : nullptr;
    S* const loss = local_max + 4 * n;
    if (sums_)
      sums_->make_statistics(ctx.device, logits, labels, local_max, global_max, sums, sum_logits, n, range_, settings_,
                             group_);
    else
      make_statistics(ctx.device, logits, labels, local_max, global_max, sums, sum_logits);
    kernels::cross_entropy_loss(ctx.device, labels, global_max, sums, sums + n, sum_logits, loss, n, range_, settings_);
    tensor<double, output, Device> total(ctx);
    if (sums_)
      sums_->add_losses(mb, loss, n, total.data());
    else
      kernels::sum(ctx.device, loss, n, total.data());
    if (keep) {
      ctx.device.copy(global_max + n, sums, static_cast<std::size_t>(n) * sizeof(S), ctx.device.main_stream());
      keep->statistics = std::move(statistics);
      keep->stamp.make(nullptr, mb.index, nullptr);
    }
    detail::note_boundary(mb, layout_v<Logits>, "the logits of ", "cross_entropy", logits, n * range_.columns);
    detail::note_boundary(mb, layout_v<Labels>, "the labels of ", "cross_entropy", labels, n);
    return total;
  }
  template <std::integral Id, spec_like Sum>
  void run_back(const microbatch<Device>& mb, T* logits, const Id* labels, saved& kept,
                const loss_seed<Sum, Device>& seed) {
    static_assert(enforced<detail::dual_value_check<dual_t<Sum>, output>, among<Logits, Labels>, dual_t<Sum>, output>);
    if (kept.statistics.empty() && rows_ != 0)
      fail("cross_entropy: backward without what forward keeps: give forward a `saved`, and backward the same one");
    kept.stamp.use("cross_entropy", nullptr, mb.index, nullptr);
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.backward());
    made_for_.require("cross_entropy", ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
    detail::require_array("cross_entropy", "logits", logits, rows_ * range_.columns);
    detail::require_array("cross_entropy", "labels", labels, rows_);
    auto scale = make_buffer<S>(ctx.device, static_cast<std::size_t>(rows_));
    kernels::fill_from(ctx.device, scale.template data<S>(), rows_, seed.data());
    const S* const statistics = kept.statistics.template data<S>();
    kernels::cross_entropy_backward(ctx.device, logits, labels, statistics, statistics + rows_,
                                    scale.template data<S>(), logits, rows_, range_, settings_);
  }
  void take_sizes(const context<Device>& ctx) {
    enforce_parts(layout_v<Logits>, ctx.ranks.shape(), ctx.sizes, "cross_entropy: logits");
    const box part = local_box(layout_v<Logits>, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    const auto last = static_cast<std::size_t>(part.dims - 1);
    range_ = {part.local[last], part.offset[last], range_.vocab};
    rows_ = part.local_size() / part.local[last];
    made_for_.take("cross_entropy", ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&layout_v<Logits>});
  }
  /// Computes the statistics of the softmax, in the type of sums. `local_max` receives the maximum of this rank's
  /// logits, `global_max` that of all. `sums` receives the sum of the exponentials and the label's logit, both relative
  /// to `global_max`. `sum_logits` receives the sum of all logits, for smoothing.
  template <std::integral Id>
  void make_statistics(Device& device, const T* logits, const Id* labels, S* local_max, S* global_max, S* sums,
                       S* sum_logits) {
    const auto n = static_cast<std::size_t>(rows_);
    kernels::cross_entropy_local_statistics(device, logits, labels, local_max, sums, sums + n, sum_logits, rows_,
                                            range_, settings_);
    if (!group_) return device.copy(global_max, local_max, n * sizeof(S), device.main_stream());
    group_->all_reduce(local_max, global_max, n, dtype_of<S>, reduce_op::max);
    kernels::cross_entropy_rescale(device, local_max, global_max, sums, rows_);
    group_->all_reduce(sums, sums, (sum_logits ? 3 : 2) * n, dtype_of<S>, reduce_op::sum);
  }

  detail::layer_names names_{"cross_entropy"};
  cross_entropy_settings settings_;
  kernels::vocabulary_range range_;
  detail::made_for made_for_;
  std::int64_t rows_ = 0;
  any_communicator* group_ = nullptr;
  std::optional<detail::deterministic_loss<T, S, Device>> sums_;  ///< replaces the sums over ranks and rows
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
