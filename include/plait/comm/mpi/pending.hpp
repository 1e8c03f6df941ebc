// The inner part of comm/mpi.hpp that holds operations in flight: the thread that moves large ones while the rank
// computes, and the watchdog of blocking calls. Which operations there are is comm/mpi.hpp's.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/deadline.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/mpi/calls.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::mpi::detail {

/// How many collectives a rank has called on a communicator.
struct call_count {
  std::array<char, 32> label{};
  std::uint64_t collectives = 0;

  void set_label(std::string_view text) {
    label = {};
    std::copy_n(text.data(), std::min(text.size(), label.size() - 1), label.data());
  }
};

/// A message of a rank that waits to the others, sent as bytes.
struct presence {
  static constexpr std::size_t most = 16;

  std::array<char, 128> waits_for{};  ///< "all_reduce #3 on 'dp'"; empty: the rank has reported nothing
  std::uint64_t communicators = 0;    ///< the entries of `calls`
  std::array<call_count, most> calls{};

  /// Returns how many collectives the rank has called on the communicator of this label: the fewest where there are
  /// several of them, and none where the rank has not reported it.
  std::uint64_t called(const call_count& on) const {
    std::uint64_t fewest = UINT64_MAX;
    for (std::size_t i = 0; i < communicators; ++i)
      if (calls[i].label == on.label) fewest = std::min(fewest, calls[i].collectives);
    return fewest == UINT64_MAX ? 0 : fewest;
  }
};

/// An operation that waits, as the ranks of its communicator know it.
struct waiting_operation {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, size = 1;
  int peer = -1;   ///< of a message; -1: a collective
  call_count own;  ///< of its communicator; of a collective, how many were called before it
};

