// Chooses which layers of a rank recompute, so that the layers keep at most a budget of bytes at the least cost. Dry
// runs find the bytes that layers keep and the work that they repeat.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/recompute.hpp"
#include "plait/device/counting.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/model.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// The price of one mode of a layer, for one microbatch.
struct recompute_price {
  std::int64_t bytes = 0;     ///< kept from its forward pass to its backward pass
  std::int64_t deferred = 0;  ///< kept from its input gradients to its weight gradients, if those are deferred
  double cost = 0;            ///< of the recomputation, in any unit

  friend constexpr bool operator==(const recompute_price&, const recompute_price&) = default;
};
/// The prices of a layer's modes.
using layer_prices = std::vector<recompute_price>;
/// The layers of a chunk, in the order of a forward pass.
using chunk_prices = std::vector<layer_prices>;

/// The microbatches of a chunk whose activations a rank holds at one time.
struct chunk_in_flight {
  int forward = 0;   ///< before their backward pass
  int deferred = 0;  ///< after their input gradients, before their weight gradients

  friend constexpr bool operator==(const chunk_in_flight&, const chunk_in_flight&) = default;
};

/// Returns the microbatches in flight on a rank, by chunk, at the times that need most memory. It leaves out a time if
/// another has at least as many of each.
constexpr std::vector<std::vector<chunk_in_flight>> most_in_flight(const schedule& s, int rank) {
  std::vector<std::vector<chunk_in_flight>> most;
  std::vector<chunk_in_flight> now(static_cast<std::size_t>(s.shape.chunks), chunk_in_flight{});
  const auto covers = [](const std::vector<chunk_in_flight>& a, const std::vector<chunk_in_flight>& b) {
    for (std::size_t c = 0; c < a.size(); ++c)
      if (a[c].forward < b[c].forward || a[c].deferred < b[c].deferred) return false;
    return true;
  };
  for (const action& a : s.order[static_cast<std::size_t>(rank)]) {
    chunk_in_flight& c = now[a.chunk];
    if (a.kind == action_kind::forward) ++c.forward;
    if (gives_input_gradient(a.kind)) --c.forward;
    if (a.kind == action_kind::input_backward) ++c.deferred;
    if (a.kind == action_kind::weight_backward) --c.deferred;
    if (std::any_of(most.begin(), most.end(), [&](const auto& m) { return covers(m, now); })) continue;
    std::erase_if(most, [&](const auto& m) { return covers(now, m); });
    most.push_back(now);
  }
  return most;
}

/// A choice of modes.
struct recompute_choice {
  std::vector<std::vector<int>> modes;  ///< of each layer of each chunk; empty if nothing fits
  double cost = 0;                      ///< of a microbatch through all chunks
  std::int64_t bytes = 0;               ///< kept at a time, at most
  std::int64_t least = 0;               ///< if nothing fits: the smallest budget that can be met
};

namespace detail {

/// A choice of modes for the first layers of a chunk, and the sum of their prices.
struct chunk_choice {
  recompute_price sum{};
  const chunk_choice* before = nullptr;  ///< the choice for the layers before the last one; null: there is none
  int mode = 0;                          ///< of the last layer

  constexpr std::vector<int> modes() const {
    std::vector<int> all;
    for (const chunk_choice* c = this; c->before != nullptr; c = c->before) all.insert(all.begin(), c->mode);
    return all;
  }
};
/// The Pareto-optimal choices for the first 0, 1, ... layers of a chunk; those for all layers by rising cost.
using chunk_choices = std::vector<std::vector<chunk_choice>>;

/// Returns the choices that no other choice beats, by rising bytes. `stairs` has the pairs of deferred bytes and cost
/// seen so far, by falling cost.
constexpr std::vector<chunk_choice> undominated(std::vector<chunk_choice> all) {
  std::sort(all.begin(), all.end(), [](const chunk_choice& a, const chunk_choice& b) {
    if (a.sum.bytes != b.sum.bytes) return a.sum.bytes < b.sum.bytes;
    return a.sum.deferred != b.sum.deferred ? a.sum.deferred < b.sum.deferred : a.sum.cost < b.sum.cost;
  });
  std::vector<chunk_choice> out;
  std::vector<std::pair<std::int64_t, double>> stairs;
  for (const chunk_choice& c : all) {
    auto next = std::upper_bound(stairs.begin(), stairs.end(), c.sum.deferred,
                                 [](std::int64_t deferred, const auto& stair) { return deferred < stair.first; });
    if (next != stairs.begin() && (next - 1)->second <= c.sum.cost) continue;
    auto first = next;  // the first pair that this choice equals or beats
    if (first != stairs.begin() && (first - 1)->first == c.sum.deferred) --first;
    while (next != stairs.end() && next->second >= c.sum.cost) ++next;
    stairs.insert(stairs.erase(first, next), {c.sum.deferred, c.sum.cost});
    out.push_back(c);
  }
  return out;
}

/// Builds up the choices layer by layer.
constexpr chunk_choices choices_of(const chunk_prices& layers) {
  chunk_choices steps(1, std::vector<chunk_choice>(1));
  for (const layer_prices& modes : layers) {
    std::vector<chunk_choice> all;
    for (const chunk_choice& before : steps.back())
      for (std::size_t m = 0; m < modes.size(); ++m)
        all.push_back({{before.sum.bytes + modes[m].bytes, before.sum.deferred + modes[m].deferred,
                        before.sum.cost + modes[m].cost},
                       &before,
                       static_cast<int>(m)});
    steps.push_back(undominated(std::move(all)));
  }
  std::sort(steps.back().begin(), steps.back().end(),
            [](const chunk_choice& a, const chunk_choice& b) { return a.sum.cost < b.sum.cost; });
  return steps;
}

/// A search through the choices of all chunks, the cheapest of each first.
class recompute_search {
 public:
  constexpr recompute_search(const std::vector<chunk_choices>& chunks,
                             const std::vector<std::vector<chunk_in_flight>>& times, std::int64_t budget)
      : chunks_(chunks), times_(times), budget_(budget), cheapest_(chunks.size() + 1, 0.0), chosen_(chunks.size(), 0) {
    for (const chunk_choices& choices : chunks) {
      recompute_price& least = least_.emplace_back(choices.back()[0].sum);
      for (const chunk_choice& c : choices.back()) {
        least.bytes = std::min(least.bytes, c.sum.bytes);
        least.deferred = std::min(least.deferred, c.sum.deferred);
      }
    }
    for (std::size_t c = chunks.size(); c-- > 0;) cheapest_[c] = cheapest_[c + 1] + chunks[c].back()[0].sum.cost;
    sums_ = least_;
    take(0, 0);
  }

