#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "plait/comm/communicator.hpp"
#include "plait/comm/ledger.hpp"
#include "plait/comm/recorder.hpp"
#include "plait/device/range.hpp"

namespace plait {

/// A communicator that adds every call to a ledger, and to a recorder if there is one, under its group's label. The
/// numbers are those of the inner communicator. Profilers see each call as a range (device/range.hpp) of its kind,
/// label and bytes. Both books belong to this rank's thread and are kept alive by it; a split continues in the same
/// books under the subgroup's label.
template <plait::communicator Comm>
class counted {
  using counts = std::span<const std::size_t>;

 public:
  counted() = default;
  counted(Comm inner, std::shared_ptr<plait::ledger> book, std::shared_ptr<plait::recorder> events = nullptr)
      : inner_(std::move(inner)) {
    if (!inner_) return;
    books_ = std::make_shared<books>();
    books_->book = std::move(book);
    books_->events = std::move(events);
    books_->label = inner_.label();
    books_->ranks = inner_.size();
    require(books_->book != nullptr, "counted: the ledger is null; give it one (the recorder may be null)");
    books_->row = &books_->book->of(books_->label);
    if (books_->events) books_->event_label = books_->events->label(books_->label);
    if constexpr (ranges_enabled) {
      for (int k = 0; k < collective_kinds; ++k)
        books_->shown[static_cast<std::size_t>(k)] = cat({name_of(static_cast<collective>(k)), " ", books_->label});
    }
  }

  explicit operator bool() const { return static_cast<bool>(inner_); }
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  std::string label() const { return std::string(inner_.label()); }
  Comm& inner() { return inner_; }
  plait::ledger& ledger() const { return *books_->book; }
  const std::shared_ptr<plait::recorder>& recorder() const { return books_->events; }

