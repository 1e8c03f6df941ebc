// The outcome of checking a schedule: ok, or an error of schedule/errors.hpp, with where it stands. The one for layouts
// is layout/verdict.hpp.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/text.hpp"
#include "plait/schedule/errors.hpp"
#include "plait/schedule/program.hpp"

namespace plait {

/// The outcome of a check with its facts: the first offending action or message, and where it stands.
struct schedule_verdict {
  schedule_error code = schedule_error::ok;
  int rank = -1;            ///< -1: no particular one
  int position = -1;        ///< in the rank's order (actions) or program (steps), from 0; -1: none
  step_entry step{};        ///< what stands there, or is missing
  int other_rank = -1;      ///< whom it waits for
  int other_position = -1;  ///< where that one is stuck; -1: it is through
  step_entry other_step{};
  int below = 0;  ///< nearest legal number of microbatches (or limit on activations) below; 0: none
  int above = 0;  ///< ... and above

  constexpr bool ok() const { return code == schedule_error::ok; }
};

/// The verdict as one line: "rank 2, action 5 (B3.0): a backward comes before ...".
std::string describe(const schedule_verdict& v);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/schedule/verdict.ipp"  // IWYU pragma: keep
#endif
