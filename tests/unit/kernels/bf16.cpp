// program: kernels
// Compares every kernel in bf16 with the same kernel in float, on equal inputs. bf16 has eight significant bits:
// rounding to nearest changes a number by at most 2^-8 of itself, and a kernel rounds each result once.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "plait/testing/findings.hpp"
#include "support/differences.hpp"
#include "support/kernel_support.hpp"

namespace {

using kernel_support::random_values;
using plait::bf16;
using plait::cpu;
using plait::gradient_of;
using plait::statistic_of;
using std::int64_t;
namespace kernels = plait::kernels;
using enum plait::kernels::activation_function;
namespace simd = plait::kernels::simd;

constexpr double roundoff = 0x1p-8;

/// Normally distributed numbers that bf16 represents exactly.
template <class T>
std::vector<T> numbers(int64_t n, unsigned seed) {
  std::vector<T> all;
  for (const float x : random_values<float>(n, seed)) all.push_back(plait::converted<T>(plait::to_bf16(x)));
  return all;
}

template <class Array>
std::vector<double> in_double(const Array& array) {
  std::vector<double> wide;
  for (const auto x : array) wide.push_back(plait::converted<double>(x));
  return wide;
}

/// The results of a kernel: `operator()` takes those in the layer's type, `exact` those that are float even for bf16.
struct written {
  std::vector<std::vector<double>> rounded, same;
  template <class Array>
  void operator()(const Array& array) {
    rounded.push_back(in_double(array));
  }
  template <class Array>
  void exact(const Array& array) {
    same.push_back(in_double(array));
  }
};

/// `run` computes in the type of its first argument, and passes its results to its second.
template <class Run>
void check_like_float(const Run& run) {
  written in_bf16, in_float;
  run(bf16{}, in_bf16);
  run(float{}, in_float);
  REQUIRE(in_bf16.rounded.size() == in_float.rounded.size());
  for (std::size_t a = 0; a < in_float.rounded.size(); ++a) {
    CAPTURE(a);
    const std::vector<double>&got = in_bf16.rounded[a], &expected = in_float.rounded[a];
    REQUIRE(got.size() == expected.size());
    std::size_t beyond = 0;
    for (std::size_t i = 0; i < got.size(); ++i)  // with a margin for the rounding errors of float, where terms cancel
      beyond += !(std::abs(got[i] - expected[i]) <= 1.001 * roundoff * std::abs(expected[i]) + 1e-6);
    CHECK(beyond == 0);
  }
  REQUIRE(in_bf16.same.size() == in_float.same.size());
  for (std::size_t a = 0; a < in_float.same.size(); ++a) {
    CAPTURE(a);
    CHECK(plait::testing::relative_difference(in_bf16.same[a], in_float.same[a]) < 1e-6);
  }
}

template <class T>
std::vector<T> zeros(int64_t n) {
  return std::vector<T>(static_cast<std::size_t>(n));
}

constexpr int64_t sizes[] = {1, 7, 16, 33, 100};

}  // namespace

TEST_CASE("packs load every bf16 and round every float like single elements") {
  std::vector<bf16> all(0x10000);
  for (std::uint32_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<std::uint16_t>(i);
  std::vector<float> wide(all.size());
  cpu device;
  kernels::cast(device, all.data(), wide.data(), static_cast<int64_t>(all.size()));
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < all.size(); ++i)
    wrong += std::bit_cast<std::uint32_t>(wide[i]) != std::bit_cast<std::uint32_t>(plait::to_float(all[i]));
  CHECK(wrong == 0);

  std::mt19937 generator(1);
  std::vector<float> any(100003);
  for (float& x : any) x = std::bit_cast<float>(static_cast<std::uint32_t>(generator()));
  const std::uint32_t edges[] = {0x7F800000u, 0xFF800000u, 0x7F800001u, 0xFFFFFFFFu, 0x7FC00000u, 0x7F7FFFFFu,
                                 0x00000001u, 0x80000000u, 0x3F808000u, 0x3F818000u, 0x3F808001u, 0x3F807FFFu};
  for (std::size_t i = 0; i < std::size(edges); ++i) any[i] = std::bit_cast<float>(edges[i]);
  std::vector<bf16> narrow(any.size());
  for (const int64_t n : {int64_t{5}, static_cast<int64_t>(any.size())}) {
    kernels::cast(device, any.data(), narrow.data(), n);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i)
      wrong += narrow[i].bits != plait::to_bf16(any[i]).bits;
  }
  CHECK(wrong == 0);
  CHECK(std::isnan(plait::to_float(narrow[2])));  // a NaN whose upper half would be infinity
}

