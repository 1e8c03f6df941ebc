// The internals of comm/mpi.hpp for operations in flight: the thread that advances large ones while the rank computes,
// the watchdog of blocking calls, and the report of missing ranks.
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

/// The number of collectives that a rank has called on a communicator.
struct call_count {
  std::array<char, 32> label{};
  std::uint64_t collectives = 0;

  void set_label(std::string_view text) {
    label = {};
    std::copy_n(text.data(), std::min(text.size(), label.size() - 1), label.data());
  }
};

/// A waiting rank's message to the others, sent as bytes.
struct wait_report {
  static constexpr std::size_t most = 16;

  std::array<char, 128> waits_for{};  ///< "all_reduce #3 on 'dp'"; empty: the rank has reported nothing
  std::uint64_t communicators = 0;    ///< number of valid entries in `calls`
  std::array<call_count, most> calls{};

  /// Returns the number of collectives that the rank has called on the communicator with this label. With several such
  /// communicators it is the smallest number. Returns nothing if the rank has not reported it.
  std::uint64_t called(const call_count& on) const {
    std::uint64_t fewest = UINT64_MAX;
    for (std::size_t i = 0; i < communicators; ++i)
      if (calls[i].label == on.label) fewest = std::min(fewest, calls[i].collectives);
    return fewest == UINT64_MAX ? 0 : fewest;
  }
};

