// A stand-in for NCCL EP on ranks that are threads of one process. It has the calls of its C API 0.1, and of NCCL's,
// that nccl_ep_exchange uses. The rows of an expert arrive in another order than by all-to-all.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "plait/device/cpu.hpp"

using cudaStream_t = plait::cpu::stream;
enum ncclResult_t { ncclSuccess, ncclSystemError, ncclInvalidArgument };
enum ncclDataType_t { ncclInt32, ncclInt64, ncclFloat32, ncclFloat64, ncclBfloat16 };
enum ncclEpAlgorithm_t { NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_ALGO_HIGH_THROUGHPUT };
enum ncclEpLayout_t { NCCL_EP_LAYOUT_UNSET, NCCL_EP_LAYOUT_EXPERT_MAJOR };
inline constexpr unsigned NCCL_EP_API_VERSION = 1, NCCL_EP_MAGIC = 0xC00FFFEEU, NCCL_EP_TENSOR_MAGIC = 0xCAFECAFEU;

struct ncclUniqueId {
  int number;
};
struct ncclEpTensor_t {
  unsigned size, magic, ndim;
  ncclDataType_t datatype;
  void* data;
  std::size_t* sizes;
};
struct ncclEpGroupConfig_t {
  unsigned size, magic, version;
  ncclEpAlgorithm_t algorithm;
  unsigned num_experts, max_dispatch_tokens_per_rank, max_recv_tokens_per_rank, max_token_bytes;
};
struct ncclEpLayoutInfo_t {
  unsigned size, magic;
  ncclEpTensor_t* expert_counters;
};
struct ncclEpHandleConfig_t;
struct ncclEpDispatchInputs_t {
  unsigned size, magic;
  ncclEpTensor_t *tokens, *topk_weights;
};
struct ncclEpDispatchOutputs_t {
  unsigned size, magic;
  ncclEpTensor_t *tokens, *topk_weights;
};
struct ncclEpDispatchConfig_t {
  unsigned size, magic;
};
struct ncclEpCombineInputs_t {
  unsigned size, magic;
  ncclEpTensor_t* tokens;
};
struct ncclEpCombineOutputs_t {
  unsigned size, magic;
  ncclEpTensor_t* tokens;
};
struct ncclEpCombineConfig_t {
  unsigned size, magic;
};

struct ncclEpHandle {
  struct ncclEpGroup* group;
  std::vector<std::int64_t> experts;                      // experts of the rows to send
  std::vector<std::pair<std::size_t, std::size_t>> came;  // source rank and row of each received row
  const char* rows = nullptr;                             // rows that other ranks read
};
using ncclEpHandle_t = ncclEpHandle*;

namespace nccl_ep_stand_in {
inline std::atomic<int> dispatches{0}, combines{0};
struct meeting {
  std::mutex mutex;
  std::condition_variable all_came;
  std::vector<ncclEpHandle*> handles;
  std::size_t came = 0, turn = 0;
  // Returns when all ranks have called it; false after a minute.
  bool wait(std::size_t rank, ncclEpHandle* handle) {
    std::unique_lock lock(mutex);
    handles[rank] = handle;
    const std::size_t mine = turn;
    if (++came == handles.size()) {
      came = 0, ++turn;
      all_came.notify_all();
    }
    return all_came.wait_for(lock, std::chrono::minutes(1), [&] { return turn != mine; });
  }
};
}  // namespace nccl_ep_stand_in

struct ncclComm {
  std::shared_ptr<nccl_ep_stand_in::meeting> ranks;
  std::size_t rank;
};
using ncclComm_t = ncclComm*;
struct ncclEpGroup {
  ncclComm_t comm;
  ncclEpGroupConfig_t config;
};
using ncclEpGroup_t = ncclEpGroup*;

inline const char* ncclGetErrorString(ncclResult_t r) {
  return r == ncclInvalidArgument ? "invalid argument" : "unhandled system error";
}
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> next{0};
  id->number = next++;
  return ncclSuccess;
}
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  static std::mutex mutex;
  static std::map<int, std::shared_ptr<nccl_ep_stand_in::meeting>> meetings;
  const std::lock_guard lock(mutex);
  auto& of_id = meetings[id.number];
  if (!of_id) of_id = std::make_shared<nccl_ep_stand_in::meeting>();
  of_id->handles.resize(static_cast<std::size_t>(ranks));
  *comm = new ncclComm{of_id, static_cast<std::size_t>(rank)};
  return ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}