TEST_CASE("sums and maxima of bf16 are those of the floats") {
  for (int64_t n = 0; n < 150; ++n) {
    const auto x = numbers<bf16>(n, 3);
    const auto wide = numbers<float>(n, 3);
    CHECK(simd::max_of(x.data(), n) == simd::max_of(wide.data(), n));
    const auto square = [](auto v) { return v * v; };
    CHECK(simd::sum_of<bf16>(n, square, x.data()) == simd::sum_of<float>(n, square, wide.data()));
  }
}

TEST_CASE("arithmetic on elements, biases and random numbers") {
  for (const int64_t n : sizes)
    check_like_float([n]<class T>(T, written& out) {
      cpu device;
      const auto a = numbers<T>(n, 1), b = numbers<T>(n, 2);
      auto y = zeros<T>(n);
      kernels::add(device, a.data(), b.data(), y.data(), n), out(y);
      kernels::multiply(device, a.data(), b.data(), y.data(), n), out(y);
      y = b, kernels::accumulate(device, a.data(), y.data(), n), out(y);
      y = b, kernels::axpy(device, a.data(), y.data(), n, 0.3f), out(y);
      y = b, kernels::scale(device, y.data(), n, 0.7f), out(y);
      kernels::fill(device, y.data(), n, 0.1), out(y);
      const double value = 1.0 / 3;
      kernels::fill_from(device, y.data(), n, &value), out(y);

      auto rows = numbers<T>(5 * (n + 3), 4);
      kernels::add_bias(device, a.data(), rows.data(), 5, n, n + 3), out(rows);
      const auto dy = numbers<T>(5 * (n + 3), 5);
      auto dbias = numbers<gradient_of<T>>(n, 6);
      kernels::bias_gradient(device, dy.data(), dbias.data(), 5, n, n + 3), out.exact(dbias);

      plait::box part;
      part.dims = 1, part.global[0] = 2 * n, part.local[0] = n, part.offset[0] = n / 2;
      kernels::dropout_forward(device, a.data(), y.data(), part, 1, 2, 0.3), out(y);
      kernels::dropout_backward(device, a.data(), y.data(), part, 1, 2, 0.3), out(y);
      kernels::fill_normal(device, y.data(), part, 1, 2, 0.5, 2.0), out(y);
      kernels::fill_uniform(device, y.data(), part, 1, 2, -1.0, 2.0), out(y);
    });
}

TEST_CASE("activations") {
  for (const int64_t n : sizes)
    check_like_float([n]<class T>(T, written& out) {
      cpu device;
      const auto x = numbers<T>(n, 1), dy = numbers<T>(n, 2);
      auto y = zeros<T>(n);
      kernels::activation_forward<relu>(device, x.data(), y.data(), n), out(y);
      kernels::activation_backward<relu>(device, x.data(), dy.data(), y.data(), n), out(y);
      kernels::activation_forward<silu>(device, x.data(), y.data(), n), out(y);
      kernels::activation_backward<silu>(device, x.data(), dy.data(), y.data(), n), out(y);
      kernels::activation_forward<gelu>(device, x.data(), y.data(), n), out(y);
      kernels::activation_backward<gelu>(device, x.data(), dy.data(), y.data(), n), out(y);
      kernels::activation_forward<gelu_tanh>(device, x.data(), y.data(), n), out(y);
      kernels::activation_backward<gelu_tanh>(device, x.data(), dy.data(), y.data(), n), out(y);

      const auto gate_up = numbers<T>(3 * 2 * n, 3), d = numbers<T>(3 * n, 4);
      auto product = zeros<T>(3 * n), gradient = zeros<T>(3 * 2 * n);
      kernels::swiglu_forward(device, gate_up.data(), product.data(), 3, n), out(product);
      kernels::swiglu_backward(device, gate_up.data(), d.data(), gradient.data(), 3, n), out(gradient);
    });
}

