// Whether a step is right: every use of a parameter after its gather, every reduction after the last gradient and
// before its update, buffers free when they are written, shared collectives in one order, memory within a limit. It
// relies on no generator, so it holds for a user's own step. Refusals: tests/unit/schedule/step_faults.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/schedule/step/step_schedule.hpp"
#include "plait/schedule/verify.hpp"

namespace plait {

// The errors of steps and the text of each. Errors of a pipeline's schedule are in schedule/errors.hpp.

/// Every way in which a step can be refused.
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
  buffer_taken,
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
  over_memory,
};

constexpr const char* text_of(step_error code) {
  switch (code) {
    case step_error::ok:
      return "ok";
    case step_error::unknown_unit:
      return "there is no such unit";
    case step_error::wrong_rank:
      return "the unit belongs to a stage of another rank";
    case step_error::pass_incomplete:
      return "a pass goes through all units of its stage, forward in their order and backward in the reverse";
    case step_error::message_within_pass:
      return "a message stands between the units of one pass, which is one action of the pipeline";
    case step_error::pipeline_refused:
      return "passes and messages are no schedule of a pipeline";
    case step_error::used_before_gather:
      return "a pass reads parameters that were not gathered";
    case step_error::used_after_release:
      return "a pass reads parameters that were released";
    case step_error::used_after_update:
      return "a pass reads parameters that were updated and not gathered since";
    case step_error::gathered_twice:
      return "parameters are gathered that lie gathered";
    case step_error::released_twice:
      return "parameters are released that do not lie gathered";
    case step_error::ends_gathered:
      return "parameters that begin a step released end it gathered";
    case step_error::ends_released:
      return "parameters that begin a step gathered end it released, or updated and not gathered";
    case step_error::reduced_too_early:
      return "a pass adds to a gradient whose reduction has begun: it must come after the last microbatch";
    case step_error::reduced_twice:
      return "a gradient is reduced twice, which would count it more than once";
    case step_error::reduction_missing:
      return "a gradient is never reduced";
    case step_error::copies_of_none:
      return "pieces of a gradient are summed over ranks with the same pieces, and the policy has none (hybrid)";
    case step_error::copies_before_reduction:
      return "pieces of a gradient are summed over ranks with the same pieces before the gradient is reduced";
    case step_error::copies_twice:
      return "pieces of a gradient are summed twice over ranks with the same pieces";
    case step_error::copies_missing:
      return "pieces of a gradient are never summed over the ranks with the same pieces";
    case step_error::ties_of_none:
      return "a gradient is summed over tied stages, and no other stage has its parameters (tied_to)";
    case step_error::ties_before_reduction:
      return "a gradient is summed over tied stages before it is reduced";
    case step_error::ties_before_copies:
      return "a gradient is summed over tied stages before it is summed over the ranks with the same pieces";
    case step_error::ties_twice:
      return "a gradient is summed over tied stages twice, which would count it more than once";
    case step_error::ties_missing:
      return "a gradient is never summed over the stages that share its parameters";
    case step_error::frozen:
      return "a frozen unit has no gradient to reduce and nothing to update";
    case step_error::buffer_taken:
      return "a pass adds to a gradient in a buffer that holds another unit's, whose reduction has not begun";
    case step_error::norm_too_early:
      return "the norm is taken before a gradient is reduced";
    case step_error::norm_twice:
      return "the norm is taken twice";
    case step_error::norm_missing:
      return "clipping needs a norm, and there is none";
    case step_error::updated_before_reduction:
      return "parameters are updated before their gradient is reduced";
    case step_error::updated_before_copies:
      return "parameters are updated before their gradient is summed over the ranks with the same pieces";
    case step_error::updated_before_ties:
      return "parameters are updated before their gradient is summed over the stages that share them";
    case step_error::updated_before_norm:
      return "parameters are updated before the norm by which their gradient is clipped";
    case step_error::updated_twice:
      return "parameters are updated twice";
    case step_error::update_missing:
      return "parameters are never updated";
    case step_error::collectives_cross:
      return "two ranks start the collectives that they share in different orders, which can deadlock";
    case step_error::collective_missing:
      return "a collective that another rank takes part in is never started there";
    case step_error::over_memory:
      return "parameters and gradients are over the limit";
  }
  return "?";
}

/// The outcome of a check: the entry that is wrong, and the one that it contradicts, if there is one.
struct step_verdict {
  step_error code = step_error::ok;
  int rank = -1;
  int position = -1;  ///< in the rank's program, from 0; -1: what is missing
  step_entry entry{};
  int other_rank = -1;
  int other_position = -1;  ///< -1: there is no other entry
  step_entry other{};
  double bytes = 0, limit = 0;  ///< of over_memory
  std::string pipeline{};       ///< of pipeline_refused: the verdict of `verify`

  bool ok() const { return code == step_error::ok; }
};

/// The verdict as one line: "rank 0, entry 7 (B0.0 of unit 1): a pass reads ...; entry 5 (release of unit 1)".
std::string describe(const step_verdict& v);

/// The bytes of an element, and how many ranks the data axes have; `most` is the limit of a rank, negative: none.
struct step_memory {
  double parameter = 4;  ///< where it is used
  double gradient = 4;
  int data_ranks = 1;
  double most = -1;
};

namespace detail {

/// The pipeline that a step's passes and messages make: a pass is an action where its last unit stands.
std::vector<std::vector<step_entry>> pipeline_of(const step_schedule& s);

}  // namespace detail

/// Whether a step is right: each rank's passes are whole, and its parameters, gradients and updates in order and within
/// the limit; passes and messages are a pipeline that finishes under the posting rule; the collectives that ranks share
/// stand in one order. These are checked in this order. The verdict names the first entry that is wrong, and the one
/// that it contradicts.
step_verdict verify(const step_schedule& s, const step_memory& memory = {}, const verify_options& options = {});

/// Throws `error` with the verdict's text unless the program of `rank` alone is right: what `verify` checks of one
/// rank.
void require_verified(const step_schedule& s, int rank, const step_memory& memory = {});

/// Throws `error` with the verdict's text unless `verify` accepts the step.
void require_verified(const step_schedule& s, const step_memory& memory = {}, const verify_options& options = {});

/// The most bytes of gathered parameters and gradients that a rank holds at a time; the step must be one that `verify`
/// accepts.
double peak_bytes(const step_schedule& s, int rank, step_memory memory);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/schedule/step/verify.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
