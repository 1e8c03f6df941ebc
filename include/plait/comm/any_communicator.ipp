// The definitions of any_communicator.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE accounting::accounting(std::string label, int rank, int ranks, std::shared_ptr<ledger> book,
                                    std::shared_ptr<recorder> events, bool timed)
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

PLAIT_INLINE std::uint64_t accounting::entry::over(bool asynchronous) {
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
  const std::uint64_t token =
      static_cast<std::uint64_t>(place < most_places ? place + 1 : 0) << kind_bits | static_cast<std::uint64_t>(kind_);
  if (!books_.events_) return token;
  const std::uint64_t ticket = books_.events_->add(
      {books_.event_label_, kind_, payload_, start_, asynchronous ? 0.0 : end_, spent, asynchronous, place});
  return ticket << (kind_bits + place_bits) | token;
}

PLAIT_INLINE void accounting::waited(std::uint64_t token, const request_times& t) noexcept {
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

PLAIT_INLINE void any_communicator::run(const call& c) {
  if (accounting_ == nullptr) return held().run(c);
  accounting::entry written(*accounting_, c);
  held().run(c);
  written.over(false);
}

PLAIT_INLINE request any_communicator::start(const call& c) {
  if (accounting_ == nullptr) return held().start(c);
  accounting::entry written(*accounting_, c);
  request r = held().start(c);
  const std::uint64_t token = written.over(true);
  r.observe(accounting_, token, written.ended());
  return r;
}

PLAIT_INLINE any_communicator any_communicator::split(int color, int key, std::string_view label) {
  any_communicator child = held().split(color, key, label);
  return accounting_ && child ? child.counted(accounting_->book(), accounting_->events()) : child;
}

PLAIT_INLINE any_communicator any_communicator::counted(std::shared_ptr<ledger> book, std::shared_ptr<recorder> events,
                                                        std::string_view name) const {
  any_communicator out = *this;
  if (held_)
    out.accounting_ = std::make_shared<accounting>(name.empty() ? label() : std::string(name), rank(), size(),
                                                   std::move(book), std::move(events), !enqueues());
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
