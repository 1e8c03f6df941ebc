// The hand-made zero-bubble schedules ZB-H1, ZB-H2 and ZB-V. They are orders for even costs: for uneven ones see
// schedule/search/automatic.hpp. Idle shares and rates are checked in tests/unit/schedule/numbers.cpp.
#pragma once

#include <algorithm>
#include <string_view>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/generators/one_f_one_b.hpp"

namespace plait {

namespace detail {

/// The hand-made zero-bubble order: `warm_up(r)` forwards before the first I, each W `delay(r)` microbatches after its
/// I, and a forward after each while there are any. W comes before F, which keeps one activation less.
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

/// ZB-H1 (Qi et al., arXiv 2401.10241; ZB1P in DeepSeek-V3): the memory of 1F1B with a third of its idle time. Idle
/// time (p-1)(F + I - W), a share of (p-1)/(3m+p-1) at unit costs and m >= p; at most p activations on every rank.
struct zb_h1 {
  static constexpr std::string_view name = "zb_h1";
  static constexpr schedule make(const pipeline_shape& shape) {
    const int p = shape.ranks;
    return detail::make_zero_bubble(
        name, shape, [p](int r) { return p - r; }, [](int r) { return r; });
  }
};

/// ZB-H2 (the same): no idle time within a rank's own span at unit costs and m >= 2p - 1, for 2p - 1 activations. The
/// makespan still holds p - 1 idle: steps that end with a global operation gain nothing over ZB-H1.
struct zb_h2 {
  static constexpr std::string_view name = "zb_h2";
  static constexpr schedule make(const pipeline_shape& shape) {
    const int p = shape.ranks;
    return detail::make_zero_bubble(
        name, shape, [p](int r) { return 2 * (p - r) - 1; }, [](int r) { return 2 * r; });
  }
};

/// ZB-V (the same, section 6): two chunks per rank in a vee, I and W split; at most p activations on every rank, both
/// chunks together, and next to no idle time within a rank's span where F = I = W. Twice the messages of 1F1B.
///
/// The order is the regular one for 2p - 1 microbatches and more; fewer are that order with the others left out.
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
      // Warm-up: chunk 0 alone, both chunks in turn, then chunk 1 with its backwards.
      for (int k = 0; k < 2 * (p - r) - 1; ++k) f(0);
      for (int k = 0; k < r; ++k) f(1), f(0);
      for (int k = 0; k < p - r; ++k) f(1), i(1), w(1);
      while (forwards[1] < forwards[0] || forwards[0] < m) {
        if (forwards[0] < m) f(0);
        i(0), w(0), f(1), i(1), w(1);
      }
      // Cool-down: input gradients first, weight gradients fill what would be idle.
      for (int k = 0; k < r; ++k) i(0), i(1);
      for (int k = 0; k < p - r; ++k) i(0), w(0);
      while (weights[1] < inputs[1]) w(1);
      while (weights[0] < inputs[0]) w(0);
    }
    return s;
  }
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
