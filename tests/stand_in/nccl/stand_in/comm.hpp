#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/threads/cuda.hpp"
#include "types.hpp"

namespace plait::nccl_stand_in {

using threads::detail::action;

/// The ranks that met through one id, and the communicators that they split off.
struct clique {
  explicit clique(int count)
      : world(std::make_shared<threads::detail::world>(count)),
        group(std::make_shared<threads::detail::group>()),
        here(static_cast<std::size_t>(count)),
        open(static_cast<std::size_t>(count)) {
    group->label = "nccl";
    for (int r = 0; r < count; ++r) group->members.push_back(r);
  }
  std::shared_ptr<threads::detail::world> world;
  std::shared_ptr<threads::detail::group> group;
  std::vector<bool> here;  // guarded by the registry, as all below
  std::vector<int> open;   ///< communicators that each rank has not ended
  int arrived = 0;
  std::set<int> devices;  ///< of all ranks
  bool complete() const { return arrived == static_cast<int>(here.size()); }
};

}  // namespace plait::nccl_stand_in

struct ncclComm {
  std::shared_ptr<plait::nccl_stand_in::clique> ranks;
  std::shared_ptr<plait::threads::detail::member> member;
  std::shared_ptr<plait::threads::cuda_engine> engine;
  int world_rank = 0, device = 0;
  bool blocking = true;
  int min_ctas = 0, max_ctas = 0;   ///< that it was made with; 0: not said
  bool may_share = false;           ///< made with splitShare
  ncclComm* shares_with = nullptr;  ///< the communicator whose resources it uses; null: its own
  std::atomic<bool> ended{false}, finalized{false};
  std::atomic<int> busy{0};  ///< polls until a communicator that does not block has done what was asked of it
  int calls = 0;             ///< of a communicator that does not block
  std::string error;         ///< guarded by the registry
  ncclResult_t failure = ncclSuccess;
};

