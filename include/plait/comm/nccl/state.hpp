// The internals of comm/nccl.hpp: a rank's operations in flight, the thread that watches them, the state that copies of
// a communicator share, and requests. After a passed deadline or an NCCL error, the thread aborts the owned
// communicators of all ranks of its team. Test: tests/cuda/comm/comm_nccl.cpp.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/deadline.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/nccl/calls.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/device/cuda_memory.hpp"

namespace plait::nccl::detail {

/// A communicator that must be aborted, and its GPU.
struct communicator_to_abort {
  ncclComm_t comm;
  int device;
};

/// Aborts communicators concurrently, because one may wait for kernels that end only with another. Ends the process if
/// this takes longer than `grace` seconds (0: no limit), because ranks that wait for it would hang.
inline void abort_side_by_side(const std::vector<communicator_to_abort>& doomed, double grace, const std::string& why) {
  struct progress {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t left;
  };
  const auto shared = std::make_shared<progress>();
  shared->left = doomed.size();
  for (const communicator_to_abort& one : doomed) {
    std::thread([one, shared] {
      static_cast<void>(cudaSetDevice(one.device));  // NCCL restores the thread's current GPU
      ncclCommAbort(one.comm);
      const std::lock_guard lock(shared->mutex);
      --shared->left;
      shared->changed.notify_one();
    }).detach();
  }
  std::unique_lock lock(shared->mutex);
  const auto all = [&] { return shared->left == 0; };
  if (grace <= 0) return shared->changed.wait(lock, all);
  if (shared->changed.wait_for(lock, std::chrono::duration<double>(grace), all)) return;
  std::fprintf(stderr,
               "plait: %s\nplait: NCCL did not abort %zu of %zu communicators within the grace of %g s; the process "
               "ends\n",
               why.c_str(), shared->left, doomed.size(), grace);
  std::abort();
}

/// An operation in flight. Its event is recorded after it. The object is reused for a later operation.
struct operation {
  enum class phase : std::uint8_t { issuing, enqueued, over };
  phase now = phase::issuing;  ///< guarded by the session's mutex
  const char* name = "";
  std::string label;
  std::uint64_t sequence = 0, ticket = 0, serial = 0, bytes = 0;
  bool recorded = false;  ///< captured in a graph, so only that graph may wait for its event
  bool joined = false;    ///< whether the main stream waits for it; only the rank's own thread uses this
  cuda::event event;

  std::string text() const { return plait::detail::operation_text(name, sequence, label); }
};

class session;

/// The ranks of this process, which fail together, and the thread that watches them.
class team {
 public:
  team() = default;
  team(const team&) = delete;
  team& operator=(const team&) = delete;

  bool failed() const { return failure_.failed(); }
  std::string cause() const {
    const std::lock_guard lock(mutex_);
    return failure_.cause();
  }
  void add(session* s, double deadline);
  /// Removes a session. Returns when none of its communicators is being aborted.
  void remove(const session* s) {
    std::unique_lock lock(mutex_);
    aborted_.wait(lock, [this] { return !aborting_; });
    std::erase(sessions_, s);
  }
  /// Returns when running aborts are complete. Until then NCCL's kernels may use memory, although the team has failed.
  void await_aborts() {
    std::unique_lock lock(mutex_);
    aborted_.wait(lock, [this] { return !aborting_; });
  }
  /// Makes the watching thread abort all owned communicators of the team, and does not wait. Since NCCL 2.26 an abort
  /// waits until no graph holds calls of the communicator, and the calling thread may have to unwind to destroy that
  /// graph. Only the first cause counts. `leaving` is a rank that an exception unwinds; its cause is known later.
  void fail(const std::string& why, int leaving = -1) {
    const std::lock_guard lock(mutex_);
    fail_locked(why, leaving);
  }
  /// Adds the text of the exception that ended `rank`. Returns false if there was another cause first.
  bool explain(int rank, const std::string& why) {
    const std::lock_guard lock(mutex_);
    return failure_.explain(rank, why) || fail_locked(why, -1);
  }