/// The ranks of a communicator and of all that are split from it, and what they wait for. A rank sends it after a tenth
/// of a deadline, in messages over a separate communicator. The others read them when their deadline is over: until
/// then nothing is asked, and no thread runs for it.
class roll_call {
 public:
  /// Collective over `all`.
  roll_call(MPI_Comm all, int rank, int size) : rank_(rank), heard_(static_cast<std::size_t>(size)) {
    check(MPI_Comm_dup(all, &comm_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    in_world_ = ranks_in(all, size, MPI_COMM_WORLD);
  }
  roll_call(const roll_call&) = delete;
  roll_call& operator=(const roll_call&) = delete;
  ~roll_call() {
    int over = 0;
    if (MPI_Finalized(&over) != MPI_SUCCESS || over) return;
    collect();
    for (message& m : sent_)  // what the library may still read is left to it
      if (!finish(m)) static_cast<void>(new std::shared_ptr<const presence>(std::move(m.said)));
    MPI_Comm_free(&comm_);
  }

  /// Sends all other ranks what this one waits for, and what it has called.
  void announce(const std::string& waits_for, const std::vector<const call_count*>& calls) {
    collect();  // of waits that are over
    std::erase_if(sent_, [](message& m) { return finish(m); });
    const auto said = std::make_shared<presence>();
    std::copy_n(waits_for.data(), std::min(waits_for.size(), said->waits_for.size() - 1), said->waits_for.data());
    said->communicators = std::min(calls.size(), presence::most);
    for (std::size_t i = 0; i < said->communicators; ++i) said->calls[i] = *calls[i];
    for (int k = 0; k < static_cast<int>(heard_.size()); ++k) {
      if (k == rank_) continue;
      message& m = sent_.emplace_back(message{said, MPI_REQUEST_NULL});
      check(MPI_Isend(said.get(), sizeof *said, MPI_BYTE, k, 0, comm_, &m.request), "MPI_Isend");
    }
  }

  /// Returns in words which ranks are missing; `o` is past its deadline.
  std::string missing(const waiting_operation& o) {
    for (int i = 0; i < 20; ++i) {  // messages come in while the library is called
      collect();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const std::vector<int> group = ranks_in(o.comm, o.size, comm_);
    std::vector<std::size_t> silent, others;
    std::string behind;
    int named = 0;
    for (int k = 0; k < o.size; ++k) {
      if (k == o.rank || (o.peer >= 0 && k != o.peer)) continue;
      const auto r = static_cast<std::size_t>(group[static_cast<std::size_t>(k)]);
      if (is_silent(r)) {
        silent.push_back(name_of(r));
      } else if (o.peer >= 0 || heard_[r].called(o.own) <= o.own.collectives) {
        if (++named <= 4)
          append(behind, {"; rank ", name_of(r), " has not called it, and waits for ", heard_[r].waits_for.data()});
      }
    }
    for (std::size_t r = 0; r < heard_.size(); ++r)
      if (is_silent(r) && std::find(silent.begin(), silent.end(), name_of(r)) == silent.end())
        others.push_back(name_of(r));
    if (named > 4) append(behind, {"; and so do ", named - 4, " more"});
    if (!silent.empty()) return silent_text(silent) + behind;
    if (named == 0 && others.empty()) return "all ranks have called it, so that a link between them is lost";
    return (others.empty() ? "no rank is silent" : "of the other ranks, " + silent_text(others)) + behind;
  }

 private:
  struct message {
    std::shared_ptr<const presence> said;
    MPI_Request request;
  };

  static bool finish(message& m) {
    int done = 0;
    return MPI_Test(&m.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0;
  }
  static std::string silent_text(const std::vector<std::size_t>& ranks) {
    return plait::detail::ranks_text(ranks) +
           (ranks.size() == 1 ? " is silent: it waits for nothing, so that it is"
                              : " are silent: they wait for nothing, so that they are") +
           " lost, stopped or still at work";
  }
  bool is_silent(std::size_t r) const { return static_cast<int>(r) != rank_ && heard_[r].waits_for[0] == '\0'; }
  /// The rank of the process in MPI_COMM_WORLD, if it is in it.
  std::size_t name_of(std::size_t r) const {
    return in_world_[r] == MPI_UNDEFINED ? r : static_cast<std::size_t>(in_world_[r]);
  }
  /// Reads what has come in.
  void collect() {
    for (int there = 1; there != 0;) {
      MPI_Status status;
      if (MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &there, &status) != MPI_SUCCESS || there == 0) return;
      presence said;
      if (MPI_Recv(&said, sizeof said, MPI_BYTE, status.MPI_SOURCE, 0, comm_, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
      heard_[static_cast<std::size_t>(status.MPI_SOURCE)] = said;
    }
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_;
  std::vector<int> in_world_;
  std::vector<presence> heard_;
  std::vector<message> sent_;
};

class watchdog;
class mover;

/// A communicator, and all that are split from it: one roll call.
struct family {
  family(MPI_Comm all, int rank, int size) : roll(all, rank, size) {}

  roll_call roll;
  std::vector<const call_count*> calls;  ///< of the communicators that exist
};

/// The state that the copies of a communicator share.
struct state {
  MPI_Comm comm = MPI_COMM_NULL;
  bool owned = false;
  bool marked = false;  ///< a communicator of the caller's: it has the attribute `attached_key`
  int rank = 0, size = 1;
  std::string label;
  double deadline = 600;                         ///< seconds; 0: none
  std::size_t limit = INT_MAX;                   ///< elements per MPI call
  std::size_t piece = 0;                         ///< bytes of a message of a large started collective; 0: by `slow`
  MPI_Errhandler callers = MPI_ERRHANDLER_NULL;  ///< of a communicator of the caller's
  std::string dropped;                           ///< an error that no wait has thrown; the next operation throws it
  std::uint64_t sequence = 0;
  call_count called;            ///< equal on all ranks that have come as far, as messages do not count
  std::uint64_t exchanges = 0;  ///< collectives by messages that were started
  int most_tag = 0;             ///< that the library takes
  std::vector<char> slow;       ///< of each rank, whether it is reached over a slow link
  std::shared_ptr<operations> ops;
  std::shared_ptr<flight_recorder> flight;
  std::shared_ptr<family> kin;
  std::shared_ptr<watchdog> dog;
  std::shared_ptr<mover> moves;

  state() = default;
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  /// Notes that a communicator of the caller's is attached. Throws `error` if it was attached before: operations of
  /// both would share tags, and the second would take the first's error handler for the caller's.
  void mark() {
    void* value = nullptr;
    int is_attached = 0;
    check(MPI_Comm_get_attr(comm, attached_key(), &value, &is_attached), "MPI_Comm_get_attr");
    if (is_attached)
      fail({"'", label, "': this MPI_Comm is attached already; use the communicator that attach returned, or its ",
            "copies, let them end first, or attach a duplicate of it (MPI_Comm_dup)"});
    check(MPI_Comm_set_attr(comm, attached_key(), nullptr), "MPI_Comm_set_attr");
    marked = true;
  }
  ~state() {
    if (kin) std::erase(kin->calls, &called);
    int over = 0;
    if (MPI_Finalized(&over) != MPI_SUCCESS || over) return;
    if (owned) MPI_Comm_free(&comm);
    if (marked) MPI_Comm_delete_attr(comm, attached_key());
    if (callers == MPI_ERRHANDLER_NULL) return;
    MPI_Comm_set_errhandler(comm, callers);
    MPI_Errhandler_free(&callers);
  }
};

/// An operation in flight: one or several MPI requests, and what must live until they are complete.
struct pending {
  std::shared_ptr<state> home;
  std::vector<MPI_Request> requests;
  std::vector<int> expected;  ///< of a receive: elements of each request
  MPI_Datatype type = MPI_DATATYPE_NULL;
  std::vector<std::byte> buffer;  ///< result of a reduce_scatter in place
  void* copy_to = nullptr;
  std::function<void(pending&)> then;  ///< what follows when the requests are complete; may make more of them
  const char* name = "";
  std::uint64_t sequence = 0, ticket = 0, bytes = 0;
  int peer = -1;             ///< of a message
  std::uint64_t before = 0;  ///< of a collective: how many its communicator has had

  MPI_Request* next() {
    requests.push_back(MPI_REQUEST_NULL);
    return &requests.back();
  }

  /// Returns whether it is complete; starts what follows when its requests are. One thread at a time.
  bool advance() {
    int done = 0;
    std::vector<MPI_Status> status(expected.empty() ? 0 : requests.size());
    check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                      expected.empty() ? MPI_STATUSES_IGNORE : status.data()),
          "MPI_Testall");
    if (!done) return false;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      int got = 0;
      MPI_Get_count(&status[i], type, &got);
      if (got != expected[i]) {
        fail({"receive on '", home->label, "': got ", got, " elements, expected ", expected[i]});
      }
    }
    if (then) {
      requests.clear();
      expected.clear();
      std::exchange(then, nullptr)(*this);
      if (!requests.empty()) return false;
    }
    requests.clear();
    expected.clear();  // a later question is answered at once
    if (copy_to != nullptr)
      std::copy(buffer.begin(), buffer.end(), static_cast<std::byte*>(std::exchange(copy_to, nullptr)));
    return true;
  }

  std::string text() const { return plait::detail::operation_text(name, sequence, home->label); }
  /// Sends all ranks that this one waits.
  void announce() const { home->kin->roll.announce(text(), home->kin->calls); }
  /// Returns the text of an operation that is past its deadline. Names the ranks that are missing where MPI may be
  /// called (`callable`).
  std::string late(bool callable) const {
    call_count own = home->called;
    own.collectives = before;
    const std::string who =
        callable ? home->kin->roll.missing({home->comm, home->rank, home->size, peer, own})
                 : cat({plait::detail::someone_is_missing, ", which MPI without MPI_THREAD_MULTIPLE cannot say"});
    return cat({plait::detail::late_text(text(), bytes_text(bytes), home->deadline, who),
                "; last operations: ", home->flight->text(16)});
  }
};

/// The wait for an operation: after a tenth of the deadline the rank notifies the others, and after the deadline it
/// ends all ranks.
class waiting {
 public:
  explicit waiting(const pending& p) : pending_(&p), limit_(p.home->deadline) {}
  /// `callable`: whether this thread may call MPI.
  void look(bool callable) {
    if (callable && !announced_ && limit_.passed(0.1)) {
      pending_->announce();
      announced_ = true;
    }
    if (limit_.passed()) end_all(pending_->late(callable));
  }
  std::string text() const { return pending_->text(); }

 private:
  const pending* pending_;
  plait::detail::deadline limit_;
  bool announced_ = false;
};

class operation;

/// Moves large operations while their ranks compute: libraries move messages when they are called, and a reduction by
/// messages has a sum and a second exchange after the first. A thread polls all that are in flight; where the library
/// allows one thread alone, every wait of the rank moves them.
class mover {
 public:
  mover() = default;
  mover(const mover&) = delete;
  mover& operator=(const mover&) = delete;
  ~mover() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void add(operation& o) {
    const std::lock_guard lock(mutex_);
    flying_.push_back(&o);
    if (!allowed_) return;
    if (!thread_.joinable()) thread_ = std::thread([this] { move(); });
    changed_.notify_all();
  }
  /// The thread does not touch it afterwards.
  void remove(operation& o) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return now_ != &o; });
    std::erase(flying_, &o);
  }
  /// Without the thread, advances all in flight but `o`: another rank may wait for one of them before this rank does.
  void move_others(operation& o);

