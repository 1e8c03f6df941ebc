// Makes a rank's first NCCL communicator: from the launcher's environment, in threads of one process, or from a
// caller's communicator. comm/launch/nccl_mpi.hpp makes it from MPI; tensor/nccl_attach.hpp makes a whole mesh on an
// existing `ncclComm_t`.
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/launch/rendezvous.hpp"
#include "plait/comm/nccl.hpp"
#include "plait/comm/nccl/calls.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_memory.hpp"

namespace plait::nccl::detail {

// The memory that `nccl::options::registered_bytes` sets: NCCL allocates it, and the device uses it for the buffers of
// collectives. Each communicator of the rank registers it (comm/nccl/state.hpp). Use `communication_memory` for single
// arrays of the caller. Test: tests/cuda/comm/comm_nccl_memory.cpp.

/// Allocates the memory that `settings` set, none by default, and gives it to the device. A device keeps such memory
/// from an earlier communicator. Throws `plait::error` if NCCL has no windows, or if the device's memory has another
/// size.
inline registered_memory memory_for_collectives([[maybe_unused]] cuda& device, const options& settings) {
  if (settings.registered_bytes == 0) return {};
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  const registered_memory& there = device.served_to_collectives();
  if (there.data != nullptr && there.bytes != settings.registered_bytes)
    fail({"nccl::options::registered_bytes is ", settings.registered_bytes, ", but the device has ", there.bytes,
          " bytes for collectives, of an earlier communicator; use the same number for all of a device's"});
  if (there.data != nullptr) return there;
  void* data = nullptr;
  check(ncclMemAlloc(&data, settings.registered_bytes), "ncclMemAlloc for nccl::options::registered_bytes");
  registered_memory memory{std::shared_ptr<void>(data, [](void* p) { ncclMemFree(p); }), settings.registered_bytes,
                           "nccl::options::registered_bytes"};
  device.serve_collectives(memory);
  return memory;
#else
  fail({"nccl::options::registered_bytes is ", settings.registered_bytes,
        ", which needs NCCL 2.27 or later; this program is compiled with ", NCCL_MAJOR, ".", NCCL_MINOR,
        "; set it to 0"});
#endif
}

}  // namespace plait::nccl::detail