 private:
  bool fail_locked(const std::string& why, int leaving);
  bool look(std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable aborted_;
  bool aborting_ = false;
  std::vector<communicator_to_abort> doomed_;
  double grace_ = 0;
  std::vector<session*> sessions_;
  plait::detail::failure failure_;
  plait::detail::watch_thread watch_{mutex_, [this](auto& lock) { return look(lock); }};
};

/// One NCCL communicator of a rank.
struct handle {
  ncclComm_t comm = nullptr;
  bool owned = true;
  std::atomic<bool> aborted{false};

  /// Reads the state of the communicator. On a non-blocking communicator only one thread at a time may do so.
  ncclResult_t state(ncclResult_t& now) {
    const std::lock_guard lock(asking_);
    return ncclCommGetAsyncError(comm, &now);
  }

 private:
  std::mutex asking_;
};

/// One rank: its streams, its operations in flight, and its communicators.
class session {
 public:
  session(std::shared_ptr<team> ranks, cudaStream_t main_stream, cudaStream_t side_stream, const options& chosen)
      : main(main_stream), side(side_stream), settings(chosen), team_(std::move(ranks)) {
    plait::detail::cuda_check(cudaGetDevice(&device_), "asking for the GPU");
    if (side_stream == nullptr) {
      own_side_ = plait::detail::make_urgent_stream();
      side = cuda::stream(own_side_.get());
    }
    const plait::detail::relaxed_capture relaxed;  // another rank of the process may be capturing a graph
    plait::detail::cuda_check(cudaMalloc(&barrier_word_, sizeof(int)), "allocating a word");
    plait::detail::cuda_check(cudaMemset(barrier_word_, 0, sizeof(int)), "zeroing a word");
    team_->add(this, settings.deadline);
  }
  session(const session&) = delete;
  session& operator=(const session&) = delete;
  ~session() {
    team_->remove(this);
    const plait::detail::relaxed_capture relaxed;
    cudaFree(barrier_word_);
  }

  cuda::stream main, side;
  cuda::event fork;  ///< the main stream's position when an asynchronous operation was started
  const options settings;
  int rank = 0;                  ///< in the first communicator, for error texts
  registered_memory registered;  ///< used by collectives; outlives the communicators that it is registered with
  /// Makes the device free its unused memory, because NCCL allocates some for each communicator. May be empty.
  std::function<void()> release_unused;

  team& ranks() { return *team_; }
  int* barrier_word() { return barrier_word_; }

  /// Runs `call` unless the ranks have failed. A thread that aborts communicators waits briefly for `call` to end.
  template <class F>
  ncclResult_t guarded(const F& call) {
    {
      const std::lock_guard lock(issue_);
      if (!team_->failed()) return call();
    }
    return ncclRemoteError;  // the caller finds that the ranks have failed
  }

  /// Registers an operation before it is issued.
  std::shared_ptr<operation> begin(const char* name, const std::string& label, std::uint64_t sequence,
                                   std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (in_flight_.size() > 32) retire();
    std::shared_ptr<operation> op;
    if (idle_.empty()) {
      op = std::make_shared<operation>();
    } else {
      op = std::move(idle_.back());
      idle_.pop_back();
    }
    op->now = operation::phase::issuing;
    op->name = name;
    op->label = label;
    op->sequence = sequence;
    op->bytes = bytes;
    op->recorded = op->joined = false;
    op->serial = ++serial_;
    op->ticket = flight_.start(label, sequence, name, bytes);
    in_flight_.push_back(op);
    return op;
  }
  /// Notes that the operation is in `stream`. If the stream is being captured, the operation counts as complete,
  /// because the watching thread does not follow replays.
  void enqueued(operation& op, cuda::stream stream) {
    const bool recorded = cuda::capturing(stream);
    op.event.record(stream);
    const std::lock_guard lock(mutex_);
    op.recorded = recorded;
    op.now = recorded ? operation::phase::over : operation::phase::enqueued;
    if (recorded) flight_.mark(op.ticket, flight_recorder::state::completed);
  }
  /// Notes that the operation has left no work in a stream.
  void over(operation& op) {
    const std::lock_guard lock(mutex_);
    op.now = operation::phase::over;
    flight_.mark(op.ticket, flight_recorder::state::completed);
  }
  bool is_enqueued(const operation& op) {
    const std::lock_guard lock(mutex_);
    return op.now != operation::phase::issuing;
  }