/// The operations that the ranks of a communicator family wait for. A rank sends its own after a tenth of a deadline,
/// over a separate communicator. The others read these messages after their deadline. Before that, it costs no calls
/// and no thread.
class wait_reports {
 public:
  /// Collective over `all`.
  wait_reports(MPI_Comm all, int rank, int size) : rank_(rank), received_(static_cast<std::size_t>(size)) {
    check(MPI_Comm_dup(all, &comm_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    in_world_ = ranks_in(all, size, MPI_COMM_WORLD);
  }
  wait_reports(const wait_reports&) = delete;
  wait_reports& operator=(const wait_reports&) = delete;
  ~wait_reports() {
    int over = 0;
    if (MPI_Finalized(&over) != MPI_SUCCESS || over) return;
    collect();
    for (message& m : sent_)  // unfinished sends must keep their memory, so it leaks
      if (!finish(m)) static_cast<void>(new std::shared_ptr<const wait_report>(std::move(m.content)));
    MPI_Comm_free(&comm_);
  }

  /// Sends all other ranks the text of the operation that this rank waits for, and the counts of its calls.
  void announce(const std::string& waits_for, const std::vector<const call_count*>& calls) {
    collect();  // messages of finished waits
    std::erase_if(sent_, [](message& m) { return finish(m); });
    const auto content = std::make_shared<wait_report>();
    std::copy_n(waits_for.data(), std::min(waits_for.size(), content->waits_for.size() - 1), content->waits_for.data());
    content->communicators = std::min(calls.size(), wait_report::most);
    for (std::size_t i = 0; i < content->communicators; ++i) content->calls[i] = *calls[i];
    for (int k = 0; k < static_cast<int>(received_.size()); ++k) {
      if (k == rank_) continue;
      message& m = sent_.emplace_back(message{content, MPI_REQUEST_NULL});
      check(MPI_Isend(content.get(), sizeof *content, MPI_BYTE, k, 0, comm_, &m.request), "MPI_Isend");
    }
  }

  /// Returns the text of the ranks that an operation on a part of the family misses past its deadline. `peer` is that
  /// of a message, -1 for a collective. `own` counts the calls on `part`, for a collective without itself.
  std::string missing(MPI_Comm part, int rank, int size, int peer, const call_count& own) {
    for (int i = 0; i < 20; ++i) {  // messages arrive only inside MPI calls
      collect();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const std::vector<int> group = ranks_in(part, size, comm_);
    std::vector<std::size_t> silent, others;
    std::string behind;
    int named = 0;
    for (int k = 0; k < size; ++k) {
      if (k == rank || (peer >= 0 && k != peer)) continue;
      const auto r = static_cast<std::size_t>(group[static_cast<std::size_t>(k)]);
      if (is_silent(r)) {
        silent.push_back(name_of(r));
      } else if (peer >= 0 || received_[r].called(own) <= own.collectives) {
        if (++named <= 4)
          append(behind, {"; rank ", name_of(r), " has not called it, and waits for ", received_[r].waits_for.data()});
      }
    }
    for (std::size_t r = 0; r < received_.size(); ++r)
      if (is_silent(r) && std::find(silent.begin(), silent.end(), name_of(r)) == silent.end())
        others.push_back(name_of(r));
    if (named > 4) append(behind, {"; and so do ", named - 4, " more"});
    if (!silent.empty()) return silent_text(silent) + behind;
    if (named == 0 && others.empty()) return "all ranks have called it, so that a link between them is lost";
    return (others.empty() ? "no rank is silent" : "of the other ranks, " + silent_text(others)) + behind;
  }

 private:
  struct message {
    std::shared_ptr<const wait_report> content;
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
  bool is_silent(std::size_t r) const { return static_cast<int>(r) != rank_ && received_[r].waits_for[0] == '\0'; }
  /// Returns the rank of the process in MPI_COMM_WORLD, or `r` if it is not in it.
  std::size_t name_of(std::size_t r) const {
    return in_world_[r] == MPI_UNDEFINED ? r : static_cast<std::size_t>(in_world_[r]);
  }
  /// Reads the messages that have arrived.
  void collect() {
    for (int there = 1; there != 0;) {
      MPI_Status status;
      if (MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &there, &status) != MPI_SUCCESS || there == 0) return;
      wait_report content;
      if (MPI_Recv(&content, sizeof content, MPI_BYTE, status.MPI_SOURCE, 0, comm_, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return;
      received_[static_cast<std::size_t>(status.MPI_SOURCE)] = content;
    }
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_;
  std::vector<int> in_world_;
  std::vector<wait_report> received_;
  std::vector<message> sent_;
};

class watchdog;
class progress_thread;

/// A communicator and all that are split from it. They share their reports of waits.
struct family {
  family(MPI_Comm all, int rank, int size) : reports(all, rank, size) {}

  wait_reports reports;
  std::vector<const call_count*> calls;  ///< of the communicators that exist
};

/// The state that the copies of a communicator share.
struct state {
  MPI_Comm comm = MPI_COMM_NULL;
  bool owned = false;
  bool marked = false;  ///< a caller's communicator that has the attribute `attached_key`
  int rank = 0, size = 1;
  std::string label;
  double deadline = 600;        ///< seconds; 0: none
  std::size_t limit = INT_MAX;  ///< elements per MPI call
  /// Bytes per message of a large asynchronous collective; 0: as `slow` requires.
  std::size_t piece = 0;
  MPI_Errhandler callers = MPI_ERRHANDLER_NULL;  ///< the caller's error handler, of an attached communicator
  std::string dropped;                           ///< an error that no wait has thrown; the next operation throws it
  std::uint64_t sequence = 0;
  call_count called;            ///< equal on ranks at the same point of the program; messages do not count
  std::uint64_t exchanges = 0;  ///< number of started collectives as messages
  int most_tag = 0;             ///< the library's largest tag
  std::vector<char> slow;       ///< for each rank, whether its link is slow
  std::shared_ptr<operations> ops;
  std::shared_ptr<flight_recorder> flight;
  std::shared_ptr<family> relatives;
  std::shared_ptr<watchdog> dog;
  std::shared_ptr<progress_thread> progress;

  state() = default;
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  /// Marks a caller's communicator as attached. Throws `error` if it is attached already: two handles would share tags,
  /// and the second would save the first one's error handler as the caller's.
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
    if (relatives) std::erase(relatives->calls, &called);
    int over = 0;
    if (MPI_Finalized(&over) != MPI_SUCCESS || over) return;
    if (owned) MPI_Comm_free(&comm);
    if (marked) MPI_Comm_delete_attr(comm, attached_key());
    if (callers == MPI_ERRHANDLER_NULL) return;
    MPI_Comm_set_errhandler(comm, callers);
    MPI_Errhandler_free(&callers);
  }
};

/// An operation in flight: its MPI requests, and the memory that they need until completion.
struct pending {
  std::shared_ptr<state> home;
  std::vector<MPI_Request> requests;
  std::vector<int> expected;  ///< of receives: elements of each request
  MPI_Datatype type = MPI_DATATYPE_NULL;
  std::vector<std::byte> buffer;  ///< result of a reduce_scatter in place
  void* copy_to = nullptr;
  std::function<void(pending&)> then;  ///< called when the requests are complete; it may add requests
  const char* name = "";
  std::uint64_t sequence = 0, ticket = 0, bytes = 0;
  int peer = -1;             ///< of a message
  std::uint64_t before = 0;  ///< for a collective: how many its communicator has called before

  MPI_Request* next() {
    requests.push_back(MPI_REQUEST_NULL);
    return &requests.back();
  }

  /// Returns whether the operation is complete. Calls `then` when its requests are complete. Only one thread at a time
  /// may call it.
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
    expected.clear();  // later calls return at once
    if (copy_to != nullptr)
      std::copy(buffer.begin(), buffer.end(), static_cast<std::byte*>(std::exchange(copy_to, nullptr)));
    return true;
  }

  std::string text() const { return plait::detail::operation_text(name, sequence, home->label); }
  /// Tells all other ranks that this rank waits.
  void announce() const { home->relatives->reports.announce(text(), home->relatives->calls); }
  /// Returns the error text of an operation past its deadline. It names the missing ranks if MPI may be called
  /// (`callable`).
  std::string late(bool callable) const {
    call_count own = home->called;
    own.collectives = before;
    const std::string who =
        callable ? home->relatives->reports.missing(home->comm, home->rank, home->size, peer, own)
                 : cat({plait::detail::someone_is_missing, ", which MPI without MPI_THREAD_MULTIPLE cannot say"});
    return cat({plait::detail::late_text(text(), bytes_text(bytes), home->deadline, who),
                "; last operations: ", home->flight->text(16)});
  }
};

/// The wait for an operation. After a tenth of the deadline the rank notifies the others; after the deadline it ends
/// all ranks.
class waiting {
 public:
  explicit waiting(const pending& p) : pending_(&p), limit_(p.home->deadline) {}
  /// `callable`: whether the calling thread may call MPI.
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

/// Advances large operations while their ranks compute. Libraries move messages only inside MPI calls, and a reduction
/// made of messages adds and sends again after its first exchange. A thread polls all operations in flight. If the
/// library allows only one thread, each wait of the rank advances them instead.
class progress_thread {
 public:
  progress_thread() = default;
  progress_thread(const progress_thread&) = delete;
  progress_thread& operator=(const progress_thread&) = delete;
  ~progress_thread() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void add(operation& o) {
    const std::lock_guard lock(mutex_);
    in_flight_.push_back(&o);
    if (!allowed_) return;
    if (!thread_.joinable()) thread_ = std::thread([this] { move(); });
    changed_.notify_all();
  }
  /// Removes an operation; the thread does not use it after this call.
  void remove(operation& o) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return now_ != &o; });
    std::erase(in_flight_, &o);
  }
  /// Advances all operations in flight except `o`, if there is no thread: another rank may wait for one of them.
  void move_others(operation& o);

 private:
  void move();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<operation*> in_flight_;
  operation* now_ = nullptr;  ///< the operation that the thread is advancing
  bool over_ = false;
  const bool allowed_ = allows_threads();
  std::thread thread_;
};

/// An asynchronous operation: its rank polls it and waits for it, and a progress thread may advance it. Only the rank
/// writes its flight recorder.
class operation {
 public:
  operation(pending&& p, bool moved) : pending_(std::move(p)), moved_(moved) {
    if (moved_) pending_.home->progress->add(*this);
  }
  operation(const operation&) = delete;
  operation& operator=(const operation&) = delete;
  ~operation() {
    if (moved_) pending_.home->progress->remove(*this);
  }

  /// Returns whether it is complete. Throws its error, also one that the progress thread met.
  bool test() {
    if (!advance()) return false;
    if (!std::exchange(noted_, true)) pending_.home->flight->mark(pending_.ticket, flight_recorder::state::completed);
    if (error_) std::rethrow_exception(error_);
    return true;
  }

  /// Returns whether it is complete, and yields the processor if not.
  bool done() {
    if (test()) return true;
    std::this_thread::yield();
    return false;
  }

  /// Polls and yields after each poll, because there may be more ranks than cores.
  void wait() {
    progress_thread& others = *pending_.home->progress;
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

  /// Waits without throwing. While an exception unwinds this rank, other ranks may never join, and this rank will end
  /// all ranks. Then it does not wait, and leaks the memory that the library may still write.
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

  /// Advances it, and returns whether it is complete. Any thread may call it; errors are kept for the rank.
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

inline void progress_thread::move_others(operation& o) {
  if (allowed_ || in_flight_.empty()) return;  // only the rank's thread uses the list
  for (operation* const other : in_flight_)
    if (other != &o) static_cast<void>(other->advance());
}

inline void progress_thread::move() {
  using std::chrono::microseconds;
  // A 10 Gbit/s link moves 500 kB in the longest pause, which is less than sockets buffer.
  constexpr microseconds shortest{50}, longest{400};
  microseconds pause = shortest;
  std::unique_lock lock(mutex_);
  while (!over_) {
    if (in_flight_.empty()) {
      pause = shortest;
      changed_.wait(lock);
      continue;
    }
    pause = std::min(2 * pause, longest);
    for (std::size_t i = 0; i < in_flight_.size();) {  // the list may change meanwhile; none is skipped for long
      now_ = in_flight_[i];
      lock.unlock();
      const bool over = now_->advance();
      lock.lock();
      if (over) {
        std::erase(in_flight_, now_);
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

/// Ends all ranks when a blocking MPI call is past its deadline. It uses a thread, because non-blocking collectives,
/// which the rank could watch itself, take up to eight times as long. Arming costs a lock and a few stores.
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
  const bool callable_ = allows_threads();  ///< whether this thread may call the library during the rank's call
  plait::detail::watch_thread thread_{mutex_, [this](auto&) { return look(), true; }};
};

/// The blocking or the non-blocking form of one MPI call. The non-blocking form has a request as its last argument.
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
