// A typed collective is the communicator's own call: nothing before it, nothing after it but the pointer that it
// returns.
#include "plait/comm/typed.hpp"

using namespace plait;

/// A communicator of which the compiler sees declarations only.
struct opaque {
  void all_reduce(const void* in, void* out, std::size_t n, dtype type, reduce_op op);
  void all_gather(const void* in, void* out, std::size_t n, dtype type);
  void reduce_scatter(const void* in, void* out, std::size_t n, dtype type, reduce_op op);
  request start_all_reduce(const void* in, void* out, std::size_t n, dtype type, reduce_op op);
  request start_all_gather(const void* in, void* out, std::size_t n, dtype type);
  request start_reduce_scatter(const void* in, void* out, std::size_t n, dtype type, reduce_op op);
};

using pending = spec<shard<seq, cp>, hidden, partial<tp>>;
using complete = spec<shard<seq, cp>, hidden, replicate<tp>>;
using settled = spec<shard<seq, cp>, hidden, invariant<tp>>;
using scattered = spec<shard<seq, cp, tp>, hidden>;
using weight_gradient = spec<hidden, partial<dp, cp, tp>>;
using summed = spec<hidden, invariant<dp, cp, tp>>;

extern "C" {

float* typed_all_reduce_in_place(opaque* comm, float* x, std::size_t n) {
  const typed_group<opaque, tp> group(*comm);
  return group.all_reduce<complete>(local_part<float, pending>{x}, n).data;
}
float* raw_all_reduce_in_place(opaque* comm, float* x, std::size_t n) {
  comm->all_reduce(x, x, n, dtype::f32, reduce_op::sum);
  return x;
}

void typed_all_reduce(opaque* comm, const float* x, float* y, std::size_t n) {
  const typed_group<opaque, tp> group(*comm);
  group.all_reduce(local_part<const float, pending>{x}, local_part<float, settled>{y}, n);
}
void raw_all_reduce(opaque* comm, const float* x, float* y, std::size_t n) {
  comm->all_reduce(x, y, n, dtype::f32, reduce_op::sum);
}

void typed_all_reduce_three_axes(opaque* comm, double* x, std::size_t n) {
  const typed_group<opaque, dp, cp, tp> group(*comm);
  group.all_reduce<summed>(local_part<double, weight_gradient>{x}, n);
}
void raw_all_reduce_three_axes(opaque* comm, double* x, std::size_t n) {
  comm->all_reduce(x, x, n, dtype::f64, reduce_op::sum);
}

void typed_all_gather(opaque* comm, const bf16* x, bf16* y, std::size_t n) {
  const typed_group<opaque, tp> group(*comm);
  group.all_gather(local_part<const bf16, scattered>{x}, local_part<bf16, complete>{y}, n);
}
void raw_all_gather(opaque* comm, const bf16* x, bf16* y, std::size_t n) { comm->all_gather(x, y, n, dtype::bf16); }

float* typed_reduce_scatter(opaque* comm, const float* x, float* y, std::size_t n) {
  const typed_group<opaque, tp> group(*comm);
  return group.reduce_scatter(local_part<const float, pending>{x}, local_part<float, scattered>{y}, n).data;
}
float* raw_reduce_scatter(opaque* comm, const float* x, float* y, std::size_t n) {
  comm->reduce_scatter(x, y, n, dtype::f32, reduce_op::sum);
  return y;
}

// Megatron's pair around a block with sequence parallelism, on one buffer each way.
void typed_gather_then_scatter(opaque* comm, float* part, float* whole, std::size_t n) {
  const typed_group<opaque, tp> group(*comm);
  group.all_gather(local_part<float, scattered>{part}, local_part<float, complete>{whole}, n);
  group.reduce_scatter(local_part<float, pending>{whole}, local_part<float, scattered>{part}, n);
}
void raw_gather_then_scatter(opaque* comm, float* part, float* whole, std::size_t n) {
  comm->all_gather(part, whole, n, dtype::f32);
  comm->reduce_scatter(whole, part, n, dtype::f32, reduce_op::sum);
}

}  // extern "C"