  [[noreturn]] void stop(const std::string& doing) { plait::fail({doing, " was stopped: ", team_->cause()}); }

  /// Returns an error text of this rank: `what`, and its last operations.
  std::string report(const std::string& what) {
    const std::lock_guard lock(mutex_);
    return report_locked(what);
  }

  void add(handle* h) {
    const std::lock_guard lock(mutex_);
    handles_.push_back(h);
  }
  void remove(const handle* h) {
    const std::lock_guard lock(mutex_);
    std::erase(handles_, h);
  }

  // Functions of the watching thread.

  /// Returns the cause that must end the ranks; empty if there is none.
  std::string problem() {
    // Otherwise the thread's calls would go to GPU 0, and create a context there.
    static_cast<void>(cudaSetDevice(device_));
    const std::lock_guard lock(mutex_);
    for (handle* const h : handles_) {
      ncclResult_t state = ncclSuccess;
      if (h->aborted || h->comm == nullptr) continue;
      if (h->state(state) != ncclSuccess || state == ncclSuccess || state == ncclInProgress) {
        continue;
      }
      return report_locked(cat({"NCCL reports: ", ncclGetErrorString(state), " (", ncclGetLastError(h->comm), ") at ",
                                in_flight_.empty() ? "no operation" : in_flight_.front()->text()}));
    }
    retire();
    if (lost_ != cudaSuccess)
      return report_locked(
          cat({"CUDA reports: ", cudaGetErrorString(lost_), ", at ", in_flight_.front()->text(), " or before it"}));
    if (in_flight_.empty()) {
      watched_ = 0;
    } else if (const operation& first = *in_flight_.front(); watched_ != first.serial) {
      watched_ = first.serial;
      limit_ = plait::detail::deadline(settings.deadline);
    } else if (limit_.passed()) {
      return report_locked(plait::detail::late_text(first.text(), bytes_text(first.bytes), settings.deadline,
                                                    plait::detail::someone_is_missing));
    }
    return "";
  }

  /// Adds the communicators that this rank owns to the list of those to abort; they are unusable from now on. A call
  /// that is being issued has until `until` to return.
  void add_doomed(std::vector<communicator_to_abort>& doomed, double until) {
    std::unique_lock calls(issue_, std::defer_lock);
    while (!calls.try_lock() && comm_clock() < until) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const std::lock_guard lock(mutex_);
    for (handle* h : handles_) {
      if (h->owned && h->comm != nullptr && !h->aborted.exchange(true)) doomed.push_back({h->comm, device_});
    }
  }

 private:
  std::string report_locked(const std::string& what) const {
    return cat({"rank ", rank, ": ", what, "; last operations: ", flight_.text(16)});
  }
  /// Removes finished operations, in order. Requires the mutex.
  void retire() {
    const plait::detail::relaxed_capture relaxed;
    while (!in_flight_.empty()) {
      const std::shared_ptr<operation>& first = in_flight_.front();
      if (first->now == operation::phase::issuing) return;
      if (first->now == operation::phase::enqueued) {
        const cudaError_t status = cudaEventQuery(first->event.handle());
        if (status != cudaSuccess) {
          static_cast<void>(cudaGetLastError());
          if (status != cudaErrorNotReady) lost_ = status;
          return;
        }
        flight_.mark(first->ticket, flight_recorder::state::completed);
      }
      if (first.use_count() == 1 && idle_.size() < 64) idle_.push_back(first);
      in_flight_.pop_front();
    }
  }

