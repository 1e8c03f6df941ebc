// Every collective and message of a step, as one rank starts them: over which ranks, and within which entry of its
// program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/collective.hpp"
#include "plait/core/dtype.hpp"
#include "plait/schedule/step/step_schedule.hpp"

namespace plait {

/// A communicator as one rank sees it. Two ranks mean the same one where name and ranks are equal.
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
  bool asynchronous = false;  ///< whether the rank goes on before it is complete
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

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/schedule/step/posted.ipp"  // IWYU pragma: keep
#endif