TEST_CASE("norms, with an addend and without") {
  for (const int64_t n : sizes)
    check_like_float([n]<class T>(T, written& out) {
      cpu device;
      constexpr int64_t rows = 40;  // more than one block of sums of a column
      const auto x = numbers<T>(rows * n, 1), w = numbers<T>(n, 2), bias = numbers<T>(n, 3),
                 dy = numbers<T>(rows * n, 4);
      const auto addend = numbers<T>(rows * n, 5);
      auto y = zeros<T>(rows * n), dx = y;
      auto inverse = zeros<statistic_of<T>>(rows), mean = inverse, dots = zeros<statistic_of<T>>(2 * rows);
      auto dw = numbers<gradient_of<T>>(n, 6), db = numbers<gradient_of<T>>(n, 7);
      kernels::norm_forward(device, x.data(), w.data(), nullptr, y.data(), nullptr, inverse.data(), rows, n, 1e-5);
      out(y), out.exact(inverse);
      kernels::norm_backward(device, x.data(), w.data(), dy.data(), nullptr, inverse.data(), dx.data(), dw.data(),
                             nullptr, rows, n, addend.data());
      out(dx), out.exact(dw);
      kernels::row_squares(device, x.data(), nullptr, mean.data(), rows, n, n), out.exact(mean);
      kernels::norm_statistics(device, nullptr, mean.data(), nullptr, mean.data(), rows, n, 1e-5);
      kernels::norm_apply(device, x.data(), nullptr, mean.data(), w.data(), nullptr, y.data(), rows, n), out(y);
      kernels::norm_backward_dots(device, x.data(), w.data(), dy.data(), nullptr, inverse.data(), mean.data(), rows, n);
      out.exact(mean);
      kernels::norm_backward_dx(device, x.data(), w.data(), dy.data(), nullptr, inverse.data(), mean.data(), dx.data(),
                                rows, n, n);
      kernels::norm_backward_dweight(device, x.data(), dy.data(), nullptr, inverse.data(), dw.data(), nullptr, rows, n);
      out(dx), out.exact(dw);

      kernels::norm_forward(device, x.data(), w.data(), bias.data(), y.data(), mean.data(), inverse.data(), rows, n,
                            1e-5);
      out(y), out.exact(mean), out.exact(inverse);
      kernels::norm_backward_dots(device, x.data(), w.data(), dy.data(), mean.data(), inverse.data(), dots.data(), rows,
                                  n);
      out.exact(dots);
      kernels::norm_backward(device, x.data(), w.data(), dy.data(), mean.data(), inverse.data(), dx.data(), dw.data(),
                             db.data(), rows, n, addend.data());
      out(dx), out.exact(dw), out.exact(db);
    });
}

TEST_CASE("the norm of a sum is that of the rounded sum") {
  cpu device;
  constexpr int64_t rows = 3, columns = 37, n = rows * columns;
  const auto x = numbers<bf16>(n, 1), addend = numbers<bf16>(n, 2), w = numbers<bf16>(columns, 3);
  auto sum = x, expected = x, y = x, expected_y = x;
  std::vector<float> inverse(rows);
  kernels::add(device, x.data(), addend.data(), expected.data(), n);
  kernels::norm_forward(device, expected.data(), w.data(), nullptr, expected_y.data(), nullptr, inverse.data(), rows,
                        columns, 1e-5);
  kernels::norm_forward(device, x.data(), w.data(), nullptr, y.data(), nullptr, inverse.data(), rows, columns, 1e-5,
                        addend.data(), sum.data());
  for (std::size_t i = 0; i < sum.size(); ++i) {
    CHECK(sum[i].bits == expected[i].bits);
    CHECK(y[i].bits == expected_y[i].bits);
  }
}

