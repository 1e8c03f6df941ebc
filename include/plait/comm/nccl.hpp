// The NCCL backend: a rank's communicator on the memory of its GPU. comm/launch/nccl.hpp makes a rank's first one;
// comm/nccl/state.hpp finds late and lost ranks. Test: tests/cuda/comm/comm_nccl.cpp.
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
#include "plait/comm/nccl/state.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl {

/// A rank's handle of an NCCL communicator, on the memory of its GPU; communicator.hpp documents the operations. The
/// host blocks in `barrier` and `split`, and while NCCL sets up a call. A blocking call runs in the order of the
/// device's main stream. An asynchronous one runs in a side stream, between the call and the main stream's wait. The
/// GPU runs a communicator's operations in the order of the calls. Operations of different communicators may run
/// concurrently, and every rank must call them in one order.
///
/// Calls in a stream that is being captured become part of the graph. The deadline covers only replays that `watch`
/// follows. The graph must be destroyed before the communicator, also when an exception unwinds, because NCCL cannot
/// end a communicator whose calls a graph holds.
///
/// NCCL chooses the order of a reduction. Messages between two ranks match in the order of their calls, in a group by
/// tag first. A message to the own rank needs a group. An error, a lost rank or a passed deadline aborts all
/// communicators of the team: all that were split from one. Waiting and later calls throw the cause.
class communicator : public verbs<communicator> {
  using op_ptr = std::shared_ptr<detail::operation>;

 public:
  communicator() = default;
  explicit communicator(std::shared_ptr<detail::state> state) : state_(std::move(state)) {}

  explicit operator bool() const { return state_ != nullptr; }
  int rank() const { return self().rank; }
  int size() const { return self().size; }
  const std::string& label() const { return self().label; }
  /// True: calls return before the GPU has completed them.
  bool enqueues() const { return true; }
  /// Whether a mesh may use it for the group of all its ranks instead of making another. False for a caller's
  /// communicator: nothing aborts it, so layers' operations would hang after a rank is lost.
  bool serves_groups() const { return self().link.owned; }
  /// Whether unequal parts whose largest has `bytes` are moved unpadded.
  bool unequal_parts(std::size_t bytes) const { return takes_unequal_parts(bytes); }
  ncclComm_t get() const { return self().link.comm; }
  detail::state& shared_state() const { return self(); }

  /// Runs in the main stream, ordered after this communicator's asynchronous operations. A barrier returns when all
  /// ranks have called it and the GPU has completed the main stream's earlier work.
  void run(const call& c) {
    detail::state& s = self();
    refuse_in_group(c.name());
    check_call(c, true);
    const op_ptr op = s.begin(c.name(), c.payload(s.size));
    s.join_last_started();
    s.used = true;
    s.issue(*op, c.name(), [&] { return ask(c, s.home->main.handle()); });
    s.home->enqueued(*op, s.home->main);
    if (c.kind != collective::barrier) return;
    detail::pending waiting{s.home, op};
    while (!waiting.done()) {
    }
    if (s.home->ranks().failed()) s.home->stop(op->text());
  }

  /// Runs on the side stream, ordered after the current work of the main stream and after earlier calls of this
  /// communicator.
  [[nodiscard]] request start(const call& c) {
    detail::state& s = self();
    if (s.open_groups > 0 && (c.kind == collective::send || c.kind == collective::receive)) {
      check_call(c, false);
      s.messages.push_back(c);
      return detail::pending::started(s.home, s.group);
    }
    refuse_in_group(c.name());
    check_call(c, true);
    const op_ptr op = s.begin(c.name(), c.payload(s.size));
    start_asynchronous(op, c.name(), [&](cudaStream_t stream) { return ask(c, stream); });
    return detail::pending::started(s.home, op);
  }

