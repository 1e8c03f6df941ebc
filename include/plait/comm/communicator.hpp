// The interface of every backend: calls as values, the handle of an asynchronous operation, the verbs, the concept
// `communicator`, and groups of messages. The backends are comm/threads.hpp, comm/mpi.hpp and comm/nccl.hpp;
// examples/guide/mailbox.hpp is a small one.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/metrics.hpp"
#include "plait/core/collective.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait {

/// One operation of a communicator as a value, for backends that run it and for metrics that count and record it.
/// Counts are elements of the dtype. `verbs` documents each kind of call, with the members that it uses.
struct call {
  using counts = std::span<const std::size_t>;

  collective kind = collective::barrier;
  const void* in = nullptr;  ///< this rank's input: all kinds but receive
  void* out = nullptr;       ///< this rank's output: all kinds but send; equals `in` for a broadcast
  /// Elements of a rank's part (all_gather, reduce_scatter), a pair's part (all_to_all), or the whole array (others).
  std::size_t count = 0;
  dtype type = dtype::u8;
  reduce_op op = reduce_op::sum;
  int peer = 0;         ///< the root of a broadcast, the other rank of a message
  int tag = 0;          ///< of a message
  bool ragged = false;  ///< parts of unequal sizes: counts and offsets for each peer; see `all_to_all_v` and the others
  counts send_counts{}, send_offsets{}, receive_counts{}, receive_offsets{};

  constexpr const char* name() const { return ragged ? ragged_name_of(kind) : name_of(kind); }

  /// Returns the bytes of one rank's input, as in wire_bytes, for a group of `ranks` ranks.
  constexpr std::uint64_t payload(int ranks) const {
    if (ragged && kind != collective::all_gather) return sum(send_counts) * size_of(type);
    const bool for_each = kind == collective::reduce_scatter || kind == collective::all_to_all;
    return count * size_of(type) * (for_each ? static_cast<std::uint64_t>(ranks) : 1);
  }

  /// Returns the bytes on the wire, as wire_bytes counts them; see `ledger` for a ragged all_to_all.
  constexpr std::uint64_t wire(int rank, int ranks) const {
    if (ragged && kind == collective::all_gather)
      return sum(receive_counts) * size_of(type) * static_cast<std::uint64_t>(ranks - 1);
    if (!ragged || kind == collective::reduce_scatter) return wire_bytes(kind, ranks, payload(ranks));
    const std::size_t own = static_cast<std::size_t>(rank);
    const std::size_t kept = own < send_counts.size() ? send_counts[own] : 0;
    return (sum(send_counts) - kept) * size_of(type) * static_cast<std::uint64_t>(ranks);
  }

  static constexpr std::size_t sum(counts c) {
    std::size_t total = 0;
    for (const std::size_t n : c) total += n;
    return total;
  }
};

/// Whether reductions of this element type exist; u8 values can only be moved.
constexpr bool reducible(dtype type) { return type != dtype::u8; }

namespace detail {

inline void check_peer(const char* what, const char* role, int peer, int size) {
  if (peer < 0 || peer >= size) fail({what, ": ", role, " is ", peer, "; the group has ranks 0 to ", size - 1});
}

}  // namespace detail

/// Throws unless `rank` of a group of `ranks` may make this call. All backends share these checks.
void check(const call& c, int rank, int ranks);

