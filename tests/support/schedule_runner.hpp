#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "plait/schedule/verify.hpp"

namespace plait::test {

/// Mixes two numbers into one that depends on their order.
inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  a ^= b + 0x9e3779b97f4a7c15u + (a << 6) + (a >> 2);
  a *= 0xff51afd7ed558ccdu;
  return a ^ (a >> 33);
}

/// Runs programs as an executor does, without using the verifier. Messages carry values, the heads of two queues match
/// without a look at their labels, and ranks move in random order. True if all steps finish and every action has the
/// right inputs.
inline bool runs_right(const pipeline_shape& shape, const std::vector<std::vector<step_entry>>& all, posting_rule rule,
                       std::mt19937& random) {
  struct post {
    step_entry step;
    int peer;
    std::uint64_t value;  // of a send: the value when it was posted
  };
  struct rank_state {
    std::size_t next = 0;
    std::deque<post> queue;
    std::map<std::tuple<char, int, int>, std::uint64_t>
        values;  // by kind ('a' or 'g'), the stage that receives it, and microbatch
    std::map<std::tuple<int, int>, std::uint64_t> kept;  // activations by stage and microbatch
  };
  const auto number = [&](int stage, int mb, bool forward) {  // the right value, computed without a pipeline
    std::uint64_t value = static_cast<std::uint64_t>(mb) + 1;
    std::vector<std::uint64_t> inputs;
    for (int i = 0; i < shape.stages(); ++i) {
      inputs.push_back(value);
      value = mix(value, static_cast<std::uint64_t>(i));
      if (forward && i == stage) return value;
    }
    for (int i = shape.stages() - 1;; --i) {
      value = mix(value, inputs[static_cast<std::size_t>(i)]);
      if (i == stage) return value;
    }
  };
  const auto slot_of = [](const transfer& t) {
    return std::tuple{t.kind == transfer_kind::activation ? 'a' : 'g', t.to_stage, t.microbatch};
  };
  std::vector<rank_state> ranks(all.size());
  bool right = true;
  const auto advance = [&](int rank) {
    rank_state& me = ranks[static_cast<std::size_t>(rank)];
    const auto& mine = all[static_cast<std::size_t>(rank)];
    if (me.next == mine.size()) return false;
    if (rule == posting_rule::blocking && !me.queue.empty()) return false;
    const step_entry& step = mine[me.next];
    if (step.op != step_op::pass) {
      const int peer = shape.rank_of(step.op == step_op::send ? step.transfer.to_stage : step.transfer.from_stage);
      me.queue.push_back({step, peer, step.op == step_op::send ? me.values[slot_of(step.transfer)] : 0});
      ++me.next;
      return true;
    }
    const int stage = shape.stage_of(rank, step.pass.chunk), mb = step.pass.microbatch;
    if (step.pass.kind == action_kind::forward) {
      const auto in = me.values.find({'a', stage, mb});
      if (stage > 0 && in == me.values.end()) return false;
      const std::uint64_t x = stage == 0 ? static_cast<std::uint64_t>(mb) + 1 : in->second;
      const std::uint64_t y = mix(x, static_cast<std::uint64_t>(stage));
      right = right && y == number(stage, mb, true);
      me.kept[{stage, mb}] = x;
      me.values[{'a', stage + 1, mb}] = y;
      if (stage + 1 == shape.stages()) me.values[{'g', stage, mb}] = y;
    } else if (step.pass.kind != action_kind::weight_backward) {
      const auto in = me.values.find({'g', stage, mb});
      if (in == me.values.end()) return false;
      const std::uint64_t g = mix(in->second, me.kept[{stage, mb}]);
      right = right && g == number(stage, mb, false);
      me.values[{'g', stage - 1, mb}] = g;
    }
    ++me.next;
    return true;
  };
  const auto pass = [&](int rank) {
    rank_state& me = ranks[static_cast<std::size_t>(rank)];
    if (me.queue.empty() || me.queue.front().step.op != step_op::send) return false;
    rank_state& peer = ranks[static_cast<std::size_t>(me.queue.front().peer)];
    if (peer.queue.empty()) return false;
    const post& theirs = peer.queue.front();
    if (theirs.step.op != step_op::receive || theirs.peer != rank) return false;
    peer.values[slot_of(theirs.step.transfer)] = me.queue.front().value;
    me.queue.pop_front();
    peer.queue.pop_front();
    return true;
  };
  const int n = static_cast<int>(all.size());
  for (;;) {
    std::vector<std::pair<int, bool>> moves;
    for (int r = 0; r < n; ++r) {
      moves.emplace_back(r, false);
      moves.emplace_back(r, true);
    }
    std::shuffle(moves.begin(), moves.end(), random);
    bool moved = false;
    for (const auto& [r, message] : moves)
      if (message ? pass(r) : advance(r)) {
        moved = true;
        break;
      }
    if (!moved) break;
  }
  for (int r = 0; r < n; ++r) {
    const rank_state& me = ranks[static_cast<std::size_t>(r)];
    right = right && me.next == all[static_cast<std::size_t>(r)].size();
    right = right && me.queue.empty();
  }
  return right;
}

}  // namespace plait::test
