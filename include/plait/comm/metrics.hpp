// Metrics of one rank's communication: a clock, waits by place in the program, sums by axes and kind, and single
// operations. Timelines and error texts use them; a `counted` communicator (comm/any_communicator.hpp) writes them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#ifndef PLAIT_COMPILED
#include <chrono>
#include <cstdio>
#endif

#include "plait/core/collective.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

/// Seconds of a monotonic clock with an arbitrary zero, common to all threads of a process.
double comm_clock();

/// The length of the union of time spans: overlapping operations count once. Spans may be added in any order while
/// operations overlap.
class busy_time {
 public:
  /// Begins an operation whose span is added later. `close` ends it, after the span was added.
  void open() { ++open_; }
  void close();
  /// Adds a span, in seconds of one clock.
  void add(double from, double to);
  /// The length of the union of the spans.
  double seconds() const;
  /// Starts at 0 again. Open operations stay open, and later count with their whole length.
  void clear() {
    total_ = 0;
    spans_.clear();
  }

 private:
  static constexpr std::size_t most = 512;

  void merge();
  double sum() const;

  double total_ = 0;
  int open_ = 0;
  std::vector<std::pair<double, double>> spans_;  ///< spans since the last moment without an open operation
};

/// The seconds that one rank has spent inside communicators. They are recorded by the place in the program where the
/// rank waited, and by the place where the operation was started. parallel/executor.hpp numbers the places. Not
/// synchronised: each rank has its own.
class wait_times {
 public:
  struct entry {
    int started;       ///< where the operation was started: this place for a blocking call, -1 if unknown
    std::string axes;  ///< as the ledger names them
    double seconds;
  };

  /// Sets the rank's current place. At -1 nothing is recorded.
  void at(int place);
  int place() const { return place_; }

  void add(int started, const std::string& axes, double seconds);

  /// The entries by place; places after the last had no waits.
  const std::vector<std::vector<entry>>& places() const { return places_; }
  /// Total seconds, with or without a place.
  double seconds() const { return all_; }

 private:
  int place_ = -1;
  double all_ = 0;
  std::vector<std::vector<entry>> places_;
};

/// The sums of one rank's communication, per label (the group's name, usually its mesh axes) and kind of collective.
/// Not synchronised: each rank has its own. `wire` follows wire_bytes: it is the traffic of the whole group, equal on
/// all its ranks. For all_to_all_v each rank counts n times the bytes that it sends to others; the mean over the group
/// is the traffic.
struct ledger {
  struct entry {
    std::uint64_t calls = 0;
    std::uint64_t payload = 0;  ///< bytes of this rank's inputs, as in wire_bytes
    std::uint64_t wire = 0;
    double seconds = 0;  ///< time inside the communicator: in blocking calls, in starts and in waits

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
    /// The time during which operations over several ranks were in progress. A blocking call counts while it lasts. An
    /// asynchronous one counts until it is complete (`request_times`), and is added when it has been waited for. The
    /// seconds of `kinds` are the exposed part of this time; the rest was hidden.
    busy_time in_flight{};
    bool timed = true;  ///< false: calls only enqueue work on a device, so seconds do not measure communication
  };

  std::deque<row> rows;         ///< in order of first use; rows never move in memory
  wait_times* waits = nullptr;  ///< records waits by place in the program; null: not recorded

  row& of(std::string_view label);

  /// Returns the sums of one label and one kind, or of all.
  entry total(std::optional<std::string_view> label = {}, std::optional<collective> kind = {}) const;

  /// Starts a new period; the rows stay.
  void clear() {
    for (row& r : rows) {
      r.kinds = {};
      r.in_flight.clear();
    }
  }
  /// Removes the counts since `before` was copied from this ledger, so that an observer's calls do not count; rows
  /// stay. No operation may be in progress, at the copy or now.
  void restore(const ledger& before);
};

/// Operations of one rank with their times, for timelines. Not synchronised: one recorder per rank.
class recorder {
 public:
  struct event {
    int label = 0;  ///< index into labels()
    collective kind = collective::barrier;
    std::uint64_t bytes = 0;  ///< bytes of this rank's input, as in wire_bytes
    double start = 0;         ///< comm_clock seconds
    double end = 0;           ///< 0 until a started operation has been waited for, then as in `request_times`
    double waited = 0;        ///< seconds of [start, end] that the rank spent inside the communicator
    bool asynchronous = false;
    int place = -1;  ///< the rank's place in its program (`wait_times`); -1: none
  };

  int label(std::string_view name);

  /// Returns a ticket for `find`.
  std::uint64_t add(const event& e);

  /// Returns the event of a ticket, or nullptr after `clear`.
  event* find(std::uint64_t ticket) {
    return ticket < first_ || ticket - first_ >= events_.size() ? nullptr : &events_[ticket - first_];
  }

  /// The events, oldest first.
  const std::vector<event>& events() const { return events_; }
  const std::vector<std::string>& labels() const { return labels_; }
  /// Removes all events. Tickets continue, so an operation in progress never finds another operation's event.
  void clear() {
    first_ += events_.size();
    events_.clear();
  }

 private:
  std::uint64_t first_ = 0;  ///< the ticket of the first event
  std::vector<event> events_;
  std::vector<std::string> labels_;
};

