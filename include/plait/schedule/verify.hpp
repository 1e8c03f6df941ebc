// Whether a schedule is complete, ordered, within its memory and free of deadlock; also its peak of activations. For
// a policy in a `static_assert` see schedule/verified.hpp. Refusals: tests/unit/schedule/verify.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/posting.hpp"

namespace plait {

/// Demands of `verify` besides that a schedule is complete, ordered and finishes.
struct verify_options {
  posting_rule posting = posting_rule::global_list;
  /// Most activations that a rank may keep, in microbatch-stages (one of v chunks counts 1/v); negative: any.
  double max_activations = -1;
};

namespace detail {

/// The largest number of chunk activations that a rank keeps at once: from F until B or W, in its order alone.
constexpr int peak_chunks(const std::vector<action>& order) {
  int held = 0, peak = 0;
  for (const action& a : order) {
    if (a.kind == action_kind::forward) peak = std::max(peak, ++held);
    if (frees_activations(a.kind)) --held;
  }
  return peak;
}

constexpr schedule_verdict check_shape(const pipeline_shape& shape) {
  if (!shape.legal()) return {.code = schedule_error::shape_illegal};
  return {};
}

/// Each stage computes each microbatch once forward and once backward, in that order, within the limit.
constexpr schedule_verdict check_actions(const schedule& s, double max_activations) {
  const pipeline_shape& shape = s.shape;
  if (const schedule_verdict v = check_shape(shape); !v.ok()) return v;
  if (s.order.size() != static_cast<std::size_t>(shape.ranks)) return {.code = schedule_error::shape_illegal};

  const auto bit = [](action_kind kind) { return static_cast<unsigned char>(1u << static_cast<unsigned>(kind)); };
  constexpr unsigned char f = 1, b = 2, i_half = 4, w_half = 8;
  std::vector<unsigned char> seen(static_cast<std::size_t>(shape.stages() * shape.microbatches), 0);
  for (int r = 0; r < shape.ranks; ++r) {
    const std::vector<action>& order = s.order[static_cast<std::size_t>(r)];
    int held = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const action a = order[i];
      schedule_verdict wrong{.rank = r, .position = static_cast<int>(i), .step = {step_op::pass, -1, a, {}}};
      const auto refuse = [&](schedule_error code) {
        wrong.code = code;
        return wrong;
      };
      if (a.chunk >= shape.chunks) return refuse(schedule_error::unknown_chunk);
      if (a.microbatch >= shape.microbatches) return refuse(schedule_error::unknown_microbatch);
      unsigned char& flags =
          seen[static_cast<std::size_t>(shape.stage_of(r, a.chunk) * shape.microbatches + a.microbatch)];
      if ((flags & bit(a.kind)) != 0) return refuse(schedule_error::done_twice);
      if (a.kind != action_kind::forward && (flags & f) == 0) return refuse(schedule_error::backward_before_forward);
      if ((a.kind == action_kind::backward && (flags & (i_half | w_half)) != 0) ||
          (a.kind != action_kind::backward && (flags & b) != 0))
        return refuse(schedule_error::two_backwards);
      if (a.kind == action_kind::weight_backward && (flags & i_half) == 0)
        return refuse(schedule_error::weight_before_input);
      flags |= bit(a.kind);
      if (a.kind == action_kind::forward) ++held;
      if (frees_activations(a.kind)) --held;
      if (max_activations >= 0 && held > max_activations * shape.chunks + 1e-9) {
        wrong.above = (peak_chunks(order) + shape.chunks - 1) / shape.chunks;
        return refuse(schedule_error::over_activation_limit);
      }
    }
  }
  for (int r = 0; r < shape.ranks; ++r)
    for (int chunk = 0; chunk < shape.chunks; ++chunk)
      for (int mb = 0; mb < shape.microbatches; ++mb) {
        const unsigned char flags = seen[static_cast<std::size_t>(shape.stage_of(r, chunk) * shape.microbatches + mb)];
        if ((flags & f) == 0)
          return {.code = schedule_error::forward_missing,
                  .rank = r,
                  .step = {step_op::pass, -1, forward_of(chunk, mb), {}}};
        if ((flags & (b | w_half)) == 0)
          return {.code = schedule_error::backward_missing,
                  .rank = r,
                  .step = {step_op::pass,
                           -1,
                           (flags & i_half) != 0 ? weight_backward_of(chunk, mb) : backward_of(chunk, mb),
                           {}}};
      }
  return {};
}

/// The action that a rank is stuck at, and for whom it waits.
constexpr schedule_verdict name_stuck(const schedule& s, const std::vector<int>& done) {
  for (int r = 0; r < s.shape.ranks; ++r) {
    const auto rank = static_cast<std::size_t>(r);
    const auto at = static_cast<std::size_t>(done[rank]);
    if (at == s.order[rank].size()) continue;
    const action a = s.order[rank][at];
    const int stage = s.shape.stage_of(r, a.chunk);
    schedule_verdict v{.code = schedule_error::never_ready,
                       .rank = r,
                       .position = done[rank],
                       .step = {step_op::pass, -1, a, {}},
                       .other_rank = s.shape.rank_of(a.kind == action_kind::forward ? stage - 1 : stage + 1)};
    const auto other = static_cast<std::size_t>(v.other_rank);
    if (const auto theirs = static_cast<std::size_t>(done[other]); theirs < s.order[other].size()) {
      v.other_position = done[other];
      v.other_step.pass = s.order[other][theirs];
    }
    return v;
  }
  return {};
}

}  // namespace detail

/// The most activations that a rank keeps at once, in microbatch-stages (one of v chunks counts 1/v), from the start of
/// a forward to the end of its B or W.
constexpr double peak_activations(const schedule& s, int rank) {
  return static_cast<double>(detail::peak_chunks(s.order[static_cast<std::size_t>(rank)])) / s.shape.chunks;
}
/// Of the rank that keeps the most.
constexpr double peak_activations(const schedule& s) {
  double peak = 0;
  for (std::size_t r = 0; r < s.order.size(); ++r) peak = std::max(peak, peak_activations(s, static_cast<int>(r)));
  return peak;
}

/// Whether a schedule is complete (each stage computes each microbatch once: F, and B or I and W), ordered (F before B
/// or I, I before W), keeps to the limit on activations, and finishes under the posting rule. The verdict names the
/// first action or message that is wrong.
///
/// Costs do not matter: a schedule that finishes with some costs finishes with any. Under `global_list` the programs of
/// unit costs are run; those of other costs finish by the argument that `rank_program` gives.
constexpr schedule_verdict verify(const schedule& s, const verify_options& options = {}) {
  if (const schedule_verdict v = detail::check_actions(s, options.max_activations); !v.ok()) return v;
  simulation times;
  std::vector<int> done;
  if (!detail::run_schedule(s, {}, times, done)) return detail::name_stuck(s, done);
  // Not one conditional expression: g++ 12 destroys its operands twice in constant expressions.
  if (options.posting != posting_rule::global_list)
    return detail::run_programs(s.shape, detail::program_in_own_order(s), options.posting);
  return detail::run_programs(s.shape, rank_program(s, times), options.posting);
}

/// Throws `error` with the schedule's name, sizes and the verdict's text unless `verify` accepts it.
inline void require_verified(const schedule& s, const verify_options& options = {}) {
  if (const schedule_verdict v = verify(s, options); !v.ok())
    fail({"schedule ", s.name.str(), " (", s.shape.ranks, " ranks, ", s.shape.chunks, " chunks each, ",
          s.shape.microbatches, " microbatches): ", describe(v)});
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
