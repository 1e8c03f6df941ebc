// The inner part of comm/nccl.hpp: the state that copies of a communicator share, and its started operations as
// requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/call.hpp"
#include "plait/comm/nccl/types.hpp"
#include "plait/comm/nccl/watchdog.hpp"
#include "plait/comm/request.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_memory.hpp"

namespace plait::nccl::detail {

/// Refuses memory that is the host's.
inline void check_device_memory(const char* what, const void* a, const void* b) {
  for (const void* const p : {a, b}) {
    cudaPointerAttributes found{};
    if (p == nullptr) continue;
    if (cudaPointerGetAttributes(&found, p) == cudaSuccess && found.type != cudaMemoryTypeUnregistered) continue;
    static_cast<void>(cudaGetLastError());
    fail({what, ": a pointer to the host's memory; NCCL works on a device's"});
  }
}

/// The state that the copies of a communicator share.
struct state {
  std::shared_ptr<session> home;
  handle link;
  int rank = 0, size = 1;
  std::string label;
  bool is_split = false;
  bool used = false;  ///< whether anything was sent in it
  std::uint64_t sequence = 0;
  int open_groups = 0;
  std::vector<call> messages;               ///< of the open group
  std::shared_ptr<operation> group;         ///< of the open group
  std::shared_ptr<operation> last_started;  ///< beside the main stream, which may not wait for it yet

  explicit state(std::shared_ptr<session> owner) : home(std::move(owner)) {}
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() {
    fail_if_leaving();
    deregister();
    if (link.comm == nullptr) return;
    home->remove(&link);
    if (!link.owned || link.aborted) {
      outlive_calls();
      return;
    }
    const ncclResult_t now = home->ranks().failed() ? ncclRemoteError : settled(ncclCommFinalize(link.comm));
    now == ncclSuccess ? ncclCommDestroy(link.comm) : ncclCommAbort(link.comm);
  }

  /// Calls NCCL and waits until the communicator has taken the call; throws with what failed.
  template <class F>
  void issue(operation& op, const char* call, const F& f) {
    ncclResult_t result = home->guarded(f);
    const double until = comm_clock() + home->settings.deadline;
    while (result == ncclInProgress) {
      std::this_thread::yield();
      ncclResult_t now = ncclInProgress;
      result = home->guarded([&] {
        const ncclResult_t asked = link.state(now);
        return asked != ncclSuccess ? asked : now;
      });
      if (result == ncclInProgress && home->settings.deadline > 0 && comm_clock() > until) {
        home->ranks().fail(
            cat({"rank ", home->rank, ": ", op.text(), " (", call, ") did not finish within its deadline of ",
                 home->settings.deadline,
                 " s: a rank of the group is lost or has not called it; last operations: ", home->last_operations()}));
      }
    }
    if (result == ncclSuccess) return;
    if (!home->ranks().failed()) {
      const char* const more = ncclGetLastError(link.comm);
      home->ranks().fail(
          cat({"rank ", home->rank, ": ", op.text(), " (", call, ") failed: ", ncclGetErrorString(result), " (",
               more ? more : "", "); last operations: ", home->last_operations()}));
    }
    home->over(op);
    home->stop(op.text());
  }

  /// Issues a call that writes to `place`, which NCCL does when the state of the communicator is success: of one that
  /// does not block, ncclCommSplit and ncclCommWindowRegister say success at once (NVIDIA/nccl issue 1472). Where the
  /// call fails, NCCL may write later still, so the place lives on with this communicator.
  template <class F>
  void issue_late(operation& op, const char* call, std::shared_ptr<void> place, const F& f) {
    places_.push_back(std::move(place));
    issue(op, call, [&] {
      const ncclResult_t said = f();
      return said == ncclSuccess ? ncclInProgress : said;
    });
    places_.pop_back();
  }

  /// The stream for what this communicator starts: the rank's side stream for the first communicator, and a separate
  /// one for each that was split off. A late message then delays no other communicator.
  cuda::stream beside() {
    if (!is_split) return home->side;
    if (own_side_ == nullptr) own_side_ = plait::detail::make_urgent_stream();
    return cuda::stream(own_side_.get());
  }

  /// Puts the main stream after what was started on this communicator and not waited for: NCCL runs a
  /// communicator's operations in one order. Those of other communicators are left alone.
  void join_last_started() {
    const std::shared_ptr<operation> last = std::exchange(last_started, nullptr);
    if (last == nullptr || last->joined) return;
    const bool recording = cuda::capturing(home->main);
    if (recording && !last->recorded) {
      fail({last->text(), " was started before the stream was recorded; wait for it before that"});
    }
    if (recording == last->recorded) home->main.wait(last->event);
    last->joined = true;
  }

  /// Waits until all that was called on this communicator is over: NCCL splits none with operations in flight.
  void settle() {
    if (!used) return;
    join_last_started();
    cuda::event all;
    all.record(home->main);
    while (!all.done()) {
      if (home->ranks().failed()) home->stop(cat({"a split of '", label, "'"}));
      std::this_thread::yield();
    }
    used = false;
  }

  /// Registers the rank's memory for collectives, if it has some, with this communicator: the last part of making it,
  /// which all of its ranks do in one order. Throws where NCCL cannot.
  void register_memory() {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    const registered_memory& memory = home->registered;
    if (memory.data == nullptr || size == 1) return;
    window_ = register_window(memory.data.get(), memory.bytes, NCCL_WIN_DEFAULT);
    if (window_ != nullptr) return;
    fail({memory.option, " is ", memory.bytes, ", but NCCL cannot register memory with '", label,
          "': its ranks do not reach each other's memory, or NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0; set it to 0"});
#endif
  }

