// A type-erased communicator of any backend.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "plait/comm/communicator.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/device/range.hpp"

namespace plait {

/// Writes a communicator's calls into a ledger, and into a recorder if there is one, under the group's label. Profilers
/// see each call as a range (device/range.hpp) of its kind, label and bytes. Used only by its rank's thread and by
/// requests. A request's token encodes the kind, the place and the recorded event.
class accounting final : public request_observer {
 public:
  /// `timed` is false if calls only enqueue work on a device.
  accounting(std::string label, int rank, int ranks, std::shared_ptr<ledger> book, std::shared_ptr<recorder> events,
             bool timed = true)
      : ledger_(std::move(book)), events_(std::move(events)), label_(std::move(label)), rank_(rank), ranks_(ranks) {
    require(ledger_ != nullptr, "accounting: the ledger is null; give it one (the recorder may be null)");
    row_ = &ledger_->of(label_);
    row_->timed = row_->timed && timed;
    if (events_) event_label_ = events_->label(label_);
    if constexpr (ranges_enabled) {
      for (int k = 0; k < collective_kinds; ++k)
        range_names_[static_cast<std::size_t>(k)] = cat({name_of(static_cast<collective>(k)), " ", label_});
    }
  }

  const std::shared_ptr<plait::ledger>& book() const { return ledger_; }
  const std::shared_ptr<plait::recorder>& events() const { return events_; }

  /// Times one call, until `over` is called.
  class entry {
   public:
    entry(accounting& books, const call& c)
        : owner_(books),
          kind_(c.kind),
          payload_(c.payload(books.ranks_)),
          wire_(c.wire(books.rank_, books.ranks_)),
          range_(books.range_name(kind_), payload_),
          start_(comm_clock()) {}
    /// Records a call that has returned. Returns a token if the call is asynchronous.
    std::uint64_t over(bool asynchronous) {
      end_ = comm_clock();
      const double spent = end_ - start_;
      owner_.row_->kinds[static_cast<std::size_t>(kind_)] += {1, payload_, wire_, spent};
      if (owner_.ranks_ > 1) {
        if (asynchronous) owner_.row_->in_flight.open();
        owner_.row_->in_flight.add(start_, end_);
      }
      int place = -1;
      if (wait_times* const waits = owner_.ledger_->waits) {
        place = waits->place();
        waits->add(place, owner_.label_, spent);
      }
      const std::uint64_t token = static_cast<std::uint64_t>(place < most_places ? place + 1 : 0) << kind_bits |
                                  static_cast<std::uint64_t>(kind_);
      if (!owner_.events_) return token;
      const std::uint64_t ticket = owner_.events_->add(
          {owner_.event_label_, kind_, payload_, start_, asynchronous ? 0.0 : end_, spent, asynchronous, place});
      return ticket << (kind_bits + place_bits) | token;
    }
    /// When the call returned.
    double ended() const { return end_; }

   private:
    accounting& owner_;
    collective kind_;
    std::uint64_t payload_, wire_;
    range range_;
    double start_, end_ = 0;
  };

  void waited(std::uint64_t token, const request_times& t) noexcept override {
    const double spent = t.waited_to - t.waited_from;
    row_->kinds[token & ((1u << kind_bits) - 1)].seconds += spent;
    const bool early = t.completed != 0 && t.completed < t.waited_from;  // then the wait only polled
    if (ranks_ > 1) {
      row_->in_flight.add(t.started, early ? t.completed : t.waited_to);
      if (early) row_->in_flight.add(t.waited_from, t.waited_to);
      row_->in_flight.close();
    }
    if (wait_times* const waits = ledger_->waits)
      waits->add(static_cast<int>(token >> kind_bits & most_places) - 1, label_, spent);
    if (!events_) return;
    if (auto* e = events_->find(token >> (kind_bits + place_bits))) {
      e->end = early ? std::max(t.completed, t.started) : t.waited_to;
      if (!early) e->waited += spent;
    }
  }

 private:
  // A token holds the number of a recorded event, the place of the start plus one, and the kind.
  static constexpr std::uint64_t kind_bits = 4, place_bits = 20;
  static constexpr int most_places = (1 << place_bits) - 1;

  const char* range_name(collective kind) const {
    if constexpr (ranges_enabled)
      return range_names_[static_cast<std::size_t>(kind)].c_str();
    else
      return "";
  }

  std::shared_ptr<plait::ledger> ledger_;
  std::shared_ptr<plait::recorder> events_;
  std::string label_;
  int rank_, ranks_;
  plait::ledger::row* row_ = nullptr;
  int event_label_ = 0;
  std::array<std::string, ranges_enabled ? collective_kinds : 0> range_names_{};
};

/// Holds any model of `communicator`, so that layers are not instantiated for each backend. It can count the held
/// communicator's calls. Copies share the held object. Each operation costs one virtual call.
class any_communicator : public verbs<any_communicator> {
 public:
  any_communicator() = default;

