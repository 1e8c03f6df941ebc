// The interface of every backend: the verbs, which are alike for all, the concept with the six members that a backend
// supplies, and groups of messages. No backend is here: comm/threads.hpp, comm/mpi.hpp and comm/nccl.hpp are plait's,
// and tests/support/mailbox.hpp is a small one that a test brings.
#pragma once

#include <concepts>
#include <cstddef>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/call.hpp"
#include "plait/comm/request.hpp"

namespace plait {

/// The operations of a communicator, by name: each is a `call` that `run` completes or `start` begins. Counts are
/// elements of the dtype. Every rank of a group calls the collectives of one communicator in the same order, with the
/// same counts, and all in the same of the two forms.
///
/// `Self` derives from it, and has `start(const call&)`, which returns a request. Where it also has `run`, that is used
/// in place of starting and waiting.
template <class Self>
class verbs {
  using counts = call::counts;

 public:
  /// out[i] = in_0[i] op ... op in_{p-1}[i], equal in every bit on every rank; in == out is allowed. The maximum and
  /// the minimum of numbers with a NaN among them is a NaN, whichever rank has it. (Not on NCCL, which gives that of
  /// the others: ask for the sum as well where a NaN must be seen there.)
  void all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    self().run({.kind = collective::all_reduce, .in = in, .out = out, .count = n, .type = t, .op = op});
  }
  [[nodiscard]] request start_all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return self().start({.kind = collective::all_reduce, .in = in, .out = out, .count = n, .type = t, .op = op});
  }

  /// out[r * n + i] = in_r[i]; in may be its own place in out.
  void all_gather(const void* in, void* out, std::size_t n, dtype t) {
    self().run({.kind = collective::all_gather, .in = in, .out = out, .count = n, .type = t});
  }
  [[nodiscard]] request start_all_gather(const void* in, void* out, std::size_t n, dtype t) {
    return self().start({.kind = collective::all_gather, .in = in, .out = out, .count = n, .type = t});
  }

  /// out[i] = the reduction of in_k[rank * n + i] over k; out may be its own place in in.
  void reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    self().run({.kind = collective::reduce_scatter, .in = in, .out = out, .count = n, .type = t, .op = op});
  }
  [[nodiscard]] request start_reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return self().start({.kind = collective::reduce_scatter, .in = in, .out = out, .count = n, .type = t, .op = op});
  }

  /// out[k * n + i] = in_k[rank * n + i].
  void all_to_all(const void* in, void* out, std::size_t n, dtype t) {
    self().run({.kind = collective::all_to_all, .in = in, .out = out, .count = n, .type = t});
  }
  [[nodiscard]] request start_all_to_all(const void* in, void* out, std::size_t n, dtype t) {
    return self().start({.kind = collective::all_to_all, .in = in, .out = out, .count = n, .type = t});
  }

  /// all_to_all with a count and an offset for each peer, in elements: to rank k go `send_counts[k]` from
  /// `send_offsets[k]` on, and what comes from it is put at `receive_offsets[k]`. Counts and offsets are read before
  /// the call returns; only the data must stay.
  void all_to_all_v(const void* in, counts send_counts, counts send_offsets, void* out, counts receive_counts,
                    counts receive_offsets, dtype t) {
    self().run(ragged(in, send_counts, send_offsets, out, receive_counts, receive_offsets, t));
  }
  [[nodiscard]] request start_all_to_all_v(const void* in, counts send_counts, counts send_offsets, void* out,
                                           counts receive_counts, counts receive_offsets, dtype t) {
    return self().start(ragged(in, send_counts, send_offsets, out, receive_counts, receive_offsets, t));
  }

  /// data = data of root.
  void broadcast(void* data, std::size_t n, dtype t, int root) {
    self().run({.kind = collective::broadcast, .in = data, .out = data, .count = n, .type = t, .peer = root});
  }
  [[nodiscard]] request start_broadcast(void* data, std::size_t n, dtype t, int root) {
    return self().start({.kind = collective::broadcast, .in = data, .out = data, .count = n, .type = t, .peer = root});
  }

  /// Messages are matched by (sender, receiver, tag), in order. A send may wait for its receive, so a ring of sends
  /// belongs in a comm_group.
  void send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    self().run({.kind = collective::send, .in = data, .count = n, .type = t, .peer = peer, .tag = tag});
  }
  [[nodiscard]] request start_send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return self().start({.kind = collective::send, .in = data, .count = n, .type = t, .peer = peer, .tag = tag});
  }
  void receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    self().run({.kind = collective::receive, .out = data, .count = n, .type = t, .peer = peer, .tag = tag});
  }
  [[nodiscard]] request start_receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return self().start({.kind = collective::receive, .out = data, .count = n, .type = t, .peer = peer, .tag = tag});
  }

  void barrier() { self().run({}); }

  void run(const call& c) { self().start(c).wait(); }

 private:
  friend Self;
  verbs() = default;

  static call ragged(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    return {.kind = collective::all_to_all,
            .in = in,
            .out = out,
            .type = t,
            .ragged = true,
            .send_counts = sc,
            .send_offsets = so,
            .receive_counts = rc,
            .receive_offsets = ro};
  }
  Self& self() { return static_cast<Self&>(*this); }
};

