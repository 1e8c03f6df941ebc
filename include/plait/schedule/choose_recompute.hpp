// Which layers of a rank recompute so that what they keep fits a budget of bytes, at the least cost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// The price of one mode of a layer, for one microbatch.
struct recompute_price {
  std::int64_t bytes = 0;     ///< kept from its forward pass to its backward pass
  std::int64_t deferred = 0;  ///< kept from its input gradients to its weight gradients, where those are deferred
  double cost = 0;            ///< of making again what is not kept, in any unit

  friend constexpr bool operator==(const recompute_price&, const recompute_price&) = default;
};
/// The modes that a layer has.
using layer_prices = std::vector<recompute_price>;
/// The layers of a chunk, in the order of a forward pass.
using chunk_prices = std::vector<layer_prices>;

/// The microbatches of a chunk whose activations a rank holds at one time.
struct chunk_in_flight {
  int forward = 0;   ///< before their backward pass
  int deferred = 0;  ///< after their input gradients, before their weight gradients

  friend constexpr bool operator==(const chunk_in_flight&, const chunk_in_flight&) = default;
};

/// The microbatches in flight on a rank, by chunk, at every time at which no other time has as many of each.
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
  std::vector<std::vector<int>> modes;  ///< of each layer of each chunk; empty where nothing fits
  double cost = 0;                      ///< of a microbatch through all chunks
  std::int64_t bytes = 0;               ///< kept at a time, at most
  std::int64_t least = 0;               ///< where nothing fits: the smallest budget that can be met
};

namespace detail {

/// The Pareto-optimal choices for the layers of one chunk, built up layer by layer.
class chunk_choices {
 public:
  struct state {
    recompute_price sum;
    int from = 0, mode = 0;  ///< the state of the layers before, and the mode of the last one
  };

  constexpr explicit chunk_choices(const chunk_prices& layers) : steps_{{state{}}} {
    for (const layer_prices& modes : layers) {
      const std::vector<state>& before = steps_.back();
      std::vector<state> all;
      for (std::size_t i = 0; i < before.size(); ++i)
        for (std::size_t m = 0; m < modes.size(); ++m)
          all.push_back({{before[i].sum.bytes + modes[m].bytes, before[i].sum.deferred + modes[m].deferred,
                          before[i].sum.cost + modes[m].cost},
                         static_cast<int>(i),
                         static_cast<int>(m)});
      std::vector<state> best = undominated(std::move(all));
      steps_.push_back(std::move(best));
    }
    order_.assign(ends().size(), 0);
    for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int>(i);
    std::sort(order_.begin(), order_.end(), [&](int a, int b) {
      return ends()[static_cast<std::size_t>(a)].sum.cost < ends()[static_cast<std::size_t>(b)].sum.cost;
    });
  }

  /// The choices for all layers, by their cost.
  constexpr std::size_t size() const { return order_.size(); }
  constexpr const recompute_price& sum(std::size_t i) const { return ends()[static_cast<std::size_t>(order_[i])].sum; }
  constexpr std::vector<int> modes(std::size_t i) const {
    std::vector<int> out(steps_.size() - 1, 0);
    int at = order_[i];
    for (std::size_t layer = out.size(); layer-- > 0;) {
      const state& s = steps_[layer + 1][static_cast<std::size_t>(at)];
      out[layer] = s.mode;
      at = s.from;
    }
    return out;
  }

 private:
  constexpr const std::vector<state>& ends() const { return steps_.back(); }