#ifndef PLAIT_COMPILED
namespace detail {

inline void check_pointer(const char* what, const void* data, std::size_t bytes) {
  if (data == nullptr && bytes != 0) fail({what, ": a null pointer for ", bytes, " bytes"});
}

/// in and out must not overlap, except that the smaller one may be at `place` bytes into the larger one.
inline void check_buffers(const char* what, const void* in, std::size_t in_bytes, const void* out,
                          std::size_t out_bytes, std::size_t place, bool may_alias) {
  check_pointer(what, in, in_bytes);
  check_pointer(what, out, out_bytes);
  if (in_bytes == 0 || out_bytes == 0) return;
  const auto a = reinterpret_cast<std::uintptr_t>(in), b = reinterpret_cast<std::uintptr_t>(out);
  if (a + in_bytes <= b || b + out_bytes <= a) return;
  if (may_alias && (in_bytes <= out_bytes ? a == b + place : b == a + place)) return;
  fail({what, ": in and out overlap",
        may_alias ? " and are not in place (the smaller buffer at its rank's own place in the larger)" : "",
        "; use separate buffers"});
}

/// Checks ragged moves: a received part must overlap neither another received part nor a sent part.
inline void check_parts(const call& c) {
  const char* const what = c.name();
  const std::size_t size = size_of(c.type);
  check_pointer(what, c.in, call::sum(c.send_counts) * size);
  check_pointer(what, c.out, call::sum(c.receive_counts) * size);
  struct part {
    std::uintptr_t begin, end;
    bool received;
  };
  std::vector<part> parts;
  parts.reserve(2 * c.send_counts.size());
  const auto add = [&](const void* buffer, call::counts counts, call::counts offsets, bool received) {
    const auto base = reinterpret_cast<std::uintptr_t>(buffer);
    for (std::size_t k = 0; k < counts.size(); ++k)
      if (counts[k] != 0) parts.push_back({base + offsets[k] * size, base + (offsets[k] + counts[k]) * size, received});
  };
  add(c.in, c.send_counts, c.send_offsets, false);
  add(c.out, c.receive_counts, c.receive_offsets, true);
  std::sort(parts.begin(), parts.end(), [](const part& a, const part& b) { return a.begin < b.begin; });
  std::uintptr_t sent = 0, received = 0;  // the greatest ends of the parts so far
  for (const part& p : parts) {
    if (p.begin < received || (p.received && p.begin < sent))
      fail({what, p.received && p.begin < received ? ": parts that are received overlap" : ": in and out overlap",
            "; each part that is received needs a place of its own"});
    (p.received ? received : sent) = std::max(p.received ? received : sent, p.end);
  }
}

}  // namespace detail

PLAIT_INLINE void check(const call& c, int rank, int ranks) {
  const char* const what = c.name();
  const std::size_t n = static_cast<std::size_t>(ranks), part = c.count * size_of(c.type);
  const std::size_t place = part * static_cast<std::size_t>(rank);
  if ((c.kind == collective::all_reduce || c.kind == collective::reduce_scatter) && !reducible(c.type))
    fail({what, ": dtype is ", name_of(c.type), "; reductions exist for float, double, bf16, int32, int64"});
  if (c.ragged) {
    for (const call::counts& list : {c.send_counts, c.send_offsets, c.receive_counts, c.receive_offsets})
      if (list.size() != n)
        fail({what, ": counts and offsets need one entry for each of the ", ranks, " ranks of the group"});
    if (c.kind != collective::reduce_scatter) return detail::check_parts(c);
    return detail::check_buffers(what, c.in, c.payload(ranks), c.out, part, 0, false);
  }
  switch (c.kind) {
    case collective::all_reduce:
      return detail::check_buffers(what, c.in, part, c.out, part, 0, true);
    case collective::all_gather:
      return detail::check_buffers(what, c.in, part, c.out, part * n, place, true);
    case collective::reduce_scatter:
      return detail::check_buffers(what, c.in, part * n, c.out, part, place, true);
    case collective::all_to_all:
      return detail::check_buffers(what, c.in, part * n, c.out, part * n, 0, ranks == 1);
    case collective::broadcast:
      detail::check_peer(what, "root", c.peer, ranks);
      return detail::check_pointer(what, c.out, part);
    case collective::send:
      detail::check_peer(what, "peer", c.peer, ranks);
      return detail::check_pointer(what, c.in, part);
    case collective::receive:
      detail::check_peer(what, "peer", c.peer, ranks);
      return detail::check_pointer(what, c.out, part);
    case collective::barrier:
      return;
  }
}
#endif

namespace detail {

/// Returns what a communicator's handle holds. Throws if the handle is empty.
template <class Pointer>
auto& held_by(const Pointer& held) {
  if (!held)
    fail(
        "a communicator that holds nothing was used: no group was given to it, or its rank has a negative color in "
        "the split");
  return *held;
}

}  // namespace detail

