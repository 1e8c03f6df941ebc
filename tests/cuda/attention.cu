#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "attention_reference.hpp"
#include "plait/kernels/cuda/attention_backward.hpp"
#include "plait/kernels/cuda/attention_forward.hpp"

namespace {

using plait::bf16;
using plait::buffer;
using plait::cuda;
using plait::statistic_of;
using plait::kernels::attention_accumulate;
using plait::kernels::attention_shape;
using plait::test::attention_arrays;
using std::int64_t;
using values = std::vector<double>;

template <class T>
T typed(double x) {
  return plait::kernels::number<T>(static_cast<plait::kernels::arithmetic<T>>(x));
}
template <class T>
double widened(T x) {
  return static_cast<double>(plait::kernels::number<plait::kernels::arithmetic<T>>(x));
}

/// Normal numbers that T holds exactly.
template <class T>
values random_values(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  values result(static_cast<std::size_t>(n));
  for (double& x : result) x = widened(typed<T>(normal(generator)));
  return result;
}

/// An array of T on the device.
template <class T>
class array {
 public:
  array(cuda& device, const values& from)
      : device_(device), size_(from.size()), memory_(plait::make_buffer<T>(device, from.size())) {
    std::vector<T> host(size_);
    for (std::size_t i = 0; i < size_; ++i) host[i] = typed<T>(from[i]);
    device_.upload(data(), host.data(), size_ * sizeof(T), device_.main_stream());
  }
  T* data() { return memory_.template data<T>(); }
  values read() {
    std::vector<T> host(size_);
    device_.download(host.data(), data(), size_ * sizeof(T), device_.main_stream());
    values result(size_);
    for (std::size_t i = 0; i < size_; ++i) result[i] = widened(host[i]);
    return result;
  }

 private:
  cuda& device_;
  std::size_t size_;
  buffer<cuda> memory_;
};

template <class T>
constexpr double tolerance = std::is_same_v<T, bf16>    ? 1e-2
                             : std::is_same_v<T, float> ? 1e-5
                                                        : 1e-12;

/// The norm of the difference over that of what is expected, over the first `width` of every `stride` elements.
double difference(const values& got, const values& expected, int64_t stride, int64_t width) {
  double squares = 0, size = 0, count = 1;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (static_cast<int64_t>(i) % stride >= width) continue;
    squares += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
    count += 1;
  }
  return std::sqrt(squares) / std::fmax(std::sqrt(size), 0.1 * std::sqrt(count));
}

/// Whether the elements that belong to no token are what they were.
bool gaps_kept(const values& got, const values& before, int64_t stride, int64_t width) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (static_cast<int64_t>(i) % stride >= width && got[i] != before[i]) return false;
  }
  return true;
}

template <class T>
void check_lse(const values& got, const values& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const bool same = std::isinf(expected[i]) ? got[i] == expected[i]
                                              : std::abs(got[i] - expected[i]) <= 5 * std::fmin(tolerance<T>, 1e-5);
    if (!same) {
      CAPTURE(i);
      CHECK(got[i] == expected[i]);
      return;
    }
  }
}

