// program: kernels
// races: *norm on CUDA equals the processor's<float>
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/cpu/norms.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "support/kernel_support.hpp"

namespace kernel_norms {  // files of one program may have helpers of the same name

using namespace plait::test;
using plait::bf16;
using plait::cuda;
using plait::gradient_of;
using plait::statistic_of;
using std::int64_t;
namespace kernels = plait::kernels;

constexpr double eps = 1e-5;

/// The results of a norm, in double; RMS norm has no mean and no dbias.
struct norm_arrays {
  values y, mean, inverse, dx, dweight, dbias;
};

struct problem {
  int64_t rows, columns;
  std::size_t lead;  ///< elements between an aligned address and the start of each array
};

constexpr problem problems[] = {{1, 1, 0},    {5, 7, 0},    {3, 64, 0},  {3, 64, 1},   {700, 64, 0},
                                {70, 37, 0},  {9, 576, 0},  {9, 576, 1}, {5, 2048, 0}, {5, 2048, 1},
                                {2, 8200, 0}, {2, 8200, 1}, {9, 1030, 0}};

values sum_of(const values& a, const values& b) {
  values sum = a;
  for (std::size_t i = 0; i < b.size(); ++i) sum[i] += b[i];
  return sum;
}

values minus(const values& a, const values& b) {
  values rest = a;
  for (std::size_t i = 0; i < b.size(); ++i) rest[i] -= b[i];
  return rest;
}

/// RMS norm, or with `centred` layer norm: inputs that are exact in T, and the cpu's results. dx includes `addend`.
template <class T>
struct norm_case {
  using S = statistic_of<T>;
  using G = gradient_of<T>;

  problem p;
  bool centred;
  values x, w = random_values<T>(p.columns, 2), b = random_values<T>(p.columns, 3),
            dy = random_values<T>(p.rows * p.columns, 4), addend = random_values<T>(p.rows * p.columns, 5);
  norm_arrays expected{values(x.size()), values(rows()),   values(rows()),
                       values(x.size()), values(w.size()), values(w.size())};
  cuda device{};

  norm_case(const problem& of, bool is_centred)
      : p(of), centred(is_centred), x(random_values<T>(p.rows * p.columns, 1, 2.0)) {
    for (double& v : x) v = widened(typed<T>(v + 1));  // a mean that is not near 0
    plait::cpu host;
    double* const mean = centred ? expected.mean.data() : nullptr;
    kernels::norm_forward(host, x.data(), w.data(), b.data(), expected.y.data(), mean, expected.inverse.data(), p.rows,
                          p.columns, eps);
    kernels::norm_backward(host, x.data(), w.data(), dy.data(), mean, expected.inverse.data(), expected.dx.data(),
                           expected.dweight.data(), centred ? expected.dbias.data() : nullptr, p.rows, p.columns,
                           addend.data());
  }
  std::size_t rows() const { return static_cast<std::size_t>(p.rows); }
  template <class N>
  auto if_centred(number_array<N>& array) {
    return centred ? array.data() : nullptr;
  }
  number_array<T> on_device(const values& from) { return {device, from, p.lead}; }

  void check() {
    CAPTURE(sizeof(T));
    CAPTURE(p.rows);
    CAPTURE(p.columns);
    CAPTURE(p.lead);
    auto x_ = on_device(x), w_ = on_device(w), b_ = on_device(b), y = on_device(x);
    number_array<S> mean(device, p.rows), inverse(device, p.rows);
    const auto forward = [&](const T* from, const T* added, T* sum, T* to) {
      kernels::norm_forward(device, from, w_.view(), if_centred(b_), to, if_centred(mean), inverse.data(), p.rows,
                            p.columns, eps, added, sum);
    };
    forward(x_.view(), nullptr, nullptr, y.data());
    CHECK(difference(y.read(), expected.y) < tolerance<T>);
    CHECK(difference(mean.read(), expected.mean) < tolerance<S>);
    CHECK(difference(inverse.read(), expected.inverse) < tolerance<S>);
    check_sum(y, forward);
    forward(x_.view(), nullptr, nullptr, y.data());
    check_backward(x_, w_, mean, inverse);
  }

