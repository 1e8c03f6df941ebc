// The in-process backend: the ranks are threads of one process, which move data in its memory and find a deadlock at
// once. Test: tests/unit/comm/threads.cpp, tests/unit/comm/threads_errors.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/deadline.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/threads/operation.hpp"
#include "plait/core/error.hpp"
#include "plait/core/function_ref.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait::threads {

/// Thrown on the ranks that are stopped because of another one; `threads::run` reports the cause instead of it.
class stopped : public error {
 public:
  using error::error;
};

namespace detail {

/// Ranks that share sequence numbers. All members are guarded by the mutex of the run.
struct group {
  std::string label;
  std::vector<int> members;           ///< world ranks
  std::vector<operation*> window;     ///< unfinished collectives, at sequence % size (a power of two)
  std::vector<operation*> unmatched;  ///< messages with one side only, oldest first
  std::vector<operation*> idle_collectives, idle_messages;
  std::vector<std::unique_ptr<operation>> store;
};

/// The state that the ranks of one run share: which of them sleep, which have returned, and why the run ends.
///
/// The invariant of exact deadlock detection: `running` counts the ranks that neither sleep nor have returned. A rank
/// falls asleep under the mutex, after it has seen there that its operation has not moved. A rank that moves an
/// operation does so under the mutex too, and counts the ranks that it wakes as running before they run. So `running ==
/// 0` means that no rank can move anything any more, and the rank that makes it so finds it.
class run_state {
 public:
  explicit run_state(int ranks)
      : slots_(static_cast<std::size_t>(ranks)),
        running_(ranks),
        helpers_(std::max(1u, std::thread::hardware_concurrency()) - 1) {}

  int size() const { return static_cast<int>(slots_.size()); }
  std::mutex& mutex() { return mutex_; }
  flight_recorder& flight(int rank) { return slot_of(rank).flight; }
  bool failed() const { return failure_.failed(); }

  /// The one place where a rank blocks: until one of the bits `want` of the operation is set. False if the run failed
  /// first and the operation is not complete (then no other rank will ever touch this rank's buffers).
  bool wait(int rank, operation& op, std::uint32_t want, std::uint64_t ticket);

  /// Sets `bits` of the operation's word and wakes at most `most` of the ranks asleep for them.
  void signal(operation& op, std::uint32_t bits, std::size_t most = ~std::size_t{0});

  /// How many sleeping ranks are worth waking to share work.
  std::size_t helpers() const { return helpers_; }

  /// The end of every rank, if there was none before. Wakes all; they throw `stopped`.
  void fail(const std::string& why);

  /// A mismatch, found while the mutex is held.
  [[noreturn]] void fail_here(const std::string& why);

  /// A rank is destroying a request while an exception unwinds it: the others must not wait for it. What it died of is
  /// known only when the exception arrives.
  void fail_by_unwinding(int rank);

  /// The rank's function has ended, by `exception` if not null.
  void leave(int rank, std::exception_ptr exception, const std::string& what);

  /// Throws `stopped` on `rank`. With the mutex held.
  [[noreturn]] void throw_stopped(int rank, const std::string& doing) const {
    throw stopped(cat({"rank ", rank, ": ", doing, " was stopped: ", failure_.cause()}));
  }
  std::string cause();
  std::exception_ptr exception() const { return exception_; }

 private:
  struct alignas(64) slot {
    std::atomic<std::uint32_t> word{0};
    const operation* waits_for = nullptr;  ///< null while the rank runs
    std::uint32_t want = 0;
    bool gone = false;
    flight_recorder flight;
  };

  slot& slot_of(int rank) { return slots_[static_cast<std::size_t>(rank)]; }

  bool all_gone() const;
  /// Returns whether there was no failure before. `leaving` as in `failure::fail`.
  bool fail_locked(const std::string& why, int leaving = -1);
  /// Called with the mutex held, after the run failed; waits without heeding that.
  bool wait_for_completion(slot& me, operation& op);

  /// Returns what every rank is doing, one line each.
  std::string situation();
  std::string flights();
  static std::string describe(const operation& op, int rank);

  std::mutex mutex_;
  std::vector<slot> slots_;
  int running_;
  std::size_t helpers_;
  plait::detail::failure failure_;
  std::exception_ptr exception_;
};

/// The side of a message that a call is: 0 sends, 1 receives; -1 is a collective.
inline int side_of(const call& c) { return c.kind == collective::send ? 0 : c.kind == collective::receive ? 1 : -1; }

/// One rank of one group: posts operations, shares their work, and waits for them.
class member {
 public:
  member(std::shared_ptr<run_state> w, std::shared_ptr<group> g, int rank)
      : run_(std::move(w)), group_(std::move(g)), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(group_->members.size()); }
  int world_rank() const { return group_->members[static_cast<std::size_t>(rank_)]; }
  const group& storage() const { return *group_; }
  run_state& run() { return *run_; }
  /// From now on, operations are on the memory of this engine's device; splits inherit it.
  void use(std::shared_ptr<device_engine> engine) { engine_ = std::move(engine); }
  bool on_device() const { return engine_ != nullptr; }
  /// Refuses memory that the device cannot use; ranks without a device take any.
  void check_memory(const char* what, const void* in, const void* out) const;

  /// Joins the operation of a call; `finish` waits for it. The last rank to join does the work, or opens it to the
  /// ranks that wait. With `starts`, the operation notes when it is finished.
  operation* post(const call& c, bool starts = false);