template <class T>
void check(const attention_shape& given, attention_accumulate accumulate = {}) {
  CAPTURE(sizeof(T));
  CAPTURE(given.batch);
  CAPTURE(given.q_len);
  CAPTURE(given.k_len);
  CAPTURE(given.heads);
  CAPTURE(given.kv_heads);
  CAPTURE(given.head_dim);
  CAPTURE(given.causal);
  CAPTURE(given.q_offset);
  CAPTURE(given.k_offset);
  const attention_shape s = given.checked();
  const int64_t q_tokens = s.batch * s.q_len, k_tokens = s.batch * s.k_len;
  const values q = random_values<T>(q_tokens * s.q_stride, 1), k = random_values<T>(k_tokens * s.k_stride, 2);
  const values v = random_values<T>(k_tokens * s.v_stride, 3), d_o = random_values<T>(q_tokens * s.do_stride, 4);
  const attention_arrays start{random_values<T>(q_tokens * s.o_stride, 5), values(q_tokens * s.heads),
                               random_values<T>(q_tokens * s.dq_stride, 6), random_values<T>(k_tokens * s.dk_stride, 7),
                               random_values<T>(k_tokens * s.dv_stride, 8)};
  const attention_arrays expected = plait::test::attention_on_cpu(given, q, k, v, d_o, start, accumulate);

  cuda device;
  array<T> q_(device, q), k_(device, k), v_(device, v), d_o_(device, d_o), o_(device, start.o), dq_(device, start.dq),
      dk_(device, start.dk), dv_(device, start.dv);
  array<statistic_of<T>> lse_(device, start.lse);
  plait::kernels::attention_forward<T>(device, q_.data(), k_.data(), v_.data(), o_.data(), lse_.data(), given);
  plait::kernels::attention_backward<T>(device, q_.data(), k_.data(), v_.data(), o_.data(), lse_.data(), d_o_.data(),
                                        dq_.data(), dk_.data(), dv_.data(), given, accumulate);
  device.synchronize();
  const values o = o_.read(), dq = dq_.read(), dk = dk_.read(), dv = dv_.read();
  const int64_t q_width = s.heads * s.head_dim, k_width = s.kv_heads * s.head_dim;
  CHECK(difference(o, expected.o, s.o_stride, q_width) < tolerance<T>);
  CHECK(difference(dq, expected.dq, s.dq_stride, q_width) < tolerance<T>);
  CHECK(difference(dk, expected.dk, s.dk_stride, k_width) < tolerance<T>);
  CHECK(difference(dv, expected.dv, s.dv_stride, k_width) < tolerance<T>);
  check_lse<T>(lse_.read(), expected.lse);
  CHECK(gaps_kept(o, start.o, s.o_stride, q_width));
  CHECK(gaps_kept(dq, start.dq, s.dq_stride, q_width));
  CHECK(gaps_kept(dk, start.dk, s.dk_stride, k_width));
  CHECK(gaps_kept(dv, start.dv, s.dv_stride, k_width));
}

attention_shape shape_of(int64_t batch, int64_t q_len, int64_t k_len, int64_t heads, int64_t kv_heads, int64_t head_dim,
                         bool causal, int64_t q_offset = 0, int64_t k_offset = 0) {
  attention_shape s;
  s.batch = batch;
  s.q_len = q_len;
  s.k_len = k_len;
  s.heads = heads;
  s.kv_heads = kv_heads;
  s.head_dim = head_dim;
  s.scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  s.causal = causal;
  s.q_offset = q_offset;
  s.k_offset = k_offset;
  return s;
}

}  // namespace

TEST_CASE_TEMPLATE("CUDA attention and its gradients are the processor's", T, float, double, bf16) {
  check<T>(shape_of(2, 17, 17, 3, 1, 8, true));
  check<T>(shape_of(1, 1, 17, 8, 1, 64, true, 16));
  check<T>(shape_of(1, 1, 1, 2, 2, 8, false));
  check<T>(shape_of(1, 64, 64, 2, 2, 64, true));
  check<T>(shape_of(1, 130, 130, 1, 1, 128, true));
  check<T>(shape_of(1, 64, 130, 3, 1, 80, false));
  check<T>(shape_of(2, 130, 130, 6, 2, 64, true));
  check<T>(shape_of(1, 40, 70, 1, 1, 256, true, 20));
  check<T>(shape_of(1, 17, 33, 1, 1, 200, false));
}

