#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/threads_member.hpp"

namespace plait::threads {

/// A rank's handle of a group of threads of this process; see communicator.hpp for what the operations mean.
///
/// Reductions are in the order of the ranks, so they give the same bits on every rank and in every run. A send waits
/// for its receive (there is no buffering). Errors, each ending all ranks of the run:
///   - ranks of a group call different operations, counts, dtypes, ops or roots at the same place of the sequence;
///   - no rank can go on (a deadlock, found exactly and at once, which includes ranks that have returned);
///   - a rank throws or calls abort.
class communicator {
 public:
  communicator() = default;
  explicit communicator(std::shared_ptr<detail::member> member) : member_(std::move(member)) {}

  explicit operator bool() const { return member_ != nullptr; }
  int rank() const { return self().rank(); }
  int size() const { return self().size(); }
  /// Rank among all threads of the run.
  int world_rank() const { return self().world_rank(); }
  const std::string& label() const { return self().home().label; }

  void all_reduce(const void* in, void* out, std::size_t count, dtype type, reduce_op op) {
    self().finish(post_all_reduce(in, out, count, type, op));
  }
  void all_gather(const void* in, void* out, std::size_t count_per_rank, dtype type) {
    self().finish(post_all_gather(in, out, count_per_rank, type));
  }
  void reduce_scatter(const void* in, void* out, std::size_t count_per_rank, dtype type, reduce_op op) {
    self().finish(post_reduce_scatter(in, out, count_per_rank, type, op));
  }
  void all_to_all(const void* in, void* out, std::size_t count_per_peer, dtype type) {
    self().finish(post_all_to_all(in, out, count_per_peer, type));
  }
  void all_to_all_v(const void* in, counts send_counts, counts send_offsets, void* out, counts receive_counts,
                    counts receive_offsets, dtype type) {
    self().finish(post_all_to_all_v(in, send_counts, send_offsets, out, receive_counts, receive_offsets, type));
  }
  void broadcast(void* data, std::size_t count, dtype type, int root) {
    self().finish(post_broadcast(data, count, type, root));
  }
  void send(const void* data, std::size_t count, dtype type, int peer, int tag = 0) {
    self().finish(post_send(data, count, type, peer, tag), 0);
  }
  void receive(void* data, std::size_t count, dtype type, int peer, int tag = 0) {
    self().finish(post_receive(data, count, type, peer, tag), 1);
  }
  void barrier() {
    self().finish(self().post({.what = detail::action::barrier}, 0, [](detail::part&) {}));
  }

  request start_all_reduce(const void* in, void* out, std::size_t count, dtype type, reduce_op op) {
    return collective(post_all_reduce(in, out, count, type, op));
  }
  request start_all_gather(const void* in, void* out, std::size_t count_per_rank, dtype type) {
    return collective(post_all_gather(in, out, count_per_rank, type));
  }
  request start_reduce_scatter(const void* in, void* out, std::size_t count_per_rank, dtype type, reduce_op op) {
    return collective(post_reduce_scatter(in, out, count_per_rank, type, op));
  }
  request start_all_to_all(const void* in, void* out, std::size_t count_per_peer, dtype type) {
    return collective(post_all_to_all(in, out, count_per_peer, type));
  }
  /// The counts and offsets are copied; only the data must stay.
  request start_all_to_all_v(const void* in, counts send_counts, counts send_offsets, void* out, counts receive_counts,
                             counts receive_offsets, dtype type) {
    return collective(post_all_to_all_v(in, send_counts, send_offsets, out, receive_counts, receive_offsets, type));
  }
  request start_broadcast(void* data, std::size_t count, dtype type, int root) {
    return collective(post_broadcast(data, count, type, root));
  }
  request start_send(const void* data, std::size_t count, dtype type, int peer, int tag = 0) {
    return request(detail::request_table<0>, member_, post_send(data, count, type, peer, tag));
  }
  request start_receive(void* data, std::size_t count, dtype type, int peer, int tag = 0) {
    return request(detail::request_table<1>, member_, post_receive(data, count, type, peer, tag));
  }

  /// Collective. The label names the subgroup in messages; without one it is the parent's, a dot and the color.
  communicator split(int color, int key, std::string_view label = {}) {
    auto child = self().split(color, key, label);
    return child ? communicator(std::move(child)) : communicator();
  }

  /// Collective: the same ranks, on the memory of each rank's device. `engine` must outlive no stream that it uses.
  communicator on(std::shared_ptr<device_engine> engine) {
    auto child = self().split(0, rank(), label());
    child->use(std::move(engine));
    return communicator(std::move(child));
  }

  void abort(const std::string& why) noexcept {
    try {
      self().run().fail(cat({"rank ", world_rank(), " called abort: ", why}));
    } catch (...) {
      std::terminate();
    }
  }

 private:
  using action = detail::action;

  detail::member& self() const {
    if (!member_) fail("a communicator without a group was used (its rank has a negative color in the split)");
    return *member_;
  }
  request collective(detail::operation* op) { return request(detail::request_table<-1>, member_, op); }

  static void set(detail::part& p, const void* in, void* out) {
    p.in = static_cast<const std::byte*>(in);
    p.out = static_cast<std::byte*>(out);
  }

