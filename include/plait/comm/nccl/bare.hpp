// An `ncclComm_t` and a stream with the three calls that comm/typed.hpp needs, each of them NCCL's own. It is not a
// `communicator` and cannot carry layers: for those, attach by comm/launch/nccl.hpp or tensor/nccl_attach.hpp.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "plait/comm/nccl/types.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl {

/// A communicator of the caller's and the stream to use it on, as `typed_group` takes them: each operation is NCCL's
/// call and a look at what it returns. No ledger, no deadline, no check of arguments: for code that has all of that
/// itself, and wants the types.
///
///     plait::nccl::bare_communicator mine{my_comm, my_stream};
///     const plait::typed_group<plait::nccl::bare_communicator, tp> group(mine);
///     auto sum = group.all_reduce<complete>(plait::local_part<float, pending>{my_pointer}, count);
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