TEST_CASE_TEMPLATE("CUDA attention of tokens with offsets", T, float, double, bf16) {
  check<T>(shape_of(1, 64, 130, 1, 1, 64, true, 66));          // the last tokens against all
  check<T>(shape_of(1, 130, 17, 1, 1, 64, true, 0, 100));      // a hundred queries see nothing
  check<T>(shape_of(2, 17, 17, 2, 1, 64, true, 0, 17));        // none sees anything
  check<T>(shape_of(1, 17, 64, 2, 1, 64, true, 1000, 0));      // all see everything
  check<T>(shape_of(1, 130, 64, 1, 1, 64, true, 0, 1 << 20));  // far ahead
  for (const int64_t ahead : {-33, -16, -1, 1, 14, 15, 30, 31, 47}) {
    check<T>(shape_of(1, 70, 90, 1, 1, 16, true, 100 + ahead, 100));
  }
}

TEST_CASE_TEMPLATE("CUDA attention of slices of a fused projection, with gaps and added gradients", T, float, double,
                   bf16) {
  attention_shape s = shape_of(2, 17, 33, 8, 1, 8, true, 16);
  s.q_stride = s.k_stride = s.v_stride = 10 * 8;
  s.o_stride = 72;
  check<T>(s);
  check<T>(s, {true, false});
  s.dq_stride = 64;
  s.dk_stride = 8;
  s.dv_stride = 16;
  s.do_stride = 80;
  check<T>(s, {false, true});
  check<T>(s, {true, true});
  check<T>(shape_of(1, 40, 17, 1, 1, 144, true, 0, 20), {true, true});
}

TEST_CASE_TEMPLATE("CUDA attention of nothing", T, float, double, bf16) {
  check<T>(shape_of(0, 17, 17, 1, 1, 8, true));
  check<T>(shape_of(1, 0, 17, 1, 1, 8, true));
  check<T>(shape_of(1, 17, 0, 1, 1, 8, true));
}

TEST_CASE_TEMPLATE("CUDA attention over two halves of the keys, merged, is attention over all", T, float, double,
                   bf16) {
  const int64_t len = 70, half = 35, heads = 2, d = 64, width = heads * d;
  const attention_shape whole = shape_of(1, len, len, heads, heads, d, true);
  const values q = random_values<T>(len * width, 1), k = random_values<T>(len * width, 2);
  const values v = random_values<T>(len * width, 3), d_o = random_values<T>(len * width, 4);
  const values zeros(static_cast<std::size_t>(len * width));
  const attention_arrays start{zeros, values(static_cast<std::size_t>(len * heads)), zeros, zeros, zeros};
  const attention_arrays expected = plait::test::attention_on_cpu(whole, q, k, v, d_o, start, {});

  cuda device;
  array<T> q_(device, q), k_(device, k), v_(device, v), d_o_(device, d_o), o_(device, zeros), other_(device, zeros),
      dq_(device, zeros), dk_(device, zeros), dv_(device, zeros);
  array<statistic_of<T>> lse_(device, start.lse), other_lse_(device, start.lse);
  attention_shape part[2] = {whole, whole};
  part[0].k_len = part[1].k_len = half;
  part[1].k_offset = half;
  plait::kernels::attention_forward<T>(device, q_.data(), k_.data(), v_.data(), o_.data(), lse_.data(), part[0]);
  plait::kernels::attention_forward<T>(device, q_.data(), k_.data() + half * width, v_.data() + half * width,
                                       other_.data(), other_lse_.data(), part[1]);
  plait::kernels::merge_lse<T>(device, o_.data(), lse_.data(), other_.data(), other_lse_.data(), width, whole);
  for (const int i : {0, 1}) {
    const int64_t first = i * half * width;
    plait::kernels::attention_backward<T>(device, q_.data(), k_.data() + first, v_.data() + first, o_.data(),
                                          lse_.data(), d_o_.data(), dq_.data(), dk_.data() + first, dv_.data() + first,
                                          part[i], {i == 1, false});
  }
  device.synchronize();
  CHECK(difference(o_.read(), expected.o, width, width) < tolerance<T>);
  CHECK(difference(dq_.read(), expected.dq, width, width) < tolerance<T>);
  CHECK(difference(dk_.read(), expected.dk, width, width) < tolerance<T>);
  CHECK(difference(dv_.read(), expected.dv, width, width) < tolerance<T>);
  check_lse<T>(lse_.read(), expected.lse);
}

