#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/tensor/context.hpp"

/// Returns the mean loss over what is held out of --data, as `batches` (rank_batches.hpp) read it; nothing where
/// `stop_asked()` says, alike on all ranks, that the run ends. Throws on all ranks where there is no target. As many
/// microbatches as fill the pipeline go through it together. Collective.
template <class Model, class Batches, plait::compute_device Device, class Stop>
std::optional<double> held_out_loss(const plait::context<Device>& ctx, Model& model, const Batches& batches,
                                    Stop&& stop_asked) {
  using tokens = typename Model::tokens;
  using document_starts = typename Model::stage_type::document_starts;
  typename Model::mean mean(ctx);
  mean.count(ctx, batches.held_out_targets(model.ignore_index()));
  mean.begin(ctx);
  typename Model::batch batch;
  std::vector<document_starts> starts;
  for (std::int64_t i = 0; i < batches.held_out(); ++i) {
    auto& [ids, labels] = batch.emplace_back(tokens(ctx), tokens(ctx));
    plait::host_tokens host_ids(ids.part(), model.order()), host_labels(host_ids);
    plait::host_starts host_starts(ids.part(), model.order());
    batches.fill_held_out(i, model.ignore_index(), host_ids, host_labels, host_starts);
    plait::upload(ctx, host_ids, ids);
    plait::upload(ctx, host_labels, labels);
    if (model.documents()) plait::upload(ctx, host_starts, starts.emplace_back(ctx));
    if (static_cast<int>(batch.size()) < 4 * model.shape().stages() && i + 1 < batches.held_out()) continue;
    if (stop_asked()) return {};
    std::vector<const std::int32_t*> of_batch;
    for (const document_starts& one : starts) of_batch.push_back(one.data());
    model.evaluate(ctx, batch, mean, of_batch);
    batch.clear();
    starts.clear();
  }
  model.sum_over_stages(ctx, mean.pending_sum());
  mean.finish(ctx);
  double sum = 0, count = 0;
  ctx.device.download(&sum, mean.loss_sum(), sizeof sum, ctx.device.main_stream());
  ctx.device.download(&count, mean.tokens(), sizeof count, ctx.device.main_stream());
  if (count == 0) plait::fail("--held-out: no token of what is held out has a target: each ends its document");
  return sum / count;
}