namespace plait::nccl_stand_in {

/// Memory that is registered with a communicator.
struct window {
  ncclComm_t comm;
  const char* begin;
  std::size_t bytes;
};

/// All communicators that ever were: that is how one is recognised after its end.
struct registry {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<clique>> met;
  std::map<const ncclComm*, std::unique_ptr<ncclComm>> all;
  unsigned long long ids = 0;
  std::map<ncclWindow_t, window> windows;
  bool has_windows = true;  ///< a test's: false where the hardware lacks them
  int registrations = 0;
  /// Collectives of communicators with a window: with all of their memory in it, and others.
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
    default:
      fail("the stand-in does not know data type " + std::to_string(type));
  }
}
inline reduce_op op_of(ncclRedOp_t op) {
  if (op == ncclSum) return reduce_op::sum;
  if (op == ncclMax) return reduce_op::max;
  if (op == ncclMin) return reduce_op::min;
  fail("the stand-in does not know reduction " + std::to_string(op));
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

/// Ranks of one process read each other's buffers, so the memory must be open to all their GPUs.
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

// ---- groups ------------------------------------------------------------------------------------------------------

/// An operation that was posted and must be waited for.
struct issued {
  ncclComm_t comm;
  cudaStream_t stream;
  int side;
  threads::detail::operation* op;
};
/// A call that is made on a stream: the caller's, or the one that a graph which recorded it is launched in.
using poster = std::function<issued(cudaStream_t)>;
struct call_of {
  ncclComm_t comm;
  cudaStream_t stream;
  poster post;
};
struct open_group {
  int depth = 0;
  std::vector<call_of> calls;
  ncclResult_t failure = ncclSuccess;
};
inline open_group& group() {
  thread_local open_group g;
  return g;
}

inline void finish(const issued& i) {
  i.comm->engine->set_streams(i.stream, i.stream);
  i.comm->member->finish(i.op, i.side);
}

/// A call of a communicator that does not block is now and then reported to be in progress.
inline ncclResult_t outcome(ncclComm_t comm) {
  if (comm->blocking || ++comm->calls % 3 != 0) return ncclSuccess;
  comm->busy = 2;
  return ncclInProgress;
}

inline ncclResult_t failed(const char* call, ncclComm_t comm, const std::exception& e) {
  const std::string text = std::string(call) + ": " + e.what();
  comm->ranks->world->fail("rank " + std::to_string(comm->world_rank) + ": " + text);
  const bool mine = dynamic_cast<const threads::stopped*>(&e) == nullptr || text.find("mismatched") != text.npos;
  return refuse(mine ? ncclInvalidUsage : ncclRemoteError, text, comm);
}

/// Posts all, then waits for all. `stream`: that of a graph's launch, null for the calls' own.
inline ncclResult_t make(const char* name, const std::vector<call_of>& calls, cudaStream_t stream) {
  std::vector<issued> open;
  ncclComm_t now = nullptr;
#ifdef PLAIT_CUDA_STAND_IN
  struct library {
    library() { ::stand_in::is_library = true; }
    ~library() { ::stand_in::is_library = false; }
  } const inside;
#endif
  try {
    for (const call_of& c : calls) open.push_back((now = c.comm, c.post(stream != nullptr ? stream : c.stream)));
    for (const issued& i : open) now = i.comm, finish(i);
  } catch (const std::exception& e) {
    return failed(name, now, e);
  }
  return ncclSuccess;
}

/// Makes the calls now, or, where their streams are being recorded, whenever the graph is launched.
inline ncclResult_t make_or_record(const char* name, std::vector<call_of> calls) {
  if (calls.empty()) return ncclSuccess;
  for (const call_of& c : calls) {
    cudaStreamCaptureStatus first{}, other{};
    if (cudaStreamIsCapturing(calls.front().stream, &first) != cudaSuccess ||
        cudaStreamIsCapturing(c.stream, &other) != cudaSuccess || first != other) {
      return refuse(ncclInvalidUsage, std::string(name) + ": streams of one group, and not all are recorded", c.comm);
    }
  }
  const ncclComm_t comm = calls.front().comm;
  const cudaStream_t stream = calls.front().stream;
  bool recorded = false;
#ifdef PLAIT_CUDA_STAND_IN
  const auto again = [name, calls](cudaStream_t s) { return make(name, calls, s) == ncclSuccess; };
  const cudaError_t status = ::stand_in::record_if_capturing(stream, again, &recorded);
#else
  cudaStreamCaptureStatus now{};
  const cudaError_t status = cudaStreamIsCapturing(stream, &now);
  if (now != cudaStreamCaptureStatusNone) {
    return refuse(ncclInvalidUsage, std::string(name) + ": these ranks meet on the host, which no graph can", comm);
  }
#endif
  if (status != cudaSuccess) {
    return refuse(ncclUnhandledCudaError, std::string(name) + ": the stream cannot be recorded", comm);
  }
  return recorded ? ncclSuccess : make(name, calls, nullptr);
}

inline ncclResult_t enqueue(const char* call, ncclComm_t comm, cudaStream_t stream, poster post) {
  const ncclResult_t ready = usable(call, comm);
  if (ready != ncclSuccess) return group().depth > 0 ? group().failure = ready : ready;
  if (group().depth > 0) {
    group().calls.push_back({comm, stream, std::move(post)});
    return ncclSuccess;
  }
  const ncclResult_t made = make_or_record(call, {{comm, stream, std::move(post)}});
  return made == ncclSuccess ? outcome(comm) : made;
}

inline ncclResult_t group_start() {
  ++group().depth;
  return ncclSuccess;
}
inline ncclResult_t group_end() {
  open_group& g = group();
  if (g.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--g.depth > 0) return ncclSuccess;
  const auto calls = std::exchange(g.calls, {});
  if (const ncclResult_t failure = std::exchange(g.failure, ncclSuccess); failure != ncclSuccess) return failure;
  if (const ncclResult_t made = make_or_record("ncclGroupEnd", calls); made != ncclSuccess) return made;
  ncclResult_t result = ncclSuccess;
  std::set<ncclComm_t> comms;
  for (const call_of& c : calls) comms.insert(c.comm);
  for (const ncclComm_t comm : comms) {
    if (outcome(comm) == ncclInProgress) result = ncclInProgress;
  }
  return result;
}

// ---- communicators -----------------------------------------------------------------------------------------------

inline void new_id(ncclUniqueId& id) {
  auto& r = registry::get();
  const std::lock_guard lock(r.mutex);
  std::memset(id.internal, 0, sizeof id.internal);
  const std::string text = "stand-in " + std::to_string(++r.ids);
  std::memcpy(id.internal, text.data(), text.size());
}

inline ncclComm_t add(std::shared_ptr<clique> ranks, std::shared_ptr<threads::detail::member> member, int world_rank,
                      bool blocking) {
  auto out = std::make_unique<ncclComm>();
  out->ranks = std::move(ranks);
  out->member = std::move(member);
  out->engine = std::make_shared<threads::cuda_engine>(nullptr, nullptr);
  out->member->use(out->engine);
  out->world_rank = world_rank;
  out->blocking = blocking;
  out->busy = blocking ? 0 : 2;
  static_cast<void>(cudaGetDevice(&out->device));
  out->ranks->devices.insert(out->device);
  const ncclComm_t comm = out.get();
  ++comm->ranks->open[static_cast<std::size_t>(world_rank)];
  registry::get().all.emplace(comm, std::move(out));
  return comm;
}

/// Whether the configuration's thread blocks are in NCCL's range; they are kept for tests to look at.
inline bool legal_ctas(const ncclConfig_t* config) {
  if (config == nullptr) return true;
  const int least = config->minCTAs, most = config->maxCTAs;
  const auto in_range = [](int n) { return n == NCCL_CONFIG_UNDEF_INT || (n >= 1 && n <= 64); };
  return in_range(least) && in_range(most) && (most == NCCL_CONFIG_UNDEF_INT || least <= most);
}
inline void keep_config(ncclComm_t comm, const ncclConfig_t* config) {
  if (config == nullptr) return;
  if (config->minCTAs != NCCL_CONFIG_UNDEF_INT) comm->min_ctas = config->minCTAs;
  if (config->maxCTAs != NCCL_CONFIG_UNDEF_INT) comm->max_ctas = config->maxCTAs;
  comm->may_share = config->splitShare == 1;
}

inline ncclResult_t init(ncclComm_t* comm, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config) {
  *comm = nullptr;
  const bool blocking = config == nullptr || config->blocking != 0;
  if (!legal_ctas(config)) return refuse(ncclInvalidArgument, "minCTAs or maxCTAs is out of its range");
  if (group().depth > 0) return group().failure = refuse(ncclInvalidUsage, "a communicator is made inside a group");
  if (ranks < 1 || rank < 0 || rank >= ranks)
    return refuse(ncclInvalidArgument, "the rank is not in the range of ranks");
  auto& r = registry::get();
  std::unique_lock lock(r.mutex);
  auto& met = r.met[std::string(id.internal, sizeof id.internal)];
  if (met == nullptr) met = std::make_shared<clique>(ranks);
  const auto all = met;
  const auto place = static_cast<std::size_t>(rank);
  if (all->here.size() != static_cast<std::size_t>(ranks) || all->here[place]) {
    const std::string why =
        "ranks that share an id differ in their number, or two of them are rank " + std::to_string(rank);
    all->world->fail(why);
    r.changed.notify_all();
    thread_error() = why;
    return ncclInvalidUsage;
  }
  all->here[place] = true;
  ++all->arrived;
  *comm = add(all, std::make_shared<threads::detail::member>(all->world, all->group, rank), rank, blocking);
  keep_config(*comm, config);
  r.changed.notify_all();
  if (!blocking) return ncclInProgress;
  r.changed.wait(lock, [&] { return all->complete() || all->world->failed(); });
  if (all->complete()) return ncclSuccess;
  (*comm)->ended = true;
  thread_error() = all->world->cause();
  *comm = nullptr;
  return ncclRemoteError;
}

inline ncclResult_t split(ncclComm_t comm, int color, int key, ncclComm_t* child, const ncclConfig_t* config) {
  *child = nullptr;
  if (!legal_ctas(config)) return refuse(ncclInvalidArgument, "minCTAs or maxCTAs is out of its range");
  if (const ncclResult_t ready = usable("ncclCommSplit", comm); ready != ncclSuccess) return ready;
  if (group().depth > 0) return group().failure = refuse(ncclInvalidUsage, "ncclCommSplit inside a group");
  try {
    auto member = comm->member->split(color, key, config != nullptr && config->commName ? config->commName : "");
    if (member != nullptr) {
      const std::lock_guard lock(registry::get().mutex);
      *child = add(comm->ranks, std::move(member), comm->world_rank, comm->blocking);
      keep_config(*child, config);
      if (comm->may_share && (*child)->may_share)
        (*child)->shares_with = comm->shares_with != nullptr ? comm->shares_with : comm;
    }
  } catch (const std::exception& e) {
    return failed("ncclCommSplit", comm, e);
  }
  if (comm->blocking) return ncclSuccess;
  comm->busy = 2;
  return ncclInProgress;
}

// ---- windows -----------------------------------------------------------------------------------------------------

/// Whether memory lies in a window of `comm`, null for any, with the registry's mutex held.
inline bool lies_in_window(ncclComm_t comm, const void* data, std::size_t bytes) {
  for (const auto& [handle, w] : registry::get().windows) {
    const char* const at = static_cast<const char*>(data);
    if ((comm == nullptr || w.comm == comm) && at >= w.begin && at + bytes <= w.begin + w.bytes) return true;
  }
  return false;
}
inline bool in_window(ncclComm_t comm, const void* data, std::size_t bytes) {
  const std::lock_guard lock(registry::get().mutex);
  return lies_in_window(comm, data, bytes);
}
/// Counts a collective of a communicator that has a window.
inline void note_windows(ncclComm_t comm, std::size_t count, const void* in, const void* out) {
  auto& r = registry::get();
  const std::lock_guard lock(r.mutex);
  bool any = false;
  for (const auto& [handle, w] : r.windows) any = any || w.comm == comm;
  if (!any || count == 0) return;
  const bool inside =
      (in == nullptr || lies_in_window(comm, in, 1)) && (out == nullptr || lies_in_window(comm, out, 1));
  ++(inside ? r.calls_in_windows : r.calls_beside_windows);
}

/// Collective: ranks that register other numbers of bytes, or call something else meanwhile, are ended.
inline ncclResult_t register_window(ncclComm_t comm, void* data, std::size_t bytes, ncclWindow_t* window, int) {
  *window = nullptr;
  if (const ncclResult_t ready = usable("ncclCommWindowRegister", comm); ready != ncclSuccess) return ready;
  try {
    comm->engine->set_streams(nullptr, nullptr);  // the last call's may be gone
    comm->member->finish(comm->member->post({.what = action::barrier, .count = bytes}, 0, [](auto&) {}), -1);
  } catch (const std::exception& e) {
    return failed("ncclCommWindowRegister", comm, e);
  }
  auto& r = registry::get();
  {
    const std::lock_guard lock(r.mutex);
    if (r.has_windows) {
      *window = reinterpret_cast<ncclWindow_t>(static_cast<std::uintptr_t>(++r.registrations));
      r.windows.emplace(*window, nccl_stand_in::window{comm, static_cast<const char*>(data), bytes});
    }
  }
  return outcome(comm);
}
inline ncclResult_t deregister_window(ncclComm_t comm, ncclWindow_t window) {
  if (const ncclResult_t ready = usable("ncclCommWindowDeregister", comm); ready != ncclSuccess) return ready;
  {
    auto& r = registry::get();
    const std::lock_guard lock(r.mutex);
    const auto found = r.windows.find(window);
    if (found == r.windows.end() || found->second.comm != comm) {
      thread_error() = "ncclCommWindowDeregister: this is no window of the communicator";
      return ncclInvalidArgument;
    }
    r.windows.erase(found);
  }
  return outcome(comm);
}

/// Once a rank has ended all its communicators, no other may wait for it.
inline void close(ncclComm_t comm) {
  bool last;
  {
    const std::lock_guard lock(registry::get().mutex);
    last = --comm->ranks->open[static_cast<std::size_t>(comm->world_rank)] == 0;
  }
  if (last) comm->ranks->world->leave(comm->world_rank, nullptr, "");
}

inline ncclResult_t finalize(ncclComm_t comm) {
  const ncclResult_t ready = usable("ncclCommFinalize", comm);
  if (ready == ncclSuccess) {
    const std::lock_guard lock(registry::get().mutex);
    for (const auto& [handle, w] : registry::get().windows) {
      if (w.comm != comm) continue;
      thread_error() = "ncclCommFinalize: the communicator has a window";
      return ncclInvalidUsage;
    }
  }
  if (ready == ncclSuccess) comm->finalized = true;
  return ready;
}
inline ncclResult_t destroy(ncclComm_t comm) {
  if (comm != nullptr && comm->finalized) comm->finalized = false;
  if (const ncclResult_t ready = usable("ncclCommDestroy", comm); ready != ncclSuccess) return ready;
  comm->ended = true;
  close(comm);
  return ncclSuccess;
}
/// May be called while another thread is inside a call of the same communicator, which then returns.
inline ncclResult_t abort(ncclComm_t comm) {
  if (comm == nullptr || comm->ended.exchange(true)) {
    return refuse(ncclInvalidUsage, "ncclCommAbort: the communicator is null, or was destroyed or aborted");
  }
#ifdef PLAIT_CUDA_STAND_IN
  std::this_thread::sleep_for(std::chrono::duration<double>(::stand_in::abort_seconds.load()));
#endif
  comm->ranks->world->fail("rank " + std::to_string(comm->world_rank) + " aborted a communicator");
  registry::get().changed.notify_all();
  close(comm);
  return ncclSuccess;
}

inline ncclResult_t state_of(ncclComm_t comm, ncclResult_t* state) {
  auto& r = registry::get();
  const std::lock_guard lock(r.mutex);
  if (comm == nullptr || r.all.count(comm) == 0 || comm->ended) {
    thread_error() = "ncclCommGetAsyncError: the communicator is null, or was destroyed or aborted";
    return ncclInvalidArgument;
  }
  if (comm->failure != ncclSuccess || comm->ranks->world->failed()) {
    if (comm->error.empty()) comm->error = comm->ranks->world->cause();
    *state = comm->failure != ncclSuccess ? comm->failure : ncclRemoteError;
  } else {
    *state = !comm->ranks->complete() || (comm->busy > 0 && --comm->busy > 0) ? ncclInProgress : ncclSuccess;
  }
  return ncclSuccess;
}

}  // namespace plait::nccl_stand_in
