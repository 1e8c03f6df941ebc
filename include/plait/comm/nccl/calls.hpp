// NCCL's calls: the names of dtypes and reductions, the check of results, the options of a communicator, and the bare
// calls that comm/typed.hpp needs. Only this header includes <nccl.h>.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstddef>
#include <string>
#include <utility>

#include "plait/comm/reduce.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait::nccl::detail {

constexpr ncclDataType_t type_of(dtype type) {
  constexpr ncclDataType_t types[] = {ncclFloat32, ncclFloat64, ncclBfloat16, ncclInt32, ncclInt64, ncclUint8};
  return types[static_cast<std::size_t>(type)];
}

constexpr ncclRedOp_t op_of(reduce_op op) {
  return op == reduce_op::sum ? ncclSum : op == reduce_op::max ? ncclMax : ncclMin;
}

[[noreturn]] inline void call_failed(ncclResult_t result, const char* call) {
  fail({call, " failed: ", ncclGetErrorString(result), " (", ncclGetLastError(nullptr), ")"});
}
inline void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess && result != ncclInProgress) call_failed(result, call);
}

}  // namespace plait::nccl::detail

namespace plait::nccl {

/// The options of NCCL communicators: deadlines, checks, and how much of the GPU collectives use. All communicators of
/// a rank use the same options, including those of axes.
struct options {
  double deadline = 600;  ///< seconds until an unfinished operation ends all ranks; 0: no limit
  /// Seconds that NCCL has to abort communicators, and ranks have to destroy the graphs that hold its calls. After that
  /// the process ends. 0: no limit.
  double grace = 60;
  bool check_pointers = false;  ///< ask CUDA whether every buffer is device memory (about 1 us each)
  /// Limits on the thread blocks of a collective. Each occupies a multiprocessor that matrix products could use. 0:
  /// NCCL chooses. (NCCL_MIN_CTAS and NCCL_MAX_CTAS set them for a whole process.)
  int min_ctas = 0, max_ctas = 0;
  /// Bytes of memory that NCCL allocates and registers with all communicators of the rank (NCCL 2.27); equal on all
  /// ranks. 0: nothing is registered. NCCL moves data in this memory without copies through its own buffers. The device
  /// uses it for the inputs and outputs of collectives: used parameters and their gradients, intermediate parts, and
  /// buffers of redistributions, but no activations. If the bytes are too few, the error gives the number in use. Ranks
  /// may use different parts of it (NCCL_WIN_DEFAULT), so NCCL's symmetric kernels stay off; only
  /// `communication_memory` has them.
  std::size_t registered_bytes = 0;
  /// Whether a mesh's communicators share NCCL's buffers and channels with the first one (NCCL 2.18). A caller's
  /// communicator must then have been made with `splitShare`. A world has one communicator for each set of axes that
  /// its model needs; sharing reduces their memory and setup time. But their operations then run one after the other,
  /// so a late message delays the collectives of all. Do not set it for pipelines or for overlap.
  bool split_share = false;
};

namespace detail {

/// Throws if a program passes a null communicator.
inline void require_given(ncclComm_t comm) {
  if (comm == nullptr)
    fail("attach: the ncclComm_t is null; give one that ncclCommInitRank has made, or let nccl::connect make one");
}

/// The configuration of a non-blocking communicator, so that a missing rank does not block the others inside NCCL.
/// Throws if `settings` have an invalid number of thread blocks.
inline ncclConfig_t config_of(const options& settings, [[maybe_unused]] const std::string& label) {
  constexpr int most = 64;  // NCCL's MAXCHANNELS
  for (const auto& [field, ctas] : {std::pair{"min_ctas", settings.min_ctas}, std::pair{"max_ctas", settings.max_ctas}})
    if (ctas < 0 || ctas > most) fail({"nccl::options::", field, " is ", ctas, ", must be 0 (NCCL chooses) to ", most});
  if (settings.max_ctas > 0 && settings.min_ctas > settings.max_ctas)
    fail({"nccl::options::min_ctas is ", settings.min_ctas, ", more than max_ctas, ", settings.max_ctas});
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  config.commName = label.c_str();
#endif
  if (settings.min_ctas > 0) config.minCTAs = settings.min_ctas;
  if (settings.max_ctas > 0) config.maxCTAs = settings.max_ctas;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
  if (settings.split_share) config.splitShare = 1;
#else
  if (settings.split_share)
    fail({"nccl::options::split_share needs NCCL 2.18 or later; this program is compiled with ", NCCL_MAJOR, ".",
          NCCL_MINOR});
#endif
  return config;
}

}  // namespace detail

/// A caller's communicator and stream, for `typed_group`. Each operation is NCCL's call and the check of its result,
/// without a ledger, a deadline or a check of arguments. Layers cannot use it: for layers, attach by
/// comm/launch/nccl.hpp or tensor/nccl_attach.hpp.
///
///     plait::nccl::bare_communicator mine{my_comm, my_stream};
///     const plait::typed_group<plait::nccl::bare_communicator, tp> group(mine);
///     auto sum = group.all_reduce<complete>(plait::part<float, pending>(here, my_pointer));  // here: a rank_place
struct bare_communicator {
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;

  void all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) const {
    detail::check(ncclAllReduce(in, out, n, detail::type_of(t), detail::op_of(op), comm, stream), "ncclAllReduce");
  }
  void all_gather(const void* in, void* out, std::size_t n, dtype t) const {
    detail::check(ncclAllGather(in, out, n, detail::type_of(t), comm, stream), "ncclAllGather");
  }
  void reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) const {
    detail::check(ncclReduceScatter(in, out, n, detail::type_of(t), detail::op_of(op), comm, stream),
                  "ncclReduceScatter");
  }
};

}  // namespace plait::nccl

#include "plait/core/macros_on.hpp"
