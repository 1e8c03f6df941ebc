// The loss of a pipeline over data that it is not trained on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/train_step.hpp"

namespace plait {

/// The loss over some microbatches, summed over their counted tokens on all ranks.
struct evaluated_loss {
  double sum = 0, tokens = 0;

  double mean() const { return sum / tokens; }  ///< NaN if no token is counted
};

/// Returns the loss of `count` microbatches with the present weights, equal on all ranks. fill(i, ids, labels, starts)
/// provides this rank's part of microbatch i, as for `training_step::load`. As many microbatches as fill the pipeline
/// run together. Before each of these groups stops(), equal on all ranks, may end the evaluation, which then returns
/// nothing. Collective.
template <model Stage, class Fill, class Stops>
std::optional<evaluated_loss> evaluate(const context<typename Stage::device>& ctx, pipeline<Stage>& model,
                                       std::int64_t count, Fill&& fill, Stops&& stops) {
  using tokens = typename Stage::tokens;
  typename pipeline<Stage>::mean mean(ctx);
  mean.begin_late(ctx);
  typename pipeline<Stage>::batch batch;
  std::vector<buffer<typename Stage::device>> starts;
  std::int64_t counted = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    auto& [ids, labels] = batch.emplace_back(tokens(ctx), tokens(ctx));
    host_tokens host_ids(ids.part(), model.order()), host_labels(host_ids);
    host_starts begins(ids.part(), model.order());
    fill(i, host_ids, host_labels, begins);
    counted += host_labels.size() -
               std::count(host_labels.data(), host_labels.data() + host_labels.size(), model.ignore_index());
    upload(ctx, host_ids, ids);
    upload(ctx, host_labels, labels);
    if (model.documents())
      upload(ctx, begins,
             starts.emplace_back(make_buffer<std::int32_t>(ctx.device, static_cast<std::size_t>(begins.size()))));
    if (static_cast<int>(batch.size()) < 4 * model.shape().stages() && i + 1 < count) continue;
    if (stops()) return {};
    std::vector<const std::int32_t*> of_batch;
    for (const auto& one : starts) of_batch.push_back(one.template data<std::int32_t>());
    model.evaluate(ctx, batch, mean, of_batch);
    batch.clear();
    starts.clear();
  }
  mean.count(ctx, counted);
  model.sum_over_stages(ctx, mean.pending_sum());
  mean.finish(ctx);
  evaluated_loss out;
  ctx.device.download(&out.sum, mean.loss_sum(), sizeof out.sum, ctx.device.main_stream());
  ctx.device.download(&out.tokens, mean.tokens(), sizeof out.tokens, ctx.device.main_stream());
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
