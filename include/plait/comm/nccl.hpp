#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/nccl_bootstrap.hpp"
#include "plait/comm/nccl_call.hpp"

namespace plait::nccl {

/// A rank's handle of an NCCL communicator, on the memory of its GPU; see communicator.hpp for what the operations
/// mean. Nothing waits on the host but `barrier`: a call is in the order of the device's main stream, a started one
/// runs in the side stream between the call and the main stream's wait. The GPU runs all of a rank's operations in the
/// order in which they were called, whatever communicator they belong to, so every rank must call them in one order.
///
/// Calls in a stream that is being recorded become part of the graph; the deadline does not cover its replays.
///
/// The order of a reduction is NCCL's choice. Messages of two ranks match in the order of their calls, in a group in
/// the order of their tags first; a message to the own rank needs a group. An error, a lost rank, or an operation that
/// is past its deadline aborts all communicators of the process; later and waiting calls throw what happened.
class communicator {
  using counts = std::span<const std::size_t>;
  using op_ptr = std::shared_ptr<detail::operation>;

  // What each operation asks of NCCL, as functions of the stream. They stand here because their types are deduced.

  static void keep(ncclResult_t& first, ncclResult_t next) {
    if (first == ncclSuccess || first == ncclInProgress) first = next;
  }
  template <class F>
  static ncclResult_t grouped(const F& calls) {
    ncclResult_t result = ncclGroupStart();
    keep(result, calls());
    keep(result, ncclGroupEnd());
    return result;
  }

