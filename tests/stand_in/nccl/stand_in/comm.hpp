#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/comm/threads.ipp"  // what ranks share
#include "plait/comm/threads/cuda.hpp"
#include "types.hpp"

namespace plait::nccl_stand_in {

using plait::collective;

struct meetings;

/// The ranks with one id, and the communicators that were split from theirs.
struct clique {
  explicit clique(int count)
      : run(std::make_shared<threads::detail::run_state>(count)),
        group(std::make_shared<threads::detail::group>()),
        here(static_cast<std::size_t>(count)),
        open(static_cast<std::size_t>(count)) {
    group->label = "nccl";
    for (int r = 0; r < count; ++r) group->members.push_back(r);
  }
  std::shared_ptr<threads::detail::run_state> run;
  std::shared_ptr<threads::detail::group> group;
  std::vector<bool> here;  // guarded by the registry, as are the members below
  std::vector<int> open;   ///< number of communicators of each rank that have not ended
  int arrived = 0;
  std::set<int> devices;                                                   ///< of all ranks
  std::map<const threads::detail::group*, std::shared_ptr<meetings>> met;  ///< of every communicator
  bool complete() const { return arrived == static_cast<int>(here.size()); }
};

}  // namespace plait::nccl_stand_in

struct ncclComm {
  std::shared_ptr<plait::nccl_stand_in::clique> ranks;
  std::shared_ptr<plait::threads::detail::member> member;
  std::shared_ptr<plait::threads::cuda_engine> engine;
  int world_rank = 0, device = 0;
  bool blocking = true;
  int min_ctas = 0, max_ctas = 0;   ///< of its configuration; 0: not given
  bool may_share = false;           ///< created with splitShare
  ncclComm* shares_with = nullptr;  ///< the communicator whose resources it uses; null: its own
  std::atomic<bool> ended{false}, finalized{false};
  std::atomic<bool> being_asked{false};  ///< whether a thread queries its state
  std::atomic<int> busy{0};              ///< polls until a communicator that does not block completes its last call
  int calls = 0;                         ///< of a communicator that does not block
  std::function<void()> write_late;  ///< the outputs of its last call, written on completion; guarded by the registry
  /// The meetings in which its ranks meet in streams, and the collectives and messages that this rank has posted.
  std::shared_ptr<plait::nccl_stand_in::meetings> met;
  std::uint64_t collectives = 0;
  /// A call whose operations in its stream may not have finished, and the memory that it uses.
  struct flight {
    std::function<bool()> pending;  ///< false when it is over
    std::function<void()> run_on;   ///< runs its stream as far as possible
    const void *in, *out;
  };
  std::vector<flight> in_flight;                            ///< guarded by the CUDA runtime's lock
  std::shared_ptr<int> recorded = std::make_shared<int>();  ///< shared with the nodes of graphs that hold its calls
  const char* name = nullptr;                               ///< of the configuration; NCCL does not copy it either
  std::string closed_as;                                    ///< its name when it ended
  std::string error;                                        ///< guarded by the registry
  ncclResult_t failure = ncclSuccess;
};

namespace plait::nccl_stand_in {

/// Memory that is registered with a communicator.
struct window {
  ncclComm_t comm;
  const char* begin;
  std::size_t bytes;
};

/// All communicators of the process, so one is recognised after its end.
struct registry {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<clique>> met;
  std::map<const ncclComm*, std::unique_ptr<ncclComm>> all;
  unsigned long long ids = 0;
  std::map<ncclWindow_t, window> windows;
  bool has_windows = true;  ///< set by tests: false if the hardware lacks them
  int registrations = 0;
  /// Collectives of communicators with a window: those with all of their memory in it, and the others.
  int calls_in_windows = 0, calls_beside_windows = 0;

