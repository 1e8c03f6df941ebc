// The link between a communicator's calls and a rank's books: the bytes and seconds of each call go into its ledger,
// and into its recorder if there is one. It makes no call: comm/any_communicator.hpp does, and an entry here with
// each. Next: comm/ledger.hpp, comm/recorder.hpp, tests/unit/comm/accounting.cpp.
#pragma once

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
/// the requests of its calls, whose tokens name a kind and a recorded event.
class accounting final : public request_observer {
 public:
  accounting(std::string label, int rank, int ranks, std::shared_ptr<ledger> book, std::shared_ptr<recorder> events)
      : book_(std::move(book)), events_(std::move(events)), label_(std::move(label)), rank_(rank), ranks_(ranks) {
    require(book_ != nullptr, "accounting: the ledger is null; give it one (the recorder may be null)");
    row_ = &book_->of(label_);
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
    std::uint64_t over(bool asynchronous) const {
      const double end = comm_clock(), spent = end - start_;
      books_.row_->kinds[static_cast<std::size_t>(kind_)] += {1, payload_, wire_, spent};
      if (!books_.events_) return static_cast<std::uint64_t>(kind_);
      const std::uint64_t ticket = books_.events_->add(
          {books_.event_label_, kind_, payload_, start_, asynchronous ? 0.0 : end, spent, asynchronous});
      return ticket << kind_bits | static_cast<std::uint64_t>(kind_);
    }

   private:
    accounting& books_;
    collective kind_;
    std::uint64_t payload_, wire_;
    range range_;
    double start_;
  };

  void waiting(std::uint64_t) noexcept override { wait_began_ = comm_clock(); }
  void completed(std::uint64_t token) noexcept override {
    const double now = comm_clock();
    row_->kinds[token & ((1u << kind_bits) - 1)].seconds += now - wait_began_;
    if (!events_) return;
    if (auto* e = events_->find(token >> kind_bits)) {
      e->end = now;
      e->waited += now - wait_began_;
    }
  }

 private:
  static constexpr std::uint64_t kind_bits = 4;

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
  double wait_began_ = 0;
};

}  // namespace plait
