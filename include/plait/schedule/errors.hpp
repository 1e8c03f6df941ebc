// The errors of schedules and the text of each, for compilers and exceptions alike. The conditions are elsewhere:
// schedule/verify.hpp, schedule/posting.hpp, and `check` of a policy. How an error is raised: core/refusal.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plait/core/refusal.hpp"
#include "plait/core/type_list.hpp"
#include "plait/schedule/pipeline_shape.hpp"

namespace plait {

/// Every way in which a schedule can be refused.
enum class schedule_error : std::uint8_t {
  ok,
  shape_illegal = 64,  // behind those of layouts: see `refused`
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

#define PLAIT_TEXT                                                                                                \
  "the shape of a pipeline needs 1 to 1024 ranks, 1 to 255 chunks on each and 1 to 65535 microbatches, of which " \
  "the product is at most 4194304, and a schedule has one list of actions for each rank"
template <>
inline constexpr const char* error_text<schedule_error::shape_illegal> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::shape_illegal, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "the policy has another number of chunks, or places them otherwise, than the shape says"
template <>
inline constexpr const char* error_text<schedule_error::placement_differs> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::placement_differs, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                   \
  "interleaved 1F1B passes groups of as many microbatches as the pipeline has ranks: the number of " \
  "microbatches must be divisible by the number of ranks"
template <>
inline constexpr const char* error_text<schedule_error::microbatches_do_not_divide> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::microbatches_do_not_divide, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "this schedule fills both directions of the pipeline: it needs more microbatches"
template <>
inline constexpr const char* error_text<schedule_error::too_few_microbatches> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::too_few_microbatches, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "an action names a chunk that its rank does not have"
template <>
inline constexpr const char* error_text<schedule_error::unknown_chunk> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::unknown_chunk, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "an action names a microbatch that the step does not have"
template <>
inline constexpr const char* error_text<schedule_error::unknown_microbatch> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::unknown_microbatch, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "an action comes twice: each stage computes each microbatch once"
template <>
inline constexpr const char* error_text<schedule_error::done_twice> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::done_twice, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a microbatch has both a whole backward B and a split one, I and W, in one stage"
template <>
inline constexpr const char* error_text<schedule_error::two_backwards> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::two_backwards, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a backward comes before the forward of its microbatch in the same stage"
template <>
inline constexpr const char* error_text<schedule_error::backward_before_forward> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::backward_before_forward, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a weight gradient W comes before the input gradient I of its microbatch in the same stage"
template <>
inline constexpr const char* error_text<schedule_error::weight_before_input> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::weight_before_input, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a forward is missing: each stage needs one F of each microbatch"
template <>
inline constexpr const char* error_text<schedule_error::forward_missing> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::forward_missing, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a backward is missing: each stage needs one B, or one I and one W, of each microbatch"
template <>
inline constexpr const char* error_text<schedule_error::backward_missing> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::backward_missing, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a forward would keep more activations than the limit allows"
template <>
inline constexpr const char* error_text<schedule_error::over_activation_limit> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::over_activation_limit, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "the schedule cannot finish: ranks wait for each other's actions in a circle"
template <>
inline constexpr const char* error_text<schedule_error::never_ready> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::never_ready, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a send stands before the action that makes it, or nothing makes it"
template <>
inline constexpr const char* error_text<schedule_error::send_misplaced> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::send_misplaced, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a receive stands after the action that needs it, or nothing needs it"
template <>
inline constexpr const char* error_text<schedule_error::receive_misplaced> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::receive_misplaced, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a rank sends or receives one message twice"
template <>
inline constexpr const char* error_text<schedule_error::transfer_twice> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::transfer_twice, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "an action needs a message that its rank never receives, or a message is never sent"
template <>
inline constexpr const char* error_text<schedule_error::transfer_missing> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::transfer_missing, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "two ranks expect different messages first: they would receive each other's data in the wrong order"
template <>
inline constexpr const char* error_text<schedule_error::messages_cross> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::messages_cross, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "the messages deadlock under this posting rule: ranks wait for each other's in a circle"
template <>
inline constexpr const char* error_text<schedule_error::deadlock> = PLAIT_TEXT;
template <class... Facts>
struct refused<schedule_error::deadlock, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

/// The text of an error, as the `static_assert` has it.
constexpr const char* text_of(schedule_error e) {
  return detail::text_among<schedule_error, schedule_error::shape_illegal, schedule_error::deadlock>(e);
}

}  // namespace plait