inline ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* group, ncclComm_t comm, const ncclEpGroupConfig_t* config) {
  if (config->magic != NCCL_EP_MAGIC || config->num_experts == 0) return ncclInvalidArgument;
  *group = new ncclEpGroup{comm, *config};
  return ncclSuccess;
}
inline ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group) {
  delete group;
  return ncclSuccess;
}
inline ncclResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                                       const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* info,
                                       const ncclEpHandleConfig_t*, cudaStream_t) {
  if (layout != NCCL_EP_LAYOUT_EXPERT_MAJOR || topk_idx->datatype != ncclInt64 || topk_idx->sizes[1] != 1 ||
      topk_idx->sizes[0] > group->config.max_dispatch_tokens_per_rank)
    return ncclInvalidArgument;
  const auto* chosen = static_cast<const std::int64_t*>(topk_idx->data);
  auto* h = *handle = new ncclEpHandle{group, {chosen, chosen + topk_idx->sizes[0]}, {}};
  const auto& [ranks, rank] = *group->comm;
  if (!ranks->wait(rank, h)) return ncclSystemError;
  const std::size_t here = group->config.num_experts / ranks->handles.size();
  for (std::size_t e = 0; e < here; ++e) {
    const std::size_t before = h->came.size();
    for (std::size_t p = ranks->handles.size(); p-- > 0;)
      for (std::size_t i = ranks->handles[p]->experts.size(); i-- > 0;)
        if (ranks->handles[p]->experts[i] == static_cast<std::int64_t>(rank * here + e)) h->came.emplace_back(p, i);
    static_cast<std::int32_t*>(info->expert_counters->data)[e] = static_cast<std::int32_t>(h->came.size() - before);
  }
  return ranks->wait(rank, h) ? ncclSuccess : ncclSystemError;
}
inline ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
  delete handle;
  return ncclSuccess;
}

namespace nccl_ep_stand_in {
inline std::size_t row_bytes(const ncclEpTensor_t& t) { return t.sizes[1] * (t.datatype == ncclFloat64 ? 8 : 4); }
// Calls `move` to read rows of other ranks: the rows that dispatch fills here, or the results that return.
template <class Move>
ncclResult_t exchange(ncclEpHandle_t h, const ncclEpTensor_t& in, const Move& move) {
  const auto& [ranks, rank] = *h->group->comm;
  h->rows = static_cast<const char*>(in.data);
  if (!ranks->wait(rank, h)) return ncclSystemError;
  move(ranks->handles, rank);
  return ranks->wait(rank, h) ? ncclSuccess : ncclSystemError;
}
}  // namespace nccl_ep_stand_in

inline ncclResult_t ncclEpDispatch(ncclEpHandle_t h, const ncclEpDispatchInputs_t* in,
                                   const ncclEpDispatchOutputs_t* out, const ncclEpLayoutInfo_t*,
                                   const ncclEpDispatchConfig_t*, cudaStream_t) {
  if (!in->topk_weights || !out->topk_weights || out->tokens->sizes[0] != h->group->config.max_recv_tokens_per_rank ||
      h->came.size() > out->tokens->sizes[0])
    return ncclInvalidArgument;
  ++nccl_ep_stand_in::dispatches;
  const std::size_t bytes = nccl_ep_stand_in::row_bytes(*in->tokens);
  return nccl_ep_stand_in::exchange(h, *in->tokens, [&](const auto& handles, std::size_t) {
    auto* to = static_cast<char*>(out->tokens->data);
    for (const auto& [p, i] : h->came) std::memcpy(to, handles[p]->rows + i * bytes, bytes), to += bytes;
  });
}
inline ncclResult_t ncclEpCombine(ncclEpHandle_t h, const ncclEpCombineInputs_t* in, const ncclEpCombineOutputs_t* out,
                                  const ncclEpCombineConfig_t*, cudaStream_t) {
  if (out->tokens->sizes[0] != h->experts.size()) return ncclInvalidArgument;
  ++nccl_ep_stand_in::combines;
  const std::size_t bytes = nccl_ep_stand_in::row_bytes(*in->tokens);
  return nccl_ep_stand_in::exchange(h, *in->tokens, [&](const auto& handles, std::size_t rank) {
    auto* to = static_cast<char*>(out->tokens->data);
    for (const ncclEpHandle* other : handles)
      for (std::size_t i = 0; i < other->came.size(); ++i)
        if (other->came[i].first == rank)
          std::memcpy(to + other->came[i].second * bytes, other->rows + i * bytes, bytes);
  });
}
