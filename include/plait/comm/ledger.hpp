// The sums of a rank's communication: calls, bytes and seconds, per group and kind of collective. Single operations
// with their times are in comm/recorder.hpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "plait/comm/clock.hpp"
#include "plait/comm/wait_book.hpp"
#include "plait/core/collective.hpp"

namespace plait {

/// The communication of one rank, per label (the group's name, usually its mesh axes) and kind of collective. Not
/// synchronised: one ledger per rank. `wire` follows wire_bytes, so it is the traffic of the whole group and equal on
/// all its ranks, except for all_to_all_v, where each rank counts n times what it sends to others: the group's traffic
/// is the mean over its ranks.
struct ledger {
  struct entry {
    std::uint64_t calls = 0;
    std::uint64_t payload = 0;  ///< bytes that this rank handed in, as in wire_bytes
    std::uint64_t wire = 0;
    double seconds = 0;  ///< time this rank spent inside the communicator: in calls, in starting and in waiting

    entry& operator+=(const entry& other) {
      calls += other.calls;
      payload += other.payload;
      wire += other.wire;
      seconds += other.seconds;
      return *this;
    }
  };
  struct row {
    std::string label;
    std::array<entry, collective_kinds> kinds{};
    /// How long an operation over several ranks was under way: a call while it lasts, and what is started until it is
    /// complete (`request_times`), which is counted once it has been waited for. Of this time, the seconds of `kinds`
    /// were spent inside the communicator, and the rest was hidden.
    busy_time under_way{};
    bool timed = true;  ///< false: calls only enqueue work on a device, so that seconds are not those of communication
  };

  std::deque<row> rows;        ///< in the order of first use; a row never moves
  wait_book* waits = nullptr;  ///< where waits are written down by their place in a program; null: nowhere

  row& of(std::string_view label);

  entry total(std::string_view label, collective kind) const {
    for (const row& r : rows) {
      if (r.label == label) return r.kinds[static_cast<std::size_t>(kind)];
    }
    return {};
  }
  entry total(std::string_view label) const {
    entry sum;
    for (const row& r : rows) {
      if (r.label != label) continue;
      for (const entry& e : r.kinds) sum += e;
    }
    return sum;
  }
  entry total() const {
    entry sum;
    for (const row& r : rows) {
      for (const entry& e : r.kinds) sum += e;
    }
    return sum;
  }

  /// Starts a new period; the rows stay.
  void clear();
  /// Forgets what has been communicated since `before` was copied from this ledger, as by an observer;
  /// the rows stay. Then and now nothing may be under way.
  void restore(const ledger& before);
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/comm/ledger.ipp"  // IWYU pragma: keep
#endif