 private:
  void move();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<operation*> flying_;
  operation* now_ = nullptr;  ///< what the thread looks at
  bool over_ = false;
  const bool allowed_ = allows_threads();
  std::thread thread_;
};

/// An operation that was started: its rank asks and waits for it, while a mover may advance it. The
/// flight recorder is the rank's own, so the rank alone notes there what it has seen.
class operation {
 public:
  operation(pending&& p, bool moved) : pending_(std::move(p)), moved_(moved) {
    if (moved_) pending_.home->moves->add(*this);
  }
  operation(const operation&) = delete;
  operation& operator=(const operation&) = delete;
  ~operation() {
    if (moved_) pending_.home->moves->remove(*this);
  }

  /// Returns whether it is complete. Throws its error, whichever thread met it.
  bool test() {
    if (!advance()) return false;
    if (!std::exchange(noted_, true)) pending_.home->flight->mark(pending_.ticket, flight_recorder::state::completed);
    if (error_) std::rethrow_exception(error_);
    return true;
  }

  /// Returns whether it is complete, and gives up the processor where it is not.
  bool done() {
    if (test()) return true;
    std::this_thread::yield();
    return false;
  }

  /// Polls politely, since ranks may outnumber cores: every look is followed by a yield.
  void wait() {
    mover& others = *pending_.home->moves;
    for (int i = 0; i < 1000; ++i) {
      if (test()) return;
      others.move_others(*this);
      std::this_thread::yield();
    }
    pending_.home->flight->mark(pending_.ticket, flight_recorder::state::waiting);
    waiting limit(pending_);
    while (!test()) {
      others.move_others(*this);
      std::this_thread::yield();
      limit.look(true);
    }
  }