/// Bytes as text, such as "512 B", "64 KB", "1.5 MB": powers of 1024, at most one decimal.
std::string bytes_text(std::uint64_t bytes);

/// The last operations of one rank, which backends put into error texts. The rank writes it for every operation, so it
/// is a fixed array and never allocates. Other threads may read the states while the rank runs.
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

  /// Sets the state of operation `ticket`, unless newer operations have overwritten it.
  void mark(std::uint64_t ticket, state now) {
    if (next_ - ticket <= capacity) entries_[ticket % capacity].now.store(now, std::memory_order_relaxed);
  }

  /// Returns the last `most` operations in one line, oldest first: "all_reduce #3 on 'tp' 4 KB completed; send #1 on
  /// 'pp' 64 B waiting".
  std::string text(std::size_t most = 4) const {
    std::string out;
    const std::uint64_t count = std::min<std::uint64_t>({next_, capacity, most});
    for (std::uint64_t i = next_ - count; i < next_; ++i) {
      const entry& e = entries_[i % capacity];
      if (!out.empty()) out += "; ";
      append(out, {e.name, " #", e.sequence, " on '", e.label.data(), "' ", bytes_text(e.bytes), " ",
                   name_of(e.now.load(std::memory_order_relaxed))});
    }
    return out.empty() ? "nothing" : out;
  }

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

#ifndef PLAIT_COMPILED
PLAIT_INLINE double comm_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

PLAIT_INLINE void busy_time::close() {
  if (--open_ > 0) return;
  merge();
  total_ += sum();
  spans_.clear();
}

PLAIT_INLINE void busy_time::add(double from, double to) {
  if (to <= from) return;
  if (open_ == 0) {
    total_ += to - from;
    return;
  }
  if (!spans_.empty() && spans_.back().first <= from && from <= spans_.back().second) {
    spans_.back().second = std::max(spans_.back().second, to);
    return;
  }
  spans_.emplace_back(from, to);
  if (spans_.size() % most == 0) merge();
}

PLAIT_INLINE double busy_time::seconds() const {
  busy_time merged = *this;
  merged.merge();
  return total_ + merged.sum();
}

PLAIT_INLINE void busy_time::merge() {
  if (spans_.size() < 2) return;
  std::sort(spans_.begin(), spans_.end());
  std::size_t end = 0;
  for (std::size_t i = 1; i < spans_.size(); ++i) {
    if (spans_[i].first <= spans_[end].second)
      spans_[end].second = std::max(spans_[end].second, spans_[i].second);
    else
      spans_[++end] = spans_[i];
  }
  spans_.resize(end + 1);
}

PLAIT_INLINE double busy_time::sum() const {
  double length = 0;
  for (const auto& [from, to] : spans_) length += to - from;
  return length;
}

PLAIT_INLINE void wait_times::at(int place) {
  place_ = place;
  if (place >= static_cast<int>(places_.size())) places_.resize(static_cast<std::size_t>(place) + 1);
}

PLAIT_INLINE void wait_times::add(int started, const std::string& axes, double seconds) {
  all_ += seconds;
  if (place_ < 0) return;
  std::vector<entry>& here = places_[static_cast<std::size_t>(place_)];
  for (entry& e : here)
    if (e.started == started && e.axes == axes) {
      e.seconds += seconds;
      return;
    }
  here.push_back({started, axes, seconds});
}

PLAIT_INLINE ledger::row& ledger::of(std::string_view label) {
  for (row& r : rows) {
    if (r.label == label) return r;
  }
  rows.push_back({std::string(label)});
  return rows.back();
}

PLAIT_INLINE ledger::entry ledger::total(std::optional<std::string_view> label, std::optional<collective> kind) const {
  entry sum;
  for (const row& r : rows)
    for (std::size_t k = 0; k < r.kinds.size(); ++k)
      if ((!label || r.label == *label) && (!kind || static_cast<std::size_t>(*kind) == k)) sum += r.kinds[k];
  return sum;
}

PLAIT_INLINE void ledger::restore(const ledger& before) {
  clear();
  for (std::size_t i = 0; i < before.rows.size(); ++i) rows[i] = before.rows[i];
}

PLAIT_INLINE int recorder::label(std::string_view name) {
  for (std::size_t i = 0; i < labels_.size(); ++i) {
    if (labels_[i] == name) return static_cast<int>(i);
  }
  labels_.emplace_back(name);
  return static_cast<int>(labels_.size()) - 1;
}

PLAIT_INLINE std::uint64_t recorder::add(const event& e) {
  events_.push_back(e);
  return first_ + events_.size() - 1;
}

PLAIT_INLINE std::string bytes_text(std::uint64_t bytes) {
  if (bytes < 1024) return cat({bytes, " B"});
  const char* const units[] = {"KB", "MB", "GB", "TB", "PB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[48];
  std::snprintf(text, sizeof text, "%.1f", value);
  std::string out = text;
  if (out.size() > 2 && out.compare(out.size() - 2, 2, ".0") == 0) out.resize(out.size() - 2);
  return cat({out, " ", units[unit]});
}
#endif

}  // namespace plait

#include "plait/core/macros_on.hpp"
