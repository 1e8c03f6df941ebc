#pragma once

// A stand-in for NCCL, for tests: the part of its C interface that plait uses, for in-process ranks on a GPU that they
// share (or on the stand-in CUDA runtime). Where NCCL would hang or mix up data, it ends all ranks with an error. Such
// errors are: ranks whose calls differ at one place of a communicator's sequence; communicators used in different
// orders; messages without their other side, or in a circle outside a group; a communicator used after its end, or
// before it is ready.
//
// A call returns when all ranks of the communicator have made it (NCCL does not wait for them); its work is then in the
// stream. With PLAIT_STAND_IN_NCCL=late, on the stand-in runtime, a call does not wait either: ranks meet in streams
// (stand_in/meetings.hpp). A call in a stream that is being captured is made at every launch of the graph, again by all
// ranks.

#include <cuda_runtime.h>

#include <climits>
#include <cstddef>

#include "stand_in/communicators.hpp"
#include "stand_in/windows.hpp"

namespace plait::nccl_stand_in {

inline ncclResult_t run_collective(const char* name, ncclComm_t comm, cudaStream_t stream, collective kind,
                                   std::size_t count, ncclDataType_t type, ncclRedOp_t op, int root, const void* in,
                                   void* out, bool to_root = false) {
  return enqueue(name, comm, stream, [=](cudaStream_t on) -> issued {
    threads::detail::signature s{.kind = kind, .count = count, .type = type_of(type), .root = root};
    if (kind == collective::all_reduce || kind == collective::reduce_scatter) s.op = op_of(op);
    if (kind == collective::broadcast || to_root) plait::detail::check_peer(name, "root", root, comm->member->size());
    if (to_root) s.ragged = true, s.count = 0;
    if (count != 0) comm->member->check_memory(name, kind == collective::broadcast ? out : in, out);
    if (count != 0) check_peers(name, comm, in, out);
    note_windows(comm, count, in, out);
    comm->engine->set_streams(on, on);
    const std::size_t bytes = count * size_of(s.type);
    const auto fill = [&](threads::detail::part& p) {
      p.in = static_cast<const std::byte*>(in);
      p.out = static_cast<std::byte*>(out);
      if (!to_root) return;
      const auto ranks = static_cast<std::size_t>(comm->member->size());
      p.send_counts.assign(ranks, 0);
      p.send_counts[static_cast<std::size_t>(root)] = count;
      p.receive_counts.assign(ranks, comm->member->rank() == root ? count : 0);
      p.send_offsets.assign(ranks, 0);
      p.receive_offsets.assign(ranks, 0);
    };
#ifdef PLAIT_CUDA_STAND_IN
    if (meets_in_streams()) return {comm, on, -1, nullptr, bytes, in, out, meet(comm, s, fill)};
#endif
    return {comm, on, -1, run_when_last(comm, comm->member->join(s, -1, 0, bytes, fill)), bytes, in, out};
  });
}

inline ncclResult_t message(const char* name, ncclComm_t comm, cudaStream_t stream, int side, int peer,
                            std::size_t count, ncclDataType_t type, const void* in, void* out) {
  return enqueue(name, comm, stream, [=](cudaStream_t on) -> issued {
    plait::detail::check_peer(name, "peer", peer, comm->member->size());
    if (count != 0) comm->member->check_memory(name, in, out);
    if (count != 0) check_peers(name, comm, in, out);
    comm->engine->set_streams(on, on);
    const threads::detail::signature s{.kind = collective::send, .count = count, .type = type_of(type)};
    const std::size_t bytes = count * size_of(s.type);
    const auto fill = [&](threads::detail::part& p) {
      p.in = static_cast<const std::byte*>(in);
      p.out = static_cast<std::byte*>(out);
    };
#ifdef PLAIT_CUDA_STAND_IN
    if (meets_in_streams()) return {comm, on, side, nullptr, bytes, in, out, meet(comm, side, peer, s, fill)};
#endif
    return {comm, on, side, run_when_last(comm, comm->member->join(s, side, peer, bytes, fill)), bytes, in, out};
  });
}

}  // namespace plait::nccl_stand_in

inline const char* ncclGetErrorString(ncclResult_t result) { return plait::nccl_stand_in::name_of(result); }
inline const char* ncclGetLastError(ncclComm_t comm) { return plait::nccl_stand_in::last_error(comm); }

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  plait::nccl_stand_in::new_id(*id);
  return ncclSuccess;
}
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t* config) {
  return plait::nccl_stand_in::init(comm, ranks, id, rank, config);
}
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return plait::nccl_stand_in::init(comm, ranks, id, rank, nullptr);
}
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  return plait::nccl_stand_in::split(comm, color, key, child, config);
}
inline ncclResult_t ncclCommFinalize(ncclComm_t comm) { return plait::nccl_stand_in::finalize(comm); }
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) { return plait::nccl_stand_in::destroy(comm); }
inline ncclResult_t ncclCommAbort(ncclComm_t comm) { return plait::nccl_stand_in::abort(comm); }
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  return plait::nccl_stand_in::state_of(comm, state);
}
inline ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return plait::nccl_stand_in::ask(comm, count, comm == nullptr ? 0 : comm->member->size());
}
inline ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return plait::nccl_stand_in::ask(comm, rank, comm == nullptr ? 0 : comm->member->rank());
}
inline ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return plait::nccl_stand_in::ask(comm, device, comm == nullptr ? 0 : comm->device);
}

inline ncclResult_t ncclGroupStart() { return plait::nccl_stand_in::group_start(); }
inline ncclResult_t ncclGroupEnd() { return plait::nccl_stand_in::group_end(); }

inline ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
  using namespace plait::nccl_stand_in;
  return run_collective("ncclAllReduce", comm, stream, collective::all_reduce, count, type, op, 0, in, out);
}
inline ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
  using namespace plait::nccl_stand_in;
  return run_collective("ncclReduceScatter", comm, stream, collective::reduce_scatter, count, type, op, 0, in, out);
}
/// A reduce_scatter in which only the root has a part.
inline ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  using namespace plait::nccl_stand_in;
  return run_collective("ncclReduce", comm, stream, collective::reduce_scatter, count, type, op, root, in, out, true);
}
inline ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
  using namespace plait::nccl_stand_in;
  return run_collective("ncclAllGather", comm, stream, collective::all_gather, count, type, ncclSum, 0, in, out);
}
inline ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
  using namespace plait::nccl_stand_in;
  return run_collective("ncclBroadcast", comm, stream, collective::broadcast, count, type, ncclSum, root, in, out);
}
inline ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return plait::nccl_stand_in::message("ncclSend", comm, stream, 0, peer, count, type, data, nullptr);
}
inline ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return plait::nccl_stand_in::message("ncclRecv", comm, stream, 1, peer, count, type, nullptr, data);
}

inline ncclResult_t ncclMemAlloc(void** data, size_t bytes) {
  return cudaMalloc(data, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
inline ncclResult_t ncclMemFree(void* data) {
  if (plait::nccl_stand_in::in_window(nullptr, data, 1))
    return plait::nccl_stand_in::refuse(ncclInvalidUsage, "ncclMemFree: the memory is registered as a window");
  return plait::nccl_stand_in::free_memory(data);
}
#if NCCL_MINOR >= 27
inline ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* data, size_t bytes, ncclWindow_t* window, int flags) {
  return plait::nccl_stand_in::register_window(comm, data, bytes, window, flags);
}
inline ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return plait::nccl_stand_in::deregister_window(comm, window);
}
#endif
