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

/// Two units of the first stage are tied to two of the last one.
inline step_schedule tied_twice(const char* name, int microbatches) {
  std::vector<step_unit> units = units_of(2, 3);
  units[0].tied_to = 5, units[5].tied_to = 0, units[1].tied_to = 4, units[4].tied_to = 1;
  return expand(parse_schedule(name, 2, microbatches), units, {});
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

/// An entry of a rank's program: the `which`-th of its kind and unit, from 0.
struct place {
  step_op op;
  int unit = -1, which = 0, rank = 0;
};

inline int place_of(const step_schedule& s, place p) {
  const std::vector<step_entry>& program = s.programs[static_cast<std::size_t>(p.rank)];
  for (std::size_t i = 0; i < program.size(); ++i)
    if (program[i].op == p.op && program[i].unit == p.unit && p.which-- == 0) return static_cast<int>(i);
  FAIL("there is no such entry");
  return -1;
}
inline step_entry entry_at(const step_schedule& s, const place& p) {
  return s.programs[static_cast<std::size_t>(p.rank)][static_cast<std::size_t>(place_of(s, p))];
}

// The step `s` with a fault.
inline step_schedule without(step_schedule s, const place& p) {
  std::vector<step_entry>& program = s.programs[static_cast<std::size_t>(p.rank)];
  program.erase(program.begin() + place_of(s, p));
  return s;
}
inline step_schedule with(step_schedule s, int at, const step_entry& e, int rank = 0) {
  std::vector<step_entry>& program = s.programs[static_cast<std::size_t>(rank)];
  program.insert(program.begin() + at, e);
  return s;
}
inline step_schedule with(const step_schedule& s, const place& p, const step_entry& e) {
  return with(s, place_of(s, p), e, p.rank);
}
/// With an entry moved to the index `to`. Entries between move by one place.
inline step_schedule moved(const step_schedule& s, const place& p, int to) {
  return with(without(s, p), to, entry_at(s, p), p.rank);
}
/// With an entry moved to the index that another one has, or to a later one.
inline step_schedule moved(const step_schedule& s, const place& p, const place& other, int later = 0) {
  return moved(s, p, place_of(s, other) + later);
}

/// Fails unless `verify` refuses a step with this text.
inline void check_refused(const step_schedule& s, const std::string& text) { CHECK(describe(verify(s)) == text); }

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
