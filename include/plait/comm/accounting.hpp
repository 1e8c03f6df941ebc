// The link between a communicator's calls and a rank's books: the bytes and seconds of each call go into its ledger,
// and into its recorder if there is one. It makes no call: comm/any_communicator.hpp does, and an entry here with
// each. Next: comm/ledger.hpp, comm/recorder.hpp, tests/unit/comm/accounting.cpp.
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
             bool timed = true)
      : book_(std::move(book)), events_(std::move(events)), label_(std::move(label)), rank_(rank), ranks_(ranks) {
    require(book_ != nullptr, "accounting: the ledger is null; give it one (the recorder may be null)");
    row_ = &book_->of(label_);
    row_->timed = row_->timed && timed;
    if (events_) event_label_ = events_->label(label_);
    if constexpr (ranges_enabled) {
      for (int k = 0; k < collective_kinds; ++k)
        range_names_[static_cast<std::size_t>(k)] = cat({name_of(static_cast<collective>(k)), " ", label_});
    }
  }

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
    std::uint64_t over(bool asynchronous) {
      end_ = comm_clock();
      const double spent = end_ - start_;
      books_.row_->kinds[static_cast<std::size_t>(kind_)] += {1, payload_, wire_, spent};
      if (books_.ranks_ > 1) {
        if (asynchronous) books_.row_->under_way.open();
        books_.row_->under_way.add(start_, end_);
      }
      int place = -1;
      if (wait_book* const waits = books_.book_->waits) {
        place = waits->place();
        waits->add(place, books_.label_, spent);
      }
      const std::uint64_t token = static_cast<std::uint64_t>(place < most_places ? place + 1 : 0) << kind_bits |
                                  static_cast<std::uint64_t>(kind_);
      if (!books_.events_) return token;
      const std::uint64_t ticket = books_.events_->add(
          {books_.event_label_, kind_, payload_, start_, asynchronous ? 0.0 : end_, spent, asynchronous, place});
      return ticket << (kind_bits + place_bits) | token;
    }
    /// When it returned.
    double ended() const { return end_; }

   private:
    accounting& books_;
    collective kind_;
    std::uint64_t payload_, wire_;
    range range_;
    double start_, end_ = 0;
  };

  void waited(std::uint64_t token, const request_times& t) noexcept override {
    const double spent = t.waited_to - t.waited_from;
    row_->kinds[token & ((1u << kind_bits) - 1)].seconds += spent;
    const bool early = t.completed != 0 && t.completed < t.waited_from;  // then waiting was only asking
    if (ranks_ > 1) {
      row_->under_way.add(t.started, early ? t.completed : t.waited_to);
      if (early) row_->under_way.add(t.waited_from, t.waited_to);
      row_->under_way.last();
    }
    if (wait_book* const waits = book_->waits)
      waits->add(static_cast<int>(token >> kind_bits & most_places) - 1, label_, spent);
    if (!events_) return;
    if (auto* e = events_->find(token >> (kind_bits + place_bits))) {
      e->end = early ? std::max(t.completed, t.started) : t.waited_to;
      if (!early) e->waited += spent;
    }
  }

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
