// program: kernels
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/cpu/attention.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "plait/kernels/settings.hpp"

namespace kernel_merge_lse {  // files of one program may have helpers of the same name

using namespace plait::test;
using plait::bf16;
using plait::cuda;
using plait::statistic_of;
using plait::kernels::attention_shape;
using std::int64_t;

template <class T, class Other>
void check(int64_t batch, int64_t q_len, int64_t heads, int64_t head_dim, int64_t gap) {
  CAPTURE(q_len);
  CAPTURE(heads);
  CAPTURE(head_dim);
  attention_shape shape;
  shape.batch = batch;
  shape.q_len = q_len;
  shape.heads = heads;
  shape.head_dim = head_dim;
  shape.o_stride = heads * head_dim + gap;
  shape.q_batch = q_len + gap;
  shape.lse_stride = q_len + gap / 2;
  const int64_t other_stride = heads * head_dim + 2 * gap, tokens = batch * shape.q_batch;
  const int64_t rows = batch * heads * shape.lse_stride;
  values o = random_values<T>(tokens * shape.o_stride, 1), lse = random_values<float>(rows, 2, 4.0);
  const values other = random_values<Other>(tokens * other_stride, 3);
  values lse_other = random_values<float>(rows, 4, 4.0);
  const double nothing = -std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < lse.size(); ++i) {  // queries that saw no key in one piece, the other or both
    if (i % 5 == 1 || i % 7 == 3) lse[i] = nothing;
    if (i % 5 == 2 || i % 7 == 3) lse_other[i] = nothing;
  }
  cuda device;
  plait::cpu host;
  number_array<T> o_(device, o);
  number_array<Other> other_(device, other);
  number_array<statistic_of<T>> lse_(device, lse), lse_other_(device, lse_other);
  plait::kernels::merge_lse<T, Other>(device, o_.data(), lse_.data(), other_.data(), lse_other_.data(), other_stride,
                                      shape);
  plait::kernels::merge_lse(host, o.data(), lse.data(), other.data(), lse_other.data(), other_stride, shape);
  CHECK(difference(o_.read(), o) < tolerance<T>);
  CHECK(difference(lse_.read(), lse) < std::fmin(tolerance<T>, 1e-5));
  device.synchronize();
}

TEST_CASE_TEMPLATE("merged attention equals the processor's", T, float, double, bf16) {
  check<T, T>(1, 0, 2, 8, 0);
  check<T, T>(1, 1, 1, 1, 0);
  check<T, T>(2, 13, 3, 40, 5);
  check<T, T>(2, 13, 3, 40, 8);  // five of eight lanes have numbers
  check<T, T>(3, 5, 4, 128, 0);
}

TEST_CASE("float sums accept bf16 parts") { check<float, bf16>(2, 9, 4, 64, 8); }

}  // namespace kernel_merge_lse
