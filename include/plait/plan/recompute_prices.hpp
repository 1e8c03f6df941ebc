// The bytes that layers of a stage keep, and the work that they repeat, under each mode of recompute. Dry runs find
// both, and the cheapest choice that fits a budget follows from them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plait/core/recompute.hpp"
#include "plait/device/counting.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/model.hpp"
#include "plait/schedule/choose_recompute.hpp"

namespace plait {

/// The price of bytes in operations of matrix products, to compare what is repeated: a byte that is written again, and
/// a byte that is sent again. The defaults are an H100's in bf16 (989 TFLOP/s, 3.35 TB/s, 450 GB/s over NVLink).
struct recompute_rates {
  double operations_per_byte = 300;
  double operations_per_sent_byte = 2200;
};

/// A stage whose layers each have a choice of how much to keep.
template <class Stage>
concept recomputes_by_layer =
    announces_units<Stage> && requires(Stage& s, const layer_recompute& keep) { s.set_recompute(keep); };

namespace detail {

/// The work of passes in one unit, and what they keep of it.
struct unit_reading {
  std::int64_t bytes = 0;  ///< more in use after it than before
  double operations = 0, sent = 0;
};

/// Meters each unit of a stage during passes. `forget` is called before each reading: it gives back what the pass has
/// made that is not to be weighed.
template <class Forget>
class unit_meter final : public unit_watcher {
 public:
  unit_meter(const context<counting_device>& ctx, int units, const Forget& forget)
      : ctx_(ctx), forget_(forget), of_(static_cast<std::size_t>(units)), before_(now()) {}
  void enter(int unit) override {
    close();
    unit_ = unit;
  }
  void close() {
    forget_();
    const unit_reading here = now();
    if (unit_ >= 0) {
      unit_reading& r = of_[static_cast<std::size_t>(unit_)];
      r.bytes += here.bytes - before_.bytes;
      r.operations += here.operations - before_.operations;
      r.sent += here.sent - before_.sent;
    }
    before_ = here;
    unit_ = -1;
  }
  const std::vector<unit_reading>& units() const { return of_; }

 private:
  unit_reading now() const {
    return {static_cast<std::int64_t>(ctx_.device.bytes_in_use()), ctx_.device.operations(),
            static_cast<double>(ctx_.ranks.ledger().total().wire)};
  }