  /// An empty communicator gives an empty any_communicator.
  template <class Comm>
    requires(!std::same_as<std::remove_cvref_t<Comm>, any_communicator> &&
             plait::communicator<std::remove_cvref_t<Comm>>)
  any_communicator(Comm&& comm) {  // NOLINT: conversion from any backend is the purpose
    if (comm) held_ = std::make_shared<holder<std::remove_cvref_t<Comm>>>(std::forward<Comm>(comm));
  }

  explicit operator bool() const { return held_ != nullptr; }
  int rank() const { return held().rank; }
  int size() const { return held().size; }
  const std::string& label() const { return held().label; }
  /// Whether calls return before the device has completed them, so that the host's clock does not measure them.
  bool enqueues() const { return held().enqueues(); }
  /// Whether this communicator itself may serve as the group of all its ranks, in order, because each further
  /// communicator costs memory and time.
  bool serves_groups() const { return held().serves_groups(); }

  /// Whether it supports ragged gathers and scatters whose largest part has `bytes`; see `plait::communicator`.
  bool unequal_parts(std::size_t bytes) const { return held().unequal_parts(bytes); }

  void run(const call& c);
  [[nodiscard]] request start(const call& c);

  /// A subgroup is counted in this communicator's ledger and recorder, under the subgroup's label.
  any_communicator split(int color, int key, std::string_view label = {});
  void abort(const std::string& why) noexcept {
    if (held_) held_->abort(why);
  }
  /// Puts the current work of the device's main stream under the backend's deadline, as one operation named by the
  /// literal `what`. It is for graphs that replay calls of this communicator. Backends without a deadline do nothing.
  void watch(const char* what) {
    if (held_) held_->watch(what);
  }
  void begin_group() { held().begin_group(); }
  void end_group() { held().end_group(); }

  /// Returns a handle of this communicator whose calls are counted in `book` under `name`, or under its label if `name`
  /// is empty. They are recorded in `events` if it is not null. The handle keeps both alive.
  any_communicator counted(std::shared_ptr<ledger> book, std::shared_ptr<recorder> events = nullptr,
                           std::string_view name = {}) const;

  /// The held communicator if it is a Comm, else nullptr.
  template <class Comm>
  Comm* get_if() const {
    auto* h = dynamic_cast<holder<Comm>*>(held_.get());
    return h ? &h->comm : nullptr;
  }

 private:
  struct base {
    base(int r, int s, std::string l) : rank(r), size(s), label(std::move(l)) {}
    virtual ~base() = default;
    virtual void run(const call&) = 0;
    virtual request start(const call&) = 0;
    virtual any_communicator split(int, int, std::string_view) = 0;
    virtual void abort(const std::string&) noexcept = 0;
    virtual void watch(const char*) = 0;
    virtual bool enqueues() const = 0;
    virtual bool serves_groups() const = 0;
    virtual bool unequal_parts(std::size_t) const = 0;
    virtual void begin_group() = 0;
    virtual void end_group() = 0;
    int rank, size;
    std::string label;
  };

  template <class Comm>
  struct holder final : base {
    Comm comm;

    template <class C>
    explicit holder(C&& c) : base(c.rank(), c.size(), std::string(c.label())), comm(std::forward<C>(c)) {}

    void run(const call& c) override { comm.run(c); }
    request start(const call& c) override { return comm.start(c); }
    any_communicator split(int color, int key, std::string_view name) override {
      return any_communicator(comm.split(color, key, name));
    }
    void abort(const std::string& why) noexcept override { comm.abort(why); }
    void watch(const char* what) override {
      if constexpr (requires { comm.watch(what); }) comm.watch(what);
    }
    bool enqueues() const override {
      if constexpr (requires { comm.enqueues(); }) return comm.enqueues();
      return false;
    }
    bool serves_groups() const override {
      if constexpr (requires { comm.serves_groups(); }) return comm.serves_groups();
      return false;
    }
    bool unequal_parts(std::size_t bytes) const override {
      if constexpr (requires { comm.unequal_parts(bytes); }) return comm.unequal_parts(bytes);
      return false;
    }
    void begin_group() override {
      if constexpr (requires { comm.begin_group(); }) comm.begin_group();
    }
    void end_group() override {
      if constexpr (requires { comm.end_group(); }) comm.end_group();
    }
  };

  base& held() const { return detail::held_by(held_); }

  std::shared_ptr<base> held_;
  std::shared_ptr<accounting> accounting_;
};

static_assert(plait::communicator<any_communicator>);

}  // namespace plait

#ifndef PLAIT_COMPILED
namespace plait {

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
#endif

#include "plait/core/macros_on.hpp"
