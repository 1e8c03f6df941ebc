// Policies that make schedules for given sizes: GPipe, 1F1B, interleaved, zero-bubble, V-Half, V-Min, DualPipeV, and
// forward passes only. schedule/automatic.hpp handles uneven costs.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/containers.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/schedule/verify.hpp"

namespace plait {

/// A schedule as a policy: a struct with one static function and four optional members.
///
///     struct my_schedule {
///       static constexpr std::string_view name = "mine";                             // default "custom"
///       static constexpr int chunks = 2;                                             // per rank; default 1
///       static constexpr stage_placement placement = stage_placement::vee;           // default straight
///       static constexpr schedule_verdict check(const pipeline_shape&) { ... }       // refuses sizes; default none
///       static constexpr schedule make(const pipeline_shape& shape) { ... }
///     };
///     static_assert(verify<my_schedule, pipeline_ranks<4>, microbatches<16>>());
template <class Policy>
concept schedule_policy = requires(const pipeline_shape& shape) {
  { Policy::make(shape) } -> std::same_as<schedule>;
};

template <schedule_policy Policy>
constexpr std::string_view schedule_name_of() {
  if constexpr (requires { std::string_view(Policy::name); })
    return Policy::name;
  else
    return "custom";
}

/// The shape of a policy's schedule on `ranks` ranks with `microbatches` microbatches.
template <schedule_policy Policy>
constexpr pipeline_shape shape_of(int ranks, int microbatches) {
  pipeline_shape shape{.ranks = ranks, .chunks = 1, .microbatches = microbatches};
  if constexpr (requires { int{Policy::chunks}; }) shape.chunks = Policy::chunks;
  if constexpr (requires { stage_placement{Policy::placement}; }) shape.placement = Policy::placement;
  return shape;
}

/// Whether a policy supports a shape. The verdict has the nearest supported numbers of microbatches.
template <schedule_policy Policy>
constexpr schedule_verdict check_shape(const pipeline_shape& shape) {
  if (const schedule_verdict v = detail::check_shape(shape); !v.ok()) return v;
  if constexpr (requires {
                  { Policy::check(shape) } -> std::same_as<schedule_verdict>;
                })
    return Policy::check(shape);
  return {};
}

/// Returns a policy's schedule, without verification. Throws `error` for sizes that the policy does not support.
template <schedule_policy Policy>
constexpr schedule make_schedule(int ranks, int microbatches) {
  const pipeline_shape shape = shape_of<Policy>(ranks, microbatches);
  if (const schedule_verdict v = check_shape<Policy>(shape); !v.ok())
    fail({"schedule ", schedule_name_of<Policy>(), " (", ranks, " ranks, ", microbatches,
          " microbatches): ", describe(v)});
  return Policy::make(shape);
}

namespace detail {

constexpr schedule empty_schedule(std::string_view name, const pipeline_shape& shape, int actions_per_cell) {
  schedule s{name, shape, {}};
  s.order.resize(static_cast<std::size_t>(shape.ranks));
  for (auto& order : s.order)
    order.reserve(static_cast<std::size_t>(shape.chunks * shape.microbatches * actions_per_cell));
  return s;
}

/// Megatron's interleaved order: groups of p microbatches pass through one chunk after another, and backwards through
/// the chunks in reverse. With one chunk this is 1F1B.
constexpr schedule make_interleaved(std::string_view name, const pipeline_shape& shape) {
  const int p = shape.ranks, v = shape.chunks, total = v * shape.microbatches;
  const auto microbatch = [&](int k) { return k / (p * v) * p + k % p; };
  const auto chunk = [&](int k) { return k % (p * v) / p; };
  schedule s = empty_schedule(name, shape, 2);
  for (int r = 0; r < p; ++r) {
    auto& order = s.order[static_cast<std::size_t>(r)];
    const int warm_up = std::min(total, v == 1 ? p - r - 1 : 2 * (p - r - 1) + (v - 1) * p);
    const auto forward = [&](int k) {
      order.push_back(v == 1 ? forward_of(0, k) : forward_of(chunk(k), microbatch(k)));
    };
    const auto backward = [&](int k) {
      order.push_back(v == 1 ? backward_of(0, k) : backward_of(v - 1 - chunk(k), microbatch(k)));
    };
    for (int k = 0; k < warm_up; ++k) forward(k);
    for (int k = warm_up; k < total; ++k) {
      forward(k);
      backward(k - warm_up);
    }
    for (int k = total - warm_up; k < total; ++k) backward(k);
  }
  return s;
}

}  // namespace detail

/// All forwards, then all backwards (Huang et al., GPipe, 2018; arXiv 1811.06965). Idle fraction (p-1)/(m+p-1); m
/// activations.
struct gpipe {
  static constexpr std::string_view name = "gpipe";
  static constexpr schedule make(const pipeline_shape& shape) {
    schedule s = detail::empty_schedule(name, shape, 2);
    for (auto& order : s.order) {
      for (int i = 0; i < shape.microbatches; ++i) order.push_back(forward_of(0, i));
      for (int i = 0; i < shape.microbatches; ++i) order.push_back(backward_of(0, i));
    }
    return s;
  }
};

/// After p - r - 1 forwards, alternates one forward and one backward (PipeDream-Flush; Narayanan et al., arXiv
/// 2104.04473). Idle fraction (p-1)/(m+p-1); min(m, p - r) activations on rank r.
struct one_f_one_b {
  static constexpr std::string_view name = "1f1b";
  static constexpr schedule make(const pipeline_shape& shape) { return detail::make_interleaved(name, shape); }
};

/// 1F1B with V chunks on each rank (Narayanan et al., arXiv 2104.04473). Idle fraction ((p-1)/V) / (m + (p-1)/V), with
/// V times as many messages; p (1 + (p-1)/(pV)) activations on rank 0 for m >= 2p. p must divide the number of
/// microbatches.
template <int Chunks>
struct interleaved {
  static_assert(Chunks >= 2 && Chunks <= max_chunks,
                "interleaved<V> needs 2 to 255 chunks per rank; with one chunk it is one_f_one_b");
  static constexpr std::string_view name = "interleaved";
  static constexpr int chunks = Chunks;
  static constexpr schedule_verdict check(const pipeline_shape& shape) {
    if (shape.microbatches % shape.ranks == 0) return {};
    const int below = shape.microbatches / shape.ranks * shape.ranks, above = below + shape.ranks;
    return {.code = schedule_error::microbatches_do_not_divide,
            .below = below,
            .above = std::int64_t{shape.stages()} * above <= max_cells && above <= max_microbatches ? above : 0};
  }
  static constexpr schedule make(const pipeline_shape& shape) { return detail::make_interleaved(name, shape); }
};

/// Returns the forward passes of `microbatches` microbatches, for an evaluation. Every stage takes them in order; if
/// two stages of a rank are ready, the later one runs first.
constexpr schedule forward_schedule(pipeline_shape shape, int microbatches) {
  shape.microbatches = microbatches;
  schedule plan{"forward", shape, std::vector<std::vector<action>>(static_cast<std::size_t>(shape.ranks))};
  // In each wave, stage s runs microbatch wave - s.
  for (int wave = 0; wave < microbatches + shape.stages() - 1; ++wave)
    for (int stage = std::min(wave, shape.stages() - 1); stage >= 0; --stage)
      if (const int microbatch = wave - stage; microbatch < microbatches)
        plan.order[static_cast<std::size_t>(shape.rank_of(stage))].push_back(
            forward_of(shape.chunk_of(stage), microbatch));
  return plan;
}

// Zero-bubble schedules, which split backwards into I and W. Their orders assume even costs.

namespace detail {

/// The hand-made zero-bubble order. Rank r runs `warm_up(r)` forwards before the first I, and each W `delay(r)`
/// microbatches after its I, followed by a forward while there are any. W before F keeps one activation less.
template <class WarmUp, class Delay>
constexpr schedule make_zero_bubble(std::string_view name, const pipeline_shape& shape, WarmUp warm_up, Delay delay) {
  const int m = shape.microbatches;
  schedule s = empty_schedule(name, shape, 3);
  for (int r = 0; r < shape.ranks; ++r) {
    auto& order = s.order[static_cast<std::size_t>(r)];
    int forwards = 0, weights = 0;
    while (forwards < std::min(m, warm_up(r))) order.push_back(forward_of(0, forwards++));
    for (int i = 0; i < m; ++i) {
      order.push_back(input_backward_of(0, i));
      if (i >= delay(r)) order.push_back(weight_backward_of(0, weights++));
      if (forwards < m) order.push_back(forward_of(0, forwards++));
    }
    while (weights < m) order.push_back(weight_backward_of(0, weights++));
  }
  return s;
}

}  // namespace detail

/// ZB-H1 (Qi et al., arXiv 2401.10241; ZB1P in DeepSeek-V3): the memory of 1F1B with a third of its idle time. The idle
/// time is (p-1)(F + I - W), a fraction (p-1)/(3m+p-1) at unit costs and m >= p. At most p activations per rank.
struct zb_h1 {
  static constexpr std::string_view name = "zb_h1";
  static constexpr schedule make(const pipeline_shape& shape) {
    const int p = shape.ranks;
    return detail::make_zero_bubble(
        name, shape, [p](int r) { return p - r; }, [](int r) { return r; });
  }
};

/// ZB-H2 (arXiv 2401.10241): no idle time within a rank's own span at unit costs and m >= 2p - 1, with 2p - 1
/// activations. The makespan still has p - 1 idle units, so steps that end with a global operation gain nothing over
/// ZB-H1.
struct zb_h2 {
  static constexpr std::string_view name = "zb_h2";
  static constexpr schedule make(const pipeline_shape& shape) {
    const int p = shape.ranks;
    return detail::make_zero_bubble(
        name, shape, [p](int r) { return 2 * (p - r) - 1; }, [](int r) { return 2 * r; });
  }
};

/// ZB-V (arXiv 2401.10241, section 6): two chunks per rank in a vee, with I and W split. A rank keeps at most p
/// activations in both chunks together. If F = I = W, a rank has almost no idle time within its span. It sends twice as
/// many messages as 1F1B.
///
/// The order is regular for at least 2p - 1 microbatches. For fewer, the missing ones are removed from that order.
struct zb_v {
  static constexpr std::string_view name = "zb_v";
  static constexpr int chunks = 2;
  static constexpr stage_placement placement = stage_placement::vee;
  static constexpr schedule make(const pipeline_shape& shape) {
    const int p = shape.ranks, m = std::max(shape.microbatches, 2 * p - 1);
    schedule s = detail::empty_schedule(name, shape, 3);
    for (int r = 0; r < p; ++r) {
      auto& order = s.order[static_cast<std::size_t>(r)];
      int forwards[2]{}, inputs[2]{}, weights[2]{};
      const auto add = [&](const action& a) {
        if (a.microbatch < shape.microbatches) order.push_back(a);
      };
      const auto f = [&](int chunk) { add(forward_of(chunk, forwards[chunk]++)); };
      const auto i = [&](int chunk) { add(input_backward_of(chunk, inputs[chunk]++)); };
      const auto w = [&](int chunk) { add(weight_backward_of(chunk, weights[chunk]++)); };
      // Warm-up: chunk 0 alone, both chunks alternately, then chunk 1 with its backwards.
      for (int k = 0; k < 2 * (p - r) - 1; ++k) f(0);
      for (int k = 0; k < r; ++k) f(1), f(0);
      for (int k = 0; k < p - r; ++k) f(1), i(1), w(1);
      while (forwards[1] < forwards[0] || forwards[0] < m) {
        if (forwards[0] < m) f(0);
        i(0), w(0), f(1), i(1), w(1);
      }
      // Cool-down: input gradients first; weight gradients fill idle time.
      for (int k = 0; k < r; ++k) i(0), i(1);
      for (int k = 0; k < p - r; ++k) i(0), w(0);
      while (weights[1] < inputs[1]) w(1);
      while (weights[0] < inputs[0]) w(0);
    }
    return s;
  }
};

// V-Half and V-Min, which trade idle time for memory. Their orders assume even costs.

namespace detail {

/// The start times of a microbatch's six actions on each rank, in units of one action; a microbatch begins every six
/// units. From rank to rank, F advances by `down` on the way down the vee and by `up` on the way up; then I by
/// `back_down` and `back_up`. `turn` is the time from the last F of chunk 0 to the first F of chunk 1. `turn_back` is
/// the time from F to I on the last stage, `turn_up` from I of chunk 1 to I of chunk 0.
struct building_block {
  int down, up, back_down, back_up;
  int turn, turn_back, turn_up;
};

/// Repeats a building block for all microbatches. On each rank, no two of the six actions begin in equal units modulo
/// 6. W fills the first free units after the I of its chunk, chunk 1 first. Only the order is used, so idle time at
/// both ends disappears.
constexpr schedule make_from_block(std::string_view name, const pipeline_shape& shape, const building_block& b) {
  const int p = shape.ranks, m = shape.microbatches;
  schedule s = empty_schedule(name, shape, 3);
  for (int r = 0; r < p; ++r) {
    const int up_there = b.down * (p - 1) + b.turn, top = up_there + b.up * (p - 1) + b.turn_back,
              down_again = top + b.back_down * (p - 1) + b.turn_up;
    struct {
      action what;
      int begin;
    } block[6] = {{forward_of(0, 0), b.down * r},
                  {forward_of(1, 0), up_there + b.up * (p - 1 - r)},
                  {input_backward_of(1, 0), top + b.back_down * r},
                  {input_backward_of(0, 0), down_again + b.back_up * (p - 1 - r)},
                  {weight_backward_of(1, 0), 0},
                  {weight_backward_of(0, 0), 0}};
    int at[6] = {-1, -1, -1, -1, -1, -1};  // which of the six actions begins in this unit modulo 6
    for (int k = 0; k < 4; ++k) at[block[k].begin % 6] = k;
    for (int k = 4; k < 6; ++k) {
      int unit = block[k - 2].begin + 1;
      while (at[unit % 6] >= 0) ++unit;
      block[k].begin = unit;
      at[unit % 6] = k;
    }
    auto& order = s.order[static_cast<std::size_t>(r)];
    for (int unit = 0, left = 6 * m; left > 0; ++unit) {
      const auto& one = block[at[unit % 6]];
      const int microbatch = (unit - one.begin) / 6;
      if (unit < one.begin || microbatch >= m) continue;
      order.push_back({one.what.kind, one.what.chunk, static_cast<std::uint16_t>(microbatch)});
      --left;
    }
  }
  return s;
}

}  // namespace detail

/// V-Half (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362): two chunks per rank in a vee,
/// with about half of 1F1B's memory and half of its idle time. At most p/2 + 3/2 activations, and at most 3/2 (p-1)
/// idle units of the makespan, at unit costs and m >= 2p.
struct v_half {
  static constexpr std::string_view name = "v_half";
  static constexpr int chunks = 2;
  static constexpr stage_placement placement = stage_placement::vee;
  static constexpr schedule make(const pipeline_shape& shape) {
    return detail::make_from_block(name, shape,
                                   shape.ranks % 2 == 0 ? detail::building_block{1, 2, 1, 2, 4, 2, 2}
                                                        : detail::building_block{1, 2, 1, 2, 1, 2, 5});
  }
};

/// V-Min (arXiv 2405.15362): a third of 1F1B's memory with two thirds of its idle time. At most p/3 + 4/3 activations,
/// and at most 2 (p-1) idle units of the makespan, at unit costs and m >= 2p.
struct v_min {
  static constexpr std::string_view name = "v_min";
  static constexpr int chunks = 2;
  static constexpr stage_placement placement = stage_placement::vee;
  static constexpr schedule make(const pipeline_shape& shape) {
    return detail::make_from_block(name, shape,
                                   shape.ranks % 3 == 0 ? detail::building_block{1, 1, 1, 1, 3, 1, 3}
                                                        : detail::building_block{1, 1, 1, 1, 1, 1, 1});
  }
};

/// DualPipeV (DeepSeek-V3, arXiv 2412.19437, and github.com/deepseek-ai/DualPipe): two chunks per rank in a vee. Most
/// forwards of one chunk are paired with a whole backward of the other. An executor may then overlap the communication
/// *within* a layer of one with the computation of the other. W is split off only where it fills idle time. The
/// schedule needs at least 2p microbatches, the number of stages.
///
/// Here the two actions of a pair run one after another. The idle time is then (p-1)(F + I - W) of a chunk if the three
/// are about equal. That is at most the published (p-1)(F&B + B - 3W), B = I + W. A rank keeps at most p + 1/2
/// activations (2p + 1 chunks).
struct dualpipe_v {
  static constexpr std::string_view name = "dualpipe_v";
  static constexpr int chunks = 2;
  static constexpr stage_placement placement = stage_placement::vee;
  static constexpr schedule_verdict check(const pipeline_shape& shape) {
    if (shape.microbatches >= shape.stages()) return {};
    return {.code = schedule_error::too_few_microbatches, .above = shape.stages()};
  }
  static constexpr schedule make(const pipeline_shape& shape) {
    const int p = shape.ranks, m = shape.microbatches;
    schedule s = detail::empty_schedule(name, shape, 3);
    for (int r = 0; r < p; ++r) {
      auto& order = s.order[static_cast<std::size_t>(r)];
      int forwards[2]{}, backwards[2]{};
      std::vector<action> pending;  // split-off W, oldest first
      std::size_t oldest = 0;
      const auto f = [&](int chunk) { order.push_back(forward_of(chunk, forwards[chunk]++)); };
      const auto b = [&](int chunk, bool split) {
        const int k = backwards[chunk]++;
        order.push_back(split ? input_backward_of(chunk, k) : backward_of(chunk, k));
        if (split) pending.push_back(weight_backward_of(chunk, k));
      };
      const auto w = [&] {
        if (oldest < pending.size()) order.push_back(pending[oldest++]);
      };
      // The eight parts of DeepSeek's DualPipeV.
      for (int k = 0; k < 2 * (p - r - 1); ++k) f(0);
      for (int k = 0; k < r + 1; ++k) f(0), f(1);
      for (int k = 0; k < p - r - 1; ++k) b(1, true), w(), f(1);
      for (int k = 0; k < m - 2 * p + r + 1; ++k) f(0), b(1, false), f(1), b(0, false);
      for (int k = 0; k < p - r - 1; ++k) b(1, false), f(1), b(0, false);
      bool split = false;
      for (int k = 0; k < r + 1; ++k) {
        if (k == (r + 1) / 2 && r % 2 == 1) split = true;
        b(1, split);
        if (k == (r + 1) / 2 && r % 2 == 0) split = true;
        b(0, split);
      }
      for (int k = 0; k < p - r - 1; ++k) w(), b(0, split);
      for (int k = 0; k < r + 1; ++k) w();
    }
    return s;
  }
};

namespace detail {

/// The policies above with a fixed number of chunks.
using hand_made_policies = type_list<gpipe, one_f_one_b, zb_h1, zb_h2, zb_v, dualpipe_v, v_half, v_min>;

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