/// The functions of a backend that a request calls, as a constant table without virtual functions. A backend that
/// reuses its operations then allocates nothing to start one. `owner` keeps `object` alive.
struct request_ops {
  /// Blocks until the operation is complete. Throws plait::error if it can never complete.
  void (*wait)(void* owner, void* object);
  /// True once the operation is complete; the caller must still wait for it. Throws if it can never complete.
  bool (*done)(void* owner, void* object);
  /// Waits without throwing; the destructor of a request calls it, because the buffers are about to be freed.
  void (*drop)(void* owner, void* object) noexcept;
  /// Completion time in seconds of `comm_clock`; 0: not complete, or the time is unknown. Null: the time is never
  /// known.
  double (*completed)(void* owner, void* object) noexcept = nullptr;
};

/// The times of an asynchronous operation, in seconds of `comm_clock`.
struct request_times {
  double started = 0;  ///< when `start` returned
  /// Completion time: from the backend if it knows, else the first time that `done` returned true, else the end of
  /// `wait`. Without a poll, an operation seems to last until its `wait`.
  double completed = 0;
  double waited_from = 0, waited_to = 0;  ///< the span that the rank spent in `wait`
};

/// Called when a request has been waited for. The ledger and the recorder measure asynchronous operations with it.
class request_observer {
 public:
  virtual void waited(std::uint64_t token, const request_times& times) noexcept = 0;

 protected:
  ~request_observer() = default;
};

/// Handle of an asynchronous operation. The operation may use the buffers until `wait` returns. The destructor waits,
/// so buffers that outlive the request are safe; the next operation reports an error met there. Functions that return a
/// request are `[[nodiscard]]`. The class is not, because nvcc 13 would warn at every assignment.
class request {
 public:
  request() = default;
  request(const request_ops& ops, std::shared_ptr<void> owner, void* object)
      : ops_(&ops), owner_(std::move(owner)), object_(object) {}
  /// Wraps an operation that has `wait()`, `done()` and `drop() noexcept`, as `request_ops` documents them.
  template <class Operation>
  explicit request(std::shared_ptr<Operation> operation) : request(ops_of<Operation>, std::move(operation), nullptr) {}
  request(request&& other) noexcept { swap(other); }
  request& operator=(request&& other) noexcept {
    request(std::move(other)).swap(*this);
    return *this;
  }
  request(const request&) = delete;
  request& operator=(const request&) = delete;
  ~request() {
    if (ops_ == nullptr) return;
    if (observer_) begin_wait();
    ops_->drop(owner_.get(), object_);
    if (observer_) end_wait();
  }

  /// Blocks until the operation is complete. Returns at once without an operation, or after an earlier wait.
  void wait() {
    if (ops_ == nullptr) return;
    if (observer_) begin_wait();
    const request_ops* ops = std::exchange(ops_, nullptr);
    ops->wait(owner_.get(), object_);
    owner_.reset();
    if (observer_) end_wait();
    observer_.reset();
  }

  /// True if `wait` would not block. Otherwise it yields the processor, because there may be more ranks than cores.
  bool done() const {
    if (ops_ == nullptr) return true;
    if (!ops_->done(owner_.get(), object_)) return false;
    if (observer_ && times_.completed == 0) {
      times_.completed = completed_at();
      if (times_.completed == 0) times_.completed = comm_clock();
    }
    return true;
  }
  /// Completion time in seconds of `comm_clock`; 0: not complete, or the backend does not know.
  double completed_at() const {
    return ops_ != nullptr && ops_->completed ? ops_->completed(owner_.get(), object_) : 0;
  }

  /// True while there is an operation that has not been waited for.
  explicit operator bool() const noexcept { return ops_ != nullptr; }

  /// `started` is the start of the operation, in seconds of `comm_clock`.
  void observe(std::shared_ptr<request_observer> observer, std::uint64_t token, double started) {
    observer_ = std::move(observer);
    token_ = token;
    times_ = {.started = started};
  }

  void swap(request& other) noexcept {
    std::swap(ops_, other.ops_);
    owner_.swap(other.owner_);
    std::swap(object_, other.object_);
    observer_.swap(other.observer_);
    std::swap(token_, other.token_);
    std::swap(times_, other.times_);
  }

 private:
  template <class Operation>
  static constexpr request_ops ops_of = {[](void* owner, void*) { static_cast<Operation*>(owner)->wait(); },
                                         [](void* owner, void*) { return static_cast<Operation*>(owner)->done(); },
                                         [](void* owner, void*) noexcept { static_cast<Operation*>(owner)->drop(); }};

