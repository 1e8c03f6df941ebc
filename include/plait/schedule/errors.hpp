// The errors of schedules with their texts, used by compile errors and exceptions alike. schedule/verify.hpp and
// `check` of a policy return them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// Every error of a schedule.
enum class schedule_error : std::uint8_t {
  ok,
  shape_illegal = 64,  // after the errors of layouts: see `refused`
  placement_differs,
  microbatches_do_not_divide,
  too_few_microbatches,
  unknown_chunk,
  unknown_microbatch,
  done_twice,
  two_backwards,
  backward_before_forward,
  weight_before_input,
  forward_missing,
  backward_missing,
  over_activation_limit,
  never_ready,
  send_misplaced,
  receive_misplaced,
  transfer_twice,
  transfer_missing,
  messages_cross,
  deadlock,
};

template <>
inline constexpr const char* error_text<schedule_error::ok> = "ok";

#define PLAIT_TEXT PLAIT_SCHEDULE_SIZES ", and a schedule has one list of actions for each rank"
PLAIT_ERROR(schedule_error::shape_illegal) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "the policy's number of chunks or placement of stages differs from the shape's"
PLAIT_ERROR(schedule_error::placement_differs) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                   \
  "interleaved 1F1B passes groups of as many microbatches as the pipeline has ranks: the number of " \
  "microbatches must be divisible by the number of ranks"
PLAIT_ERROR(schedule_error::microbatches_do_not_divide) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "this schedule fills both directions of the pipeline: it needs more microbatches"
PLAIT_ERROR(schedule_error::too_few_microbatches) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "an action names a chunk that its rank does not have"
PLAIT_ERROR(schedule_error::unknown_chunk) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "an action names a microbatch that the step does not have"
PLAIT_ERROR(schedule_error::unknown_microbatch) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "an action comes twice: each stage computes each microbatch once"
PLAIT_ERROR(schedule_error::done_twice) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a microbatch has both a whole backward B and a split one, I and W, in one stage"
PLAIT_ERROR(schedule_error::two_backwards) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a backward comes before the forward of its microbatch in the same stage"
PLAIT_ERROR(schedule_error::backward_before_forward) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a weight gradient W comes before the input gradient I of its microbatch in the same stage"
PLAIT_ERROR(schedule_error::weight_before_input) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a forward is missing: each stage needs one F of each microbatch"
PLAIT_ERROR(schedule_error::forward_missing) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a backward is missing: each stage needs one B, or one I and one W, of each microbatch"
PLAIT_ERROR(schedule_error::backward_missing) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a forward would keep more activations than the limit allows"
PLAIT_ERROR(schedule_error::over_activation_limit) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "the schedule cannot finish: ranks wait for each other's actions in a circle"
PLAIT_ERROR(schedule_error::never_ready) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a send stands before the action that makes it, or nothing makes it"
PLAIT_ERROR(schedule_error::send_misplaced) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a receive stands after the action that needs it, or nothing needs it"
PLAIT_ERROR(schedule_error::receive_misplaced) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a rank sends or receives one message twice"
PLAIT_ERROR(schedule_error::transfer_twice) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "an action needs a message that its rank never receives, or a message is never sent"
PLAIT_ERROR(schedule_error::transfer_missing) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "two ranks expect different messages first: they would receive each other's data in the wrong order"
PLAIT_ERROR(schedule_error::messages_cross) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "the messages deadlock under this posting rule: ranks wait for each other's in a circle"
PLAIT_ERROR(schedule_error::deadlock) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

/// The text of an error, equal to its `static_assert`.
constexpr const char* text_of(schedule_error e) {
  return detail::text_among<schedule_error, schedule_error::shape_illegal, schedule_error::deadlock>(e);
}

/// Every error of a step.
enum class step_error : std::uint8_t {
  ok,
  unknown_unit,
  wrong_rank,
  pass_incomplete,
  message_within_pass,
  pipeline_refused,
  used_before_gather,
  used_after_release,
  used_after_update,
  gathered_twice,
  released_twice,
  ends_gathered,
  ends_released,
  reduced_too_early,
  reduced_twice,
  reduction_missing,
  copies_of_none,
  copies_before_reduction,
  copies_twice,
  copies_missing,
  ties_of_none,
  ties_before_reduction,
  ties_before_copies,
  ties_twice,
  ties_missing,
  frozen,
  norm_too_early,
  norm_twice,
  norm_missing,
  updated_before_reduction,
  updated_before_copies,
  updated_before_ties,
  updated_before_norm,
  updated_twice,
  update_missing,
  collectives_cross,
  collective_missing,
  offload_of_none,
  offloaded_twice,
  dropped_without_copy,
  dropped_in_use,
  reloaded_on_device,
  used_while_copied,
  used_after_drop,
  over_memory,
  over_host_memory,
};

/// The text of an error, from a table in the order of the enumeration.
constexpr const char* text_of(step_error code) {
  constexpr const char* texts[] = {
      "ok",
      "there is no such unit",
      "the unit belongs to a stage of another rank",
      "a pass goes through all units of its stage, forward in their order and backward in the reverse",
      "a message stands between the units of one pass, which is one action of the pipeline",
      "passes and messages are not a schedule of a pipeline",
      "a pass reads parameters that were not gathered",
      "a pass reads parameters that were released",
      "a pass reads parameters that were updated and not gathered since",
      "parameters are gathered that are already gathered",
      "parameters are released that are not gathered",
      "parameters that begin a step released end it gathered",
      "parameters that begin a step gathered end it released, or updated and not gathered",
      "a pass adds to a gradient whose reduction has begun: it must come after the last microbatch",
      "a gradient is reduced twice, which would count it more than once",
      "a gradient is never reduced",
      "pieces of a gradient are summed over ranks with the same pieces, and the policy has none (hybrid)",
      "pieces of a gradient are summed over ranks with the same pieces before the gradient is reduced",
      "pieces of a gradient are summed twice over ranks with the same pieces",
      "pieces of a gradient are never summed over the ranks with the same pieces",
      "a gradient is summed over tied stages, and no other stage has its parameters (tied_to)",
      "a gradient is summed over tied stages before it is reduced",
      "a gradient is summed over tied stages before it is summed over the ranks with the same pieces",
      "a gradient is summed over tied stages twice, which would count it more than once",
      "a gradient is never summed over the stages that share its parameters",
      "a frozen unit has no gradient to reduce and nothing to update",
      "the norm is taken before a gradient is reduced",
      "the norm is taken twice",
      "clipping needs a norm, and there is none",
      "parameters are updated before their gradient is reduced",
      "parameters are updated before their gradient is summed over the ranks with the same pieces",
      "parameters are updated before their gradient is summed over the stages that share them",
      "parameters are updated before the norm by which their gradient is clipped",
      "parameters are updated twice",
      "parameters are never updated",
      "two ranks start the collectives that they share in different orders, which can deadlock",
      "a collective that another rank takes part in is never started there",
      "activations are offloaded that no forward pass has kept, or that a backward pass has used",
      "activations are offloaded twice",
      "activations are dropped from the device, and no copy of them to the host was started",
      "activations are dropped before the forward pass of the next unit, which may read them",
      "activations are reloaded that are on the device",
      "a backward pass frees activations whose copy to the host was not waited for",
      "a backward pass reads activations that were dropped and not reloaded",
      "parameters, gradients and activations are over the limit",
      "offloaded activations are over the limit of the host's memory",
  };
  static_assert(std::size(texts) == static_cast<std::size_t>(step_error::over_host_memory) + 1, "an error has no text");
  return texts[static_cast<std::size_t>(code)];
}

}  // namespace plait
