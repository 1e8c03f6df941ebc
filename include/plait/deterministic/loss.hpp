// The deterministic sums of a cross-entropy: the softmax's sum over leaves of the vocabulary, and the sum of losses
// over tokens.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/deterministic/feature_sum.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/microbatch.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait::detail {

/// T is the type of logits, S the type of sums.
template <class T, class S, compute_device Device>
class deterministic_loss {
 public:
  /// `logits` is the layout of the logits, whose last dim is the vocabulary. Throws `plait::error` as `feature_sum`
  /// does.
  deterministic_loss(const context<Device>& ctx, const layout& logits, const std::string& name);

  /// Computes the softmax statistics of `rows` rows, relative to the maximum over all columns. `group` has the ranks
  /// with the other columns; null if there are none.
  template <std::integral Id>
  void make_statistics(Device& device, const T* logits, const Id* labels, S* local_max, S* global_max, S* sums,
                       S* sum_logits, std::int64_t rows, const kernels::vocabulary_range& range,
                       const kernels::cross_entropy_settings& settings, any_communicator* group) const;
  /// Adds losses that are rounded to multiples of one number. It is so small that rounding loses no more digits than
  /// the sum would. It is so large that a step's sum is exact for means up to 64, in any order.
  void add_losses(const microbatch<Device>& mb, const S* losses, std::int64_t rows, double* total) const {
    if constexpr (has_deterministic_products<Device>) {
      const double quantum = std::ldexp(1.0, std::ilogb(static_cast<double>(all_rows_ * mb.count)) + 1 + 6 - 53);
      kernels::sum_of_multiples(mb.ctx.device, losses, rows, quantum, total);
    }
  }

 private:
  feature_sum<Device> columns_;
  std::int64_t all_rows_ = 0;  ///< of a microbatch on all ranks
};

template <class T, class S, compute_device Device>
deterministic_loss<T, S, Device>::deterministic_loss(const context<Device>& ctx, const layout& logits,
                                                     const std::string& name) {
  const dim_id dim = logits.dims.back().dim;
  layout complete = logits;
  complete.dims.pop_back();
  layout pending = complete;
  for (axis_id axis : logits.dims.back().axes) complete.set(axis, state::replicated), pending.set(axis, state::partial);
  const ready_plan moves(pending, complete, ctx.ranks, ctx.sizes, name + ": statistics");
  columns_ = feature_sum<Device>(ctx, logits, dim, feature_leaves(ctx.deterministic, ctx.sizes.of(dim)), moves, name);
  const box part = local_box(logits, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
  all_rows_ = part.global_size() / ctx.sizes.of(dim);
}

template <class T, class S, compute_device Device>
template <std::integral Id>
void deterministic_loss<T, S, Device>::make_statistics(Device& device, const T* logits, const Id* labels, S* local_max,
                                                       S* global_max, S* sums, S* sum_logits, std::int64_t rows,
                                                       const kernels::vocabulary_range& range,
                                                       const kernels::cross_entropy_settings& settings,
                                                       any_communicator* group) const {
  const std::int64_t width = range.columns / columns_.local_leaves(), elements = (sum_logits ? 3 : 2) * rows;
  constexpr auto size = static_cast<std::int64_t>(sizeof(T));
  kernels::cross_entropy_max(device, logits, local_max, rows, range);
  if (group)
    group->all_reduce(local_max, global_max, static_cast<std::size_t>(rows), dtype_of<S>, reduce_op::max);
  else
    device.copy(global_max, local_max, static_cast<std::size_t>(rows) * sizeof(S), device.main_stream());
  auto part = make_buffer<T>(device, static_cast<std::size_t>(rows * width));
  T* const of_leaf = part.template data<T>();
  columns_.template run<S>(
      device, elements, false,
      [&](std::int64_t i, S* out, bool) {
        kernels::copy_2d(device, logits + i * width, of_leaf, rows, width * size, range.columns * size, width * size);
        kernels::cross_entropy_statistics(
            device, static_cast<const T*>(of_leaf), labels, static_cast<const S*>(global_max), out, out + rows,
            sum_logits ? out + 2 * rows : nullptr, rows,
            kernels::vocabulary_range{width, range.first_column + i * width, range.vocab}, settings);
      },
      sums,
      [&](const S* sum) {
        if (sum == sums) return;
        device.copy(sums, sum, static_cast<std::size_t>(elements) * sizeof(S), device.main_stream());
      });
}

PLAIT_COMPILED_TEMPLATE(class deterministic_loss<float, float, cpu>)
PLAIT_COMPILED_TEMPLATE(class deterministic_loss<bf16, float, cpu>)
PLAIT_COMPILED_TEMPLATE(class deterministic_loss<double, double, cpu>)
#define PLAIT_INSTANTIATE(T, A, Id)                                                              \
  PLAIT_COMPILED_TEMPLATE(void deterministic_loss<T, A, cpu>::make_statistics(                   \
      cpu&, const T*, const Id*, A*, A*, A*, A*, std::int64_t, const kernels::vocabulary_range&, \
      const kernels::cross_entropy_settings&, any_communicator*) const)
PLAIT_INSTANTIATE(float, float, std::int32_t)
PLAIT_INSTANTIATE(float, float, std::int64_t)
PLAIT_INSTANTIATE(bf16, float, std::int32_t)
PLAIT_INSTANTIATE(bf16, float, std::int64_t)
PLAIT_INSTANTIATE(double, double, std::int32_t)
PLAIT_INSTANTIATE(double, double, std::int64_t)
#undef PLAIT_INSTANTIATE

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