TEST_CASE("CUDA attention refuses what its kernels cannot read") {
  cuda device;
  array<bf16> memory(device, values(1024));
  array<float> lse(device, values(64));
  const auto forward = [&](const attention_shape& s, int64_t offset) {
    bf16* const at = memory.data() + offset;
    plait::kernels::attention_forward<bf16>(device, at, at, at, at, lse.data(), s);
  };
  CHECK_THROWS_WITH_AS(forward(shape_of(1, 2, 2, 1, 1, 12, true), 0),
                       "attention: head_dim = 12, for bf16 a multiple of 8", plait::error);
  CHECK_THROWS_WITH_AS(forward(shape_of(1, 2, 2, 1, 1, 264, true), 0),
                       "attention: head_dim = 264, on a GPU at most 256", plait::error);
  CHECK_THROWS_WITH_AS(forward(shape_of(1, 2, 2, 1, 1, 8, true), 1),
                       "attention: bf16 arrays must begin on a 16-byte boundary", plait::error);
  attention_shape odd = shape_of(1, 2, 2, 1, 1, 8, true);
  odd.k_stride = 12;
  CHECK_THROWS_WITH_AS(forward(odd, 0), "attention: a stride of 12, for bf16 a multiple of 8", plait::error);
}

namespace {

/// Another library's attention that supports heads of 64 and only counts its calls.
class counting_library final : public plait::attention_library {
 public:
  int forwards = 0, backwards = 0;
  bool supports(const attention_shape& shape, plait::dtype) override { return shape.head_dim == 64; }
  void forward(cuda&, const bf16*, const bf16*, const bf16*, bf16*, float*, const attention_shape&) override {
    ++forwards;
  }
  void backward(cuda&, const bf16*, const bf16*, const bf16*, const bf16*, const float*, const bf16*, bf16*, bf16*,
                bf16*, const attention_shape&) override {
    ++backwards;
  }
};

}  // namespace

TEST_CASE("the library's attention runs where it is chosen and can") {
  using plait::attention_backend;
  using plait::attention_choice;
  using plait::kernels::attention_backend_for;
  counting_library library;
  const attention_shape small = shape_of(1, 4, 4, 1, 1, 8, true), usual = shape_of(1, 4, 4, 1, 1, 64, true);
  const attention_choice automatic{attention_backend::automatic, &library}, forced{attention_backend::cudnn, &library};
  CHECK(attention_backend_for({}, usual) == attention_backend::own);
  CHECK(attention_backend_for(automatic, small) == attention_backend::own);
  CHECK(attention_backend_for(automatic, usual) == attention_backend::cudnn);
  CHECK(attention_backend_for(automatic, usual, {.accumulate = {true, false}}) == attention_backend::own);
  CHECK(attention_backend_for({attention_backend::own, &library}, usual) == attention_backend::own);
  CHECK_THROWS_WITH_AS(attention_backend_for({attention_backend::cudnn, nullptr}, usual),
                       "attention: cuDNN is chosen, but the device was given no attention_library", plait::error);
  CHECK_THROWS_WITH_AS(attention_backend_for(forced, small),
                       "attention: cuDNN is chosen, but does not support bf16, head_dim = 8, q_len = 4, k_len = 4, "
                       "offsets 0 and 0; choose attention_backend::automatic or own",
                       plait::error);

  cuda device;
  array<bf16> memory(device, values(1024));
  array<float> lse(device, values(64));
  bf16* const x = memory.data();
  plait::kernels::attention_forward<bf16>(device, x, x, x, x, lse.data(), usual, forced);
  plait::kernels::attention_backward<bf16>(device, x, x, x, x, lse.data(), x, x, x, x, usual, {}, nullptr, automatic);
  plait::kernels::attention_forward<bf16>(device, x, x, x, x, lse.data(), small, automatic);
  device.synchronize();
  CHECK(library.forwards == 1);
  CHECK(library.backwards == 1);
}
