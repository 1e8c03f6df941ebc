#pragma once

#include <cstdint>
#include <string>

#include "plait/schedule/program.hpp"

/// Every way in which a schedule can be refused: a code, and the text that the `static_assert` and the exception share.
#define PLAIT_SCHEDULE_ERRORS(X)                                                                                      \
  X(shape_illegal, PLAIT_SCHEDULE_SIZES ", and a schedule has one list of actions for each rank")                     \
  X(placement_differs, "the policy has another number of chunks, or places them otherwise, than the shape says")      \
  X(microbatches_do_not_divide,                                                                                       \
    "interleaved 1F1B passes groups of as many microbatches as there are pipeline stages: the number of "             \
    "microbatches must be divisible by the number of stages")                                                         \
  X(too_few_microbatches, "this schedule fills both directions of the pipeline: it needs more microbatches")          \
  X(unknown_chunk, "an action names a chunk that its rank does not have")                                             \
  X(unknown_microbatch, "an action names a microbatch that the step does not have")                                   \
  X(done_twice, "an action comes twice: each stage computes each microbatch once")                                    \
  X(two_backwards, "a microbatch has both a whole backward B and a split one, I and W, in one stage")                 \
  X(backward_before_forward, "a backward comes before the forward of its microbatch in the same stage")               \
  X(weight_before_input, "a weight gradient W comes before the input gradient I of its microbatch in the same stage") \
  X(forward_missing, "a forward is missing: each stage needs one F of each microbatch")                               \
  X(backward_missing, "a backward is missing: each stage needs one B, or one I and one W, of each microbatch")        \
  X(over_activation_limit, "a forward would keep more activations than the limit allows")                             \
  X(never_ready, "the schedule cannot finish: ranks wait for each other's actions in a circle")                       \
  X(send_misplaced, "a send stands before the action that makes it, or nothing makes it")                             \
  X(receive_misplaced, "a receive stands after the action that needs it, or nothing needs it")                        \
  X(transfer_twice, "a rank sends or receives one message twice")                                                     \
  X(transfer_missing, "an action needs a message that its rank never receives, or a message is never sent")           \
  X(messages_cross,                                                                                                   \
    "two ranks expect different messages first: they would receive each other's data in the wrong order")             \
  X(deadlock, "the messages deadlock under this posting rule: ranks wait for each other's in a circle")

namespace plait {

/// What the verifier says of a schedule.
enum class schedule_rule : std::uint8_t {
  ok,
#define PLAIT_CODE(code, text) code,
  PLAIT_SCHEDULE_ERRORS(PLAIT_CODE)
#undef PLAIT_CODE
};

constexpr const char* text_of(schedule_rule r) {
  switch (r) {
#define PLAIT_TEXT(code, text) \
  case schedule_rule::code:    \
    return text;
    PLAIT_SCHEDULE_ERRORS(PLAIT_TEXT)
#undef PLAIT_TEXT
    case schedule_rule::ok:
      break;
  }
  return "ok";
}

/// The outcome of a check with its facts: the first offending action or message, and where it stands.
struct schedule_verdict {
  schedule_rule code = schedule_rule::ok;
  int rank = -1;            ///< -1: no particular one
  int position = -1;        ///< in the rank's order (actions) or program (steps), from 0; -1: none
  program_step step{};      ///< what stands there, or is missing
  int other_rank = -1;      ///< whom it waits for
  int other_position = -1;  ///< where that one is stuck; -1: it is through
  program_step other_step{};
  int below = 0;  ///< nearest legal number of microbatches (or limit on activations) below; 0: none
  int above = 0;  ///< ... and above

  constexpr bool ok() const { return code == schedule_rule::ok; }
};

/// The verdict as one line: "rank 2, action 5 (B3.0): a backward comes before ...".
inline std::string describe(const schedule_verdict& v) {
  if (v.ok()) return "ok";
  std::string text;
  const bool in_program = v.code >= schedule_rule::send_misplaced;
  if (v.rank >= 0) {
    text += "rank " + std::to_string(v.rank) + ", ";
    if (v.position >= 0) text += (in_program ? "step " : "action ") + std::to_string(v.position) + " ";
    text += (in_program ? "(" + describe(v.step) : "(" + describe(v.step.action)) + "): ";
  }
  text += text_of(v.code);
  if (v.other_rank >= 0) {
    text += "; it waits for rank " + std::to_string(v.other_rank);
    if (v.other_position >= 0)
      text += in_program
                  ? ", which is stuck at step " + std::to_string(v.other_position) + " (" + describe(v.other_step) + ")"
                  : ", which is stuck at action " + std::to_string(v.other_position) + " (" +
                        describe(v.other_step.action) + ")";
  }
  if (v.below > 0 || v.above > 0) {
    const bool both = v.below > 0 && v.above > 0;
    text += v.code == schedule_rule::over_activation_limit ? "; the nearest legal limit is "
            : both                                         ? "; the nearest legal numbers of microbatches are "
                                                           : "; the nearest legal number of microbatches is ";
    if (v.below > 0) text += std::to_string(v.below);
    if (both) text += " and ";
    if (v.above > 0) text += std::to_string(v.above);
  }
  return text;
}

}  // namespace plait