  void all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    timed(collective::all_reduce, n * size_of(t), [&] { inner_.all_reduce(in, out, n, t, op); });
  }
  void all_gather(const void* in, void* out, std::size_t n, dtype t) {
    timed(collective::all_gather, n * size_of(t), [&] { inner_.all_gather(in, out, n, t); });
  }
  void reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    timed(collective::reduce_scatter, all(n, t), [&] { inner_.reduce_scatter(in, out, n, t, op); });
  }
  void all_to_all(const void* in, void* out, std::size_t n, dtype t) {
    timed(collective::all_to_all, all(n, t), [&] { inner_.all_to_all(in, out, n, t); });
  }
  void all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    const auto [payload, wire] = bytes_of(sc, t);
    timed(collective::all_to_all, payload, wire, [&] { inner_.all_to_all_v(in, sc, so, out, rc, ro, t); });
  }
  void broadcast(void* data, std::size_t n, dtype t, int root) {
    timed(collective::broadcast, n * size_of(t), [&] { inner_.broadcast(data, n, t, root); });
  }
  void send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    timed(collective::send, n * size_of(t), [&] { inner_.send(data, n, t, peer, tag); });
  }
  void receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    timed(collective::receive, n * size_of(t), [&] { inner_.receive(data, n, t, peer, tag); });
  }
  void barrier() {
    timed(collective::barrier, 0, [&] { inner_.barrier(); });
  }

  request start_all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return started(collective::all_reduce, n * size_of(t), [&] { return inner_.start_all_reduce(in, out, n, t, op); });
  }
  request start_all_gather(const void* in, void* out, std::size_t n, dtype t) {
    return started(collective::all_gather, n * size_of(t), [&] { return inner_.start_all_gather(in, out, n, t); });
  }
  request start_reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return started(collective::reduce_scatter, all(n, t),
                   [&] { return inner_.start_reduce_scatter(in, out, n, t, op); });
  }
  request start_all_to_all(const void* in, void* out, std::size_t n, dtype t) {
    return started(collective::all_to_all, all(n, t), [&] { return inner_.start_all_to_all(in, out, n, t); });
  }
  request start_all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    const auto [payload, wire] = bytes_of(sc, t);
    return started(collective::all_to_all, payload, wire,
                   [&] { return inner_.start_all_to_all_v(in, sc, so, out, rc, ro, t); });
  }
  request start_broadcast(void* data, std::size_t n, dtype t, int root) {
    return started(collective::broadcast, n * size_of(t), [&] { return inner_.start_broadcast(data, n, t, root); });
  }
  request start_send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return started(collective::send, n * size_of(t), [&] { return inner_.start_send(data, n, t, peer, tag); });
  }
  request start_receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return started(collective::receive, n * size_of(t), [&] { return inner_.start_receive(data, n, t, peer, tag); });
  }

  counted split(int color, int key, std::string_view label = {}) {
    Comm child = inner_.split(color, key, label);
    return child ? counted(std::move(child), books_->book, books_->events) : counted();
  }
  void abort(const std::string& why) noexcept { inner_.abort(why); }

  void begin_group()
    requires requires(Comm& c) { c.begin_group(); }
  {
    inner_.begin_group();
  }
  void end_group()
    requires requires(Comm& c) { c.end_group(); }
  {
    inner_.end_group();
  }

 private:
  /// Shared by the copies of a communicator and by its requests, whose tokens name a kind and a recorded event.
  struct books final : request_observer {
    std::shared_ptr<plait::ledger> book;
    std::shared_ptr<plait::recorder> events;
    std::string label;
    plait::ledger::row* row = nullptr;
    int event_label = 0;
    int ranks = 0;
    std::array<std::string, ranges_enabled ? collective_kinds : 0> shown;  ///< names of ranges, by kind
    double wait_began = 0;

    static constexpr std::uint64_t kind_bits = 4;

    void waiting(std::uint64_t) noexcept override { wait_began = comm_clock(); }
    void completed(std::uint64_t token) noexcept override {
      const double now = comm_clock();
      row->kinds[token & ((1u << kind_bits) - 1)].seconds += now - wait_began;
      if (!events) return;
      if (auto* e = events->find(token >> kind_bits)) {
        e->end = now;
        e->waited += now - wait_began;
      }
    }
    /// What ranges of the kind are called.
    const char* name(collective kind) const {
      if constexpr (ranges_enabled)
        return shown[static_cast<std::size_t>(kind)].c_str();
      else
        return "";
    }
    void add(collective kind, std::uint64_t payload, std::uint64_t wire, double seconds) {
      row->kinds[static_cast<std::size_t>(kind)] += {1, payload, wire, seconds};
    }
  };

  std::uint64_t all(std::size_t n, dtype t) const { return n * size_of(t) * static_cast<std::size_t>(size()); }

  std::pair<std::uint64_t, std::uint64_t> bytes_of(counts send_counts, dtype t) const {
    std::uint64_t payload = 0, sent = 0;
    for (std::size_t k = 0; k < send_counts.size(); ++k) {
      payload += send_counts[k] * size_of(t);
      if (static_cast<int>(k) != rank()) sent += send_counts[k] * size_of(t);
    }
    return {payload, sent * static_cast<std::uint64_t>(size())};
  }

  books& open_books() {
    if (!books_) fail("a communicator without a group was used (its rank has a negative color in the split)");
    return *books_;
  }

  template <class F>
  void timed(collective kind, std::uint64_t payload, const F& call) {
    timed(kind, payload, wire_bytes(kind, open_books().ranks, payload), call);
  }
  template <class F>
  void timed(collective kind, std::uint64_t payload, std::uint64_t wire, const F& call) {
    books& b = open_books();
    const range shown(b.name(kind), payload);
    const double start = comm_clock();
    call();
    const double end = comm_clock();
    b.add(kind, payload, wire, end - start);
    if (b.events) b.events->add({b.event_label, kind, payload, start, end, end - start, false});
  }

  template <class F>
  request started(collective kind, std::uint64_t payload, const F& call) {
    return started(kind, payload, wire_bytes(kind, open_books().ranks, payload), call);
  }
  template <class F>
  request started(collective kind, std::uint64_t payload, std::uint64_t wire, const F& call) {
    books& b = open_books();
    const range shown(b.name(kind), payload);
    const double start = comm_clock();
    request r = call();
    const double spent = comm_clock() - start;
    b.add(kind, payload, wire, spent);
    const std::uint64_t ticket = b.events ? b.events->add({b.event_label, kind, payload, start, 0, spent, true}) : 0;
    r.observe(books_, ticket << books::kind_bits | static_cast<std::uint64_t>(kind));
    return r;
  }

  Comm inner_;
  std::shared_ptr<books> books_;
};

}  // namespace plait