  detail::operation* post_all_reduce(const void* in, void* out, std::size_t count, dtype type, reduce_op op) {
    plait::detail::check_reducible("all_reduce", type);
    const std::size_t bytes = count * size_of(type);
    plait::detail::check_buffers("all_reduce", in, bytes, out, bytes, 0);
    self().check_memory("all_reduce", in, out);
    return self().post({action::all_reduce, count, type, op}, bytes, [&](detail::part& p) { set(p, in, out); });
  }
  detail::operation* post_all_gather(const void* in, void* out, std::size_t count, dtype type) {
    const std::size_t bytes = count * size_of(type);
    plait::detail::check_buffers("all_gather", in, bytes, out, bytes * ranks(), bytes * place());
    self().check_memory("all_gather", in, out);
    return self().post({action::all_gather, count, type}, bytes, [&](detail::part& p) { set(p, in, out); });
  }
  detail::operation* post_reduce_scatter(const void* in, void* out, std::size_t count, dtype type, reduce_op op) {
    plait::detail::check_reducible("reduce_scatter", type);
    const std::size_t bytes = count * size_of(type);
    plait::detail::check_buffers("reduce_scatter", in, bytes * ranks(), out, bytes, bytes * place());
    self().check_memory("reduce_scatter", in, out);
    return self().post({action::reduce_scatter, count, type, op}, bytes * ranks(),
                       [&](detail::part& p) { set(p, in, out); });
  }
  detail::operation* post_all_to_all(const void* in, void* out, std::size_t count, dtype type) {
    const std::size_t bytes = count * size_of(type) * ranks();
    plait::detail::check_buffers("all_to_all", in, bytes, out, bytes, 0, size() == 1);
    self().check_memory("all_to_all", in, out);
    return self().post({action::all_to_all, count, type}, bytes, [&](detail::part& p) { set(p, in, out); });
  }
  detail::operation* post_all_to_all_v(const void* in, counts send_counts, counts send_offsets, void* out,
                                       counts receive_counts, counts receive_offsets, dtype type) {
    plait::detail::check_counts("all_to_all_v", size(), send_counts, send_offsets, receive_counts, receive_offsets);
    std::size_t sent = 0, received = 0;
    for (std::size_t k = 0; k < ranks(); ++k) {
      sent += send_counts[k];
      received += receive_counts[k];
    }
    plait::detail::check_pointer("all_to_all_v", in, sent);
    plait::detail::check_pointer("all_to_all_v", out, received);
    self().check_memory("all_to_all_v", in, out);
    return self().post({.what = action::all_to_all_v, .type = type}, sent * size_of(type), [&](detail::part& p) {
      set(p, in, out);
      p.send_counts.assign(send_counts.begin(), send_counts.end());
      p.send_offsets.assign(send_offsets.begin(), send_offsets.end());
      p.receive_counts.assign(receive_counts.begin(), receive_counts.end());
      p.receive_offsets.assign(receive_offsets.begin(), receive_offsets.end());
    });
  }
  detail::operation* post_broadcast(void* data, std::size_t count, dtype type, int root) {
    plait::detail::check_peer("broadcast", "root", root, size());
    plait::detail::check_pointer("broadcast", data, count * size_of(type));
    self().check_memory("broadcast", data, nullptr);
    return self().post({.what = action::broadcast, .count = count, .type = type, .root = root}, count * size_of(type),
                       [&](detail::part& p) { set(p, data, data); });
  }
  detail::operation* post_send(const void* data, std::size_t count, dtype type, int peer, int tag) {
    plait::detail::check_peer("send", "peer", peer, size());
    plait::detail::check_pointer("send", data, count * size_of(type));
    self().check_memory("send", data, nullptr);
    return self().post_message(0, peer, {.what = action::message, .count = count, .type = type, .root = tag},
                               [&](detail::part& p) { set(p, data, nullptr); });
  }
  detail::operation* post_receive(void* data, std::size_t count, dtype type, int peer, int tag) {
    plait::detail::check_peer("receive", "peer", peer, size());
    plait::detail::check_pointer("receive", data, count * size_of(type));
    self().check_memory("receive", data, nullptr);
    return self().post_message(1, peer, {.what = action::message, .count = count, .type = type, .root = tag},
                               [&](detail::part& p) { set(p, nullptr, data); });
  }

  std::size_t ranks() const { return static_cast<std::size_t>(size()); }
  std::size_t place() const { return static_cast<std::size_t>(rank()); }

  std::shared_ptr<detail::member> member_;
};

static_assert(plait::communicator<communicator>);

/// Runs `body(communicator)` on `ranks` threads and returns when all have ended. The first error of any rank ends them
/// all and is thrown here as a plait::error that says which rank it was and what every rank did last; the rank's own
/// exception is nested in it.
template <class F>
void run(int ranks, F&& body) {
  if (ranks < 1) fail({"threads::run: ranks is ", ranks, "; at least 1 is needed"});
  const auto world = std::make_shared<detail::world>(ranks);
  const auto home = std::make_shared<detail::group>();
  home->label = "world";
  for (int r = 0; r < ranks; ++r) home->members.push_back(r);

  const auto rank_main = [&](int rank) {
    std::exception_ptr exception;
    std::string what;
    try {
      communicator comm(std::make_shared<detail::member>(world, home, rank));
      body(comm);
    } catch (const std::exception& e) {
      exception = std::current_exception();
      what = e.what();
    } catch (...) {
      exception = std::current_exception();
      what = "an exception that is not a std::exception";
    }
    world->leave(rank, exception, what);
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  try {
    for (int r = 0; r < ranks; ++r) threads.emplace_back(rank_main, r);
  } catch (const std::exception& e) {
    world->fail(cat({"threads::run: only ", threads.size(), " of ", ranks, " threads could be started: ", e.what()}));
  }
  for (std::thread& t : threads) t.join();

  if (!world->failed()) return;
  if (const std::exception_ptr inner = world->exception()) {
    try {
      std::rethrow_exception(inner);
    } catch (...) {
      std::throw_with_nested(error(world->cause()));
    }
  }
  throw error(world->cause());
}

}  // namespace plait::threads
