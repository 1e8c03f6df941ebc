// Whether a step is right: every use of a parameter after its gather, every reduction after the last gradient and
// before its update, buffers free when they are written, shared collectives in one order, memory within a limit. It
// relies on no generator, so it holds for a user's own step. Refusals: tests/unit/schedule/step_faults.cpp.
#pragma once

#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/step/errors.hpp"
#include "plait/schedule/verify.hpp"

namespace plait {

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
