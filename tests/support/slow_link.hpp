// A communicator that delays the completion of its operations by given times. Tests measure with it how much of a slow
// network's time a step hides, or whether an order is right under any delays.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/communicator.hpp"
#include "plait/comm/metrics.hpp"

namespace plait::testing {

/// The earliest time at which an operation that this rank starts at `now` may complete, in seconds of `comm_clock`. The
/// rank's own thread calls it once for each operation, in order, with the bytes that the rank sends. It may sleep.
using link_time = std::function<double(const call& c, double bytes, double now)>;

/// A link of `bytes_per_second`. The operations of a rank pass through it one by one, each after `latency` seconds.
/// Operations of a few packets at most do not wait for larger ones.
inline link_time throttled_link(double bytes_per_second, double latency = 0) {
  return [=, free = 0.0](const call&, double bytes, double now) mutable {
    if (bytes <= 4096) return now + bytes / bytes_per_second + latency;
    free = std::max(free, now) + bytes / bytes_per_second;
    return free + latency;
  };
}

/// A rank's communicator, and those split from it, on one shared link.
class slow_communicator : public verbs<slow_communicator> {
 public:
  slow_communicator() = default;
  slow_communicator(any_communicator inner, link_time link)
      : slow_communicator(std::move(inner), std::make_shared<link_time>(std::move(link))) {}

  explicit operator bool() const { return static_cast<bool>(inner_); }
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  std::string label() const { return std::string(inner_.label()); }
  bool enqueues() const { return inner_.enqueues(); }
  bool unequal_parts(std::size_t bytes) const { return inner_.unequal_parts(bytes); }

  [[nodiscard]] request start(const call& c) {
    const double bytes = static_cast<double>(c.wire(rank(), size())) / (c.kind == collective::send ? 1 : size());
    auto mine = std::make_shared<operation>();
    mine->through = (*link_)(c, bytes, comm_clock());
    inner_.start(c).swap(mine->inner);
    return request(ops, std::move(mine), nullptr);
  }
  void abort(const std::string& why) noexcept { inner_.abort(why); }
  slow_communicator split(int color, int key, std::string_view label = {}) {
    return slow_communicator(inner_.split(color, key, label), link_);
  }

 private:
  struct operation {
    request inner;
    double through = 0;
  };
  static void wait(void* owner, void*) {
    auto& o = *static_cast<operation*>(owner);
    o.inner.wait();
    if (const double left = o.through - comm_clock(); left > 0)
      std::this_thread::sleep_for(std::chrono::duration<double>(left));
  }
  static bool done(void* owner, void*) {
    const auto& o = *static_cast<operation*>(owner);
    return o.inner.done() && o.through <= comm_clock();
  }
  static void drop(void* owner, void*) noexcept { request().swap(static_cast<operation*>(owner)->inner); }
  static double completed(void* owner, void*) noexcept {
    const auto& o = *static_cast<operation*>(owner);
    try {
      return done(owner, nullptr) ? std::max(o.through, o.inner.completed_at()) : 0;
    } catch (const std::exception&) {  // `wait` throws the same error
      return 0;
    }
  }
  static constexpr request_ops ops{wait, done, drop, completed};

  slow_communicator(any_communicator inner, std::shared_ptr<link_time> link)
      : inner_(std::move(inner)), link_(std::move(link)) {}

  any_communicator inner_;
  std::shared_ptr<link_time> link_;
};

}  // namespace plait::testing
