// Whether all collectives and messages of a step, over all communicators and on all ranks of a mesh, stand in one
// order, so that none can deadlock. What a rank computes between them is schedule/step/verify.hpp's. Refusals:
// tests/unit/schedule/order.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "plait/schedule/step/posted.hpp"

namespace plait {

enum class order_error : std::uint8_t {
  ok,
  not_a_member,  ///< a rank uses a communicator in which it is not
  differ,        ///< two ranks' next calls on one communicator are not the same collective of the same entry
  missing,       ///< a rank ends its step before a call that another rank waits for
  cross,         ///< ranks wait for each other in a circle
};

/// The outcome: two calls that contradict each other, on two ranks.
struct order_verdict {
  order_error code = order_error::ok;
  int rank = -1, other_rank = -1;
  std::string call{}, other_call{};  ///< described; `other_call` is empty where the other rank starts nothing more
  int circle = 0;                    ///< of `cross`: how many ranks wait for each other
  std::int64_t completed = 0;        ///< of a step that is right: how many collectives and messages

  bool ok() const { return code == order_error::ok; }
};

/// "ok", or "rank 1, all_reduce of 64 over tp in F0.0 of unit 2: ...; see rank 0, all_reduce of 64 over cp in ..."
std::string describe(const order_verdict& v);

/// Runs the programs of all ranks of a mesh, by rank, under the strictest rule that there is: a rank starts its next
/// call once the one before is complete, whether it would wait for it or not, and a collective completes when all
/// ranks of its communicator have come to it, a message when both have. The k-th calls of a communicator meet each
/// other, and must be one collective, of one length and type, from the same pass of the same unit.
///
/// A step that ends here has one order of everything that is communicated, with which every rank's own order agrees:
/// that in which the calls completed. So it ends under every rule by which backends post: however many streams,
/// queues and communicators there are, whichever calls are waited for at once and whichever later, and however few of
/// them can be under way at a time, the first call in that order that is not complete has been started by all its
/// ranks, or they are computing on the way to it: each waits at most for calls that it started before, which are
/// complete, as they come before in the order. Calls that are asynchronous are so proven with those that are not.
///
/// Throws where a program refers to a group that it has not.
order_verdict verify_order(std::span<const posted_program> ranks);

/// Throws `error` with the verdict's text unless `verify_order` accepts the programs.
void require_one_order(std::span<const posted_program> ranks);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/schedule/step/order.ipp"  // IWYU pragma: keep
#endif
