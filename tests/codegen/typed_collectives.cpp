// A typed collective compiles to the communicator's own call; it only adds the returned pointer.
#include "plait/comm/typed.hpp"
#include "plait/layout/apply.hpp"

using namespace plait;

/// A communicator with declarations only, so the compiler cannot inline its calls.
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

float* typed_all_reduce_in_place(opaque* comm, const part<float, pending>& x) {
  const typed_group<opaque, tp> group(*comm);
  return group.all_reduce<complete>(x).unchecked();
}
float* raw_all_reduce_in_place(opaque* comm, const array<float>& x) {
  comm->all_reduce(x.data, x.data, count(x), dtype::f32, reduce_op::sum);
  return x.data;
}

void typed_all_reduce(opaque* comm, const part<const float, pending>& x, const part<float, settled>& y) {
  const typed_group<opaque, tp> group(*comm);
  group.all_reduce(x, y);
}
void raw_all_reduce(opaque* comm, const array<const float>& x, const array<float>& y) {
  detail::require_one_shape("all_reduce", x.where, y.where);
  comm->all_reduce(x.data, y.data, count(x), dtype::f32, reduce_op::sum);
}

void typed_all_reduce_three_axes(opaque* comm, const part<double, weight_gradient>& x) {
  const typed_group<opaque, dp, cp, tp> group(*comm);
  group.all_reduce<summed>(x);
}
void raw_all_reduce_three_axes(opaque* comm, const array<double>& x) {
  comm->all_reduce(x.data, x.data, count(x), dtype::f64, reduce_op::sum);
}

void typed_all_gather(opaque* comm, const part<const bf16, scattered>& x, const part<bf16, complete>& y) {
  const typed_group<opaque, tp> group(*comm);
  group.all_gather(x, y);
}
void raw_all_gather(opaque* comm, const array<const bf16>& x, const array<bf16>& y) {
  detail::require_one_shape("all_gather", x.where, y.where);
  comm->all_gather(x.data, y.data, count(x), dtype::bf16);
}

float* typed_reduce_scatter(opaque* comm, const part<const float, pending>& x, const part<float, scattered>& y) {
  const typed_group<opaque, tp> group(*comm);
  return group.reduce_scatter(x, y).unchecked();
}
float* raw_reduce_scatter(opaque* comm, const array<const float>& x, const array<float>& y) {
  detail::require_one_shape("reduce_scatter", x.where, y.where);
  comm->reduce_scatter(x.data, y.data, count(y), dtype::f32, reduce_op::sum);
  return y.data;
}

// A program's own kernel called through `apply`: the sizes are compared, then the kernel is called.
void gelu(float* y, const float* x, std::int64_t n);
float* typed_nonlinear(const part<float, settled>& y, const part<const float, settled>& x) {
  return apply(rule::nonlinear, gelu, y, x).unchecked();
}
float* raw_nonlinear(const part<float, settled>& y, const part<const float, settled>& x) {
  if (!y || !x) detail::refuse_kernel_memory();
  detail::require_equal_sizes(y, x);
  gelu(y.unchecked(), x.unchecked(), y.size());
  return y.unchecked();
}

}  // extern "C"