  /// Returns when nothing that was called on this communicator uses memory any more, because it is over or, where the
  /// ranks have failed, aborted; false where it may, as a communicator of the caller's is not aborted here. For
  /// destructors of memory that NCCL knows.
  bool finish() {
    team& ranks = home->ranks();
    if (!ranks.failed() && !is_idle()) fail_if_leaving();
    if (!ranks.failed()) await_streams();
    if (!ranks.failed()) return true;
    ranks.await_aborts();
    if (!link.owned) return is_idle();
    await_streams();
    return true;
  }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  /// Returns a window of the communicator for memory, null where NCCL cannot make one. Collective.
  ncclWindow_t register_window(void* data, std::size_t bytes, int flags) {
    const auto op = begin("register", bytes);
    const auto window = std::make_shared<ncclWindow_t>();
    issue_late(*op, "ncclCommWindowRegister", window,
               [&] { return ncclCommWindowRegister(link.comm, data, bytes, window.get(), flags); });
    home->over(*op);
    return *window;
  }
  /// Takes a window from the communicator, of memory that nothing uses any more.
  void deregister(ncclWindow_t window) {
    static_cast<void>(settled(home->guarded([&] { return ncclCommWindowDeregister(link.comm, window); })));
  }
#endif

  std::shared_ptr<operation> begin(const char* name, std::uint64_t bytes) {
    auto op = home->begin(name, label, sequence++, bytes);
    if (!home->ranks().failed()) return op;
    home->over(*op);
    home->stop(op->text());
  }

 private:
  std::vector<cudaStream_t> streams() const {
    std::vector<cudaStream_t> all{home->main.handle(), home->side.handle()};
    if (own_side_ != nullptr) all.push_back(own_side_.get());
    return all;
  }
  void await_streams() const {
    for (const cudaStream_t stream : streams()) cudaStreamSynchronize(stream);
  }
  bool is_idle() const {
    const plait::detail::relaxed_capture relaxed;
    bool idle = true;
    for (const cudaStream_t stream : streams()) idle = cudaStreamQuery(stream) == cudaSuccess && idle;
    static_cast<void>(cudaGetLastError());  // not ready
    return idle;
  }
  /// While an exception unwinds this rank, the others may never call what is in flight: they end.
  void fail_if_leaving() {
    if (link.comm != nullptr && link.owned && std::uncaught_exceptions() > 0)
      home->ranks().fail(cat({"rank ", home->rank, " is leaving by an exception"}), home->rank);
  }
  /// Until the communicator is aborted NCCL reads its label and, where a call was given up, may write to its place; one
  /// of the caller's is not aborted here, and keeps the places.
  void outlive_calls() {
    if (link.owned)
      home->ranks().await_aborts();
    else if (!places_.empty())
      static_cast<void>(new auto(std::move(places_)));
  }
  /// Before the communicator goes, and the memory after it: what uses either must be over.
  void deregister() {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (window_ == nullptr || link.aborted || home->ranks().failed()) return;
    static_cast<void>(finish());
    if (!home->ranks().failed()) deregister(window_);  // else it goes with the communicator
#endif
  }
  /// Waits, at the end, for a call that is in progress.
  ncclResult_t settled(ncclResult_t now) {
    const double until = comm_clock() + home->settings.deadline;
    while (now == ncclInProgress) {
      if (link.state(now) != ncclSuccess || home->ranks().failed()) break;
      if (home->settings.deadline > 0 && comm_clock() > until) break;
      std::this_thread::yield();
    }
    return now;
  }

  std::vector<std::shared_ptr<void>> places_;  ///< that NCCL writes
  plait::detail::owned_stream own_side_;       ///< what it holds at its end is finished all the same
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  ncclWindow_t window_{};
#endif
};

/// A started operation, and the rank that waits for it.
struct pending {
  std::shared_ptr<session> home;
  std::shared_ptr<operation> op;

  void wait() {
    if (home->ranks().failed()) home->stop(op->text());
    if (!home->is_enqueued(*op)) fail({op->text(), " was waited for before the end of its group"});
    join();
  }
  bool done() {
    if (home->ranks().failed()) home->stop(op->text());
    if (op->recorded) fail({op->text(), " is part of a graph, which runs later: the host cannot wait for it"});
    if (home->is_enqueued(*op) && op->event.done()) return true;
    std::this_thread::yield();
    return false;
  }
  void drop() noexcept {
    try {
      if (home->is_enqueued(*op)) join();
    } catch (const std::exception&) {  // the next call meets the same error
    }
  }

  void join() {
    home->main.wait(op->event);
    op->joined = true;
  }

  static request started(std::shared_ptr<session> home, std::shared_ptr<operation> op) {
    static constexpr request_ops table = {[](void* owner, void*) { static_cast<pending*>(owner)->wait(); },
                                          [](void* owner, void*) { return static_cast<pending*>(owner)->done(); },
                                          [](void* owner, void*) noexcept { static_cast<pending*>(owner)->drop(); }};
    return request(table, std::make_shared<pending>(pending{std::move(home), std::move(op)}), nullptr);
  }
};

}  // namespace plait::nccl::detail

#include "plait/core/macros_on.hpp"
