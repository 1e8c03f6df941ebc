// Two records of a rank's single operations: the flight recorder, which plait's backends keep for the texts of errors,
// and the recorder, whose events have times and exist only where they are asked for. Sums are in comm/ledger.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/clock.hpp"
#include "plait/core/collective.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

/// "512 B", "64 KB", "1.5 MB": powers of 1024, at most one decimal.
std::string bytes_text(std::uint64_t bytes);

/// The last operations of one rank, kept for the text of an error. Written by its rank for every operation, so it is a
/// fixed array and never allocates; the states may be read while the rank runs.
class flight_recorder {
 public:
  static constexpr std::size_t capacity = 16;
  enum class state : std::uint8_t { started, waiting, completed };

  /// Returns a ticket for `mark`.
  std::uint64_t start(std::string_view label, std::uint64_t sequence, const char* name, std::uint64_t bytes) {
    entry& e = entries_[next_ % capacity];
    const std::size_t n = std::min(label.size(), e.label.size() - 1);
    std::copy_n(label.data(), n, e.label.data());
    e.label[n] = '\0';
    e.sequence = sequence;
    e.name = name;
    e.bytes = bytes;
    e.now.store(state::started, std::memory_order_relaxed);
    return next_++;
  }

  /// Notes how far operation `ticket` is; one that has left the ring already is skipped.
  void mark(std::uint64_t ticket, state now) {
    if (next_ - ticket <= capacity) entries_[ticket % capacity].now.store(now, std::memory_order_relaxed);
  }

  /// One line, oldest first: "all_reduce #3 on 'tp' 4 KB completed; send #1 on 'pp' 64 B waiting". The last `most`.
  std::string text(std::size_t most = 4) const;

 private:
  static const char* name_of(state s) {
    return s == state::started ? "started" : s == state::waiting ? "waiting" : "completed";
  }
  struct entry {
    std::array<char, 32> label{};
    std::uint64_t sequence = 0;
    const char* name = "";
    std::uint64_t bytes = 0;
    std::atomic<state> now{state::started};
  };
  std::array<entry, capacity> entries_{};
  std::uint64_t next_ = 0;
};

/// Operations of one rank with their times, for timelines. Not synchronised: one recorder per rank. With a capacity it
/// is a ring that keeps the last ones.
class recorder {
 public:
  struct event {
    int label = 0;  ///< index into labels()
    collective kind = collective::barrier;
    std::uint64_t bytes = 0;  ///< what this rank hands in, as in wire_bytes
    double start = 0;         ///< comm_clock seconds
    double end = 0;           ///< 0 while an asynchronous operation has not been waited for, then `request_times` says
    double waited = 0;        ///< seconds of [start, end] that the rank spent inside the communicator
    bool asynchronous = false;
    int place = -1;  ///< where in its program the rank was (`wait_book`); -1: at no place
  };

  explicit recorder(std::size_t capacity = 0) : capacity_(capacity) {}

  int label(std::string_view name);

  /// Returns a ticket for `find`.
  std::uint64_t add(const event& e);

  /// The event of a ticket, or nullptr once the ring has overwritten it, or it was cleared.
  event* find(std::uint64_t ticket) {
    if (ticket < first_ || ticket >= added_ || added_ - ticket > events_.size()) return nullptr;
    return &events_[place_of(ticket)];
  }

  /// Oldest first.
  std::vector<event> events() const;
  const std::vector<std::string>& labels() const { return labels_; }
  /// Since the last `clear`.
  std::uint64_t added() const { return added_ - first_; }
  /// Forgets all events. Tickets go on, so that an operation under way finds no other's event.
  void clear() {
    events_.clear();
    first_ = added_;
  }

 private:
  std::size_t place_of(std::uint64_t ticket) const {
    return static_cast<std::size_t>(capacity_ == 0 ? ticket - first_ : (ticket - first_) % capacity_);
  }

  std::size_t capacity_;
  std::uint64_t added_ = 0, first_ = 0;  ///< tickets that were given, and the first since the last `clear`
  std::vector<event> events_;
  std::vector<std::string> labels_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/comm/recorder.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