  /// A norm of x + addend is bitwise equal to the norm of a sum that was computed before. The sum may replace x.
  template <class Norm>
  void check_sum(number_array<T>& y, const Norm& norm) {
    auto x_ = on_device(x), addend_ = on_device(addend), sum = on_device(x), whole = on_device(x);
    kernels::accumulate(device, addend_.view(), whole.data(), p.rows * p.columns);
    norm(whole.view(), nullptr, nullptr, y.data());
    const auto normalised = y.raw();
    for (number_array<T>* to : {&sum, &x_}) {
      norm(x_.view(), addend_.view(), to->data(), y.data());
      CHECK(plait::test::same_bits(y.raw(), normalised));
      CHECK(plait::test::same_bits(to->raw(), whole.raw()));
    }
  }

  void check_backward(number_array<T>& x_, number_array<T>& w_, number_array<S>& mean, number_array<S>& inverse) {
    auto dy_ = on_device(dy), addend_ = on_device(addend), dx = on_device(x);
    const values ones(w.size(), 1.0), weights = sum_of(expected.dweight, ones),
                                      biases = centred ? sum_of(expected.dbias, ones) : ones;
    number_array<G> dw(device, ones), db(device, ones), again(device, ones), bias_again(device, ones),
        alone(device, ones), bias_alone(device, ones);
    const auto backward = [&](T* to, G* dweight, G* dbias, const T* added) {
      kernels::norm_backward(device, x_.view(), w_.view(), dy_.view(), if_centred(mean), inverse.view(), to, dweight,
                             dbias, p.rows, p.columns, added);
    };
    backward(dx.data(), dw.data(), if_centred(db), addend_.view());
    CHECK(difference(dx.read(), expected.dx) < tolerance<T>);
    CHECK(difference(dw.read(), weights) < tolerance<G>);
    CHECK(difference(db.read(), biases) < tolerance<G>);
    const auto first = dx.raw();
    backward(dx.data(), again.data(), if_centred(bias_again), addend_.view());
    CHECK(plait::test::same_bits(first, dx.raw()));
    CHECK(plait::test::same_bits(dw.raw(), again.raw()));
    CHECK(plait::test::same_bits(db.raw(), bias_again.raw()));
    backward(nullptr, alone.data(), if_centred(bias_alone), nullptr);
    CHECK(difference(alone.read(), weights) < tolerance<G>);
    CHECK(difference(bias_alone.read(), biases) < tolerance<G>);
    kernels::norm_backward_dweight(device, x_.view(), dy_.view(), if_centred(mean), inverse.view(), alone.data(),
                                   nullptr, p.rows, p.columns);
    CHECK(difference(alone.read(), sum_of(expected.dweight, weights)) < tolerance<G>);
    backward(dy_.data(), nullptr, nullptr, nullptr);  // in place of dy
    CHECK(difference(dy_.read(), minus(expected.dx, addend)) < 2 * tolerance<T>);
  }

