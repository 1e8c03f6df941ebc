// Definitions for threads.hpp, which includes this file unless PLAIT_COMPILED is defined: the shared state of a run,
// and its ranks.
#pragma once

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/deadline.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/threads/operation.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/function_ref.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait::threads {

namespace detail {

// A futex sleeps and wakes in about half the time of std::atomic::wait, which hashes the address, counts its waiters
// and spins. (A 1 KB all-reduce on 8 ranks and 2 cores takes 6 to 9 microseconds instead of 9 to 17.)
inline void sleep_while_zero(std::atomic<std::uint32_t>& word) {
  while (word.load(std::memory_order_acquire) == 0) {
#if defined(__linux__)
    static_assert(sizeof word == 4);
    ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
#else
    word.wait(0, std::memory_order_acquire);
#endif
  }
}

inline void wake(std::atomic<std::uint32_t>& word) {
  word.store(1, std::memory_order_release);
#if defined(__linux__)
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
#else
  word.notify_one();
#endif
}

/// Ranks that share sequence numbers. The run's mutex guards all members.
struct group {
  std::string label;
  std::vector<int> members;           ///< world ranks
  std::vector<operation*> window;     ///< unfinished collectives, at sequence % size (a power of two)
  std::vector<operation*> unmatched;  ///< messages that only one side has posted, oldest first
  std::vector<operation*> idle_collectives, idle_messages;
  std::vector<std::unique_ptr<operation>> store;
};

/// The state that all ranks of one run share: which ranks sleep, which have returned, and the cause of a failure.
///
/// The invariant of exact deadlock detection: `running` counts the ranks that neither sleep nor have returned. A rank
/// goes to sleep under the mutex, after it has seen there that its operation is not ready. A rank that advances an
/// operation also holds the mutex, and counts the ranks that it wakes as running before they run. So `running == 0`
/// means that no rank can advance. The rank that sets it to 0 detects the deadlock.
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

  /// Blocks a rank until one of the bits `want` of the operation is set; ranks block nowhere else. Returns false if the
  /// run failed and the operation is not complete. No other rank will then touch this rank's buffers.
  bool wait(int rank, operation& op, std::uint32_t want, std::uint64_t ticket) {
    for (int i = 0; i < 20; ++i) {
      if ((op.word.load(std::memory_order_acquire) & want) != 0) return true;
      std::this_thread::yield();
    }
    slot& me = slot_of(rank);
    {
      const std::lock_guard lock(mutex_);
      if ((op.word.load(std::memory_order_acquire) & want) != 0) return true;
      if (failed() && !op.complete()) return false;
      me.flight.mark(ticket, flight_recorder::state::waiting);
      me.waits_for = &op;
      me.want = want;
      me.word.store(0, std::memory_order_relaxed);
      --running_;
      if (running_ == 0 && !failed()) fail_locked("deadlock: no rank can continue" + situation());
    }
    sleep_while_zero(me.word);
    if ((op.word.load(std::memory_order_acquire) & want) != 0) return true;
    const std::lock_guard lock(mutex_);
    if (!op.complete()) return false;
    // The run failed while other ranks work on the operation. They finish it before this rank may free its buffers.
    wait_for_completion(me, op);
    return true;
  }

  /// Sets `bits` of the operation's word, and wakes at most `most` of the ranks that wait for these bits.
  void signal(operation& op, std::uint32_t bits, std::size_t most = ~std::size_t{0}) {
    std::array<slot*, 64> woken;
    std::size_t count = 0;
    {
      const std::lock_guard lock(mutex_);
      op.word.fetch_or(bits, std::memory_order_release);
      for (const int r : op.world_ranks) {
        slot& s = slot_of(r);
        if (most == 0) break;
        if (s.waits_for != &op || (s.want & bits) == 0) continue;
        --most;
        s.waits_for = nullptr;
        ++running_;
        if (count < woken.size()) {
          woken[count++] = &s;
        } else {
          wake(s.word);
        }
      }
    }
    // Ranks are woken after the unlock; otherwise they would block on the mutex.
    for (std::size_t i = 0; i < count; ++i) wake(woken[i]->word);
  }

  /// The most sleeping ranks that are worth waking to share work.
  std::size_t helpers() const { return helpers_; }

  /// Ends all ranks, unless they have failed before. Wakes all; they throw `stopped`.
  void fail(const std::string& why) {
    const std::lock_guard lock(mutex_);
    fail_locked(why + flights());
  }

  /// Ends all ranks because of a mismatch. Requires the mutex.
  [[noreturn]] void fail_here(const std::string& why) {
    fail_locked(why + flights());
    throw stopped(why);
  }

  /// Ends the other ranks because an exception unwinds `rank`, which destroys a request. The exception's text is known
  /// later, when the exception leaves the rank's function.
  void fail_by_unwinding(int rank) {
    const std::lock_guard lock(mutex_);
    fail_locked(cat({"rank ", rank, " is leaving by an exception"}), rank);
  }

  /// Notes that the rank's function has ended, by `exception` if not null.
  void leave(int rank, std::exception_ptr exception, const std::string& what) {
    const std::lock_guard lock(mutex_);
    slot_of(rank).returned = true;
    --running_;
    if (exception) {
      const std::string why = cat({"rank ", rank, ": ", what, flights()});
      if (failure_.explain(rank, why) || fail_locked(why)) exception_ = std::move(exception);
    }
    if (running_ == 0 && !failed() && !all_returned()) fail_locked("deadlock: no rank can continue" + situation());
  }

  /// Throws `stopped` on `rank`. Requires the mutex.
  [[noreturn]] void throw_stopped(int rank, const std::string& doing) const {
    throw stopped(cat({"rank ", rank, ": ", doing, " was stopped: ", failure_.cause()}));
  }
  std::string cause() {
    const std::lock_guard lock(mutex_);
    return failure_.cause();
  }
  std::exception_ptr exception() const { return exception_; }

 private:
  struct alignas(64) slot {
    std::atomic<std::uint32_t> word{0};
    const operation* waits_for = nullptr;  ///< null while the rank runs
    std::uint32_t want = 0;
    bool returned = false;
    flight_recorder flight;
  };

  slot& slot_of(int rank) { return slots_[static_cast<std::size_t>(rank)]; }

  bool all_returned() const {
    return std::all_of(slots_.begin(), slots_.end(), [](const slot& s) { return s.returned; });
  }
  /// Sets the cause of the failure, and returns whether it is the first. `leaving` as in `failure::fail`.
  bool fail_locked(const std::string& why, int leaving = -1) {
    if (!failure_.fail(why, leaving)) return false;
    for (slot& s : slots_) {
      if (s.waits_for == nullptr) continue;
      s.waits_for = nullptr;
      ++running_;
      wake(s.word);
    }
    return true;
  }
  /// Waits although the run has failed. Requires the mutex.
  void wait_for_completion(slot& me, operation& op) {
    while ((op.word.load(std::memory_order_acquire) & operation::finished) == 0) {
      me.waits_for = &op;
      me.want = operation::finished;
      me.word.store(0, std::memory_order_relaxed);
      --running_;
      mutex_.unlock();
      sleep_while_zero(me.word);
      mutex_.lock();
    }
  }

  /// Returns the current operation of every rank, one line each.
  std::string situation() {
    std::string out;
    for (int r = 0; r < size(); ++r) {
      const slot& s = slot_of(r);
      append(out, {"\n  rank ", r});
      if (s.returned) {
        out += " has returned";
      } else if (s.waits_for != nullptr) {
        out += " waits in " + describe(*s.waits_for, r);
      } else {
        out += " runs";
      }
      out += "; last: " + s.flight.text();
    }
    return out;
  }
  std::string flights() {
    std::string out = "\nlast operations";
    for (int r = 0; r < size(); ++r) append(out, {"\n  rank ", r, ": ", slot_of(r).flight.text()});
    return out;
  }
  static std::string describe(const operation& op, int rank) {
    const signature& s = op.what;
    if (s.is_message()) {
      const bool sends = op.parts[0].here && op.world_ranks[0] == rank;
      return cat({sends ? "send to rank " : "receive from rank ", op.world_ranks[sends ? 1 : 0], " (", s.count, " ",
                  plait::name_of(s.type), ", tag ", s.root, ") on '", op.home->label, "': the other side is missing"});
    }
    std::string missing;
    for (std::size_t i = 0; i < op.parts.size(); ++i) {
      if (!op.parts[i].here) append(missing, {(missing.empty() ? "" : ", "), op.world_ranks[i]});
    }
    return plait::detail::operation_text(text(s), op.sequence, op.home->label) + ": missing ranks " + missing;
  }

  std::mutex mutex_;
  std::vector<slot> slots_;
  int running_;
  std::size_t helpers_;
  plait::detail::failure failure_;
  std::exception_ptr exception_;
};

/// The side of a call in a message: 0 sends, 1 receives, -1 for a collective.
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
  /// Later operations use the memory of this engine's device; splits inherit it.
  void use(std::shared_ptr<device_engine> engine) { engine_ = std::move(engine); }
  bool on_device() const { return engine_ != nullptr; }
  /// Refuses memory that the device cannot use. Ranks without a device take any memory.
  void check_memory(const char* what, const void* in, const void* out) const {
    if (engine_ == nullptr) return;
    if (in != nullptr) engine_->check(what, in);
    if (out != nullptr && out != in) engine_->check(what, out);
  }

  /// Joins the operation of a call; `finish` waits for it. The last rank to join does the work, or opens it to the
  /// waiting ranks. With `starts`, the operation records when it is finished.
  operation* post(const call& c, bool starts = false) {
    check(c, rank(), size());
    check_memory(c.name(), c.in, c.out);
    const auto fill = [&](part& p) {
      p.fill(c);
      p.starts = starts;
    };
    signature s{.kind = c.kind, .count = c.ragged ? 0 : c.count, .type = c.type, .ragged = c.ragged};
    if (c.kind == collective::all_reduce || c.kind == collective::reduce_scatter) s.op = c.op;
    if (c.kind == collective::broadcast) s.root = c.peer;
    const int side = side_of(c);
    if (side >= 0) s.kind = collective::send, s.root = c.tag;
    const joined here = join(s, side, c.peer, c.payload(size()), fill);
    if (here.last) execute(*here.op);
    return here.op;
  }

  /// An operation that this rank has joined, and whether it joined last.
  struct joined {
    operation* op;
    bool last;
  };
  /// Joins the next collective in this rank's sequence or, with a `side` as in `side_of`, a message to or from `peer`.
  /// `fill` writes the rank's part.
  joined join(signature s, int side, int peer, std::uint64_t bytes, function_ref<void(part&)> fill) {
    const bool message = side >= 0;
    std::uint64_t& sequence = message ? messages_ : sequence_;
    const char* const name = side == 0 ? "send" : message ? "receive" : s.name();
    s.on_device = engine_ != nullptr && !s.is_split;
    const std::lock_guard lock(run_->mutex());
    if (run_->failed())
      stop(message ? cat({name, side == 0 ? " to rank " : " from rank ", of_world(peer), " on '", group_->label, "'"})
                   : plait::detail::operation_text(text(s), sequence, group_->label));
    operation* const op = message ? find_or_begin_message(s, side, peer) : find_or_begin(s);
    if (!(op->what == s)) message ? message_mismatch(*op, side, s) : mismatch(*op, s);
    part& mine = part_of(*op, side);
    fill(mine);
    if (s.ragged) check_pairs(*op);
    if (s.on_device) arrive(mine);
    mine.here = true;
    mine.ticket = run_->flight(world_rank()).start(group_->label, sequence++, name, bytes);
    const bool last = ++op->arrived == static_cast<int>(op->parts.size());
    if (last && s.is_split) make_children(*op);
    return {op, last};
  }

  /// Does the work of an operation that all ranks have joined. The last rank to join calls it.
  void execute(operation& op) {
    if (op.what.on_device) return execute_on_device(op);
    const work w(op);
    op.units = w.units();
    if (w.bytes() <= solo_bytes || op.units < 2 || run_->helpers() == 0) {
      for (std::size_t u = 0; u < op.units; ++u) w.run(u);
      finished(op);
      return;
    }
    op.next_unit.store(0, std::memory_order_relaxed);
    op.units_left.store(op.units, std::memory_order_relaxed);
    run_->signal(op, operation::open, run_->helpers());
    help(op);
  }

  /// Waits for the operation, shares its work, and leaves it. `side` as in `side_of`.
  void finish(operation* op, int side = -1) {
    wait(*op, side);
    if (engine_ != nullptr) leave(*op);
    release(*op);
  }

  std::shared_ptr<member> split(int color, int key, std::string_view label) {
    const auto [op, last] = join({.is_split = true}, -1, 0, 0, [&](part& p) {
      p.color = color;
      p.key = key;
      p.label = label;
    });
    if (last) finished(*op);
    wait(*op, -1);
    part& mine = op->parts[static_cast<std::size_t>(rank_)];
    std::shared_ptr<group> child = std::move(mine.child);
    const int child_rank = mine.child_rank;
    release(*op);
    if (child == nullptr) return nullptr;
    auto out = std::make_shared<member>(run_, std::move(child), child_rank);
    out->engine_ = engine_;
    return out;
  }

  /// Whether `finish` would not block.
  bool done(operation& op) {
    if ((op.word.load(std::memory_order_acquire) & operation::finished) != 0) {
      if (engine_ == nullptr || op.broken || engine_->reached(op)) return true;
      std::this_thread::yield();
      return false;
    }
    if (run_->failed()) {
      const std::lock_guard lock(run_->mutex());
      if (!op.complete()) stop(plait::detail::operation_text(text(op.what), op.sequence, group_->label));
    }
    std::this_thread::yield();
    return false;
  }

  /// Finishes without throwing, for destructors.
  void drop(operation* op, int side) noexcept {
    try {
      if (std::uncaught_exceptions() > 0) run_->fail_by_unwinding(world_rank());
      finish(op, side);
    } catch (const stopped&) {  // later operations and threads::run throw the cause
    }
  }

 private:
  int of_world(int rank) const { return group_->members[static_cast<std::size_t>(rank)]; }

  part& part_of(operation& op, int side) { return op.parts[static_cast<std::size_t>(side < 0 ? rank_ : side)]; }

  void wait(operation& op, int side) {
    const std::uint64_t ticket = part_of(op, side).ticket;
    if (!run_->wait(world_rank(), op, operation::open | operation::finished, ticket)) {
      const std::lock_guard lock(run_->mutex());
      stop(plait::detail::operation_text(text(op.what), op.sequence, group_->label));
    }
    if ((op.word.load(std::memory_order_acquire) & operation::finished) == 0) {
      help(op);
      run_->wait(world_rank(), op, operation::finished, ticket);
    }
    run_->flight(world_rank()).mark(ticket, flight_recorder::state::completed);
  }

  /// Counts a rank that leaves the operation; the last one returns it for reuse.
  void release(operation& op) {
    if (op.left.fetch_add(1, std::memory_order_acq_rel) + 1 != static_cast<int>(op.parts.size())) return;
    const std::lock_guard lock(run_->mutex());
    if (op.what.is_message()) {
      group_->idle_messages.push_back(&op);
    } else {
      group_->window[op.sequence & (group_->window.size() - 1)] = nullptr;
      group_->idle_collectives.push_back(&op);
    }
  }

  operation* acquire(std::vector<operation*>& idle, std::size_t parts) {
    if (!idle.empty()) {
      operation* op = idle.back();
      idle.pop_back();
      return op;
    }
    group_->store.push_back(std::make_unique<operation>());
    operation* op = group_->store.back().get();
    op->parts.resize(parts);
    return op;
  }
  operation* find_or_begin(const signature& s) {
    auto& window = group_->window;
    if (window.empty()) window.resize(8);
    operation*& place = window[sequence_ & (window.size() - 1)];
    if (place != nullptr && place->sequence == sequence_) return place;
    if (place != nullptr) {  // a rank is ahead by more than the window's length
      widen_window();
      return find_or_begin(s);
    }
    place = acquire(group_->idle_collectives, group_->members.size());
    if (place->world_ranks.empty()) place->world_ranks = group_->members;
    place->begin(s, sequence_, group_.get());
    return place;
  }
  /// Returns the oldest message of this sender, receiver and tag that lacks this side, or a new one.
  operation* find_or_begin_message(const signature& s, int side, int peer) {
    const int source = side == 0 ? rank_ : peer, target = side == 0 ? peer : rank_;
    auto& open = group_->unmatched;
    const auto match = std::find_if(open.begin(), open.end(), [&](const operation* o) {
      return o->source == source && o->target == target && o->what.root == s.root &&
             !o->parts[static_cast<std::size_t>(side)].here;
    });
    if (match != open.end()) {
      operation* const op = *match;
      open.erase(match);
      return op;
    }
    operation* const op = open.emplace_back(acquire(group_->idle_messages, 2));
    op->begin(s, messages_, group_.get());
    op->source = source;
    op->target = target;
    op->world_ranks.assign({of_world(source), of_world(target)});
    return op;
  }
  void widen_window() {
    std::vector<operation*> wider(group_->window.size() * 2);
    for (operation* op : group_->window) {
      if (op != nullptr) wider[op->sequence & (wider.size() - 1)] = op;
    }
    group_->window.swap(wider);
  }
  /// If the device refuses the work, all ranks end. The ranks that wait for the operation are notified first.
  void execute_on_device(operation& op) {
    try {
      engine_->run(op);
    } catch (const std::exception& e) {
      op.broken = true;
      run_->fail(on_this_rank(e));
      finished(op);
      throw;
    }
    finished(op);
  }
  void arrive(part& mine) {
    try {
      engine_->arrive(mine);
    } catch (const std::exception& e) {
      run_->fail_here(on_this_rank(e));
    }
  }
  void leave(operation& op) {
    if (!op.broken) return engine_->leave(op);
    const std::lock_guard lock(run_->mutex());
    stop(text(op.what));
  }
  std::string on_this_rank(const std::exception& e) const { return cat({"rank ", world_rank(), ": ", e.what()}); }

  void help(operation& op) {
    const work w(op);
    const std::size_t units = op.units;
    for (std::size_t u; (u = op.next_unit.fetch_add(1, std::memory_order_relaxed)) < units;) {
      w.run(u);
      if (op.units_left.fetch_sub(1, std::memory_order_acq_rel) == 1) finished(op);
    }
  }
  void finished(operation& op) {
    if (op.started()) op.through = comm_clock();
    run_->signal(op, operation::finished);
  }
  /// Makes the subgroups of a split; the last rank calls it. Requires the mutex.
  void make_children(operation& op) {
    std::vector<std::size_t> order(op.parts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      const part &x = op.parts[a], &y = op.parts[b];
      return std::pair(x.color, x.key) < std::pair(y.color, y.key);
    });
    std::shared_ptr<group> child;
    int color = -1;
    for (const std::size_t r : order) {
      part& p = op.parts[r];
      p.child = nullptr;
      if (p.color < 0) continue;
      if (p.color != color) {
        color = p.color;
        child = std::make_shared<group>();
        child->label = p.label.empty() ? cat({group_->label, ".", color}) : p.label;
      }
      p.child = child;
      p.child_rank = static_cast<int>(child->members.size());
      child->members.push_back(group_->members[r]);
    }
  }

  // Errors. All these functions require the mutex.
  [[noreturn]] void stop(const std::string& doing) const { run_->throw_stopped(world_rank(), doing); }
  [[noreturn]] void mismatch(const operation& op, const signature& s) const {
    std::size_t other = 0;
    while (other + 1 < op.parts.size() && !op.parts[other].here) ++other;
    run_->fail_here(cat({"mismatched collective #", sequence_, " on '", group_->label, "': rank ", world_rank(),
                         " calls ", text(s), ", but rank ", group_->members[other], " called ", text(op.what)}));
  }
  [[noreturn]] void message_mismatch(const operation& op, int side, const signature& s) const {
    const signature& sent = side == 0 ? s : op.what;
    const signature& received = side == 0 ? op.what : s;
    run_->fail_here(cat({"mismatched message on '", group_->label, "', tag ", s.root, ": rank ", op.world_ranks[0],
                         " sends ", sent.count, " ", plait::name_of(sent.type), ", but rank ", op.world_ranks[1],
                         " receives ", received.count, " ", plait::name_of(received.type)}));
  }
  /// Compares the counts of a ragged call, sent and received, with those of the ranks that have joined before.
  void check_pairs(const operation& op) const {
    const auto me = static_cast<std::size_t>(rank_);
    const part& mine = op.parts[me];
    const auto check = [&](std::size_t from, std::size_t to, std::size_t sent, std::size_t expected) {
      if (sent == expected) return;
      run_->fail_here(cat({"mismatched collective #", sequence_, " on '", group_->label, "': in ", op.what.name(),
                           " rank ", group_->members[from], " sends ", sent, " ", plait::name_of(op.what.type),
                           " to rank ", group_->members[to], ", which expects ", expected}));
    };
    check(me, me, mine.send_counts[me], mine.receive_counts[me]);
    for (std::size_t k = 0; k < op.parts.size(); ++k) {
      const part& other = op.parts[k];
      if (!other.here || k == me) continue;
      check(me, k, mine.send_counts[k], other.receive_counts[me]);
      check(k, me, other.send_counts[me], mine.receive_counts[k]);
    }
  }

  std::shared_ptr<run_state> run_;
  std::shared_ptr<group> group_;
  int rank_;
  std::uint64_t sequence_ = 0;
  std::uint64_t messages_ = 0;
  std::shared_ptr<device_engine> engine_;  ///< null: the host's memory is used
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