  /// Waits without throwing. While an exception unwinds this rank, others may never join, and it is about to end all
  /// ranks: then no thread moves the operation from here on, and the library keeps what it may still write to.
  void drop() noexcept {
    if (std::uncaught_exceptions() > 0) {
      const std::lock_guard lock(mutex_);
      if (!std::exchange(over_, true)) static_cast<void>(new std::vector<std::byte>(std::move(pending_.buffer)));
      return;
    }
    try {
      wait();
    } catch (const std::exception& e) {
      pending_.home->dropped = e.what();
    }
  }

  /// Advances it, and returns whether it is over. Any thread may; errors are kept for the rank.
  bool advance() noexcept {
    const std::lock_guard lock(mutex_);
    if (over_) return true;
    try {
      over_ = pending_.advance();
    } catch (...) {
      error_ = std::current_exception();
      over_ = true;
    }
    return over_;
  }

 private:
  std::mutex mutex_;
  pending pending_;
  std::exception_ptr error_;
  const bool moved_;
  bool over_ = false, noted_ = false;
};

inline void mover::move_others(operation& o) {
  if (allowed_ || flying_.empty()) return;  // one thread alone: no other looks at the list
  for (operation* const other : flying_)
    if (other != &o) static_cast<void>(other->advance());
}

inline void mover::move() {
  using std::chrono::microseconds;
  constexpr microseconds shortest{50}, longest{400};  // a link of 10 Gbit/s moves 500 kB meanwhile: sockets hold more
  microseconds pause = shortest;
  std::unique_lock lock(mutex_);
  while (!over_) {
    if (flying_.empty()) {
      pause = shortest;
      changed_.wait(lock);
      continue;
    }
    pause = std::min(2 * pause, longest);
    for (std::size_t i = 0; i < flying_.size();) {  // others may come or go meanwhile; none goes unseen for long
      now_ = flying_[i];
      lock.unlock();
      const bool over = now_->advance();
      lock.lock();
      if (over) {
        std::erase(flying_, now_);
        pause = shortest;
      }
      i += !over;
      now_ = nullptr;
      changed_.notify_all();
    }
    lock.unlock();
    std::this_thread::sleep_for(pause);
    lock.lock();
  }
}

/// Ends all ranks when a blocking MPI call is past its deadline. A thread does so: the rank could watch non-blocking
/// collectives by itself, but blocking ones are up to eight times as fast. Arming is a lock and a few stores.
class watchdog {
 public:
  void arm(const pending& p) {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(p);
    thread_.cover(p.home->deadline);
  }
  void disarm() {
    const std::lock_guard lock(mutex_);
    waiting_.reset();
  }

 private:
  void look() {
    if (!waiting_) return;
    try {
      waiting_->look(callable_);
    } catch (const std::exception& e) {
      end_all(cat({waiting_->text(), " did not finish, and the ranks could not be asked why: ", e.what()}));
    }
  }

  std::mutex mutex_;
  std::optional<waiting> waiting_;
  const bool callable_ = allows_threads();  ///< the library, while the rank is in a call of it
  plait::detail::watch_thread thread_{mutex_, [this](auto&) { return look(), true; }};
};

/// The blocking or the non-blocking form of one MPI call; they differ in the request at the end.
template <class Blocking, class Starting, class... Arguments>
void issue(pending& p, bool blocking, const char* name, Blocking call, Starting start, Arguments... arguments) {
  if (!blocking) return check(start(arguments..., p.next()), name);
  p.home->flight->mark(p.ticket, flight_recorder::state::waiting);
  const bool watched = p.home->deadline > 0;
  if (watched) p.home->dog->arm(p);
  const int code = call(arguments...);
  if (watched) p.home->dog->disarm();
  check(code, name);
}

}  // namespace plait::mpi::detail

#include "plait/core/macros_on.hpp"