  /// Rows split over two ranks on one device; the host does the reductions.
  void check_split() {
    CAPTURE(sizeof(T));
    CAPTURE(p.columns);
    const int64_t cut = p.columns / 3;
    const auto parts = [&](auto f) {
      for (const auto& [begin, n] : {std::pair{int64_t{0}, cut}, std::pair{cut, p.columns - cut}})
        f(n, [this, first = begin, count = n](const values& of) {
          return kernel_support::columns_of(of, p.columns, first, count);
        });
    };
    values sums(rows()), squares(rows()), dots(centred ? 2 * rows() : rows());
    number_array<S> mine(device, static_cast<int64_t>(dots.size()));
    const auto first_rows = [&] {
      const values all = mine.read();
      return values(all.begin(), all.begin() + p.rows);
    };
    if (centred)
      parts([&](int64_t count, auto part) {
        kernels::row_sums(device, on_device(part(x)).view(), mine.data(), p.rows, count);
        sums = sum_of(sums, first_rows());
      });
    number_array<S> mean(device, sums), inverse(device, p.rows);
    parts([&](int64_t count, auto part) {
      kernels::row_squares(device, on_device(part(x)).view(), if_centred(mean), mine.data(), p.rows, count, p.columns);
      squares = sum_of(squares, first_rows());
    });
    number_array<S> reduced(device, squares);
    kernels::norm_statistics(device, if_centred(mean), reduced.view(), if_centred(mean), inverse.data(), p.rows,
                             p.columns, eps);
    CHECK(difference(mean.read(), expected.mean) < tolerance<S>);
    CHECK(difference(inverse.read(), expected.inverse) < tolerance<S>);
    parts([&](int64_t count, auto part) {
      auto x_ = on_device(part(x)), w_ = on_device(part(w)), b_ = on_device(part(b)), dy_ = on_device(part(dy));
      number_array<T> y(device, p.rows * count);
      kernels::norm_apply(device, x_.view(), if_centred(mean), inverse.view(), w_.view(), if_centred(b_), y.data(),
                          p.rows, count);
      CHECK(difference(y.read(), part(expected.y)) < tolerance<T>);
      kernels::norm_backward_dots(device, x_.view(), w_.view(), dy_.view(), if_centred(mean), inverse.view(),
                                  mine.data(), p.rows, count);
      dots = sum_of(dots, mine.read());
    });
    check_split_backward(parts, dots, mean, inverse);
  }
  template <class Parts>
  void check_split_backward(const Parts& parts, const values& dots, number_array<S>& mean, number_array<S>& inverse) {
    number_array<S> dot(device, dots);
    parts([&](int64_t count, auto part) {
      auto x_ = on_device(part(x)), w_ = on_device(part(w)), dy_ = on_device(part(dy)),
           addend_ = on_device(part(addend));
      number_array<T> dx(device, p.rows * count);
      number_array<G> dw(device, count);
      const auto backward = [&](T* to, const T* added) {
        kernels::norm_backward_dx(device, x_.view(), w_.view(), dy_.view(), if_centred(mean), inverse.view(),
                                  dot.view(), to, p.rows, count, p.columns, added);
      };
      backward(dx.data(), nullptr);
      kernels::norm_backward_dweight(device, x_.view(), dy_.view(), if_centred(mean), inverse.view(), dw.data(),
                                     nullptr, p.rows, count);
      CHECK(difference(dw.read(), part(expected.dweight)) < tolerance<G>);
      backward(dy_.data(), addend_.view());
      CHECK(difference(dy_.read(), part(expected.dx)) < tolerance<T>);
      CHECK(difference(sum_of(dx.read(), addend_.read()), dy_.read()) < 2 * tolerance<T>);
    });
  }
};

TEST_CASE_TEMPLATE("rms norm on CUDA equals the processor's", T, float, double, bf16) {
  for (const problem& p : problems) norm_case<T>(p, false).check();
}

TEST_CASE_TEMPLATE("layer norm on CUDA equals the processor's", T, float, double, bf16) {
  for (const problem& p : problems) {
    if (p.columns > 1) norm_case<T>(p, true).check();  // with one column the result is only rounding error
  }
}

TEST_CASE_TEMPLATE("norms on CUDA of rows over two ranks", T, float, double, bf16) {
  for (const problem& p : {problem{5, 7, 0}, problem{6, 192, 0}, problem{6, 192, 1}, problem{3, 2400, 0}})
    for (const bool centred : {false, true}) norm_case<T>(p, centred).check_split();
}

TEST_CASE("norms on CUDA of no rows do nothing") {
  cuda device;
  float* const none = nullptr;
  const float* const nothing = nullptr;
  number_array<float> dw(device, values{1, 2, 3, 4});
  kernels::norm_forward(device, nothing, nothing, nullptr, none, nullptr, none, 0, 4, eps);
  kernels::norm_backward(device, nothing, nothing, nothing, nullptr, nothing, none, dw.data(), nullptr, 0, 4);
  kernels::norm_backward_dweight(device, nothing, nothing, nullptr, nothing, dw.data(), nullptr, 0, 4);
  kernels::norm_forward(device, nothing, nothing, nothing, none, none, none, 0, 4, eps);
  kernels::row_sums(device, nothing, none, 0, 4);
  device.synchronize();
  CHECK(dw.read() == values{1, 2, 3, 4});
}

}  // namespace kernel_norms
