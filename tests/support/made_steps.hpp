#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "plait/schedule/expand.hpp"
#include "plait/schedule/parse.hpp"
#include "plait/schedule/simulate.hpp"
#include "plait/schedule/verify.hpp"

/// Steps of units of equal size, as text, and faults that a test inserts into them.
namespace plait::test {

/// `each` units in every stage. With more than one stage, the first and the last unit may be tied.
inline std::vector<step_unit> units_of(int stages, int each, bool tied = false) {
  std::vector<step_unit> units;
  for (int stage = 0; stage < stages; ++stage)
    for (int i = 0; i < each; ++i) units.push_back({.stage = stage, .parameters = 100});
  if (tied) units.front().tied_to = stages * each - 1, units.back().tied_to = 0;
  return units;
}

inline step_schedule step_of(const char* name, int ranks, int microbatches, const data_parallel& policy, int each = 3,
                             bool tied = false) {
  const schedule s = parse_schedule(name, ranks, microbatches);
  return expand(s, units_of(s.shape.stages(), each, tied), policy);
}

inline std::string text_of(const std::vector<step_entry>& program) {
  std::string text;
  for (const step_entry& e : program) {
    const char* const names[] = {"",       "S",      "R",    "gather",  "release", "reduce", "norm",
                                 "update", "copies", "ties", "offload", "drop",    "reload"};
    if (!text.empty()) text += ' ';
    text += names[static_cast<int>(e.op)];
    if (moves_activations(e.op)) text += std::to_string(e.pass.microbatch) + ":";
    if (e.op == step_op::pass) text += std::string(1, letter(e.pass.kind)) + std::to_string(e.pass.microbatch) + ":";
    if (e.unit >= 0) text += std::to_string(e.unit);
  }
  return text;
}

inline int place_of(const step_schedule& s, int rank, step_op op, int unit, int which = 0) {
  const std::vector<step_entry>& program = s.programs[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < program.size(); ++i)
    if (program[i].op == op && program[i].unit == unit && which-- == 0) return static_cast<int>(i);
  FAIL("there is no such entry");
  return -1;
}
inline void move(step_schedule& s, int rank, int from, int to) {
  std::vector<step_entry>& program = s.programs[static_cast<std::size_t>(rank)];
  const step_entry e = program[static_cast<std::size_t>(from)];
  program.erase(program.begin() + from);
  program.insert(program.begin() + to, e);
}
inline void erase(step_schedule& s, int rank, int at) {
  s.programs[static_cast<std::size_t>(rank)].erase(s.programs[static_cast<std::size_t>(rank)].begin() + at);
}
inline void insert(step_schedule& s, int rank, int at, const step_entry& e) {
  s.programs[static_cast<std::size_t>(rank)].insert(s.programs[static_cast<std::size_t>(rank)].begin() + at, e);
}

inline constexpr data_parallel plain{}, zero1{.level = zero_level::optimizer}, zero2{.level = zero_level::gradients},
    zero3{.level = zero_level::parameters};

inline step_costs costs_of(const step_schedule& s, double bandwidth, int data_ranks = 2) {
  step_costs costs;
  costs.units.assign(s.units.size(), action_times{});
  costs.data_ranks = data_ranks;
  costs.bandwidth = bandwidth;
  costs.gather_bytes = costs.reduce_bytes = 1;
  return costs;
}

}  // namespace plait::test
