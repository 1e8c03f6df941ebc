#pragma once

// Creation and end of communicators.

#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "groups.hpp"

namespace plait::nccl_stand_in {

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
  auto& met = out->ranks->met[&out->member->storage()];
  if (met == nullptr) met = std::make_shared<meetings>();
  out->met = met;
  const ncclComm_t comm = out.get();
  ++comm->ranks->open[static_cast<std::size_t>(world_rank)];
  registry::get().all.emplace(comm, std::move(out));
  return comm;
}

/// Whether the configuration's numbers of thread blocks are in NCCL's range; keeps them for tests.
inline bool legal_ctas(const ncclConfig_t* config) {
  if (config == nullptr) return true;
  const int least = config->minCTAs, most = config->maxCTAs;
  const auto in_range = [](int n) { return n == NCCL_CONFIG_UNDEF_INT || (n >= 1 && n <= 64); };
  return in_range(least) && in_range(most) && (most == NCCL_CONFIG_UNDEF_INT || least <= most);
}
inline const char* name_in([[maybe_unused]] const ncclConfig_t* config) {
#if NCCL_MINOR >= 27
  if (config != nullptr) return config->commName;
#endif
  return nullptr;
}
inline void keep_config(ncclComm_t comm, const ncclConfig_t* config) {
  if (config == nullptr) return;
  if (config->minCTAs != NCCL_CONFIG_UNDEF_INT) comm->min_ctas = config->minCTAs;
  if (config->maxCTAs != NCCL_CONFIG_UNDEF_INT) comm->max_ctas = config->maxCTAs;
  comm->may_share = config->splitShare == 1;
  comm->name = name_in(config);
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
    all->run->fail(why);
    r.changed.notify_all();
    thread_error() = why;
    return ncclInvalidUsage;
  }
  all->here[place] = true;
  ++all->arrived;
  *comm = add(all, std::make_shared<threads::detail::member>(all->run, all->group, rank), rank, blocking);
  keep_config(*comm, config);
  r.changed.notify_all();
  if (!blocking) return ncclInProgress;
  r.changed.wait(lock, [&] { return all->complete() || all->run->failed(); });
  if (all->complete()) return ncclSuccess;
  (*comm)->ended = true;
  thread_error() = all->run->cause();
  *comm = nullptr;
  return ncclRemoteError;
}

inline ncclResult_t split(ncclComm_t comm, int color, int key, ncclComm_t* child, const ncclConfig_t* config) {
  *child = nullptr;
  if (!legal_ctas(config)) return refuse(ncclInvalidArgument, "minCTAs or maxCTAs is out of its range");
  if (const ncclResult_t ready = usable("ncclCommSplit", comm); ready != ncclSuccess) return ready;
  if (group().depth > 0) return group().failure = refuse(ncclInvalidUsage, "ncclCommSplit inside a group");
#ifdef PLAIT_CUDA_STAND_IN
  if (is_in_flight(comm)) return refuse(ncclInvalidUsage, "ncclCommSplit: the communicator has operations in flight");
#endif
  ncclComm_t made = nullptr;
  try {
    const char* const name = name_in(config);
    auto member = comm->member->split(color, key, name != nullptr ? name : "");
    if (member != nullptr) {
      const std::lock_guard lock(registry::get().mutex);
      made = add(comm->ranks, std::move(member), comm->world_rank, comm->blocking);
      keep_config(made, config);
      if (comm->may_share && made->may_share)
        made->shares_with = comm->shares_with != nullptr ? comm->shares_with : comm;
    }
  } catch (const std::exception& e) {
    return failed("ncclCommSplit", comm, e);
  }
  if (!comm->blocking) return written_late(comm, [made, child] { *child = made; });
  *child = made;
  return ncclSuccess;
}

