// The link between a communicator's calls and a rank's books: the bytes and seconds of each call go into its ledger,
// and into its recorder if there is one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "plait/comm/call.hpp"
#include "plait/comm/ledger.hpp"
#include "plait/comm/recorder.hpp"
#include "plait/comm/request.hpp"
#include "plait/core/error.hpp"
#include "plait/device/range.hpp"

namespace plait {

/// Writes a communicator's calls into a ledger, and into a recorder if there is one, under the group's label. Profilers
/// see each call as a range (device/range.hpp) of its kind, label and bytes. It belongs to one rank's thread, and to
/// the requests of its calls, whose tokens name a kind, a place and a recorded event.
class accounting final : public request_observer {
 public:
  /// `timed` is false where calls only enqueue work on a device.
  accounting(std::string label, int rank, int ranks, std::shared_ptr<ledger> book, std::shared_ptr<recorder> events,
             bool timed = true);

  const std::shared_ptr<plait::ledger>& book() const { return book_; }
  const std::shared_ptr<plait::recorder>& events() const { return events_; }

  /// A call that is being made: the clock runs until it is `over`.
  class entry {
   public:
    entry(accounting& books, const call& c)
        : books_(books),
          kind_(c.kind),
          payload_(c.payload(books.ranks_)),
          wire_(c.wire(books.rank_, books.ranks_)),
          range_(books.range_name(kind_), payload_),
          start_(comm_clock()) {}
    /// Writes down a call that has returned, and gives it a token where it was only started.
    std::uint64_t over(bool asynchronous);
    /// When it returned.
    double ended() const { return end_; }

   private:
    accounting& books_;
    collective kind_;
    std::uint64_t payload_, wire_;
    range range_;
    double start_, end_ = 0;
  };

  void waited(std::uint64_t token, const request_times& t) noexcept override;

 private:
  // A token is a recorded event, the place of the start and one more, and a kind.
  static constexpr std::uint64_t kind_bits = 4, place_bits = 20;
  static constexpr int most_places = (1 << place_bits) - 1;

  const char* range_name(collective kind) const {
    if constexpr (ranges_enabled)
      return range_names_[static_cast<std::size_t>(kind)].c_str();
    else
      return "";
  }

  std::shared_ptr<plait::ledger> book_;
  std::shared_ptr<plait::recorder> events_;
  std::string label_;
  int rank_, ranks_;
  plait::ledger::row* row_ = nullptr;
  int event_label_ = 0;
  std::array<std::string, ranges_enabled ? collective_kinds : 0> range_names_{};
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/comm/accounting.ipp"  // IWYU pragma: keep
#endif
