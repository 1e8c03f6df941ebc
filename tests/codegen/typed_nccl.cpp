// A typed collective on the caller's NCCL communicator compiles to NCCL's call with the caller's arguments, and the
// check of its result that every program makes.
// include: declared ../stand_in/cuda
#include "plait/comm/nccl/calls.hpp"
#include "plait/comm/typed.hpp"

using namespace plait;
using nccl::detail::check;

using pending = spec<shard<seq, cp>, hidden, partial<tp>>;
using complete = spec<shard<seq, cp>, hidden, replicate<tp>>;
using scattered = spec<shard<seq, cp, tp>, hidden>;
using group = typed_group<const nccl::bare_communicator, tp>;

/// An array of a program that checks its arrays.
template <class T>
struct array {
  T* data;
  std::int64_t size;
  box where;
};
template <class T>
std::size_t count(const array<T>& x) {
  return static_cast<std::size_t>(x.size);
}

extern "C" {

float* typed_nccl_all_reduce(ncclComm_t comm, cudaStream_t stream, const part<float, pending>& x) {
  const nccl::bare_communicator mine{comm, stream};
  return group(mine).all_reduce<complete>(x).unchecked();
}
float* raw_nccl_all_reduce(ncclComm_t comm, cudaStream_t stream, const array<float>& x) {
  check(ncclAllReduce(x.data, x.data, count(x), ncclFloat32, ncclSum, comm, stream), "ncclAllReduce");
  return x.data;
}

void typed_nccl_all_gather(ncclComm_t comm, cudaStream_t stream, const part<const bf16, scattered>& x,
                           const part<bf16, complete>& y) {
  const nccl::bare_communicator mine{comm, stream};
  group(mine).all_gather(x, y);
}
void raw_nccl_all_gather(ncclComm_t comm, cudaStream_t stream, const array<const bf16>& x, const array<bf16>& y) {
  detail::require_one_shape("all_gather", x.where, y.where);
  check(ncclAllGather(x.data, y.data, count(x), ncclBfloat16, comm, stream), "ncclAllGather");
}

void typed_nccl_reduce_scatter(ncclComm_t comm, cudaStream_t stream, const part<const double, pending>& x,
                               const part<double, scattered>& y) {
  const nccl::bare_communicator mine{comm, stream};
  group(mine).reduce_scatter(x, y);
}
void raw_nccl_reduce_scatter(ncclComm_t comm, cudaStream_t stream, const array<const double>& x,
                             const array<double>& y) {
  detail::require_one_shape("reduce_scatter", x.where, y.where);
  check(ncclReduceScatter(x.data, y.data, count(y), ncclFloat64, ncclSum, comm, stream), "ncclReduceScatter");
}

}  // extern "C"
