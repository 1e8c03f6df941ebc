// The inner part of comm/mpi.hpp: operations in flight, the watchdog of blocking calls, reductions that MPI lacks, and
// counts beyond an int. Of the headers of the communicator, it is the one that includes <mpi.h>.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/recorder.hpp"
#include "plait/comm/reduce.hpp"
#include "plait/core/dtype.hpp"
#include "plait/core/error.hpp"

namespace plait::mpi::detail {

inline void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail({call, " failed: ", text});
}

inline int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// Says why and ends all processes. The pause lets the launcher forward the text before it kills everybody.
[[noreturn]] inline void end_all(const std::string& why) noexcept {
  std::fprintf(stderr, "rank %d: %s\n", world_rank(), why.c_str());
  std::fflush(stderr);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::terminate();
}

inline MPI_Datatype type_of(dtype type) {
  switch (type) {
    case dtype::f32:
      return MPI_FLOAT;
    case dtype::f64:
      return MPI_DOUBLE;
    case dtype::bf16:
      return MPI_UINT16_T;
    case dtype::i32:
      return MPI_INT32_T;
    case dtype::i64:
      return MPI_INT64_T;
    case dtype::u8:
      return MPI_UINT8_T;
  }
  return MPI_DATATYPE_NULL;
}

// inout = in op inout. The operations of the MPI library know no bf16, and leave open what max does with a NaN (Open
// MPI's drop it).
template <reduce_op Op>
void combine(void* in, void* inout, int* length, MPI_Datatype* type) {
  const auto with = [&]<class T>() {
    const auto n = static_cast<std::size_t>(*length);
    const void* const sources[] = {in, inout};
    plait::detail::reduce_range<Op, T>(
        2, [&](int k) { return static_cast<const std::byte*>(sources[k]); }, 0, n,
        [&](std::size_t at, const T* block, std::size_t count) {
          std::copy_n(block, count, static_cast<T*>(inout) + at);
        });
  };
  if (*type == MPI_FLOAT) return with.template operator()<float>();
  if (*type == MPI_DOUBLE) return with.template operator()<double>();
  if (*type == MPI_INT32_T) return with.template operator()<std::int32_t>();
  if (*type == MPI_INT64_T) return with.template operator()<std::int64_t>();
  return with.template operator()<bf16>();
}

/// The reductions, made once per process family of communicators and freed with the last of them.
struct operations {
  MPI_Op sum_bf16 = MPI_OP_NULL, max = MPI_OP_NULL, min = MPI_OP_NULL;

  operations() {
    check(MPI_Op_create(&combine<reduce_op::sum>, 1, &sum_bf16), "MPI_Op_create");
    check(MPI_Op_create(&combine<reduce_op::max>, 1, &max), "MPI_Op_create");
    check(MPI_Op_create(&combine<reduce_op::min>, 1, &min), "MPI_Op_create");
  }
  operations(const operations&) = delete;
  operations& operator=(const operations&) = delete;
  ~operations() {
    int over = 0;
    if (MPI_Finalized(&over) != MPI_SUCCESS || over) return;
    for (MPI_Op* op : {&sum_bf16, &max, &min}) MPI_Op_free(op);
  }

  MPI_Op of(reduce_op op, dtype type) const {
    const bool real = type == dtype::f32 || type == dtype::f64 || type == dtype::bf16;
    if (op == reduce_op::sum) return type == dtype::bf16 ? sum_bf16 : MPI_SUM;
    if (op == reduce_op::max) return real ? max : MPI_MAX;
    return real ? min : MPI_MIN;
  }
};

/// A type of `count` elements where a count may not fit an int.
class big_type {
 public:
  big_type(std::size_t count, dtype type, std::size_t limit) {
    const MPI_Datatype element = type_of(type);
    const std::size_t whole = count / limit, rest = count % limit;
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(limit), element, &block), "MPI_Type_contiguous");
    const int lengths[] = {static_cast<int>(whole), static_cast<int>(rest)};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(whole * limit * size_of(type))};
    const MPI_Datatype types[] = {block, element};
    check(MPI_Type_create_struct(2, lengths, places, types, &type_), "MPI_Type_create_struct");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
    MPI_Type_free(&block);
  }
  big_type(const big_type&) = delete;
  big_type& operator=(const big_type&) = delete;
  ~big_type() { MPI_Type_free(&type_); }  // communication that still uses it completes normally
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

/// Returns the largest tag that the library takes, at least 32767.
inline int most_tag() {
  void* value = nullptr;
  int known = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &known), "MPI_Comm_get_attr");
  return known ? *static_cast<int*>(value) : 32767;
}

class watchdog;

