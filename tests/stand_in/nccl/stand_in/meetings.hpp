#pragma once

// Ranks that meet in streams and not on the host (PLAIT_STAND_IN_NCCL=late). A call queues this rank's part of an
// operation and returns before other ranks have made the call, as in NCCL. The operation runs when the streams of all
// its ranks have reached it: when a program asks for its result or, with PLAIT_STAND_IN_STREAMS=random, at random
// between operations of other communicators.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "comm.hpp"
#include "plait/comm/threads/operation.hpp"

namespace plait::nccl_stand_in {

/// The arguments of an operation's ranks, and the meeting of the streams that executes it.
struct rendezvous {
  threads::detail::operation op;
#ifdef PLAIT_CUDA_STAND_IN
  std::shared_ptr<::stand_in::meeting> in_streams = std::make_shared<::stand_in::meeting>();
#endif
};

/// The operations of one communicator that not all ranks have reached.
struct meetings {
  using of_pair = std::map<std::pair<int, int>, std::deque<std::shared_ptr<rendezvous>>>;  ///< by source and target
  std::mutex mutex;
  std::map<std::uint64_t, std::shared_ptr<rendezvous>> collectives;  ///< by place in the sequence
  of_pair messages[2];                                               ///< sends without receives, receives without sends
};

#ifdef PLAIT_CUDA_STAND_IN

/// Whether the ranks meet in streams. False while the clock is on, which adds up times as calls are made.
inline bool meets_in_streams() {
  static const bool late = [] {
    const char* const text = std::getenv("PLAIT_STAND_IN_NCCL");
    const std::string_view how = text != nullptr ? text : "";
    if (!how.empty() && how != "late" && how != "meets")
      ::stand_in::die("PLAIT_STAND_IN_NCCL is '" + std::string(how) + "'; legal are meets and late");
    return how == "late";
  }();
  return late && !::stand_in::runtime::instance().clock.on();
}

inline std::shared_ptr<rendezvous> make_rendezvous(ncclComm_t comm, const threads::detail::signature& what,
                                                   std::size_t parts) {
  auto r = std::make_shared<rendezvous>();
  r->op.parts.resize(parts);
  r->op.begin(what, 0, &comm->member->storage());
  ::stand_in::meeting& m = *r->in_streams;
  m.missing = parts;
  m.given_up = [run = comm->ranks->run] { return run->failed(); };
  m.refuse = [run = comm->ranks->run](const std::string& why) { run->fail(why); };
  m.run = [op = &r->op] {
    const threads::detail::work w(*op);
    for (std::size_t u = 0; u < w.units(); ++u) w.run(u);
  };
  return r;
}

/// This rank's part of its communicator's next collective. Throws if another rank's call differs.
template <class Fill>
std::shared_ptr<rendezvous> meet(ncclComm_t comm, const threads::detail::signature& what, const Fill& fill) {
  const std::lock_guard lock(comm->met->mutex);
  const std::uint64_t place = comm->collectives++;
  auto& here = comm->met->collectives[place];
  if (here == nullptr) here = make_rendezvous(comm, what, static_cast<std::size_t>(comm->member->size()));
  const std::shared_ptr<rendezvous> r = here;
  if (!(r->op.what == what)) {
    fail({"mismatched collective #", place, ": rank ", comm->world_rank, " calls ", text(what),
          ", but another rank called ", text(r->op.what)});
  }
  fill(r->op.parts[static_cast<std::size_t>(comm->member->rank())]);
  if (++r->op.arrived == comm->member->size()) comm->met->collectives.erase(place);
  return r;
}

/// One side of the next message between two ranks (0 sends, 1 receives). Throws if the other side differs.
template <class Fill>
std::shared_ptr<rendezvous> meet(ncclComm_t comm, int side, int peer, const threads::detail::signature& what,
                                 const Fill& fill) {
  const std::lock_guard lock(comm->met->mutex);
  const int rank = comm->member->rank();
  const std::pair<int, int> way = side == 0 ? std::pair(rank, peer) : std::pair(peer, rank);
  auto& waiting = comm->met->messages[1 - side][way];
  std::shared_ptr<rendezvous> r;
  if (waiting.empty()) {
    r = make_rendezvous(comm, what, 2);
    comm->met->messages[side][way].push_back(r);
  } else {
    r = std::move(waiting.front());
    waiting.pop_front();
    if (!(r->op.what == what)) {
      fail({"mismatched message: rank ", comm->world_rank, side == 0 ? " sends " : " receives ", text(what),
            ", but the other side is ", text(r->op.what)});
    }
  }
  fill(r->op.parts[static_cast<std::size_t>(side)]);
  return r;
}

#endif

}  // namespace plait::nccl_stand_in
