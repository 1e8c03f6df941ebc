#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plait/optim/adamw.hpp"
#include "plait/optim/gradient_norm.hpp"

namespace plait {

struct step_result {
  double loss = 0;           ///< mean over the counted tokens of the global batch
  double gradient_norm = 0;  ///< before clipping
  std::int64_t tokens = 0;   ///< counted tokens of the global batch
};

/// Completes a scalar that is partial over `axes`.
template <compute_device Device>
double resolve_scalar(context<Device>& ctx, const axis_list& axes, double value) {
  axis_list ordered;
  for (axis_id axis : ctx.ranks.shape().axes)
    if (axes.contains(axis)) ordered.push_back(axis);
  ordered = ctx.ranks.pruned(ordered);
  if (!ordered.empty()) ctx.ranks.group(ordered).all_reduce(&value, &value, 1, dtype::f64, reduce_op::sum);
  return value;
}

/// One optimizer step over any number of microbatches. The loss is the sum over all tokens of the global batch divided
/// by their number, whatever the layout and the number of microbatches; there is no other scale anywhere.
///
/// `fill(i, ids, labels)` provides microbatch i; labels equal to `ignore_index` do not count. It is called for every
/// microbatch before the first pass, because the number of counted tokens scales the gradients.
template <class Model, class T, compute_device Device, class Fill>
step_result train_step(context<Device>& ctx, Model& model, adamw<T, Device>& optimizer, std::int64_t microbatches,
                       double learning_rate, double clip, Fill&& fill) {
  using tokens = typename Model::tokens;
  const std::int64_t ignored = model.options().loss.ignore_index;
  std::vector<std::pair<tokens, tokens>> batch;
  double counted = 0;
  for (std::int64_t i = 0; i < microbatches; ++i) {
    batch.emplace_back(tokens(ctx), tokens(ctx));
    fill(i, batch.back().first, batch.back().second);
    const tokens& labels = batch.back().second;
    for (std::int64_t t = 0; t < labels.size(); ++t) counted += labels.data()[t] != ignored;
  }
  axis_list sharding;
  for (const dim_placement& p : layout_v<typename tokens::spec>.dims) sharding = union_of(sharding, p.axes);
  counted = resolve_scalar(ctx, sharding, counted);

  model.visit([&](parameter_base<T, Device>& p) {
    p.gather(ctx);
    p.zero_gradient(ctx);
  });
  typename Model::loss_seed seed(ctx);
  *seed.data() = counted > 0 ? 1.0 / counted : 0.0;  // with no token counted there is no loss and no gradient
  double sum = 0;
  const std::int64_t first = ctx.first_sample;
  for (auto& [ids, labels] : batch) {
    typename Model::saved kept;
    sum += *model.forward(ctx, ids, labels, &kept).data();
    model.backward(ctx, ids, labels, kept, seed);
    if (ctx.deferred) ctx.deferred->run();  // what they read goes with `kept`
    ctx.first_sample += ctx.sizes.of(layout_v<typename tokens::spec>.dims[0].dim);
  }
  ctx.first_sample = first;
  sum = resolve_scalar(ctx, layout_v<typename Model::loss_sum::spec>.partial, sum);

  gradient_norm<Device> norm;
  model.visit([&](parameter_base<T, Device>& p) {
    p.reduce(ctx);
    norm.add(ctx, p);
  });
  step_result result{counted > 0 ? sum / counted : 0.0, norm.total(ctx), static_cast<std::int64_t>(counted)};
  optimizer.begin_step(learning_rate, clip_factor(result.gradient_norm, clip));
  model.visit([&](parameter_base<T, Device>& p) { optimizer.update(ctx, p); });
  return result;
}

}  // namespace plait
