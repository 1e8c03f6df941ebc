// An exchange of experts' rows by NCCL EP, the library in NCCL's contrib/nccl_ep, at C API 0.1.
#pragma once

#include <nccl_ep.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/moe/expert_exchange.hpp"

namespace plait {

/// An `expert_exchange` by NCCL EP's high-throughput mode with its expert-major layout. Each row travels as a token
/// that chooses one expert, so dispatch and combine only move rows. Weights and sums over experts stay in the layer. A
/// token that chooses two experts of one rank therefore travels there twice.
///
/// API 0.1 requires memory for the most rows that a rank can receive, `expert_group::most_received`, and so does the
/// layer's input of experts. The layer needs exact counts on the host. `open` waits for the device twice: for the
/// counts of sent rows, and for those of received rows. Each layer has its own communicator and group. NCCL EP
/// determines the legal types and widths of rows; its errors are thrown with its text.
template <class T, compute_device Device>
class nccl_ep_exchange {
 public:
  struct route {
    std::shared_ptr<std::remove_pointer_t<ncclEpHandle_t>> handle;
    std::size_t leaving = 0;
  };

  nccl_ep_exchange(Device& on, const expert_group& group)
      : experts_(static_cast<std::size_t>(group.experts)),
        parts_(static_cast<std::size_t>(group.peers) * experts_),
        width_(static_cast<std::size_t>(group.width)) {
    const std::size_t sent = in_blocks(group.most_sent);
    slots_ = std::max(sent, in_blocks(group.most_received));
    ncclUniqueId id{};
    const int rank = group.ranks->rank();
    if (rank == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    host_values<std::byte, Device> there(on, sizeof(id));
    there.upload(reinterpret_cast<const std::byte*>(&id), sizeof(id));
    group.ranks->broadcast(there.data(), sizeof(id), dtype::u8, 0);
    there.download(reinterpret_cast<std::byte*>(&id), sizeof(id));
    auto made = std::make_shared<state>();
    check(ncclCommInitRank(&made->comm, group.ranks->size(), id, rank), "ncclCommInitRank");
    auto config = with_size<ncclEpGroupConfig_t>();
    config.version = NCCL_EP_API_VERSION;
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = static_cast<unsigned>(parts_);
    config.max_dispatch_tokens_per_rank = static_cast<unsigned>(sent);
    config.max_recv_tokens_per_rank = static_cast<unsigned>(slots_);
    config.max_token_bytes = static_cast<unsigned>(width_ * sizeof(T));
    check(ncclEpCreateGroup(&made->group, made->comm, &config), "ncclEpCreateGroup");
    const std::vector<float> ones(sent, 1.0F);
    made->ones = make_buffer<float>(on, sent);
    made->weights = make_buffer<float>(on, slots_);
    on.upload(made->ones.data(), ones.data(), made->ones.bytes(), on.main_stream());
    state_ = std::move(made);
  }

  route open(Device& on, host_values<std::int32_t, Device>& counts, expert_rows& rows) const {
    std::vector<std::int32_t> leaving(parts_), here(experts_);
    counts.download(leaving.data(), parts_);
    std::vector<std::int64_t> experts;
    for (std::size_t e = 0; e < parts_; ++e)
      experts.insert(experts.end(), static_cast<std::size_t>(leaving[e]), static_cast<std::int64_t>(e));
    auto chosen = make_buffer<std::int64_t>(on, experts.size());
    on.upload(chosen.data(), experts.data(), chosen.bytes(), on.main_stream());
    const tensor of_rows(ncclInt64, chosen.data(), experts.size(), 1);
    tensor counters(ncclInt32, counts.data() + parts_, experts_);
    auto layout = with_size<ncclEpLayoutInfo_t>();
    layout.expert_counters = &counters.of;
    ncclEpHandle_t handle = nullptr;
    check(ncclEpCreateHandle(&handle, state_->group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &of_rows.of, &layout, nullptr,
                             on.main_stream()),
          "ncclEpCreateHandle");
    route r{{handle, [kept = state_](ncclEpHandle_t h) { ncclEpHandleDestroy(h); }}, experts.size()};
    counts.download(here.data(), experts_, parts_);
    rows.leaving = static_cast<std::int64_t>(experts.size());
    rows.begin.assign(1, 0);
    for (const std::int32_t n : here) rows.begin.push_back(rows.begin.back() + n);
    return r;
  }

  /// NCCL EP enqueues its work and returns; meanwhile `meanwhile()` enqueues more.
  template <std::invocable Work>
  buffer<Device> dispatch(Device& on, const route& r, buffer<Device> leaving, Work&& meanwhile) const {
    auto came = make_buffer<T>(on, slots_ * width_);
    tensor from(type, leaving.data(), r.leaving, width_), to(type, came.data(), slots_, width_);
    tensor ones(ncclFloat32, state_->ones.data(), r.leaving, 1), weights(ncclFloat32, state_->weights.data(), slots_);
    auto in = with_size<ncclEpDispatchInputs_t>();
    auto out = with_size<ncclEpDispatchOutputs_t>();
    const auto how = with_size<ncclEpDispatchConfig_t>();
    in.tokens = &from.of, in.topk_weights = &ones.of;
    out.tokens = &to.of, out.topk_weights = &weights.of;
    check(ncclEpDispatch(r.handle.get(), &in, &out, nullptr, &how, on.main_stream()), "ncclEpDispatch");
    meanwhile();
    return came;
  }
  buffer<Device> combine(Device& on, const route& r, buffer<Device> rows) const {
    auto whole = make_buffer<T>(on, slots_ * width_);  // NCCL EP reads as many slots as dispatch writes
    on.copy(whole.data(), rows.data(), std::min(rows.bytes(), whole.bytes()), on.main_stream());
    auto back = make_buffer<T>(on, r.leaving * width_);
    tensor from(type, whole.data(), slots_, width_), to(type, back.data(), r.leaving, width_);
    auto in = with_size<ncclEpCombineInputs_t>();
    auto out = with_size<ncclEpCombineOutputs_t>();
    const auto how = with_size<ncclEpCombineConfig_t>();
    in.tokens = &from.of, out.tokens = &to.of;
    check(ncclEpCombine(r.handle.get(), &in, &out, &how, on.main_stream()), "ncclEpCombine");
    return back;
  }

 private:
  static constexpr ncclDataType_t type = dtype_of<T> == dtype::f64   ? ncclFloat64
                                         : dtype_of<T> == dtype::f32 ? ncclFloat32
                                                                     : ncclBfloat16;
  struct state {
    ncclComm_t comm = nullptr;
    ncclEpGroup_t group = nullptr;
    buffer<Device> ones, weights;  ///< of the sent rows, and of the received rows
    state() = default;
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() {
      if (group) ncclEpGroupDestroy(group);
      if (comm) ncclCommDestroy(comm);
    }
  };
  /// A descriptor with its extents, to which it points.
  struct tensor {
    std::size_t extents[2];
    ncclEpTensor_t of{};
    tensor(ncclDataType_t element, void* data, std::size_t rows, std::size_t columns = 0) : extents{rows, columns} {
      of.size = static_cast<unsigned>(sizeof(of));
      of.magic = NCCL_EP_TENSOR_MAGIC;
      of.ndim = columns == 0 ? 1 : 2;
      of.datatype = element;
      of.data = data;
      of.sizes = extents;
    }
    tensor(const tensor&) = delete;
    tensor& operator=(const tensor&) = delete;
  };
  template <class S>
  static S with_size() {
    S s{};
    s.size = static_cast<unsigned>(sizeof(S));
    s.magic = NCCL_EP_MAGIC;
    return s;
  }
  /// NCCL EP's bounds are multiples of 64.
  static std::size_t in_blocks(std::int64_t rows) { return (static_cast<std::size_t>(rows) + 63) / 64 * 64; }
  static void check(ncclResult_t result, const char* call) {
    if (result != ncclSuccess) fail({"nccl_ep_exchange: ", call, ": ", ncclGetErrorString(result)});
  }

  std::size_t experts_, parts_, width_, slots_ = 0;  ///< local experts, experts of all peers, elements of a row, rows
                                                     ///< of an output
  std::shared_ptr<state> state_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