  auto call_all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) const {
    return [=, this](cudaStream_t stream) {
      return ncclAllReduce(in, out, n, detail::type_of(t), detail::op_of(op), get(), stream);
    };
  }
  auto call_all_gather(const void* in, void* out, std::size_t n, dtype t) const {
    return [=, this](cudaStream_t stream) { return ncclAllGather(in, out, n, detail::type_of(t), get(), stream); };
  }
  auto call_reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) const {
    return [=, this](cudaStream_t stream) {
      return ncclReduceScatter(in, out, n, detail::type_of(t), detail::op_of(op), get(), stream);
    };
  }
  auto call_broadcast(void* data, std::size_t n, dtype t, int root) const {
    return [=, this](cudaStream_t stream) {
      return ncclBroadcast(data, data, n, detail::type_of(t), root, get(), stream);
    };
  }
  auto call_message(bool sends, const void* data, std::size_t n, dtype t, int peer) const {
    return [=, this](cudaStream_t stream) { return send_or_receive(sends, data, n, t, peer, stream); };
  }
  ncclResult_t send_or_receive(bool sends, const void* data, std::size_t n, dtype t, int peer,
                               cudaStream_t stream) const {
    return sends ? ncclSend(data, n, detail::type_of(t), peer, get(), stream)
                 : ncclRecv(const_cast<void*>(data), n, detail::type_of(t), peer, get(), stream);
  }
  auto call_all_to_all(const void* in, void* out, std::size_t n, dtype t) const {
    return [=, this](cudaStream_t stream) {
      return exchange(
          in, out, t, stream, [=](std::size_t k) { return std::pair(n, k * n); },
          [=](std::size_t k) { return std::pair(n, k * n); });
    };
  }
  auto call_all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) const {
    return [=, this](cudaStream_t stream) {
      return exchange(
          in, out, t, stream, [=](std::size_t k) { return std::pair(sc[k], so[k]); },
          [=](std::size_t k) { return std::pair(rc[k], ro[k]); });
    };
  }
  /// One group of a message to and from every rank; `sent(k)` and `received(k)` give count and offset in elements.
  template <class Sent, class Received>
  ncclResult_t exchange(const void* in, void* out, dtype t, cudaStream_t stream, const Sent& sent,
                        const Received& received) const {
    return grouped([&] {
      ncclResult_t result = ncclSuccess;
      for (std::size_t step = 0; step < ranks(); ++step) {  // everybody starts with another peer
        const std::size_t k = (static_cast<std::size_t>(rank()) + step) % ranks();
        const auto [out_count, out_at] = sent(k);
        const auto [in_count, in_at] = received(k);
        const auto* from = static_cast<const std::byte*>(in) + out_at * size_of(t);
        const auto* to = static_cast<std::byte*>(out) + in_at * size_of(t);
        if (out_count != 0) keep(result, send_or_receive(true, from, out_count, t, static_cast<int>(k), stream));
        if (in_count != 0) keep(result, send_or_receive(false, to, in_count, t, static_cast<int>(k), stream));
      }
      return result;
    });
  }

 public:
  communicator() = default;
  explicit communicator(std::shared_ptr<detail::state> state) : state_(std::move(state)) {}

  explicit operator bool() const { return state_ != nullptr; }
  int rank() const { return self().rank; }
  int size() const { return self().size; }
  const std::string& label() const { return self().label; }
  ncclComm_t get() const { return self().link.comm; }
  detail::state& shared_state() const { return self(); }

  void all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    direct(
        "all_reduce", n * size_of(t), [&] { check_all_reduce(in, out, n, t); }, call_all_reduce(in, out, n, t, op));
  }
  void all_gather(const void* in, void* out, std::size_t n, dtype t) {
    direct(
        "all_gather", n * size_of(t), [&] { check_all_gather(in, out, n, t); }, call_all_gather(in, out, n, t));
  }
  void reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    direct(
        "reduce_scatter", n * size_of(t) * ranks(), [&] { check_reduce_scatter(in, out, n, t); },
        call_reduce_scatter(in, out, n, t, op));
  }
  void all_to_all(const void* in, void* out, std::size_t n, dtype t) {
    direct(
        "all_to_all", n * size_of(t) * ranks(), [&] { check_all_to_all(in, out, n, t); },
        call_all_to_all(in, out, n, t));
  }
  void all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    direct(
        "all_to_all_v", total(sc) * size_of(t), [&] { check_all_to_all_v(in, sc, so, out, rc, ro, t); },
        call_all_to_all_v(in, sc, so, out, rc, ro, t));
  }
  void broadcast(void* data, std::size_t n, dtype t, int root) {
    direct(
        "broadcast", n * size_of(t), [&] { check_broadcast(data, n, t, root); }, call_broadcast(data, n, t, root));
  }
  void send(const void* data, std::size_t n, dtype t, int peer, int = 0) {
    direct(
        "send", n * size_of(t), [&] { check_message("send", data, n, t, peer, true); },
        call_message(true, data, n, t, peer));
  }
  void receive(void* data, std::size_t n, dtype t, int peer, int = 0) {
    direct(
        "receive", n * size_of(t), [&] { check_message("receive", data, n, t, peer, true); },
        call_message(false, data, n, t, peer));
  }
  /// Returns when all ranks have called it and the GPU has done what was in the main stream before.
  void barrier() {
    int* const word = self().home->barrier_word();
    const op_ptr op = direct(
        "barrier", 0, [] {},
        [this, word](cudaStream_t stream) { return ncclAllReduce(word, word, 1, ncclInt32, ncclMax, get(), stream); });
    detail::pending waiting{self().home, op};
    while (!waiting.done()) {
    }
    if (self().home->ranks().failed()) self().home->stop(op->text());
  }

  request start_all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return started(
        "all_reduce", n * size_of(t), [&] { check_all_reduce(in, out, n, t); }, call_all_reduce(in, out, n, t, op));
  }
  request start_all_gather(const void* in, void* out, std::size_t n, dtype t) {
    return started(
        "all_gather", n * size_of(t), [&] { check_all_gather(in, out, n, t); }, call_all_gather(in, out, n, t));
  }
  request start_reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return started(
        "reduce_scatter", n * size_of(t) * ranks(), [&] { check_reduce_scatter(in, out, n, t); },
        call_reduce_scatter(in, out, n, t, op));
  }
  request start_all_to_all(const void* in, void* out, std::size_t n, dtype t) {
    return started(
        "all_to_all", n * size_of(t) * ranks(), [&] { check_all_to_all(in, out, n, t); },
        call_all_to_all(in, out, n, t));
  }
  request start_all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    return started(
        "all_to_all_v", total(sc) * size_of(t), [&] { check_all_to_all_v(in, sc, so, out, rc, ro, t); },
        call_all_to_all_v(in, sc, so, out, rc, ro, t));
  }
  request start_broadcast(void* data, std::size_t n, dtype t, int root) {
    return started(
        "broadcast", n * size_of(t), [&] { check_broadcast(data, n, t, root); }, call_broadcast(data, n, t, root));
  }
  request start_send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return start_message("send", {true, data, n, t, peer, tag});
  }
  request start_receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return start_message("receive", {false, data, n, t, peer, tag});
  }

  /// Messages started from here on are issued together by `end_group`, as one group of NCCL's. Groups nest.
  void begin_group() {
    detail::state& s = self();
    if (s.open_groups == 0) s.group = s.begin("group", 0);
    ++s.open_groups;
  }
  void end_group() {
    detail::state& s = self();
    if (s.open_groups == 0) fail({"end_group without begin_group on '", s.label, "'"});
    if (--s.open_groups > 0) return;
    const op_ptr op = std::exchange(s.group, nullptr);
    std::vector<detail::message> messages = std::exchange(s.messages, {});
    if (messages.empty() || std::uncaught_exceptions() > 0) return s.home->over(*op);  // half a group would hang
    std::stable_sort(messages.begin(), messages.end(), [](const auto& a, const auto& b) { return a.tag < b.tag; });
    put_beside(op, "ncclGroupEnd", [&](cudaStream_t stream) {
      return grouped([&] {
        ncclResult_t result = ncclSuccess;
        for (const detail::message& m : messages) {
          keep(result, send_or_receive(m.sends, m.data, m.count, m.type, m.peer, stream));
        }
        return result;
      });
    });
  }

  communicator split(int color, int key, std::string_view label = {}) {
    detail::state& s = self();
    refuse_in_group("split");
    auto child = std::make_shared<detail::state>(s.home);
    child->label = label.empty() ? cat({s.label, ".", color}) : std::string(label);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.commName = child->label.c_str();
    const op_ptr op = s.begin("split", 0);
    s.issue(*op, "ncclCommSplit", [&] {
      return ncclCommSplit(s.link.comm, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &child->link.comm, &config);
    });
    if (child->link.comm == nullptr) {
      s.home->over(*op);
      return {};
    }
    return ready(std::move(child), op);
  }

  /// Aborts all communicators of this process; the other processes find a lost peer.
  void abort(const std::string& why) noexcept {
    try {
      self().home->ranks().fail(cat({"rank ", self().home->rank, " called abort: ", why}));
    } catch (...) {
      std::terminate();
    }
  }

  /// Waits until a new communicator is made, and asks it for its ranks.
  static communicator ready(std::shared_ptr<detail::state> s, const op_ptr& op) {
    detail::state& made = *s;
    made.home->add(&made.link);
    made.issue(*op, "making a communicator", [] { return ncclInProgress; });
    made.issue(*op, "ncclCommUserRank", [&] { return ncclCommUserRank(made.link.comm, &made.rank); });
    made.issue(*op, "ncclCommCount", [&] { return ncclCommCount(made.link.comm, &made.size); });
    made.home->over(*op);
    return communicator(std::move(s));
  }

 private:
  detail::state& self() const {
    if (!state_) fail("a communicator without a group was used (its rank has a negative color in the split)");
    return *state_;
  }

  // ---- how an operation is issued --------------------------------------------------------------------------------

  /// In the main stream, behind what was started before it.
  template <class Check, class Call>
  op_ptr direct(const char* name, std::size_t bytes, const Check& check, const Call& call) {
    detail::state& s = self();
    refuse_in_group(name);
    check();
    const op_ptr op = s.begin(name, bytes);
    s.home->join_last_started();
    s.issue(*op, name, [&] { return call(s.home->main.handle()); });
    s.home->enqueued(*op, s.home->main);
    return op;
  }

  /// In the side stream, behind what is in the main stream now.
  template <class Call>
  void put_beside(const op_ptr& op, const char* name, const Call& call) {
    detail::session& home = *self().home;
    home.fork.record(home.main);
    home.side.wait(home.fork);
    self().issue(*op, name, [&] { return call(home.side.handle()); });
    home.enqueued(*op, home.side);
    home.last_started = op;
  }
  template <class Check, class Call>
  request started(const char* name, std::size_t bytes, const Check& check, const Call& call) {
    refuse_in_group(name);
    check();
    const op_ptr op = self().begin(name, bytes);
    put_beside(op, name, call);
    return detail::pending::started(self().home, op);
  }
  request start_message(const char* name, const detail::message& m) {
    detail::state& s = self();
    if (s.open_groups == 0) {
      return started(
          name, m.count * size_of(m.type), [&] { check_message(name, m.data, m.count, m.type, m.peer, true); },
          call_message(m.sends, m.data, m.count, m.type, m.peer));
    }
    check_message(name, m.data, m.count, m.type, m.peer, false);
    s.messages.push_back(m);
    return detail::pending::started(s.home, s.group);
  }
  void refuse_in_group(const char* name) const {
    if (self().open_groups > 0) {
      fail({name, " on '", self().label, "': only started messages can stand in a group"});
    }
  }

  // ---- checks ----------------------------------------------------------------------------------------------------

  std::size_t ranks() const { return static_cast<std::size_t>(size()); }
  static std::size_t total(counts c) {
    std::size_t sum = 0;
    for (const std::size_t n : c) sum += n;
    return sum;
  }
  std::size_t place(std::size_t bytes) const { return bytes * static_cast<std::size_t>(rank()); }

  void check_memory(const char* what, const void* a, const void* b) const {
    if (self().home->settings.check_pointers) detail::check_device_memory(what, a, b);
  }
  void check_all_reduce(const void* in, void* out, std::size_t n, dtype t) const {
    plait::detail::check_reducible("all_reduce", t);
    plait::detail::check_buffers("all_reduce", in, n * size_of(t), out, n * size_of(t), 0);
    check_memory("all_reduce", in, out);
  }
  void check_all_gather(const void* in, void* out, std::size_t n, dtype t) const {
    const std::size_t bytes = n * size_of(t);
    plait::detail::check_buffers("all_gather", in, bytes, out, bytes * ranks(), place(bytes));
    check_memory("all_gather", in, out);
  }
  void check_reduce_scatter(const void* in, void* out, std::size_t n, dtype t) const {
    const std::size_t bytes = n * size_of(t);
    plait::detail::check_reducible("reduce_scatter", t);
    plait::detail::check_buffers("reduce_scatter", in, bytes * ranks(), out, bytes, place(bytes));
    check_memory("reduce_scatter", in, out);
  }
  void check_all_to_all(const void* in, void* out, std::size_t n, dtype t) const {
    const std::size_t bytes = n * size_of(t) * ranks();
    plait::detail::check_buffers("all_to_all", in, bytes, out, bytes, 0, size() == 1);
    check_memory("all_to_all", in, out);
  }
  void check_all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) const {
    plait::detail::check_counts("all_to_all_v", size(), sc, so, rc, ro);
    plait::detail::check_pointer("all_to_all_v", in, total(sc) * size_of(t));
    plait::detail::check_pointer("all_to_all_v", out, total(rc) * size_of(t));
    check_memory("all_to_all_v", in, out);
  }
  void check_broadcast(void* data, std::size_t n, dtype t, int root) const {
    plait::detail::check_peer("broadcast", "root", root, size());
    plait::detail::check_pointer("broadcast", data, n * size_of(t));
    check_memory("broadcast", data, nullptr);
  }
  void check_message(const char* what, const void* data, std::size_t n, dtype t, int peer, bool alone) const {
    plait::detail::check_peer(what, "peer", peer, size());
    plait::detail::check_pointer(what, data, n * size_of(t));
    if (alone && peer == rank()) fail({what, ": a message to the own rank must stand in a comm_group"});
    check_memory(what, data, nullptr);
  }

  std::shared_ptr<detail::state> state_;
};

static_assert(plait::communicator<communicator>);

}  // namespace plait::nccl
