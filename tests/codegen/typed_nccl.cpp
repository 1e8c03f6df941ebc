// A typed collective on the caller's NCCL communicator is NCCL's call with the caller's arguments, and the look at its
// result that every program takes.
// include: declared ../stand_in/cuda
#include "plait/comm/nccl/calls.hpp"
#include "plait/comm/typed.hpp"

using namespace plait;
using nccl::detail::check;

using pending = spec<shard<seq, cp>, hidden, partial<tp>>;
using complete = spec<shard<seq, cp>, hidden, replicate<tp>>;
using scattered = spec<shard<seq, cp, tp>, hidden>;
using group = typed_group<const nccl::bare_communicator, tp>;

extern "C" {

float* typed_nccl_all_reduce(ncclComm_t comm, cudaStream_t stream, float* x, std::size_t n) {
  const nccl::bare_communicator mine{comm, stream};
  return group(mine).all_reduce<complete>(local_part<float, pending>{x}, n).data;
}
float* raw_nccl_all_reduce(ncclComm_t comm, cudaStream_t stream, float* x, std::size_t n) {
  check(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, comm, stream), "ncclAllReduce");
  return x;
}

void typed_nccl_all_gather(ncclComm_t comm, cudaStream_t stream, const bf16* x, bf16* y, std::size_t n) {
  const nccl::bare_communicator mine{comm, stream};
  group(mine).all_gather(local_part<const bf16, scattered>{x}, local_part<bf16, complete>{y}, n);
}
void raw_nccl_all_gather(ncclComm_t comm, cudaStream_t stream, const bf16* x, bf16* y, std::size_t n) {
  check(ncclAllGather(x, y, n, ncclBfloat16, comm, stream), "ncclAllGather");
}

void typed_nccl_reduce_scatter(ncclComm_t comm, cudaStream_t stream, const double* x, double* y, std::size_t n) {
  const nccl::bare_communicator mine{comm, stream};
  group(mine).reduce_scatter(local_part<const double, pending>{x}, local_part<double, scattered>{y}, n);
}
void raw_nccl_reduce_scatter(ncclComm_t comm, cudaStream_t stream, const double* x, double* y, std::size_t n) {
  check(ncclReduceScatter(x, y, n, ncclFloat64, ncclSum, comm, stream), "ncclReduceScatter");
}

}  // extern "C"