/// After a rank has ended all its communicators, no other rank may wait for it.
inline void close(ncclComm_t comm) {
  if (comm->name != nullptr) comm->closed_as = comm->name;
  bool last;
  {
    const std::lock_guard lock(registry::get().mutex);
    last = --comm->ranks->open[static_cast<std::size_t>(comm->world_rank)] == 0;
  }
  if (last) comm->ranks->run->leave(comm->world_rank, nullptr, "");
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
  if (ready != ncclSuccess) return ready;
  comm->finalized = true;
#ifdef PLAIT_CUDA_STAND_IN
  // Until all its calls are over, and no graph can launch them again.
  if (!comm->blocking && (is_in_flight(comm) || is_recorded(comm))) return ncclInProgress;
  if (is_recorded(comm))
    ::stand_in::die("ncclCommFinalize: a graph holds calls of the communicator, and is not destroyed");
  while (is_in_flight(comm) && !comm->ranks->run->failed()) {
    run_on(comm);
    std::this_thread::yield();
  }
#endif
  return ready;
}
inline ncclResult_t destroy(ncclComm_t comm) {
#ifdef PLAIT_CUDA_STAND_IN
  if (comm != nullptr && is_recorded(comm))
    ::stand_in::die("ncclCommDestroy: a graph holds calls of the communicator, and is not destroyed");
  if (comm != nullptr && !comm->blocking && is_in_flight(comm))
    ::stand_in::die("ncclCommDestroy: operations are in flight, as ncclCommFinalize would have told");
#endif
  if (comm != nullptr && comm->finalized) comm->finalized = false;
  if (const ncclResult_t ready = usable("ncclCommDestroy", comm); ready != ncclSuccess) return ready;
  comm->ended = true;
  close(comm);
  return ncclSuccess;
}
/// Another thread may be inside a call of the same communicator, which then returns. As NCCL since 2.26, abort waits
/// until the graphs that hold calls of the communicator are destroyed.
inline ncclResult_t abort(ncclComm_t comm) {
  if (comm == nullptr || comm->ended.exchange(true)) {
    return refuse(ncclInvalidUsage, "ncclCommAbort: the communicator is null, or was destroyed or aborted");
  }
#ifdef PLAIT_CUDA_STAND_IN
  if (!::stand_in::device_chosen) ++::stand_in::calls_without_device;  // NCCL selects its GPU, then the thread's again
  std::this_thread::sleep_for(std::chrono::duration<double>(::stand_in::abort_seconds.load()));
  ++::stand_in::aborts_begun;
  while (::stand_in::aborts_begun < ::stand_in::aborts_together) std::this_thread::yield();
#endif
  comm->ranks->run->fail("rank " + std::to_string(comm->world_rank) + " aborted a communicator");
#ifdef PLAIT_CUDA_STAND_IN
  run_on(comm);  // its kernels have ended when it returns
  while (is_recorded(comm)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
#endif
  {
    auto& r = registry::get();
    const std::lock_guard lock(r.mutex);
    std::erase_if(r.windows, [&](const auto& w) { return w.second.comm == comm; });
    write_now(comm);
  }
  registry::get().changed.notify_all();
  close(comm);
  return ncclSuccess;
}

inline ncclResult_t state_of(ncclComm_t comm, ncclResult_t* state) {
  auto& r = registry::get();
  {
    const std::lock_guard lock(r.mutex);
    if (comm == nullptr || r.all.count(comm) == 0 || comm->ended) {
      thread_error() = "ncclCommGetAsyncError: the communicator is null, or was destroyed or aborted";
      return ncclInvalidArgument;
    }
  }
  bool finishing = false;
#ifdef PLAIT_CUDA_STAND_IN
  if (!comm->blocking && comm->being_asked.exchange(true))
    ::stand_in::die("ncclCommGetAsyncError: two threads at a time ask for the state of a communicator");
  struct end_of_question {
    ncclComm_t comm;
    ~end_of_question() { comm->being_asked = false; }
  } const end{comm};
  std::this_thread::yield();  // until another one arrives
  if (comm->finalized) {
    run_on(comm);
    finishing = is_in_flight(comm) || is_recorded(comm);
  }
#endif
  const std::lock_guard lock(r.mutex);
  if (comm->failure != ncclSuccess || comm->ranks->run->failed()) {
    if (comm->error.empty()) comm->error = comm->ranks->run->cause();
    *state = comm->failure != ncclSuccess ? comm->failure : ncclRemoteError;
  } else {
    const bool in_progress = finishing || !comm->ranks->complete() || (comm->busy > 0 && --comm->busy > 0);
    *state = in_progress ? ncclInProgress : ncclSuccess;
    if (!in_progress) write_now(comm);
  }
  return ncclSuccess;
}

}  // namespace plait::nccl_stand_in
