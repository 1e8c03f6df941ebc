#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"

namespace bench {

/// The speed of a link, and whether a rank may compute while messages travel. All ranks share it.
struct link {
  using clock = std::chrono::steady_clock;

  double seconds_per_byte = 0;
  bool overlaps = true;            ///< false: a rank waits for each group of messages where it starts
  std::atomic<double> waited = 0;  ///< seconds that all ranks together only waited for the link
  std::atomic<double> in_use = 0;  ///< seconds that the messages of all ranks take on it

  clock::duration time_of(double bytes) const {
    return std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(bytes * seconds_per_byte));
  }
  void wait_until(clock::time_point end) {
    const clock::time_point now = clock::now();
    if (end <= now) return;
    waited += std::chrono::duration<double>(end - now).count();
    std::this_thread::sleep_until(end);
  }
  void posted(int from, int to, int tag) {
    const std::lock_guard lock(mutex_);
    sent_[{from, to, tag}].push_back(clock::now());
  }
  /// Returns when the message that has just been received was sent.
  clock::time_point sent(int from, int to, int tag) {
    const std::lock_guard lock(mutex_);
    auto& times = sent_[{from, to, tag}];
    const clock::time_point first = times.front();
    times.pop_front();
    return first;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, int, int>, std::deque<clock::time_point>> sent_;
};

/// A communicator of in-process ranks whose messages, all-gathers, reduce-scatters and ragged exchanges take the time
/// of a link. Other calls are as fast as those of the inner communicator.
template <plait::communicator Comm>
class slow_link : public plait::verbs<slow_link<Comm>> {
  using clock = link::clock;

 public:
  slow_link() = default;
  slow_link(Comm inner, link* shared) : inner_(std::move(inner)), link_(shared) {
    if (inner_) group_ = std::make_shared<std::vector<std::shared_ptr<pending>>>();
  }

  explicit operator bool() const { return static_cast<bool>(inner_); }
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  std::string label() const { return std::string(inner_.label()); }
  bool unequal_parts(std::size_t bytes) const { return inner_.unequal_parts(bytes); }

  void run(const plait::call& c) {
    if (c.kind == plait::collective::send || c.kind == plait::collective::receive || c.ragged) return start(c).wait();
    inner_.run(c);
    if (c.kind == plait::collective::all_gather || c.kind == plait::collective::reduce_scatter)
      pass_around(c.count * size_of(c.type));
  }
  plait::request start(const plait::call& c) {
    if (c.kind == plait::collective::send) link_->posted(rank(), c.peer, c.tag);
    if (c.ragged) {
      for (int peer = 0; peer < size(); ++peer) link_->posted(rank(), peer, of_exchange);
      const std::size_t own = c.send_counts[static_cast<std::size_t>(rank())];
      const std::size_t bytes = (c.sum(c.send_counts) - own) * size_of(c.type);
      plait::request all = started({inner_.start(c), link_, clock::now(), bytes, size(), rank(), of_exchange});
      if (!link_->overlaps) group_->back()->finish();
      return all;
    }
    if (c.kind != plait::collective::send && c.kind != plait::collective::receive) return inner_.start(c);
    const int from = c.kind == plait::collective::send ? from_none : c.peer;
    return started({inner_.start(c), link_, clock::now(), c.count * size_of(c.type), from, rank(), c.tag});
  }

  slow_link split(int color, int key, std::string_view label = {}) {
    Comm child = inner_.split(color, key, label);
    return child ? slow_link(std::move(child), link_) : slow_link();
  }
  void abort(const std::string& why) noexcept { inner_.abort(why); }

  void begin_group() { group_->clear(); }
  void end_group() {
    if (!link_->overlaps)
      for (const std::shared_ptr<pending>& p : *group_) p->finish();
    group_->clear();
  }

 private:
  static constexpr int from_none = -1, of_exchange = -1;  ///< used in place of a rank, and of a tag

  struct pending {
    plait::request inner;
    link* shared;
    clock::time_point posted;
    std::size_t bytes;
    int from, to, tag;  ///< for an exchange, `from` is the number of ranks
    bool over = false;

    void finish() {
      if (std::exchange(over, true)) return;
      inner.wait();
      if (from == from_none) return;
      clock::time_point begin = posted;
      if (tag != of_exchange)
        begin = std::max(begin, shared->sent(from, to, tag));
      else
        for (int peer = 0; peer < from; ++peer) begin = std::max(begin, shared->sent(peer, to, tag));
      shared->in_use += static_cast<double>(bytes) * shared->seconds_per_byte;
      shared->wait_until(begin + shared->time_of(static_cast<double>(bytes)));
    }
  };
  static constexpr plait::request_ops ops = {[](void* owner, void*) { static_cast<pending*>(owner)->finish(); },
                                             [](void* owner, void*) { return static_cast<pending*>(owner)->over; },
                                             [](void* owner, void*) noexcept {
                                               try {
                                                 static_cast<pending*>(owner)->finish();
                                               } catch (...) {  // the inner communicator's next call throws
                                               }
                                             }};

  plait::request started(pending p) {
    auto held = std::make_shared<pending>(std::move(p));
    group_->push_back(held);
    return plait::request(ops, std::move(held), nullptr);
  }
  /// Waits for the time in which a ring brings `block` bytes of each rank to all.
  void pass_around(std::size_t block) const {
    link_->wait_until(clock::now() + link_->time_of(static_cast<double>(block) * (size() - 1)));
  }

  Comm inner_;
  link* link_ = nullptr;
  std::shared_ptr<std::vector<std::shared_ptr<pending>>> group_;  ///< messages since begin_group
};

}  // namespace bench
