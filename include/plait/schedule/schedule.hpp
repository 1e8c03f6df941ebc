// A pipeline schedule as data: sizes, and the order of each rank's actions. The schedule of learning rates is in
// parallel/optim/lr_schedule.hpp.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "plait/schedule/action.hpp"
#include "plait/schedule/pipeline_shape.hpp"

namespace plait {

static_assert(forward_of(max_chunks, 0).chunk == max_chunks && forward_of(0, max_microbatches).microbatch == 65535,
              "an action has room for every legal chunk and microbatch");

/// A short text that works in constant expressions of every compiler; what does not fit is cut off.
struct schedule_name {
  char text[32]{};

  constexpr schedule_name() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): a name is written as a literal
  constexpr schedule_name(std::string_view name) {
    for (std::size_t i = 0; i < name.size() && i + 1 < sizeof text; ++i) text[i] = name[i];
  }
  constexpr schedule_name(const char* name) : schedule_name(std::string_view(name)) {}
  constexpr std::string_view view() const { return text; }
  std::string str() const { return text; }

  friend constexpr bool operator==(const schedule_name&, const schedule_name&) = default;
};

/// Who computes what in which order: the whole of a pipeline schedule, as data. Communication is derived from it
/// (`program.hpp`), so are its times (`simulate.hpp`) and whether it is legal (`verify.hpp`).
///
///     schedule s = parse_schedule("interleaved:2", ranks, microbatches);  // or interleaved<2>::make(...), or your own
///     require_verified(s);                                                // complete, ordered, free of deadlock
///     auto programs = rank_program(s, costs);                 // what each rank computes, sends and receives
///     for (const step_entry& step : programs[my_rank]) ...  // an executor
///
/// Usable in constant expressions, where it must not outlive the expression.
struct schedule {
  schedule_name name;
  pipeline_shape shape;
  std::vector<std::vector<action>> order;  ///< of each rank, first to last
};

}  // namespace plait