  constexpr bool found() const { return found_; }
  /// The indices of the cheapest choices that fit.
  constexpr const std::vector<std::size_t>& best() const { return best_; }
  constexpr double cost() const { return cost_; }
  /// Returns the most bytes that are kept at one time.
  constexpr std::int64_t bytes(const std::vector<recompute_price>& sums) const {
    std::int64_t most = 0;
    for (const std::vector<chunk_in_flight>& time : times_) {
      std::int64_t held = 0;
      for (std::size_t c = 0; c < sums.size(); ++c)
        held += time[c].forward * sums[c].bytes + time[c].deferred * sums[c].deferred;
      most = std::max(most, held);
    }
    return most;
  }

 private:
  constexpr void take(std::size_t chunk, double cost) {
    if (chunk == chunks_.size()) {
      found_ = true, cost_ = cost, best_ = chosen_;
      return;
    }
    for (std::size_t i = 0; i < chunks_[chunk].back().size(); ++i) {
      const recompute_price& sum = chunks_[chunk].back()[i].sum;
      if (found_ && cost + sum.cost + cheapest_[chunk + 1] >= cost_) break;  // later choices cost as much or more
      sums_[chunk] = sum;
      if (bytes(sums_) > budget_) continue;  // even with the least of the later chunks
      chosen_[chunk] = i;
      take(chunk + 1, cost + sum.cost);
    }
    sums_[chunk] = least_[chunk];
  }

  const std::vector<chunk_choices>& chunks_;
  const std::vector<std::vector<chunk_in_flight>>& times_;
  std::int64_t budget_;
  std::vector<recompute_price> least_{}, sums_{};
  std::vector<double> cheapest_;  ///< of this chunk and the later ones
  std::vector<std::size_t> chosen_, best_{};
  double cost_ = 0;
  bool found_ = false;
};

/// Returns the smallest budget that can be met.
constexpr std::int64_t least_budget(const std::vector<chunk_choices>& chunks,
                                    const std::vector<std::vector<chunk_in_flight>>& times) {
  const auto met = [&](std::int64_t budget) { return recompute_search(chunks, times, budget).found(); };
  std::int64_t low = -1, high = 1;  // not met, met
  while (!met(high)) low = high, high *= 2;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (met(middle) ? high : low) = middle;
  }
  return high;
}

/// Reorders modes among layers of equal prices: layers that keep less come first.
constexpr void order_equal_layers(const chunk_prices& layers, std::vector<int>& modes) {
  const auto bytes = [&](std::size_t i) { return layers[i][static_cast<std::size_t>(modes[i])].bytes; };
  for (std::size_t i = 0; i < modes.size(); ++i) {
    std::size_t least = i;
    for (std::size_t j = i + 1; j < modes.size(); ++j)
      if (layers[j] == layers[i] && bytes(j) < bytes(least)) least = j;
    std::swap(modes[i], modes[least]);
  }
}

}  // namespace detail