  /// Begins a group of messages, which `end_group` issues together as one NCCL group. Groups nest.
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
    std::vector<call> messages = std::exchange(s.messages, {});
    if (messages.empty() || std::uncaught_exceptions() > 0) return s.home->over(*op);  // half a group would hang
    std::stable_sort(messages.begin(), messages.end(), [](const auto& a, const auto& b) { return a.tag < b.tag; });
    start_asynchronous(op, "ncclGroupEnd", [&](cudaStream_t stream) {
      return grouped([&] {
        ncclResult_t result = ncclSuccess;
        for (const call& m : messages) keep(result, ask(m, stream));
        return result;
      });
    });
  }

  communicator split(int color, int key, std::string_view label = {}) {
    detail::state& s = self();
    refuse_in_group("split");
    auto child = std::make_shared<detail::state>(s.home);
    child->is_split = true;
    child->label = label.empty() ? cat({s.label, ".", color}) : std::string(label);
    ncclConfig_t config = detail::config_of(s.home->settings, child->label);
    if (cuda::capturing(s.home->main))
      fail({"split on '", s.label, "': NCCL makes no communicator while a graph is recorded; ask for it before"});
    s.wait_for_transfers();
    if (s.home->release_unused) s.home->release_unused();
    const op_ptr op = s.begin("split", 0);
    s.issue_late(*op, "ncclCommSplit", child, [&] {
      return ncclCommSplit(s.link.comm, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &child->link.comm, &config);
    });
    if (child->link.comm != nullptr) return ready(std::move(child), op);
    s.home->over(*op);
    if (color >= 0) fail({"split on '", s.label, "': NCCL made no communicator for color ", color});
    return {};
  }

  /// Puts the current work of the main stream, such as a graph that replays calls, under the deadline as one operation.
  /// `name` is a literal.
  void watch(const char* name) {
    detail::state& s = self();
    const op_ptr op = s.begin(name, 0);
    s.home->enqueued(*op, s.home->main);
  }

  /// Requests the abort of all communicators of its team in this process, and returns at once. The other processes find
  /// a lost peer.
  void abort(const std::string& why) noexcept {
    try {
      self().home->ranks().fail(cat({"rank ", self().home->rank, " called abort: ", why}));
    } catch (...) {
      std::terminate();
    }
  }

  /// Waits until a new communicator is ready, and reads its rank and size.
  static communicator ready(std::shared_ptr<detail::state> s, const op_ptr& op) {
    detail::state& made = *s;
    made.home->add(&made.link);
    made.issue(*op, "making a communicator", [] { return ncclInProgress; });
    made.issue(*op, "ncclCommUserRank", [&] { return ncclCommUserRank(made.link.comm, &made.rank); });
    made.issue(*op, "ncclCommCount", [&] { return ncclCommCount(made.link.comm, &made.size); });
    made.home->over(*op);
    made.register_memory();
    return communicator(std::move(s));
  }

 private:
  detail::state& self() const { return plait::detail::held_by(state_); }

  /// Issues an operation to NCCL.
  ncclResult_t ask(const call& c, cudaStream_t stream) const {
    const ncclDataType_t type = detail::type_of(c.type);
    if (c.ragged && c.kind != collective::all_to_all) return for_each_part(c, stream);
    switch (c.kind) {
      case collective::all_reduce:
        return ncclAllReduce(c.in, c.out, c.count, type, detail::op_of(c.op), get(), stream);
      case collective::all_gather:
        return ncclAllGather(c.in, c.out, c.count, type, get(), stream);
      case collective::reduce_scatter:
        return ncclReduceScatter(c.in, c.out, c.count, type, detail::op_of(c.op), get(), stream);
      case collective::all_to_all:
        return exchange(c, stream);
      case collective::broadcast:
        return ncclBroadcast(c.in, c.out, c.count, type, c.peer, get(), stream);
      case collective::send:
        return ncclSend(c.in, c.count, type, c.peer, get(), stream);
      case collective::receive:
        return ncclRecv(c.out, c.count, type, c.peer, get(), stream);
      case collective::barrier: {
        int* const word = self().home->barrier_word();
        return ncclAllReduce(word, word, 1, ncclInt32, ncclMax, get(), stream);
      }
    }
    return ncclInvalidArgument;
  }

  /// Issues one group with a message to and from every rank.
  ncclResult_t exchange(const call& c, cudaStream_t stream) const {
    return grouped([&] {
      ncclResult_t result = ncclSuccess;
      for (std::size_t step = 0; step < ranks(); ++step) {  // ranks start with different peers
        const std::size_t k = (static_cast<std::size_t>(rank()) + step) % ranks(), even = k * c.count;
        const std::size_t sent = c.ragged ? c.send_counts[k] : c.count, got = c.ragged ? c.receive_counts[k] : c.count;
        const std::size_t from = (c.ragged ? c.send_offsets[k] : even) * size_of(c.type),
                          to = (c.ragged ? c.receive_offsets[k] : even) * size_of(c.type);
        const ncclDataType_t type = detail::type_of(c.type);
        const int peer = static_cast<int>(k);
        if (sent != 0)
          keep(result, ncclSend(static_cast<const std::byte*>(c.in) + from, sent, type, peer, get(), stream));
        if (got != 0) keep(result, ncclRecv(static_cast<std::byte*>(c.out) + to, got, type, peer, get(), stream));
      }
      return result;
    });
  }

  /// Issues one group with a call for the part of each rank: a gather's broadcasts, or a scatter's reductions.
  ncclResult_t for_each_part(const call& c, cudaStream_t stream) const {
    const ncclDataType_t type = detail::type_of(c.type);
    return grouped([&] {
      ncclResult_t result = ncclSuccess;
      for (std::size_t k = 0; k < ranks(); ++k) {
        const int root = static_cast<int>(k);
        if (c.kind == collective::all_gather && c.receive_counts[k] != 0) {
          std::byte* const to = static_cast<std::byte*>(c.out) + c.receive_offsets[k] * size_of(c.type);
          keep(result, ncclBroadcast(c.in, to, c.receive_counts[k], type, root, get(), stream));
        }
        if (c.kind == collective::reduce_scatter && c.send_counts[k] != 0) {
          const std::byte* const from = static_cast<const std::byte*>(c.in) + c.send_offsets[k] * size_of(c.type);
          keep(result, ncclReduce(from, c.out, c.send_counts[k], type, detail::op_of(c.op), root, get(), stream));
        }
      }
      return result;
    });
  }

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

  template <class Ask>
  void start_asynchronous(const op_ptr& op, const char* name, const Ask& ask) {
    detail::state& s = self();
    detail::session& home = *s.home;
    const cuda::stream side = s.asynchronous_stream();
    home.fork.record(home.main);
    side.wait(home.fork);
    s.used = true;
    s.issue(*op, name, [&] { return ask(side.handle()); });
    home.enqueued(*op, side);
    s.last_started = op;
  }

  void refuse_in_group(const char* name) const {
    if (self().open_groups > 0) fail({name, " on '", self().label, "': only started messages can stand in a group"});
  }
  void check_call(const call& c, bool alone) const {
    check(c, rank(), size());
    if (alone && (c.kind == collective::send || c.kind == collective::receive) && c.peer == rank())
      fail({c.name(), ": a message to the own rank must stand in a comm_group"});
    if (self().home->settings.check_pointers) detail::check_device_memory(c.name(), c.in, c.out);
  }

  std::size_t ranks() const { return static_cast<std::size_t>(size()); }

  std::shared_ptr<detail::state> state_;
};