  /// By rising bytes; `stairs` are the pairs of deferred bytes and cost seen so far, of falling cost.
  static constexpr std::vector<state> undominated(std::vector<state> all) {
    std::sort(all.begin(), all.end(), [](const state& a, const state& b) {
      if (a.sum.bytes != b.sum.bytes) return a.sum.bytes < b.sum.bytes;
      return a.sum.deferred != b.sum.deferred ? a.sum.deferred < b.sum.deferred : a.sum.cost < b.sum.cost;
    });
    std::vector<state> out;
    std::vector<std::pair<std::int64_t, double>> stairs;
    for (const state& s : all) {
      auto next = std::upper_bound(stairs.begin(), stairs.end(), s.sum.deferred,
                                   [](std::int64_t deferred, const auto& stair) { return deferred < stair.first; });
      if (next != stairs.begin() && (next - 1)->second <= s.sum.cost) continue;
      auto first = next;  // what this one is as good as
      if (first != stairs.begin() && (first - 1)->first == s.sum.deferred) --first;
      while (next != stairs.end() && next->second >= s.sum.cost) ++next;
      stairs.insert(stairs.erase(first, next), {s.sum.deferred, s.sum.cost});
      out.push_back(s);
    }
    return out;
  }

  std::vector<std::vector<state>> steps_;  ///< of the first 0, 1, ... layers
  std::vector<int> order_{};
};

/// A search through the choices of all chunks, the cheapest of each first.
class recompute_search {
 public:
  constexpr recompute_search(const std::vector<chunk_choices>& chunks,
                             const std::vector<std::vector<chunk_in_flight>>& times, std::int64_t budget)
      : chunks_(chunks),
        times_(times),
        budget_(budget),
        least_(chunks.size(), recompute_price{}),
        cheapest_(chunks.size() + 1, 0.0) {
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      least_[c] = chunks[c].sum(0);
      for (std::size_t i = 1; i < chunks[c].size(); ++i) {
        least_[c].bytes = std::min(least_[c].bytes, chunks[c].sum(i).bytes);
        least_[c].deferred = std::min(least_[c].deferred, chunks[c].sum(i).deferred);
      }
    }
    for (std::size_t c = chunks.size(); c-- > 0;) cheapest_[c] = cheapest_[c + 1] + chunks[c].sum(0).cost;
    chosen_.assign(chunks.size(), 0);
    sums_ = least_;
  }

  constexpr void run() { take(0, 0); }
  constexpr bool found() const { return found_; }
  constexpr double cost() const { return cost_; }
  constexpr const std::vector<std::size_t>& best() const { return best_; }
  /// The most bytes that are kept at a time.
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
    for (std::size_t i = 0; i < chunks_[chunk].size(); ++i) {
      const recompute_price& sum = chunks_[chunk].sum(i);
      if (found_ && cost + sum.cost + cheapest_[chunk + 1] >= cost_) break;  // as are all that follow
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
  std::vector<recompute_price> least_, sums_{};
  std::vector<double> cheapest_;  ///< of this chunk and the later ones
  std::vector<std::size_t> chosen_{}, best_{};
  double cost_ = 0;
  bool found_ = false;
};

/// The smallest budget that can be met.
constexpr std::int64_t least_budget(const std::vector<chunk_choices>& chunks,
                                    const std::vector<std::vector<chunk_in_flight>>& times) {
  const auto met = [&](std::int64_t budget) {
    recompute_search search(chunks, times, budget);
    search.run();
    return search.found();
  };
  std::int64_t low = -1, high = 1;  // not met, met
  while (!met(high)) low = high, high *= 2;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (met(middle) ? high : low) = middle;
  }
  return high;
}

/// Among layers of equal prices, those that keep less come first.
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

/// The cheapest modes for the layers of a rank's chunks with which the rank never keeps more than `budget` bytes. Among
/// layers of equal prices, those that keep less come first: what the last ones keep is given back
/// by the time the first ones run again. Exact; where nothing fits, `modes` is empty and `least` is set. Throws where
/// `times`, made by `most_in_flight`, has another number of chunks, or a layer has no mode.
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
  for (const chunk_prices& layers : chunks) choices.emplace_back(layers);
  recompute_choice out;
  detail::recompute_search search(choices, times, budget);
  search.run();
  if (!search.found()) {
    out.least = detail::least_budget(choices, times);
    return out;
  }
  std::vector<recompute_price> sums;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    sums.push_back(choices[c].sum(search.best()[c]));
    out.modes.push_back(choices[c].modes(search.best()[c]));
    detail::order_equal_layers(chunks[c], out.modes.back());
  }
  out.cost = search.cost();
  out.bytes = search.bytes(sums);
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