  void begin_wait() {
    if (times_.completed == 0) times_.completed = completed_at();
    times_.waited_from = comm_clock();
  }
  void end_wait() {
    times_.waited_to = comm_clock();
    observer_->waited(token_, times_);
  }

  const request_ops* ops_ = nullptr;
  std::shared_ptr<void> owner_;
  void* object_ = nullptr;
  std::shared_ptr<request_observer> observer_;
  std::uint64_t token_ = 0;
  mutable request_times times_;  ///< set where there is an observer
};

/// The operations of a communicator, by name. Each makes a `call`, and `run` completes or `start` begins it. Counts are
/// elements of the dtype. Every rank of a group makes the collective calls of one communicator in one order and with
/// equal counts. For one collective, all ranks call `run` or all call `start`.
///
/// `Self` derives from this class, and has `start(const call&)`, which returns a request. If it also has `run`, verbs
/// that block call that instead of starting and waiting.
template <class Self>
class verbs {
  using counts = call::counts;

 public:
  /// out[i] = in_0[i] op ... op in_{p-1}[i], bit-identical on every rank; in == out is allowed. The maximum and the
  /// minimum are NaN if any rank has a NaN. NCCL ignores NaNs in these two: reduce the sum as well where a NaN must be
  /// seen.
  void all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    self().run({.kind = collective::all_reduce, .in = in, .out = out, .count = n, .type = t, .op = op});
  }
  [[nodiscard]] request start_all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return self().start({.kind = collective::all_reduce, .in = in, .out = out, .count = n, .type = t, .op = op});
  }

  /// out[r * n + i] = in_r[i]; in may be this rank's part of out.
  void all_gather(const void* in, void* out, std::size_t n, dtype t) {
    self().run({.kind = collective::all_gather, .in = in, .out = out, .count = n, .type = t});
  }
  [[nodiscard]] request start_all_gather(const void* in, void* out, std::size_t n, dtype t) {
    return self().start({.kind = collective::all_gather, .in = in, .out = out, .count = n, .type = t});
  }

  /// out[i] = the reduction of in_k[rank * n + i] over k; out may be this rank's part of in.
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

  /// all_to_all with a count and an offset for each peer, in elements. This rank sends rank k `send_counts[k]` elements
  /// from `send_offsets[k]` on, and puts rank k's elements at `receive_offsets[k]`. Counts and offsets are read before
  /// the call returns; only the data must stay valid.
  void all_to_all_v(const void* in, counts send_counts, counts send_offsets, void* out, counts receive_counts,
                    counts receive_offsets, dtype t) {
    self().run(exchange(in, send_counts, send_offsets, out, receive_counts, receive_offsets, t));
  }
  [[nodiscard]] request start_all_to_all_v(const void* in, counts send_counts, counts send_offsets, void* out,
                                           counts receive_counts, counts receive_offsets, dtype t) {
    return self().start(exchange(in, send_counts, send_offsets, out, receive_counts, receive_offsets, t));
  }

  /// all_gather of parts of unequal sizes: `parts[k]` elements of rank k are put at `offsets[k]`. Parts and offsets are
  /// equal on all ranks, and are read before the call returns. in and out must not overlap. Only communicators whose
  /// `unequal_parts` returns true support it; see the concept.
  void all_gather_v(const void* in, void* out, counts parts, counts offsets, dtype t) {
    with_parts(collective::all_gather, in, out, parts, offsets, t, {}, [&](const call& c) { self().run(c); });
  }
  [[nodiscard]] request start_all_gather_v(const void* in, void* out, counts parts, counts offsets, dtype t) {
    return with_parts(collective::all_gather, in, out, parts, offsets, t, {},
                      [&](const call& c) { return self().start(c); });
  }

  /// reduce_scatter into parts of unequal sizes: rank k gets the reduction of `parts[k]` elements from `offsets[k]` on.
  /// The other rules of all_gather_v hold here too.
  void reduce_scatter_v(const void* in, void* out, counts parts, counts offsets, dtype t, reduce_op op) {
    with_parts(collective::reduce_scatter, in, out, parts, offsets, t, op, [&](const call& c) { self().run(c); });
  }
  [[nodiscard]] request start_reduce_scatter_v(const void* in, void* out, counts parts, counts offsets, dtype t,
                                               reduce_op op) {
    return with_parts(collective::reduce_scatter, in, out, parts, offsets, t, op,
                      [&](const call& c) { return self().start(c); });
  }

  /// Copies root's data to all ranks.
  void broadcast(void* data, std::size_t n, dtype t, int root) {
    self().run({.kind = collective::broadcast, .in = data, .out = data, .count = n, .type = t, .peer = root});
  }
  [[nodiscard]] request start_broadcast(void* data, std::size_t n, dtype t, int root) {
    return self().start({.kind = collective::broadcast, .in = data, .out = data, .count = n, .type = t, .peer = root});
  }

  /// Messages are matched by (sender, receiver, tag), in order. A send may block until its receive, so send around a
  /// ring with a comm_group.
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

  static call exchange(const void* in, counts send_counts, counts send_offsets, void* out, counts receive_counts,
                       counts receive_offsets, dtype t) {
    call c{.kind = collective::all_to_all, .in = in, .out = out, .type = t, .ragged = true};
    c.send_counts = send_counts, c.send_offsets = send_offsets;
    c.receive_counts = receive_counts, c.receive_offsets = receive_offsets;
    return c;
  }
  /// Calls f(call), where the call is a ragged gather or scatter written as an exchange: this rank's own part is equal
  /// for all peers.
  template <class F>
  auto with_parts(collective kind, const void* in, void* out, counts parts, counts offsets, dtype t, reduce_op op,
                  const F& f) {
    const auto rank = static_cast<std::size_t>(self().rank());
    const std::size_t own = rank < parts.size() ? parts[rank] : 0;
    const std::vector<std::size_t> same(parts.size(), own), begin(parts.size());
    call c = kind == collective::all_gather ? exchange(in, same, begin, out, parts, offsets, t)
                                            : exchange(in, parts, offsets, out, same, begin, t);
    c.kind = kind, c.count = own, c.op = op;
    return f(c);
  }
  Self& self() { return static_cast<Self&>(*this); }
};