  std::shared_ptr<team> team_;
  std::mutex issue_, mutex_;  // lock order: issue_ first
  flight_recorder flight_;
  std::deque<std::shared_ptr<operation>> in_flight_;
  std::vector<std::shared_ptr<operation>> idle_;
  std::vector<handle*> handles_;
  std::uint64_t serial_ = 0, watched_ = 0;
  plait::detail::deadline limit_{0};
  cudaError_t lost_ = cudaSuccess;  ///< the error of a failed query; then no operation in flight will complete
  int device_ = 0;
  plait::detail::owned_stream own_side_;
  int* barrier_word_ = nullptr;
};

inline void team::add(session* s, double deadline) {
  const std::lock_guard lock(mutex_);
  sessions_.push_back(s);
  watch_.cover(deadline);
}

inline bool team::fail_locked(const std::string& why, int leaving) {
  if (!failure_.fail(why, leaving)) return false;
  const double until = comm_clock() + 0.2;
  for (session* s : sessions_) {
    s->add_doomed(doomed_, until);
    grace_ = std::max(grace_, s->settings.grace);
  }
  aborting_ = !doomed_.empty();
  watch_.wake();
  return true;
}

/// Checks the ranks for problems. If they have failed, aborts their communicators and ends the watch.
inline bool team::look(std::unique_lock<std::mutex>& lock) {
  std::string why;
  for (std::size_t i = 0; i < sessions_.size() && why.empty() && !failed(); ++i) why = sessions_[i]->problem();
  if (!why.empty()) {
    std::fprintf(stderr, "plait: %s\n", why.c_str());
    fail_locked(why, -1);
  }
  if (!failed()) return true;
  why = failure_.cause();
  lock.unlock();  // ranks may read the cause during the aborts
  abort_side_by_side(doomed_, grace_, why);
  lock.lock();
  aborting_ = false;
  aborted_.notify_all();
  return false;
}

/// Refuses host memory.
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
  bool used = false;  ///< whether it has had an operation
  std::uint64_t sequence = 0;
  int open_groups = 0;
  std::vector<call> messages;               ///< of the open group
  std::shared_ptr<operation> group;         ///< of the open group
  std::shared_ptr<operation> last_started;  ///< in a side stream; the main stream need not wait for it yet

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

  /// Calls NCCL, and waits until the communicator has accepted the call. Throws if it fails.
  template <class F>
  void issue(operation& op, const char* call, const F& f) {
    ncclResult_t result = home->guarded(f);
    const plait::detail::deadline limit(home->settings.deadline);
    while (result == ncclInProgress) {
      std::this_thread::yield();
      ncclResult_t now = ncclInProgress;
      result = home->guarded([&] {
        const ncclResult_t asked = link.state(now);
        return asked != ncclSuccess ? asked : now;
      });
      if (result == ncclInProgress && limit.passed())
        home->ranks().fail(home->report(
            plait::detail::late_text(op.text(), call, home->settings.deadline, plait::detail::someone_is_missing)));
    }
    if (result == ncclSuccess) return;
    if (!home->ranks().failed()) {
      const char* const more = ncclGetLastError(link.comm);
      home->ranks().fail(home->report(
          cat({op.text(), " (", call, ") failed: ", ncclGetErrorString(result), " (", more ? more : "", ")"})));
    }
    home->over(op);
    home->stop(op.text());
  }

  /// Issues a call that writes to `place`. NCCL has written when the state of the communicator is success. On a
  /// non-blocking communicator, ncclCommSplit and ncclCommWindowRegister return success at once (NVIDIA/nccl issue
  /// 1472). After a failed call NCCL may still write, so this communicator keeps the place alive.
  template <class F>
  void issue_late(operation& op, const char* call, std::shared_ptr<void> place, const F& f) {
    places_.push_back(std::move(place));
    issue(op, call, [&] {
      const ncclResult_t result = f();
      return result == ncclSuccess ? ncclInProgress : result;
    });
    places_.pop_back();
  }

