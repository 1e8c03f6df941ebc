// The scale of a loss and of its gradients: the mean over counted tokens, and the seed of the backward pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "plait/kernels/kernels.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/layout/rules.hpp"
#include "plait/tensor/executor.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {
namespace detail {

constexpr layout sum_of_all_dims(layout a) {
  while (!a.dims.empty()) a = reduce_sum(a, a.dims.back().dim).result;
  return a;
}
template <class Spec>
struct sum_of_all_dims_value {
  static constexpr layout value = sum_of_all_dims(layout_v<Spec>);
};
/// The loss and the count of its tokens must be pending over the same axes: both are sums over the same rows.
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
/// device. Only `token_mean` makes it, or `weighted`, which names another weight.
template <spec_like LossSum, compute_device Device = cpu>
class loss_seed {
 public:
  using spec = dual_t<LossSum>;
  /// For another loss than the mean: `weight` is the gradient of the sum, the same on every rank.
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

/// The mean of a loss over the counted tokens of the global batch: the one definition of the scale of a loss and of its
/// gradients, whatever the layout and the number of microbatches. `LossSum` is the spec of the summed loss, `Labels`
/// that of the labels; the axes of every reduction follow from the two. All numbers lie in the device's memory, so that
/// nothing waits for them.
///
///     mean.count(ctx, own_counted_tokens);     // of all microbatches of the step, on this rank
///     mean.begin(ctx);                         // collective; then seed() is there; or
///     mean.begin_late(ctx);                    // and the first of seed(ctx) and finish(ctx) is collective
///     mean.add(ctx, loss_of_a_microbatch);     // any number of times
///     mean.finish(ctx);                        // collective; then loss_sum() and tokens() are complete
template <spec_like LossSum, spec_like Labels, compute_device Device = cpu>
class token_mean {
 public:
  using seed_type = loss_seed<LossSum, Device>;
  /// Of the number of counted tokens: a sum over the same rows as the loss.
  using count_spec = spec_from<detail::sum_of_all_dims_value<Labels>, Labels>;
  static_assert(enforced<detail::same_rows_value<LossSum, count_spec>, among<LossSum, Labels>, LossSum, Labels>);

  explicit token_mean(const context<Device>& ctx)
      : own_(ctx),
        all_(ctx),
        sum_(ctx),
        total_(ctx),
        seed_(ctx),
        complete_count_(layout_v<count_spec>, layout_v<dual_t<LossSum>>, ctx.ranks, ctx.sizes, "counted tokens"),
        complete_sum_(layout_v<LossSum>, complete, ctx.ranks, ctx.sizes, "loss") {}

  void count(const context<Device>& ctx, std::int64_t own) {
    const auto number = static_cast<double>(own);
    ctx.device.upload(own_.data(), &number, sizeof number, ctx.device.main_stream());
  }
  void begin(const context<Device>& ctx) {
    begin_late(ctx);
    complete_count(ctx);
  }
  /// As `begin`, but ranks bring their counts together when the seed is first asked for: over one connection to another
  /// rank, as in TCP, the counts would wait for the gathers of parameters that the forward pass hides.
  void begin_late(const context<Device>& ctx) {
    counted_ = false;
    ctx.device.zero(sum_.data(), sizeof(double), ctx.device.main_stream());
  }
  const seed_type& seed() const { return seed_; }
  const seed_type& seed(const context<Device>& ctx) {
    complete_count(ctx);
    return seed_;
  }
  void add(const context<Device>& ctx, const tensor<double, LossSum, Device>& sum) {
    kernels::accumulate(ctx.device, sum.data(), sum_.data(), 1);
  }
  /// The summed loss on this rank so far, to be completed over the stages of a pipeline.
  double* pending_sum() { return sum_.data(); }
  void finish(const context<Device>& ctx) {
    complete_count(ctx);
    complete_sum_.run(ctx.device, sum_.data(), total_.data(), dtype::f64);
  }

  /// The sum over all tokens, and their number, in the device's memory.
  const double* loss_sum() const { return total_.data(); }
  double* loss_sum() { return total_.data(); }
  const double* tokens() const { return all_.data(); }

 private:
  static constexpr layout complete = [] {
    layout a = layout_v<LossSum>;
    const axis_list pending = a.partial;
    for (axis_id axis : pending) a.set(axis, state::invariant);
    return a;
  }();
  struct complete_value {
    static constexpr layout value = complete;
  };
  using complete_spec = spec_from<complete_value, LossSum>;

  void complete_count(const context<Device>& ctx) {
    if (counted_) return;
    counted_ = true;
    complete_count_.run(ctx.device, own_.data(), all_.data(), dtype::f64);
    kernels::reciprocal(ctx.device, all_.data(), seed_.value_.data());  // no token counted: no gradient
  }

  tensor<double, count_spec, Device> own_;
  tensor<double, dual_t<LossSum>, Device> all_;
  tensor<double, LossSum, Device> sum_;
  tensor<double, complete_spec, Device> total_;
  seed_type seed_;
  executor complete_count_, complete_sum_;
  bool counted_ = false;  ///< by all ranks
};

}  // namespace plait
