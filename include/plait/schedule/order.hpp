// Verifies that all collectives and messages of a step stand in one order, over all communicators and on all ranks of a
// mesh. Then none can deadlock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plait/core/collective.hpp"
#include "plait/core/types.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// A communicator as one rank sees it. Two ranks mean one communicator where name and ranks are equal.
struct posted_group {
  std::string name;        ///< its axes, and what it is for: "tp", "dp reductions", "pp gradients"
  std::vector<int> ranks;  ///< of the whole mesh, in the communicator's order

  friend bool operator==(const posted_group&, const posted_group&) = default;
};

/// One collective, or one message, that a rank starts.
struct posted_call {
  int group = -1;  ///< index into `posted_program::groups`
  collective kind = collective::barrier;
  /// Elements, as in `call`; of an all-to-all with a count for each peer, which may differ between ranks, 0.
  std::uint64_t count = 0;
  dtype type = dtype::u8;
  reduce_op op = reduce_op::sum;
  int peer = 0;  ///< the root of a broadcast, the other rank of a message, by its place in the group
  int tag = 0;   ///< of a message
  /// Calls of one number are posted together and wait for each other's ends only, as the messages of a ring
  /// (`comm_group`).
  int together = -1;
  bool asynchronous = false;  ///< whether the rank continues before it is complete
  int entry = -1;             ///< in which entry of the rank's program; -1: in none
};

/// The collectives and messages that one rank starts in a step, in order.
struct posted_program {
  std::vector<posted_group> groups;
  std::vector<posted_call> calls;
  std::vector<step_entry> entries;  ///< the rank's program, to which `posted_call::entry` refers

  const posted_group& group_of(const posted_call& c) const { return groups[static_cast<std::size_t>(c.group)]; }
};

/// "all_reduce of 64 over tp in F0.1 of unit 5"
std::string describe(const posted_program& of, const posted_call& c);

enum class order_error : std::uint8_t {
  ok,
  not_a_member,  ///< a rank uses a communicator in which it is not
  differ,        ///< two ranks' next calls on one communicator differ in their collective or its entry
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
/// call once the one before is complete, whether it would wait for it or not. A collective completes when all ranks of
/// its communicator have come to it, a message when both have. The k-th calls of a communicator meet each other. They
/// must be one collective, of one length and type, from one pass of one unit.
///
/// A step that ends here has one order of all communication: the order in which the calls completed. Every rank's own
/// order agrees with it. So the step ends under every rule by which backends post: the first incomplete call in that
/// order was started by all its ranks, or they are computing on the way to it. This holds for any number of streams,
/// queues and communicators, whichever calls are waited for at once, and however few can be under way. Each rank waits
/// at most for calls that it started before. These are complete, as they come before in the order. So the proof covers
/// asynchronous calls together with all others.
///
/// Throws where a program refers to a group that it does not have.
order_verdict verify_order(std::span<const posted_program> ranks);

/// Throws `error` with the verdict's text unless `verify_order` accepts the programs.
void require_one_order(std::span<const posted_program> ranks);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/schedule/order.ipp"  // IWYU pragma: keep
#endif
