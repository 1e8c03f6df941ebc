// The schedules GPipe, 1F1B and interleaved 1F1B, whose backwards are whole. Those that split backwards into I and W
// are in schedule/generators/zero_bubble.hpp. By name: schedule/parse.hpp; a policy's members: schedule/policy.hpp.
#pragma once

#include <algorithm>
#include <string_view>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/policy.hpp"

namespace plait {

namespace detail {

constexpr schedule empty_schedule(std::string_view name, const pipeline_shape& shape, int actions_per_cell) {
  schedule s{name, shape, {}};
  s.order.resize(static_cast<std::size_t>(shape.ranks));
  for (auto& order : s.order)
    order.reserve(static_cast<std::size_t>(shape.chunks * shape.microbatches * actions_per_cell));
  return s;
}

/// Megatron's order of an interleaved schedule: groups of p microbatches pass chunk after chunk, backwards in the
/// reverse order of chunks. For one chunk, 1F1B.
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

/// All forwards, then all backwards (Huang et al., GPipe, 2018; arXiv 1811.06965). Idle (p-1)/(m+p-1), m activations.
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

/// After p - r - 1 forwards, one forward and one backward in turn (PipeDream-Flush; Narayanan et al., arXiv
/// 2104.04473). Idle (p-1)/(m+p-1); min(m, p - r) activations on rank r.
struct one_f_one_b {
  static constexpr std::string_view name = "1f1b";
  static constexpr schedule make(const pipeline_shape& shape) { return detail::make_interleaved(name, shape); }
};

/// 1F1B with V chunks on each rank (Narayanan et al., arXiv 2104.04473). Idle ((p-1)/V) / (m + (p-1)/V), for V times
/// the messages; p (1 + (p-1)/(pV)) activations on rank 0 for m >= 2p. Microbatches must be divisible by p.
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

}  // namespace plait

#include "plait/core/macros_on.hpp"