PLAIT_INLINE int communicator::rank() const { return self().rank(); }
PLAIT_INLINE int communicator::size() const { return self().size(); }
PLAIT_INLINE int communicator::world_rank() const { return self().world_rank(); }
PLAIT_INLINE const std::string& communicator::label() const { return self().storage().label; }
PLAIT_INLINE bool communicator::enqueues() const { return self().on_device(); }

PLAIT_INLINE void communicator::run(const call& c) { self().finish(self().post(c), detail::side_of(c)); }

PLAIT_INLINE request communicator::start(const call& c) {
  const int side = detail::side_of(c);
  return request(side < 0    ? detail::request_table<-1>
                 : side == 0 ? detail::request_table<0>
                             : detail::request_table<1>,
                 member_, self().post(c, true));
}

PLAIT_INLINE communicator communicator::split(int color, int key, std::string_view label) {
  return communicator(self().split(color, key, label));
}

PLAIT_INLINE communicator communicator::on(std::shared_ptr<device_engine> engine) {
  auto child = self().split(0, rank(), label());
  child->use(std::move(engine));
  return communicator(std::move(child));
}

PLAIT_INLINE void communicator::abort(const std::string& why) noexcept {
  self().run().fail(cat({"rank ", world_rank(), " called abort: ", why}));
}

PLAIT_INLINE void detail::run_ranks(int ranks, const std::function<void(communicator&)>& body) {
  if (ranks < 1) fail({"threads::run: ranks is ", ranks, "; at least 1 is needed"});
  const auto shared = std::make_shared<run_state>(ranks);
  const auto home = std::make_shared<group>();
  home->label = "world";
  for (int r = 0; r < ranks; ++r) home->members.push_back(r);

  const auto rank_main = [&](int rank) {
    std::exception_ptr exception;
    std::string what;
    try {
      communicator comm(std::make_shared<member>(shared, home, rank));
      body(comm);
    } catch (...) {
      exception = std::current_exception();
      what = plait::detail::exception_text();
    }
    shared->leave(rank, exception, what);
  };
  plait::detail::run_rank_threads("threads::run", static_cast<std::size_t>(ranks), rank_main,
                                  [&](const std::string& why) { shared->fail(why); });
  if (shared->failed()) plait::detail::throw_cause(shared->cause(), shared->exception());
}

}  // namespace plait::threads

#include "plait/core/macros_on.hpp"