/// A cheap handle: copies share the sequence of operations, and belong to the thread of their rank. A backend derives
/// from `verbs<itself>` and has
///
///     int rank() const;
///     int size() const;
///     label() const;                             // what the group is called in messages
///     request start(const call&);
///     Self split(int color, int key, std::string_view label = {});
///     void abort(const std::string& why) noexcept;
///
/// `split` makes the subgroups: the ranks of one color, ordered by key, then by rank; a negative color gives an empty
/// communicator (false as a bool). `abort` ends every rank of the world with an error. Where it has `begin_group()` and
/// `end_group()`, comm_group calls them around its messages.
template <class C>
concept communicator = std::copyable<C> && std::default_initializable<C> && std::constructible_from<bool, const C&> &&
                       requires(C& c, const C& same, const call& what, std::string_view label, const std::string& why) {
                         { same.rank() } -> std::same_as<int>;
                         { same.size() } -> std::same_as<int>;
                         { same.label() } -> std::convertible_to<std::string>;
                         c.run(what);
                         { c.start(what) } -> std::same_as<request>;
                         { c.split(0, 0) } -> std::same_as<C>;
                         { c.split(0, 0, label) } -> std::same_as<C>;
                         { c.abort(why) } noexcept;
                       };

/// Sends and receives that progress together, whatever their order: nothing waits before the end of the group, so
/// rings and exchanges cannot block each other.
///
///     comm_group ring(comm);
///     ring.send(out, n, dtype::f32, next);
///     ring.receive(in, n, dtype::f32, previous);
///     ring.end();                     // or start(), and wait() when they are needed
///
/// A group that is destroyed waits for what it has started, and forgets the rest; an error met there is reported by the
/// next operation.
template <class C>
class comm_group {
 public:
  explicit comm_group(C& comm) : comm_(comm) {}
  comm_group(const comm_group&) = delete;
  comm_group& operator=(const comm_group&) = delete;

  void send(const void* data, std::size_t count, dtype type, int peer, int tag = 0) {
    calls_.push_back({.kind = collective::send, .in = data, .count = count, .type = type, .peer = peer, .tag = tag});
  }
  void receive(void* data, std::size_t count, dtype type, int peer, int tag = 0) {
    calls_.push_back(
        {.kind = collective::receive, .out = data, .count = count, .type = type, .peer = peer, .tag = tag});
  }

  void start() {
    if (calls_.empty()) return;
    const std::vector<call> calls = std::exchange(calls_, {});
    const open_group all(comm_);  // where a start throws, the group ends without half of its messages going
    for (const call& c : calls) requests_.push_back(comm_.start(c));
  }
  void wait() {
    for (request& r : requests_) r.wait();
    requests_.clear();
  }
  void end() {
    start();
    wait();
  }

 private:
  struct open_group {
    static constexpr bool hooked = requires(C& c) {
      c.begin_group();
      c.end_group();
    };
    explicit open_group(C& c) : comm(c) {
      if constexpr (hooked) comm.begin_group();
    }
    open_group(const open_group&) = delete;
    ~open_group() noexcept(false) {
      if constexpr (hooked) {
        if (std::uncaught_exceptions() == before) {
          comm.end_group();
          return;
        }
        try {
          comm.end_group();
        } catch (...) {  // the first error is on its way
        }
      }
    }
    C& comm;
    int before = std::uncaught_exceptions();
  };

  C& comm_;
  std::vector<call> calls_;
  std::vector<request> requests_;
};

}  // namespace plait
