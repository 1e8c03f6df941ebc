// The schedule DualPipeV. It is not DualPipe, which feeds a pipeline from both ends and holds each stage on two ranks.
// Other schedules in a vee: schedule/generators/zero_bubble.hpp. Numbers: tests/unit/schedule/numbers.cpp.
#pragma once

#include <string_view>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/generators/one_f_one_b.hpp"

namespace plait {

/// DualPipeV (DeepSeek-V3, arXiv 2412.19437, and github.com/deepseek-ai/DualPipe): two chunks per rank in a vee. Most
/// forwards of one chunk stand beside a whole backward of the other, so that an executor may overlap the communication
/// *within* a layer of one with the computation of the other; W is split off only where it fills idle time. Needs as
/// many microbatches as there are stages, 2p.
///
/// Here the two of a pair run one after the other. Idle time is then (p-1)(F + I - W) of a chunk where the three are
/// about even, within the published (p-1)(F&B + B - 3W), B = I + W; at most p + 1/2 activations (2p + 1 chunks).
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
      std::vector<action> pending;  // W that were split off, oldest first
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
      // The eight parts of the original.
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

}  // namespace plait

#include "plait/core/macros_on.hpp"
