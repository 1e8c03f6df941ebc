// The outcome of checking a schedule: ok, or an error of schedule/errors.hpp, with where it stands. It is a value and
// stops nothing: `require_verified` in schedule/verify.hpp throws. The one for layouts is layout/verdict.hpp.
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
  program_step step{};      ///< what stands there, or is missing
  int other_rank = -1;      ///< whom it waits for
  int other_position = -1;  ///< where that one is stuck; -1: it is through
  program_step other_step{};
  int below = 0;  ///< nearest legal number of microbatches (or limit on activations) below; 0: none
  int above = 0;  ///< ... and above

  constexpr bool ok() const { return code == schedule_error::ok; }
};

/// The verdict as one line: "rank 2, action 5 (B3.0): a backward comes before ...".
inline std::string describe(const schedule_verdict& v) {
  if (v.ok()) return "ok";
  std::string text;
  const bool in_program = v.code >= schedule_error::send_misplaced;
  if (v.rank >= 0) {
    append(text, {"rank ", v.rank, ", "});
    if (v.position >= 0) append(text, {in_program ? "step " : "action ", v.position, " "});
    text += (in_program ? "(" + describe(v.step) : "(" + describe(v.step.action)) + "): ";
  }
  text += text_of(v.code);
  if (v.other_rank >= 0) {
    append(text, {"; it waits for rank ", v.other_rank});
    if (v.other_position >= 0)
      text += in_program
                  ? cat({", which is stuck at step ", v.other_position, " (", describe(v.other_step), ")"})
                  : cat({", which is stuck at action ", v.other_position, " (", describe(v.other_step.action), ")"});
  }
  if (v.below > 0 || v.above > 0) {
    const bool both = v.below > 0 && v.above > 0;
    text += v.code == schedule_error::over_activation_limit ? "; the nearest legal limit is "
            : both                                          ? "; the nearest legal numbers of microbatches are "
                                                            : "; the nearest legal number of microbatches is ";
    if (v.below > 0) text += std::to_string(v.below);
    if (both) text += " and ";
    if (v.above > 0) text += std::to_string(v.above);
  }
  return text;
}

}  // namespace plait