/// Has the MPI library move what is under way, while the rank computes: libraries do it when they are called. A thread
/// that calls now and then, while any large operation is in flight; none where the library allows one thread alone.
class mover {
 public:
  mover() {
    int provided = 0;
    check(MPI_Query_thread(&provided), "MPI_Query_thread");
    allowed_ = provided == MPI_THREAD_MULTIPLE;
  }
  mover(const mover&) = delete;
  mover& operator=(const mover&) = delete;
  ~mover() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  void begin() {
    if (!allowed_) return;
    const std::lock_guard lock(mutex_);
    if (in_flight_++ > 0) return;
    if (!thread_.joinable()) thread_ = std::thread([this] { move(); });
    changed_.notify_one();
  }
  void end() {
    if (!allowed_) return;
    const std::lock_guard lock(mutex_);
    --in_flight_;
  }

 private:
  void move() {
    std::unique_lock lock(mutex_);
    while (!over_) {
      if (in_flight_ == 0) {
        changed_.wait(lock);
        continue;
      }
      lock.unlock();
      int found = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, 0, MPI_COMM_SELF, &found, MPI_STATUS_IGNORE);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int in_flight_ = 0;
  bool over_ = false, allowed_ = false;
  std::thread thread_;
};

/// The state that the copies of a communicator share.
struct state {
  MPI_Comm comm = MPI_COMM_NULL;
  bool owned = false;
  int rank = 0, size = 1;
  std::string label;
  double deadline = 600;        ///< seconds; 0: none
  std::size_t limit = INT_MAX;  ///< elements per MPI call
  std::uint64_t sequence = 0;
  std::uint64_t exchanges = 0;  ///< reductions by messages that were started
  int most_tag = 0;             ///< that the library takes
  std::shared_ptr<operations> ops;
  std::shared_ptr<flight_recorder> flight;
  std::shared_ptr<watchdog> dog;
  std::shared_ptr<mover> moves;

  state() = default;
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() {
    int over = 0;
    if (owned && MPI_Finalized(&over) == MPI_SUCCESS && !over) MPI_Comm_free(&comm);
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
  std::shared_ptr<void> moved;         ///< has the library move it, until it is complete
  const char* name = "";
  std::uint64_t sequence = 0, ticket = 0, bytes = 0;

  MPI_Request* next() {
    requests.push_back(MPI_REQUEST_NULL);
    return &requests.back();
  }

  bool test() {
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
    complete();
    return true;
  }

  /// Polls politely, since ranks may outnumber cores: every look is followed by a yield.
  void wait() {
    for (int i = 0; i < 1000; ++i) {
      if (test()) return;
      std::this_thread::yield();
    }
    home->flight->mark(ticket, flight_recorder::state::waiting);
    const double until = comm_clock() + home->deadline;
    while (!test()) {
      std::this_thread::yield();
      if (home->deadline <= 0 || comm_clock() < until) continue;
      end_all(late());
    }
  }

  /// The text of an operation that is past its deadline.
  std::string late() const {
    return cat({name, " #", sequence, " on '", home->label, "' (", bytes_text(bytes),
                ") did not finish within its deadline of ", home->deadline,
                " s: a rank of the group is lost or has not called it; last operations: ", home->flight->text(16)});
  }

  void complete() {
    requests.clear();
    expected.clear();  // who asks again is told at once
    moved.reset();
    if (copy_to != nullptr)
      std::copy(buffer.begin(), buffer.end(), static_cast<std::byte*>(std::exchange(copy_to, nullptr)));
    home->flight->mark(ticket, flight_recorder::state::completed);
  }
};

/// Ends all ranks when a blocking MPI call is past its deadline. A thread of its own, because the blocking collectives
/// of MPI libraries are up to eight times as fast as their non-blocking ones, which a rank could watch by itself; it
/// looks at the clock ten times per deadline, at least once a second. Arming is a lock and two stores.
class watchdog {
 public:
  watchdog() = default;
  watchdog(const watchdog&) = delete;
  watchdog& operator=(const watchdog&) = delete;
  ~watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  void arm(const pending& p) {
    const double now = comm_clock();
    const std::lock_guard lock(mutex_);
    watched_ = &p;
    until_ = now + p.home->deadline;
    if (p.home->deadline / 10 < tick_) {
      tick_ = p.home->deadline / 10;
      changed_.notify_one();
    }
    if (!thread_.joinable()) thread_ = std::thread([this] { look(); });
  }
  void disarm() {
    const std::lock_guard lock(mutex_);
    watched_ = nullptr;
  }

 private:
  void look() {
    std::unique_lock lock(mutex_);
    while (!over_) {
      changed_.wait_for(lock, std::chrono::duration<double>(tick_));
      if (watched_ != nullptr && comm_clock() > until_) end_all(watched_->late());
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const pending* watched_ = nullptr;
  double until_ = 0, tick_ = 1;
  bool over_ = false;
  std::thread thread_;
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
