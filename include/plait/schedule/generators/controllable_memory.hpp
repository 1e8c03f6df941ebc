// The schedules V-Half and V-Min, which trade idle time for memory. Their order is for even costs: for uneven ones see
// schedule/search/automatic.hpp. The stated numbers are checked in tests/unit/schedule/numbers.cpp.
#pragma once

#include <string_view>

#include "plait/schedule/generators/one_f_one_b.hpp"

namespace plait {

namespace detail {

/// When the six actions of a microbatch begin on each rank, in units of one action; every six units another microbatch
/// does the same. On the way down the vee F moves on by `down`, up by `up`, then I down by `back_down` and up by
/// `back_up`; the `turn`s are from the last F of chunk 0 to the first of chunk 1, from F to I on the last stage, and
/// from I of chunk 1 to I of chunk 0.
struct building_block {
  int down, up, back_down, back_up;
  int turn, turn_back, turn_up;
};

/// The regular schedule of a building block: on each rank, no two of the six begin in the same unit modulo 6, W fills
/// the first units that are left after the I of its chunk, chunk 1 first. What is idle at the ends closes up by itself:
/// only the order is kept.
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
    int at[6] = {-1, -1, -1, -1, -1, -1};  // which of the six begins in this unit modulo 6
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
/// at about half of 1F1B's memory with half of its idle time. Here at most p/2 + 3/2 activations, and a makespan idle
/// of at most 3/2 (p-1), at unit costs and m >= 2p.
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

/// V-Min (the same): a third of 1F1B's memory with two thirds of its idle time. Here at most p/3 + 4/3 activations, and
/// a makespan idle of at most 2 (p-1), at unit costs and m >= 2p.
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

}  // namespace plait
