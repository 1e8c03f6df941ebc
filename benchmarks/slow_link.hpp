#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"

namespace bench {

/// How long a link takes, and whether a rank may compute meanwhile. Shared by all ranks.
struct link {
  using clock = std::chrono::steady_clock;

  double seconds_per_byte = 0;
  bool overlaps = true;            ///< false: each group of messages is waited for where it is started
  std::atomic<double> waited = 0;  ///< seconds that ranks, all together, had nothing to do but wait for the link

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
  /// When the message that has just been received was sent.
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

/// A communicator of in-process ranks whose messages, all-gathers and reduce-scatters take as long as a link takes:
/// they are there when the link would have brought them, and not before. Everything else is as fast as the inner one.
template <plait::communicator Comm>
class slow_link {
  using counts = std::span<const std::size_t>;
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

  void all_reduce(const void* i, void* o, std::size_t n, plait::dtype t, plait::reduce_op op) {
    inner_.all_reduce(i, o, n, t, op);
  }
  void all_gather(const void* i, void* o, std::size_t n, plait::dtype t) {
    inner_.all_gather(i, o, n, t);
    pass_around(n * size_of(t));
  }
  void reduce_scatter(const void* i, void* o, std::size_t n, plait::dtype t, plait::reduce_op op) {
    inner_.reduce_scatter(i, o, n, t, op);
    pass_around(n * size_of(t));
  }
  void all_to_all(const void* i, void* o, std::size_t n, plait::dtype t) { inner_.all_to_all(i, o, n, t); }
  void all_to_all_v(const void* i, counts sc, counts so, void* o, counts rc, counts ro, plait::dtype t) {
    inner_.all_to_all_v(i, sc, so, o, rc, ro, t);
  }
  void broadcast(void* d, std::size_t n, plait::dtype t, int root) { inner_.broadcast(d, n, t, root); }
  void send(const void* d, std::size_t n, plait::dtype t, int peer, int tag = 0) {
    start_send(d, n, t, peer, tag).wait();
  }
  void receive(void* d, std::size_t n, plait::dtype t, int peer, int tag = 0) {
    start_receive(d, n, t, peer, tag).wait();
  }
  void barrier() { inner_.barrier(); }

  plait::request start_all_reduce(const void* i, void* o, std::size_t n, plait::dtype t, plait::reduce_op op) {
    return inner_.start_all_reduce(i, o, n, t, op);
  }
  plait::request start_all_gather(const void* i, void* o, std::size_t n, plait::dtype t) {
    return inner_.start_all_gather(i, o, n, t);
  }
  plait::request start_reduce_scatter(const void* i, void* o, std::size_t n, plait::dtype t, plait::reduce_op op) {
    return inner_.start_reduce_scatter(i, o, n, t, op);
  }
  plait::request start_all_to_all(const void* i, void* o, std::size_t n, plait::dtype t) {
    return inner_.start_all_to_all(i, o, n, t);
  }
  plait::request start_all_to_all_v(const void* i, counts sc, counts so, void* o, counts rc, counts ro,
                                    plait::dtype t) {
    return inner_.start_all_to_all_v(i, sc, so, o, rc, ro, t);
  }
  plait::request start_broadcast(void* d, std::size_t n, plait::dtype t, int root) {
    return inner_.start_broadcast(d, n, t, root);
  }
  plait::request start_send(const void* d, std::size_t n, plait::dtype t, int peer, int tag = 0) {
    link_->posted(rank(), peer, tag);
    return started({inner_.start_send(d, n, t, peer, tag), link_, clock::now(), n * size_of(t), -1, rank(), tag});
  }
  plait::request start_receive(void* d, std::size_t n, plait::dtype t, int peer, int tag = 0) {
    return started({inner_.start_receive(d, n, t, peer, tag), link_, clock::now(), n * size_of(t), peer, rank(), tag});
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
  struct pending {
    plait::request inner;
    link* shared;
    clock::time_point posted;
    std::size_t bytes;
    int from, to, tag;  ///< `from` -1: a send
    bool over = false;

    void finish() {
      if (std::exchange(over, true)) return;
      inner.wait();
      if (from < 0) return;
      const clock::time_point begin = std::max(posted, shared->sent(from, to, tag));
      shared->wait_until(begin + shared->time_of(static_cast<double>(bytes)));
    }
  };
  static constexpr plait::request_ops ops = {[](void* owner, void*) { static_cast<pending*>(owner)->finish(); },
                                             [](void* owner, void*) { return static_cast<pending*>(owner)->over; },
                                             [](void* owner, void*) noexcept {
                                               try {
                                                 static_cast<pending*>(owner)->finish();
                                               } catch (...) {  // the inner communicator's next operation says why
                                               }
                                             }};

  plait::request started(pending p) {
    auto held = std::make_shared<pending>(std::move(p));
    group_->push_back(held);
    return plait::request(ops, std::move(held), nullptr);
  }
  /// What a ring of c ranks takes to bring `block` bytes of each rank to all.
  void pass_around(std::size_t block) const {
    link_->wait_until(clock::now() + link_->time_of(static_cast<double>(block) * (size() - 1)));
  }

  Comm inner_;
  link* link_ = nullptr;
  std::shared_ptr<std::vector<std::shared_ptr<pending>>> group_;  ///< of messages since begin_group
};

}  // namespace bench