  static registry& get() {
    static registry one;
    return one;
  }
};

inline std::string& thread_error() {
  thread_local std::string text;
  return text;
}
inline const char* last_error(ncclComm_t comm) {
  auto& r = registry::get();
  const std::lock_guard lock(r.mutex);
  if (comm != nullptr && r.all.count(comm) != 0 && !comm->error.empty()) thread_error() = comm->error;
  return thread_error().c_str();
}
inline ncclResult_t refuse(ncclResult_t what, const std::string& why, ncclComm_t comm = nullptr) {
  thread_error() = why;
  if (comm != nullptr) {
    const std::lock_guard lock(registry::get().mutex);
    if (comm->failure == ncclSuccess) comm->error = why, comm->failure = what;
  }
  return what;
}

inline const char* name_of(ncclResult_t result) {
  const char* const names[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                               "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
  return result >= 0 && result <= 7 ? names[result] : "unknown result code";
}

inline dtype type_of(ncclDataType_t type) {
  switch (type) {
    case ncclUint8:
      return dtype::u8;
    case ncclInt32:
      return dtype::i32;
    case ncclInt64:
      return dtype::i64;
    case ncclFloat32:
      return dtype::f32;
    case ncclFloat64:
      return dtype::f64;
    case ncclBfloat16:
      return dtype::bf16;
  }
  fail("the stand-in does not know data type " + std::to_string(type));
}
inline reduce_op op_of(ncclRedOp_t op) {
  return op == ncclSum ? reduce_op::sum : op == ncclMax ? reduce_op::max : reduce_op::min;
}

/// Whether a call may be made on `comm` now.
inline ncclResult_t usable(const char* call, ncclComm_t comm) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, std::string(call) + ": the communicator is null");
  {
    auto& r = registry::get();
    const std::lock_guard lock(r.mutex);
    if (r.all.count(comm) == 0) {
      thread_error() = std::string(call) + ": this is no communicator";
      return ncclInvalidArgument;
    }
    if (!comm->ended && !comm->finalized && !comm->ranks->complete()) {
      thread_error() = std::string(call) + ": the communicator is still being made";
      return ncclInvalidUsage;
    }
  }
  if (comm->ended) return refuse(ncclInvalidUsage, std::string(call) + ": the communicator was destroyed or aborted");
  if (comm->finalized) return refuse(ncclInvalidUsage, std::string(call) + ": the communicator was finalized");
  if (comm->busy > 0) {
    return refuse(ncclInvalidUsage,
                  std::string(call) + ": the last call is in progress; ask ncclCommGetAsyncError first");
  }
  return ncclSuccess;
}

/// Ranks of one process read each other's buffers, so all their GPUs must have access to the memory.
inline void check_peers(const char* call, ncclComm_t comm, const void* in, const void* out) {
#ifdef PLAIT_CUDA_STAND_IN
  std::set<int> devices;
  {
    const std::lock_guard lock(registry::get().mutex);
    devices = comm->ranks->devices;
  }
  for (const void* const p : {in, out}) {
    for (const int device : devices) {
      if (p != nullptr && !::stand_in::usable_by(p, device))
        fail({call, ": device ", device, " has no access to a buffer of device ", comm->device});
    }
  }
#else
  static_cast<void>(call), static_cast<void>(comm), static_cast<void>(in), static_cast<void>(out);
#endif
}

inline ncclResult_t ask(ncclComm_t comm, int* answer, int value) {
  const ncclResult_t ready = usable("asking a communicator", comm);
  if (ready == ncclSuccess) *answer = value;
  return ready;
}

/// A communicator that does not block returns success for a split or a window before it writes its outputs. It writes
/// them when its state is queried and it has completed the call, or when it is aborted: NCCL's thread may do so then.
inline ncclResult_t written_late(ncclComm_t comm, std::function<void()> write) {
  const std::lock_guard lock(registry::get().mutex);
  comm->busy = 2;
  comm->write_late = std::move(write);
  return ncclSuccess;
}
/// Requires the registry's mutex.
inline void write_now(ncclComm_t comm) {
  if (const auto write = std::exchange(comm->write_late, nullptr)) write();
}
/// Does the work of an operation when the last rank joins it.
inline plait::threads::detail::operation* run_when_last(ncclComm_t comm, plait::threads::detail::member::joined here) {
  if (here.last) comm->member->execute(*here.op);
  return here.op;
}

}  // namespace plait::nccl_stand_in