namespace plait::nccl {

inline ncclUniqueId new_id() {
  ncclUniqueId id;
  detail::check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

namespace detail {

inline communicator connect(std::shared_ptr<team> ranks, cuda& device, const ncclUniqueId& id, int rank, int size,
                            const options& settings) {
  device.bind_thread();
  auto home = std::make_shared<session>(std::move(ranks), device.main_stream().handle(), device.side_stream().handle(),
                                        settings);
  home->rank = rank;
  home->registered = memory_for_collectives(device, settings);
  home->release_unused = [&device] { device.release_unused(); };
  home->release_unused();
  auto s = std::make_shared<state>(home);
  s->label = "world";
  ncclConfig_t config = detail::config_of(settings, s->label);  // NCCL keeps the pointer to the name
  const auto op = s->begin("init", 0);
  const ncclResult_t first = ncclCommInitRankConfig(&s->link.comm, size, id, rank, &config);
  if (s->link.comm == nullptr) check(first == ncclSuccess ? ncclInternalError : first, "ncclCommInitRankConfig");
  return communicator::ready(std::move(s), op);
}

inline communicator attach(ncclComm_t comm, cudaStream_t stream, const options& settings, std::string_view label,
                           cudaStream_t side, registered_memory memory, std::function<void()> release_unused) {
  require_given(comm);
  auto home = std::make_shared<session>(std::make_shared<team>(), stream, side, settings);
  home->registered = std::move(memory);
  home->release_unused = std::move(release_unused);
  auto s = std::make_shared<state>(home);
  s->label = label;
  s->link.owned = false;
  s->link.comm = comm;
  const auto op = s->begin("attach", 0);
  communicator out = communicator::ready(std::move(s), op);
  home->rank = out.rank();
  return out;
}

}  // namespace detail

/// The communicator of `size` processes that share `id`, with one process for each GPU. One process makes the id by
/// `new_id()`. It works on the device's streams; the device must outlive it. Throws `plait::error` if a rank does not
/// connect within the deadline.
inline communicator connect(cuda& device, const ncclUniqueId& id, int rank, int size, const options& settings = {}) {
  return detail::connect(std::make_shared<detail::team>(), device, id, rank, size, settings);
}

/// The communicator of all processes that torchrun or srun has started. `place_from` documents the variables;
/// `launch_place::local_rank` is the device to choose.
inline communicator from_environment(cuda& device, const options& settings = {}) {
  const launch_place here = place_from_environment();
  std::string bytes(sizeof(ncclUniqueId), '\0');
  if (here.rank == 0) {
    const ncclUniqueId made = new_id();
    std::memcpy(bytes.data(), &made, sizeof made);
  }
  bytes = share(here, bytes, settings.deadline > 0 ? settings.deadline : 1e9);
  ncclUniqueId id;
  if (bytes.size() != sizeof id) fail("nccl: rank 0 runs another program: its id has another size");
  std::memcpy(&id, bytes.data(), sizeof id);
  return connect(device, id, here.rank, here.size, settings);
}

/// Uses a caller's communicator, with a stream for its calls and one for asynchronous operations (null: plait makes
/// one). None of them is destroyed or aborted here. Meanwhile the communicator must not be used for other things. plait
/// owns its splits. The calling thread's current GPU must be the communicator's.
inline communicator attach(ncclComm_t comm, cudaStream_t stream, const options& settings = {},
                           std::string_view label = "attached", cudaStream_t side = nullptr) {
  if (settings.registered_bytes != 0) fail("nccl::attach: options::registered_bytes needs a device to serve from it");
  return detail::attach(comm, stream, settings, label, side, {}, {});
}
/// This overload uses the device's streams.
inline communicator attach(ncclComm_t comm, cuda& device, const options& settings = {},
                           std::string_view label = "attached") {
  return detail::attach(comm, device.main_stream().handle(), settings, label, device.side_stream().handle(),
                        detail::memory_for_collectives(device, settings), [&device] { device.release_unused(); });
}

/// Runs `body(communicator, device)` in one thread for each of `devices` (CUDA's indices), and returns when all have
/// ended. The first error ends them all. It is thrown here as a plait::error that names its rank, with the rank's own
/// exception nested in it.
template <class F>
void run(const std::vector<int>& devices, const cuda::options& device_options, const options& settings, F&& body) {
  if (devices.empty()) fail("nccl::run: devices is empty; at least 1 is needed");
  const ncclUniqueId id = new_id();
  const auto team = std::make_shared<detail::team>();
  std::mutex mutex;
  std::exception_ptr exception;
  const auto report = [&](int rank) {
    if (!team->explain(rank, cat({"rank ", rank, ": ", plait::detail::exception_text()}))) return;
    const std::lock_guard lock(mutex);
    exception = std::current_exception();
  };
  const auto rank_main = [&](int rank) {
    try {
      cuda::options chosen = device_options;
      chosen.device = devices[static_cast<std::size_t>(rank)];
      if (chosen.peers.empty()) chosen.peers = devices;  // NCCL accesses buffers on the other GPUs of this process
      cuda device(chosen);
      communicator comm = detail::connect(team, device, id, rank, static_cast<int>(devices.size()), settings);
      try {
        body(comm, device);
      } catch (...) {  // report the error while the communicators can still be aborted
        report(rank);
      }
    } catch (...) {
      report(rank);
    }
  };
  plait::detail::run_rank_threads("nccl::run", devices.size(), rank_main,
                                  [&](const std::string& why) { team->fail(why); });
  if (team->failed()) plait::detail::throw_cause(team->cause(), exception);
}
template <class F>
void run(const std::vector<int>& devices, F&& body) {
  run(devices, cuda::options{}, options{}, std::forward<F>(body));
}

}  // namespace plait::nccl

#include "plait/core/macros_on.hpp"