TEST_CASE("rotations, tables and the loss") {
  check_like_float([]<class T>(T, written& out) {
    cpu device;
    using S = statistic_of<T>;
    constexpr int64_t tokens = 6, heads = 3, head_dim = 20, stride = heads * head_dim + 4;
    auto cosine = zeros<S>(tokens / 2 * head_dim / 2), sine = cosine;
    const int64_t positions[] = {0, 5, 1000};
    kernels::rope_table(device, positions, 3, kernels::rope_inverse_frequencies(head_dim, 1e4), cosine.data(),
                        sine.data());
    const auto from = numbers<T>(tokens * stride, 1);
    auto x = from;
    kernels::rope_forward(device, x.data(), stride, x.data(), cosine.data(), sine.data(), tokens, heads, head_dim,
                          stride, 3),
        out(x);
    x = from;
    kernels::rope_backward(device, x.data(), stride, x.data(), cosine.data(), sine.data(), tokens, heads, head_dim,
                           stride, 3),
        out(x);
    kernels::rope_backward(device, from.data(), stride, x.data(), cosine.data(), sine.data(), tokens, heads, head_dim,
                           stride, 3);
    out(x);

    constexpr int64_t width = 19, vocab = 11;
    const int64_t ids[] = {3, 0, 10, 3, 7, 3};
    const auto table = numbers<T>(5 * width, 2), dy = numbers<T>(tokens * width, 3);
    auto y = zeros<T>(tokens * width);
    auto dtable = numbers<gradient_of<T>>(5 * width, 4);
    kernels::embedding_forward(device, ids, table.data(), y.data(), tokens, width, 3, 5, vocab), out(y);
    kernels::embedding_backward(device, ids, dy.data(), dtable.data(), tokens, width, 3, 5, vocab), out.exact(dtable);

    const kernels::vocabulary_range range{.columns = 16, .first_column = 0, .vocab = vocab};
    const kernels::cross_entropy_settings settings{.ignore_index = 7, .label_smoothing = 0.1, .z_loss = 1e-3};
    auto logits = numbers<T>(tokens * range.columns, 5);
    auto largest = zeros<S>(tokens), sums = largest, of_target = largest, of_all = largest, loss = largest;
    kernels::cross_entropy_max(device, logits.data(), largest.data(), tokens, range), out.exact(largest);
    kernels::cross_entropy_statistics(device, logits.data(), ids, largest.data(), sums.data(), of_target.data(),
                                      of_all.data(), tokens, range, settings);
    out.exact(sums), out.exact(of_target), out.exact(of_all);
    kernels::cross_entropy_local_statistics(device, logits.data(), ids, largest.data(), sums.data(), of_target.data(),
                                            of_all.data(), tokens, range, settings);
    out.exact(sums), out.exact(of_target), out.exact(of_all);
    kernels::cross_entropy_loss(device, ids, largest.data(), sums.data(), of_target.data(), of_all.data(), loss.data(),
                                tokens, range, settings);
    out.exact(loss);
    const std::vector<S> scale(tokens, S(0.25));
    kernels::cross_entropy_backward(device, logits.data(), ids, largest.data(), sums.data(), scale.data(),
                                    logits.data(), tokens, range, settings);
    out(logits);
  });
}

namespace {

/// Attention of a piece whose rows are slices of longer ones, in type T with outputs of type O.
template <class T, class O>
struct attended {
  std::vector<double> o, lse, dq, dk, dv;