  /// An operation that this rank has joined, and whether it was the last to do so.
  struct joined {
    operation* op;
    bool last;
  };
  /// Joins the collective that is next in this rank's sequence; `fill` writes the rank's part.
  joined join(signature s, std::uint64_t bytes, function_ref<void(part&)> fill);
  /// Joins the oldest message of this sender, receiver and tag that lacks this side (0 sends, 1 receives), or begins
  /// one.
  joined join_message(int side, int peer, signature s, function_ref<void(part&)> fill);

  /// Does the work of an operation that all have joined: the last of them calls it.
  void execute(operation& op);

  /// Waits for the operation, sharing its work, and leaves it. `side` as in `side_of`.
  void finish(operation* op, int side = -1) {
    wait(*op, side);
    if (engine_ != nullptr) leave(*op);
    release(*op);
  }

  std::shared_ptr<member> split(int color, int key, std::string_view label);

  /// Whether finish would not block.
  bool done(operation& op);

  /// finish, when an error cannot be thrown.
  void drop(operation* op, int side) noexcept;

 private:
  int of_world(int rank) const { return group_->members[static_cast<std::size_t>(rank)]; }

  part& part_of(operation& op, int side) { return op.parts[static_cast<std::size_t>(side < 0 ? rank_ : side)]; }

  void wait(operation& op, int side);

  /// The last rank to leave puts the operation back.
  void release(operation& op);

  operation* acquire(std::vector<operation*>& idle, std::size_t parts);
  operation* find_or_begin(const signature& s);
  void widen_window();
  /// A device that refuses the work ends all ranks. The ranks that wait for the operation must learn it first.
  void execute_on_device(operation& op);
  void arrive(part& mine);
  void leave(operation& op);
  std::string on_this_rank(const std::exception& e) const;

  void help(operation& op);
  void finished(operation& op) {
    if (op.started()) op.through = comm_clock();
    run_->signal(op, operation::finished);
  }
  /// With the mutex held, by the last rank of a split.
  void make_children(operation& op);

  // Errors, with the mutex held.
  [[noreturn]] void stop(const std::string& doing) const;
  [[noreturn]] void mismatch(const operation& op, const signature& s) const;
  [[noreturn]] void message_mismatch(const operation& op, int side, const signature& s) const;
  /// all_to_all_v: what this rank sends and expects, compared with the ranks that are here already.
  void check_pairs(const operation& op) const;

  std::shared_ptr<run_state> run_;
  std::shared_ptr<group> group_;
  int rank_;
  std::uint64_t sequence_ = 0;
  std::uint64_t messages_ = 0;
  std::shared_ptr<device_engine> engine_;  ///< null: the memory is the host's
};

template <int Side>
inline constexpr request_ops request_table = {
    [](void* owner, void* object) { static_cast<member*>(owner)->finish(static_cast<operation*>(object), Side); },
    [](void* owner, void* object) { return static_cast<member*>(owner)->done(*static_cast<operation*>(object)); },
    [](void* owner, void* object) noexcept {
      static_cast<member*>(owner)->drop(static_cast<operation*>(object), Side);
    },
    [](void*, void* object) noexcept { return static_cast<operation*>(object)->finished_at(); }};

}  // namespace detail

/// A rank's handle of a group of threads of this process; see communicator.hpp for what the operations mean.
///
/// Reductions are in the order of the ranks, so they give equal bits on every rank and in every run. A send waits for
/// its receive (there is no buffering). Errors, each ending all ranks of the run:
///   - ranks of a group call different operations, counts, dtypes, ops or roots at the same place of the sequence;
///   - no rank can go on (a deadlock, found exactly and at once, which includes ranks that have returned);
///   - a rank throws or calls abort.
class communicator : public verbs<communicator> {
 public:
  communicator() = default;
  explicit communicator(std::shared_ptr<detail::member> member) : member_(std::move(member)) {}

  explicit operator bool() const { return member_ != nullptr; }
  int rank() const { return self().rank(); }
  int size() const { return self().size(); }
  /// Rank among all threads of the run.
  int world_rank() const { return self().world_rank(); }
  const std::string& label() const { return self().storage().label; }
  /// Whether calls return before a device has done what they ask for.
  bool enqueues() const { return self().on_device(); }

  void run(const call& c) { self().finish(self().post(c), detail::side_of(c)); }
  [[nodiscard]] request start(const call& c) {
    const int side = detail::side_of(c);
    return request(side < 0    ? detail::request_table<-1>
                   : side == 0 ? detail::request_table<0>
                               : detail::request_table<1>,
                   member_, self().post(c, true));
  }

  /// Collective. The label names the subgroup in messages; without one it is the parent's, a dot and the color.
  communicator split(int color, int key, std::string_view label = {}) {
    auto child = self().split(color, key, label);
    return child ? communicator(std::move(child)) : communicator();
  }

  /// Returns these ranks on the memory of each rank's device. Collective. The streams that `engine` uses must outlive
  /// it.
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
  detail::member& self() const {
    if (!member_)
      fail(
          "a communicator that holds nothing was used: no group was given to it, or its rank has a negative color in "
          "the split");
    return *member_;
  }

  std::shared_ptr<detail::member> member_;
};

static_assert(plait::communicator<communicator>);

namespace detail {

void run_ranks(int ranks, const std::function<void(communicator&)>& body);

}  // namespace detail

/// Runs `body(communicator)` on `ranks` threads and returns when all have ended. The first error of any rank ends them
/// all. It is thrown here as a plait::error that names the rank and what every rank did last. The rank's own exception
/// is nested in it.
template <class F>
void run(int ranks, F&& body) {
  detail::run_ranks(ranks, [&body](communicator& comm) { body(comm); });
}

}  // namespace plait::threads

#ifndef PLAIT_COMPILED
#include "plait/comm/threads.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