/// Returns the cheapest modes for the layers of a rank's chunks with which the rank never keeps more than `budget`
/// bytes. Among layers of equal prices, those that keep less come first: the memory of the last layers is free before
/// the first ones run again. The result is exact. If nothing fits, `modes` is empty and `least` is set. Throws if
/// `times`, made by
/// `most_in_flight`, has another number of chunks, or if a layer has no mode.
constexpr recompute_choice choose_recompute(const std::vector<chunk_prices>& chunks,
                                            const std::vector<std::vector<chunk_in_flight>>& times,
                                            std::int64_t budget) {
  for (const chunk_prices& layers : chunks)
    for (const layer_prices& modes : layers)
      if (modes.empty()) fail("choose_recompute: a layer has no mode to choose");
  for (const std::vector<chunk_in_flight>& time : times)
    if (time.size() != chunks.size())
      fail({"choose_recompute: prices of ", chunks.size(), " chunks, and microbatches in flight of ", time.size()});
  std::vector<detail::chunk_choices> choices;
  for (const chunk_prices& layers : chunks) choices.push_back(detail::choices_of(layers));
  recompute_choice out;
  const detail::recompute_search search(choices, times, budget);
  if (!search.found()) {
    out.least = detail::least_budget(choices, times);
    return out;
  }
  std::vector<recompute_price> sums;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    const detail::chunk_choice& best = choices[c].back()[search.best()[c]];
    sums.push_back(best.sum);
    out.modes.push_back(best.modes());
    detail::order_equal_layers(chunks[c], out.modes.back());
  }
  out.cost = search.cost();
  out.bytes = search.bytes(sums);
  return out;
}

/// The prices of a byte that is written again and of a byte that is sent again, in operations of matrix products. They
/// are those of an H100 in bf16 (989 TFLOP/s, 3.35 TB/s, 450 GB/s over NVLink).
inline constexpr double operations_per_byte = 300, operations_per_sent_byte = 2200;

/// A stage that can set for each layer how much it recomputes.
template <class Stage>
concept recomputes_by_layer =
    announces_units<Stage> && requires(Stage& s, const layer_recompute& keep) { s.set_recompute(keep); };

namespace detail {

/// The work of passes in one unit, and the bytes that they keep.
struct unit_reading {
  std::int64_t bytes = 0;  ///< in use after the passes, minus those before
  double operations = 0, sent = 0;
};

/// Measures each unit of a stage during passes. It calls `forget` before each reading, which releases memory that the
/// reading must not count.
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

/// The last pass before kept bytes are measured.
enum class passes_until { forward, input_gradients, weight_gradients };

/// The bytes that passes of one microbatch keep in addition to gradients, and what they computed and sent.
struct metered_passes {
  std::vector<std::int64_t> bytes;  ///< of each unit
  std::int64_t others = 0;          ///< that belong to no unit, such as inputs of blocks
  std::vector<unit_reading> work;
};

/// Runs the passes and measures them. `stages` are all stages of the rank; they may share parameters.
template <class Stage>
metered_passes meter_passes(const context<counting_device>& ctx, std::span<Stage* const> stages, Stage& stage,
                            passes_until until, int microbatches) {
  // Deterministic sums are gradients that passes allocate. A microbatch may be added to them only once.
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
  // The bytes of a unit are those released with its deferred work and with the values that it keeps.
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

/// Returns the prices of a stage's units by mode: none, selective and full. The last price is of bytes that belong to
/// no unit, which are equal in all modes. Leaves the stage in mode full. `stages` are all stages of the rank, on the
/// `counting_device`, with parameters gathered. A step has `microbatches`.
template <recomputes_by_layer Stage>
chunk_prices price_stage(const context<counting_device>& ctx, std::span<Stage* const> stages, Stage& stage,
                         int microbatches) {
  const auto passes = [&](passes_until until) { return meter_passes(ctx, stages, stage, until, microbatches); };
  std::array<metered_passes, recompute_modes> forward, deferred, whole;
  passes(passes_until::weight_gradients);  // allocates memory that is made once, such as gradients
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
                       again + operations_per_byte * made_again + operations_per_sent_byte * sent});
    }
  }
  prices.push_back({{forward[0].others, deferred[0].others, 0}});
  return prices;
}

}  // namespace detail

/// A choice of what the layers of a rank's stages recompute.
struct recompute_fit {
  std::int64_t bytes = 0;                 ///< the most that layers keep at one time
  std::int64_t least = 0;                 ///< if nothing fits: the smallest budget that can be met
  std::vector<layer_recompute> stages{};  ///< of each stage of the rank, by its layers' numbers in the model
};

/// Returns the cheapest modes with which the layers of this rank's stages never keep more than `budget` bytes for their
/// backward passes. These bytes are activations, including the inputs of blocks, between passes. Messages, parameters
/// and gradients do not count. `stages` are the stages of a rank of the pipeline, by chunk, on the `counting_device`,
/// with parameters gathered.
template <recomputes_by_layer Stage>
recompute_fit fit_recompute(const context<counting_device>& ctx, std::span<Stage* const> stages, const schedule& plan,
                            int rank, std::int64_t budget) {
  std::vector<chunk_prices> prices;
  for (Stage* stage : stages) prices.push_back(detail::price_stage(ctx, stages, *stage, plan.shape.microbatches));
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