  attended(kernels::attention_shape s, bool adds) {
    cpu device;
    const int64_t width = s.heads * s.head_dim, kv_width = s.kv_heads * s.head_dim;
    s.q_stride = width + 8, s.k_stride = kv_width + 4, s.v_stride = kv_width + 12;
    s.dq_stride = width + 2, s.dk_stride = kv_width + 6, s.dv_stride = kv_width;
    const int64_t q_tokens = s.batch * s.q_len, k_tokens = s.batch * s.k_len;
    const auto q = numbers<T>(q_tokens * s.q_stride, 1), k = numbers<T>(k_tokens * s.k_stride, 2);
    const auto v = numbers<T>(k_tokens * s.v_stride, 3), d_o = numbers<T>(q_tokens * width, 4);
    auto out = zeros<O>(q_tokens * width);
    auto sums = zeros<statistic_of<T>>(s.batch * s.heads * s.q_len), delta = sums;
    auto queries = numbers<O>(q_tokens * s.dq_stride, 5), keys = numbers<O>(k_tokens * s.dk_stride, 6);
    auto of_values = numbers<O>(k_tokens * s.dv_stride, 7);
    kernels::attention_forward(device, q.data(), k.data(), v.data(), out.data(), sums.data(), s);
    kernels::attention_backward(device, q.data(), k.data(), v.data(), out.data(), sums.data(), d_o.data(),
                                queries.data(), keys.data(), of_values.data(), s, {adds, adds});
    o = in_double(out), lse = in_double(sums), dq = in_double(queries), dk = in_double(keys), dv = in_double(of_values);
    kernels::attention_delta(device, out.data(), d_o.data(), delta.data(), s);
    auto again = numbers<O>(q_tokens * s.dq_stride, 5);  // a given delta equals the computed one
    kernels::attention_backward(device, q.data(), k.data(), v.data(), out.data(), sums.data(), d_o.data(), again.data(),
                                keys.data(), of_values.data(), s, {adds, adds}, delta.data());
    CHECK(plait::testing::relative_difference(in_double(again), dq) < 2 * roundoff);
  }
};

/// Probabilities, gradients of scores and outputs are each rounded once, by at most 2^-8 of themselves. In the
/// Euclidean norm that is less, but more where terms cancel. Measured: at most 0.6 of this bound.
template <class O>
void check_attention(const kernels::attention_shape& s, bool adds) {
  const attended<bf16, O> got(s, adds);
  const attended<float, float> expected(s, adds);
  using plait::testing::relative_difference;
  CHECK(relative_difference(got.o, expected.o) < roundoff);
  for (std::size_t i = 0; i < got.lse.size(); ++i)  // for a query that sees no key it is -infinity
    CHECK((got.lse[i] == expected.lse[i] || std::abs(got.lse[i] - expected.lse[i]) < 1e-5));
  CHECK(relative_difference(got.dq, expected.dq) < roundoff);
  CHECK(relative_difference(got.dk, expected.dk) < roundoff);
  CHECK(relative_difference(got.dv, expected.dv) < roundoff);
}

}  // namespace

TEST_CASE("attention and its gradients, rounded or in float, over blocks of queries and keys") {
  const auto shape = [](int64_t batch, int64_t q, int64_t k, int64_t heads, int64_t kv, int64_t d) {
    kernels::attention_shape s{.batch = batch, .q_len = q, .k_len = k, .heads = heads, .kv_heads = kv, .head_dim = d};
    s.scale = 1 / std::sqrt(static_cast<double>(d));
    s.q_offset = std::max<int64_t>(k - q, 0);
    return s;
  };
  std::vector<kernels::attention_shape> shapes{shape(2, 5, 5, 2, 1, 8), shape(1, 70, 70, 4, 2, 12),
                                               shape(1, 330, 330, 1, 1, 16), shape(2, 33, 300, 2, 2, 20)};
  shapes.push_back(shapes[1]), shapes.back().mask = kernels::attention_mask::window(9);
  shapes.push_back(shapes[1]), shapes.back().mask = kernels::attention_mask::full();
  shapes.push_back(shapes[1]), shapes.back().score = {.cap = 2, .alibi = true};
  shapes.push_back(shapes[1]), shapes.back().k_offset = 40;  // the first queries see no key
  for (const kernels::attention_shape& s : shapes) {
    CAPTURE(s.q_len);
    CAPTURE(s.k_len);
    CAPTURE(describe(s.mask));
    CAPTURE(s.k_offset);
    for (const bool adds : {false, true}) {
      check_attention<bf16>(s, adds);
      check_attention<float>(s, adds);
    }
  }
}