  /// The stream for this communicator's asynchronous operations. The first communicator uses the rank's side stream,
  /// and each split one has its own. A late message then delays no other communicator.
  cuda::stream asynchronous_stream() {
    if (!is_split) return home->side;
    if (own_side_ == nullptr) own_side_ = plait::detail::make_urgent_stream();
    return cuda::stream(own_side_.get());
  }

  /// Makes the main stream wait for this communicator's last asynchronous operation, because NCCL runs a communicator's
  /// operations in one order. It does not wait for other communicators.
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

  /// Waits until all calls on this communicator are complete, because NCCL cannot split one with operations in flight.
  void wait_for_transfers() {
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

  /// Registers the rank's memory for collectives, if any, with this communicator. It is the last part of its
  /// construction; all its ranks do it in one order. Throws if NCCL cannot.
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

  /// Waits until no call of this communicator uses memory. Returns true once all calls are complete, or aborted after a
  /// failure. Returns false if some may still run, because a caller's communicator is not aborted here. For destructors
  /// of memory that NCCL uses.
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
  /// Returns a window of the communicator for memory, or null if NCCL cannot make one. Collective.
  ncclWindow_t register_window(void* data, std::size_t bytes, int flags) {
    const auto op = begin("register", bytes);
    const auto window = std::make_shared<ncclWindow_t>();
    issue_late(*op, "ncclCommWindowRegister", window,
               [&] { return ncclCommWindowRegister(link.comm, data, bytes, window.get(), flags); });
    home->over(*op);
    return *window;
  }
  /// Removes a window from the communicator. Its memory must no longer be in use.
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
    static_cast<void>(cudaGetLastError());  // clears the "not ready" result
    return idle;
  }
  /// Ends the other ranks while an exception unwinds this one, because they may never make the calls in flight.
  void fail_if_leaving() {
    if (link.comm != nullptr && link.owned && std::uncaught_exceptions() > 0)
      home->ranks().fail(cat({"rank ", home->rank, " is leaving by an exception"}), home->rank);
  }
  /// NCCL reads the label until the communicator is aborted, and a cancelled call may still write to its place. A
  /// caller's communicator is not aborted here, so this keeps both alive.
  void outlive_calls() {
    if (link.owned)
      home->ranks().await_aborts();
    else if (!places_.empty())
      static_cast<void>(new auto(std::move(places_)));
  }
  /// Removes the memory's registration. Calls that use it must be complete before the communicator and the memory are
  /// freed.
  void deregister() {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (window_ == nullptr || link.aborted || home->ranks().failed()) return;
    static_cast<void>(finish());
    if (!home->ranks().failed()) deregister(window_);  // otherwise it is freed with the communicator
#endif
  }
  /// Waits, in the destructor, for a call that is in progress.
  ncclResult_t settled(ncclResult_t now) {
    const plait::detail::deadline limit(home->settings.deadline);
    while (now == ncclInProgress && !limit.passed()) {
      if (link.state(now) != ncclSuccess || home->ranks().failed()) break;
      std::this_thread::yield();
    }
    return now;
  }

  std::vector<std::shared_ptr<void>> places_;  ///< places that NCCL may still write
  plait::detail::owned_stream own_side_;       ///< CUDA completes its work after it is destroyed
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  ncclWindow_t window_{};
#endif
};

/// An asynchronous operation as its rank waits for it.
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
    } catch (const std::exception&) {  // the next call throws this error again
    }
  }

  void join() {
    home->main.wait(op->event);
    op->joined = true;
  }

  static request started(std::shared_ptr<session> home, std::shared_ptr<operation> op) {
    return request(std::make_shared<pending>(pending{std::move(home), std::move(op)}));
  }
};

}  // namespace plait::nccl::detail

#include "plait/core/macros_on.hpp"