  const context<counting_device>& ctx_;
  const Forget& forget_;
  std::vector<unit_reading> of_;
  unit_reading before_;
  int unit_ = -1;
};

/// How far passes go: what is kept is then weighed.
enum class passes_until { forward, input_gradients, weight_gradients };

/// The bytes that passes of one microbatch keep in addition to gradients, and what they computed and sent.
struct metered_passes {
  std::vector<std::int64_t> bytes;  ///< of each unit
  std::int64_t others = 0;          ///< of what belongs to no unit, such as inputs of blocks
  std::vector<unit_reading> work;
};

/// `stages` are all of the rank, which may share parameters.
template <class Stage>
metered_passes meter_passes(const context<counting_device>& ctx, std::span<Stage* const> stages, Stage& stage,
                            passes_until until, int microbatches) {
  // Sums in order are gradients, but made as passes add to them, and a microbatch may be added once.
  const auto forget_sums = [&] {
    if (!sums_in_order(ctx)) return;
    for (Stage* any : stages) any->visit([&](auto& p) { p.zero_gradient(ctx); });
  };
  forget_sums();
  const auto in_use = [&] { return static_cast<std::int64_t>(ctx.device.bytes_in_use()); };
  const typename Stage::tokens ids(ctx), labels(ctx);
  const auto seed = Stage::mean::seed_type::weighted(ctx, 0.0);
  const std::int64_t before = in_use();
  metered_passes found{std::vector<std::int64_t>(static_cast<std::size_t>(stage.units()), 0), 0, {}};
  weight_work later;
  unit_meter meter(ctx, stage.units(), forget_sums);
  microbatch<counting_device> mb(ctx);
  mb.count = microbatches;
  mb.units = &meter;
  if (until == passes_until::input_gradients) mb.deferred = &later;
  typename Stage::saved kept;
  {
    typename Stage::activation x;
    if (!stage.part().first) x = typename Stage::activation(ctx);
    x = stage.forward_layers(mb, ids, std::move(x), &kept);
    if (stage.part().last) plait::detail::forward_loss_of_step(stage, mb, std::move(x), labels, kept, [](auto&&) {});
  }
  if (until != passes_until::forward) {
    typename Stage::gradient dy;
    if (stage.part().last)
      dy = plait::detail::backward_loss_of_step(stage, mb, labels, kept, seed, [](auto&&) {});
    else
      dy = typename Stage::gradient(ctx);
    dy = stage.backward_layers(mb, ids, kept, std::move(dy));
  }
  meter.close();
  found.work = meter.units();
  found.others = in_use() - before;
  // Each unit's is what is given back when it goes: with its deferred work, and with what it keeps.
  unit_meter given_back(ctx, stage.units(), forget_sums);
  later.run(&given_back);
  given_back.close();
  const auto first = static_cast<std::size_t>(stage.part().first ? 1 : 0);
  for (std::size_t i = 0; i < kept.blocks.blocks.size(); ++i) {
    given_back.enter(static_cast<int>(first + i));
    kept.blocks.blocks[i] = {};
  }
  if (stage.part().last) {
    given_back.enter(stage.units() - 1);
    kept.head = {};
    kept.loss = {};
  }
  given_back.close();
  for (std::size_t u = 0; u < found.bytes.size(); ++u) {
    found.bytes[u] = -given_back.units()[u].bytes;
    found.others -= found.bytes[u];
  }
  return found;
}

template <recomputes_by_layer Stage>
chunk_prices price_stage(const context<counting_device>& ctx, std::span<Stage* const> stages, Stage& stage,
                         int microbatches, const recompute_rates& rates) {
  const auto passes = [&](passes_until until) { return meter_passes(ctx, stages, stage, until, microbatches); };
  std::array<metered_passes, recompute_modes> forward, deferred, whole;
  passes(passes_until::weight_gradients);  // finds memory that is made once, as of gradients
  for (std::size_t mode = 0; mode < recompute_modes; ++mode) {
    stage.set_recompute(static_cast<recompute>(mode));
    forward[mode] = passes(passes_until::forward);
    deferred[mode] = passes(passes_until::input_gradients);
    whole[mode] = passes(passes_until::weight_gradients);
  }
  chunk_prices prices;
  for (std::size_t u = 0; u < forward[0].bytes.size(); ++u) {
    layer_prices& modes = prices.emplace_back();
    for (std::size_t mode = 0; mode < recompute_modes; ++mode) {
      const double again = whole[mode].work[u].operations - whole[0].work[u].operations;
      const double sent = whole[mode].work[u].sent - whole[0].work[u].sent;
      const auto made_again = static_cast<double>(forward[0].bytes[u] - forward[mode].bytes[u]);
      modes.push_back({forward[mode].bytes[u], deferred[mode].bytes[u],
                       again + rates.operations_per_byte * made_again + rates.operations_per_sent_byte * sent});
    }
  }
  prices.push_back({{forward[0].others, deferred[0].others, 0}});
  return prices;
}

}  // namespace detail

/// The prices of a stage's units by mode, none, selective and full, and last of what belongs to no unit, which no mode
/// changes. Leaves the stage recomputing everything. The stage is one on the `counting_device`, with parameters
/// gathered; a step of it has `microbatches`.
template <recomputes_by_layer Stage>
chunk_prices price_recompute(const context<counting_device>& ctx, Stage& stage, int microbatches = 1,
                             const recompute_rates& rates = {}) {
  Stage* const alone = &stage;
  return detail::price_stage(ctx, std::span<Stage* const>(&alone, 1), stage, microbatches, rates);
}

/// A choice of what the layers of a rank's stages recompute.
struct recompute_fit {
  std::int64_t bytes = 0;                 ///< that layers keep at a time, at most
  std::int64_t least = 0;                 ///< where nothing fits: the smallest budget that can be met
  std::vector<layer_recompute> stages{};  ///< of each stage of the rank, by its layers' numbers in the model
};

/// The cheapest modes with which the layers of this rank's stages never keep more than `budget` bytes for their
/// backward passes, between passes: activations, with the inputs of blocks. Messages under way, parameters and
/// gradients do not count. `stages` are the stages of a rank of the pipeline, by chunk, on the `counting_device`, with
/// parameters gathered.
template <recomputes_by_layer Stage>
recompute_fit fit_recompute(const context<counting_device>& ctx, std::span<Stage* const> stages, const schedule& plan,
                            int rank, std::int64_t budget, const recompute_rates& rates = {}) {
  std::vector<chunk_prices> prices;
  for (Stage* stage : stages)
    prices.push_back(detail::price_stage(ctx, stages, *stage, plan.shape.microbatches, rates));
  const recompute_choice choice = choose_recompute(prices, most_in_flight(plan, rank), budget);
  recompute_fit out{choice.bytes, choice.least};
  for (std::size_t c = 0; c < choice.modes.size(); ++c) {
    const stage_layers part = stages[c]->part();
    std::vector<recompute> layers(static_cast<std::size_t>(part.end), recompute::none);
    const auto mode = [&](std::size_t unit) { return static_cast<recompute>(choice.modes[c][unit]); };
    const std::size_t first = part.first ? 1 : 0;
    for (auto i = static_cast<std::size_t>(part.begin); i < layers.size(); ++i)
      layers[i] = mode(first + i - static_cast<std::size_t>(part.begin));
    const auto head = static_cast<std::size_t>(stages[c]->units() - 1);
    out.stages.emplace_back(std::move(layers), part.last ? mode(head) : recompute::none);
  }
  return out;
}

}  // namespace plait