/// A communicator is a cheap handle: copies share the sequence of operations, and are used by the thread of their rank.
/// A backend derives from `verbs<itself>` and has
///
///     int rank() const;
///     int size() const;
///     label() const;                             // the name of the group in messages
///     request start(const call&);
///     Self split(int color, int key, std::string_view label = {});
///     void abort(const std::string& why) noexcept;
///
/// `split` makes subgroups: the ranks of one color, ordered by key, then by rank. A negative color gives an empty
/// communicator (false as a bool). `abort` ends every rank of the world with an error.
///
/// Two members are optional. comm_group calls `begin_group()` and `end_group()` around its messages. If `bool
/// unequal_parts(std::size_t bytes) const` returns true, the backend takes ragged all_gathers and reduce_scatters whose
/// largest part has `bytes`. Otherwise redistributions pad their parts to the largest one.
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

/// The member `unequal_parts` of a kind of communicators, for dry runs without them; null: always true.
using unequal_parts_rule = bool (*)(std::size_t bytes);

namespace nccl {
/// The rule of NCCL's communicators. Unequal parts move unpadded as one group of broadcasts or reductions, one for each
/// rank. Parts of less than 64 KiB are padded, because one collective starts faster than a group. (The limit is an
/// estimate: a link of 100 GB/s moves 64 KiB in less than a microsecond.)
constexpr bool takes_unequal_parts(std::size_t bytes) { return bytes >= std::size_t{64} << 10; }
}  // namespace nccl

/// Sends and receives that progress together, in any order. Nothing blocks before the end of the group, so rings and
/// exchanges cannot deadlock.
///
///     comm_group ring(comm);
///     ring.send(out, n, dtype::f32, next);
///     ring.receive(in, n, dtype::f32, previous);
///     ring.end();                     // or start(), and wait() when they are needed
///
/// The destructor waits for the messages that were started, and drops the others. The next operation reports an error
/// met there.
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
    const open_group all(comm_);  // if a start throws, this ends the group
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
        } catch (...) {  // an exception is already in flight
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

#include "plait/core/macros_on.hpp"