static_assert(plait::communicator<communicator>);

/// Device memory that NCCL moves without copies through its own buffers. NCCL allocates it, and from NCCL 2.27 on
/// registers it as symmetric memory where the hardware supports that. It is optional: collectives take any memory of
/// the GPU. The constructor is collective, with an equal number of bytes on every rank. The communicator must outlive
/// it. The destructor waits for this communicator's calls and for the main stream.
class communication_memory {
 public:
  communication_memory(communicator& comm, std::size_t bytes) : comm_(comm), bytes_(bytes) {
    if (bytes == 0) return;
    detail::check(ncclMemAlloc(&data_, bytes), "ncclMemAlloc");
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    detail::state& s = comm_.shared_state();
    try {
      window_ = s.register_window(data_, bytes_, NCCL_WIN_COLL_SYMMETRIC);
    } catch (...) {
      if (s.finish()) ncclMemFree(data_);  // otherwise the memory leaks, because calls may still use it
      throw;
    }
#endif
  }
  communication_memory(const communication_memory&) = delete;
  communication_memory& operator=(const communication_memory&) = delete;
  ~communication_memory() {
    if (data_ == nullptr) return;
    detail::state& s = comm_.shared_state();
    if (!s.finish()) return;  // leaks it, because calls may still use it
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (window_ != nullptr) s.deregister(window_);
#endif
    ncclMemFree(data_);
  }

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// Whether NCCL has registered it as symmetric memory.
  bool symmetric() const {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    return window_ != nullptr;
#else
    return false;
#endif
  }

 private:
  communicator comm_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  ncclWindow_t window_{};
#endif
};

}  // namespace plait::nccl

#include "plait/core/macros_on.hpp"
