// program: kernels
// races: *norm on CUDA equals the processor's<float>
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/cpu/norms.hpp"
#include "plait/kernels/cuda/kernels.hpp"

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

norm_arrays sized(std::size_t n, std::size_t columns) {
  const std::size_t rows = n / columns;
  return {values(n), values(rows), values(rows), values(n), values(columns), values(columns)};
}

/// The cpu's norms. dx includes `addend`.
norm_arrays rms_norm_on_cpu(const values& x, const values& weight, const values& dy, const values& addend) {
  plait::cpu device;
  norm_arrays made = sized(x.size(), weight.size());
  const auto columns = static_cast<int64_t>(weight.size());
  const auto rows = static_cast<int64_t>(made.inverse.size());
  kernels::norm_forward(device, x.data(), weight.data(), nullptr, made.y.data(), nullptr, made.inverse.data(), rows,
                        columns, eps);
  kernels::norm_backward(device, x.data(), weight.data(), dy.data(), nullptr, made.inverse.data(), made.dx.data(),
                         made.dweight.data(), nullptr, rows, columns, addend.data());
  return made;
}

norm_arrays layer_norm_on_cpu(const values& x, const values& weight, const values& bias, const values& dy,
                              const values& addend) {
  plait::cpu device;
  norm_arrays made = sized(x.size(), weight.size());
  const auto columns = static_cast<int64_t>(weight.size());
  const auto rows = static_cast<int64_t>(made.inverse.size());
  kernels::norm_forward(device, x.data(), weight.data(), bias.data(), made.y.data(), made.mean.data(),
                        made.inverse.data(), rows, columns, eps);
  kernels::norm_backward(device, x.data(), weight.data(), dy.data(), made.mean.data(), made.inverse.data(),
                         made.dx.data(), made.dweight.data(), made.dbias.data(), rows, columns, addend.data());
  return made;
}

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

/// The inputs of a norm, exact in T.
template <class T>
struct inputs {
  values x, w, b, dy, addend;
  explicit inputs(const problem& p)
      : x(random_values<T>(p.rows * p.columns, 1, 2.0)),
        w(random_values<T>(p.columns, 2)),
        b(random_values<T>(p.columns, 3)),
        dy(random_values<T>(p.rows * p.columns, 4)),
        addend(random_values<T>(p.rows * p.columns, 5)) {
    for (double& v : x) v = widened(typed<T>(v + 1));  // a mean that is not near 0
  }
};

/// A norm of x + addend is bitwise equal to the norm of a sum that was computed before. The sum may replace x.
template <class T, class Norm>
void check_sum(cuda& device, const problem& p, const inputs<T>& in, number_array<T>& y, const Norm& norm) {
  number_array<T> x(device, in.x, p.lead), addend(device, in.addend, p.lead), sum(device, in.x, p.lead);
  number_array<T> expected(device, in.x, p.lead);
  kernels::accumulate(device, addend.view(), expected.data(), p.rows * p.columns);
  norm(expected.view(), nullptr, nullptr, y.data());
  const auto normalised = y.raw();
  norm(x.view(), addend.view(), sum.data(), y.data());
  CHECK(plait::test::same_bits(y.raw(), normalised));
  CHECK(plait::test::same_bits(sum.raw(), expected.raw()));
  norm(x.view(), addend.view(), x.data(), y.data());
  CHECK(plait::test::same_bits(y.raw(), normalised));
  CHECK(plait::test::same_bits(x.raw(), expected.raw()));
}

template <class T>
void check_rms(const problem& p) {
  using S = statistic_of<T>;
  using G = gradient_of<T>;
  CAPTURE(sizeof(T));
  CAPTURE(p.rows);
  CAPTURE(p.columns);
  CAPTURE(p.lead);
  const inputs<T> in(p);
  const norm_arrays expected = rms_norm_on_cpu(in.x, in.w, in.dy, in.addend);
  cuda device;
  number_array<T> x(device, in.x, p.lead), w(device, in.w, p.lead), dy(device, in.dy, p.lead);
  number_array<T> addend(device, in.addend, p.lead), y(device, in.x, p.lead), dx(device, in.x, p.lead);
  number_array<S> inverse(device, p.rows);
  const values ones(in.w.size(), 1.0);
  number_array<G> dw(device, ones), again(device, ones), alone(device, ones);

  kernels::norm_forward(device, x.view(), w.view(), nullptr, y.data(), nullptr, inverse.data(), p.rows, p.columns, eps);
  CHECK(difference(y.read(), expected.y) < tolerance<T>);
  CHECK(difference(inverse.read(), expected.inverse) < tolerance<S>);
  check_sum<T>(device, p, in, y, [&](const T* from, const T* added, T* sum, T* to) {
    kernels::norm_forward(device, from, w.view(), nullptr, to, nullptr, inverse.data(), p.rows, p.columns, eps, added,
                          sum);
  });
  kernels::norm_forward(device, x.view(), w.view(), nullptr, y.data(), nullptr, inverse.data(), p.rows, p.columns, eps);
  kernels::norm_backward(device, x.view(), w.view(), dy.view(), nullptr, inverse.view(), dx.data(), dw.data(), nullptr,
                         p.rows, p.columns, addend.view());
  CHECK(difference(dx.read(), expected.dx) < tolerance<T>);
  CHECK(difference(dw.read(), sum_of(expected.dweight, ones)) < tolerance<G>);

  const auto first = dx.raw();
  kernels::norm_backward(device, x.view(), w.view(), dy.view(), nullptr, inverse.view(), dx.data(), again.data(),
                         nullptr, p.rows, p.columns, addend.view());
  CHECK(plait::test::same_bits(first, dx.raw()));
  CHECK(plait::test::same_bits(dw.raw(), again.raw()));
  kernels::norm_backward(device, x.view(), w.view(), dy.view(), nullptr, inverse.view(), static_cast<T*>(nullptr),
                         alone.data(), nullptr, p.rows, p.columns);
  CHECK(difference(alone.read(), sum_of(expected.dweight, ones)) < tolerance<G>);
  kernels::norm_backward(device, x.view(), w.view(), dy.view(), nullptr, inverse.view(), dy.data(),
                         static_cast<G*>(nullptr), nullptr, p.rows, p.columns);  // in place of dy
  CHECK(difference(dy.read(), minus(expected.dx, in.addend)) < 2 * tolerance<T>);
}

/// Rows split over two ranks on one device; the host does the reductions.
template <class T>
void check_split_rms(const problem& p) {
  using S = statistic_of<T>;
  using G = gradient_of<T>;
  CAPTURE(sizeof(T));
  CAPTURE(p.columns);
  const inputs<T> in(p);
  const norm_arrays expected = rms_norm_on_cpu(in.x, in.w, in.dy, in.addend);
  cuda device;
  const int64_t cut = p.columns / 3;
  const auto parts = [&](auto f) {
    for (const auto& [first, count] : {std::pair{int64_t{0}, cut}, std::pair{cut, p.columns - cut}})
      f(first, count, number_array<T>(device, part_of(in.x, p.columns, first, count), p.lead),
        number_array<T>(device, part_of(in.w, p.columns, first, count), p.lead),
        number_array<T>(device, part_of(in.dy, p.columns, first, count), p.lead));
  };
  values squares(static_cast<std::size_t>(p.rows)), dots = squares;
  number_array<S> mine(device, p.rows);
  parts([&](int64_t, int64_t count, auto x, auto, auto) {
    kernels::row_squares(device, x.view(), nullptr, mine.data(), p.rows, count, count);
    squares = sum_of(squares, mine.read());
  });
  number_array<S> reduced(device, squares), inverse(device, p.rows);
  kernels::norm_statistics(device, nullptr, reduced.view(), nullptr, inverse.data(), p.rows, p.columns, eps);
  CHECK(difference(inverse.read(), expected.inverse) < tolerance<S>);
  parts([&](int64_t first, int64_t count, auto x, auto w, auto dy) {
    number_array<T> y(device, p.rows * count);
    kernels::norm_apply(device, x.view(), nullptr, inverse.view(), w.view(), nullptr, y.data(), p.rows, count);
    CHECK(difference(y.read(), part_of(expected.y, p.columns, first, count)) < tolerance<T>);
    kernels::norm_backward_dots(device, x.view(), w.view(), dy.view(), nullptr, inverse.view(), mine.data(), p.rows,
                                count);
    dots = sum_of(dots, mine.read());
  });
  number_array<S> dot(device, dots);
  parts([&](int64_t first, int64_t count, auto x, auto w, auto dy) {
    number_array<T> addend(device, part_of(in.addend, p.columns, first, count), p.lead), dx(device, p.rows * count);
    number_array<G> dw(device, count);
    kernels::norm_backward_dx(device, x.view(), w.view(), dy.view(), nullptr, inverse.view(), dot.view(), dx.data(),
                              p.rows, count, p.columns);
    kernels::norm_backward_dweight(device, x.view(), dy.view(), nullptr, inverse.view(), dw.data(), nullptr, p.rows,
                                   count);
    CHECK(difference(dw.read(), part_of(expected.dweight, p.columns, first, count)) < tolerance<G>);
    kernels::norm_backward_dx(device, x.view(), w.view(), dy.view(), nullptr, inverse.view(), dot.view(), dy.data(),
                              p.rows, count, p.columns, addend.view());
    CHECK(difference(dy.read(), part_of(expected.dx, p.columns, first, count)) < tolerance<T>);
    CHECK(difference(sum_of(dx.read(), addend.read()), dy.read()) < 2 * tolerance<T>);
  });
}

template <class T>
void check_layer(const problem& p) {
  using S = statistic_of<T>;
  using G = gradient_of<T>;
  CAPTURE(sizeof(T));
  CAPTURE(p.rows);
  CAPTURE(p.columns);
  CAPTURE(p.lead);
  const inputs<T> in(p);
  const norm_arrays expected = layer_norm_on_cpu(in.x, in.w, in.b, in.dy, in.addend);
  cuda device;
  number_array<T> x(device, in.x, p.lead), w(device, in.w, p.lead), b(device, in.b, p.lead);
  number_array<T> dy(device, in.dy, p.lead), addend(device, in.addend, p.lead);
  number_array<T> y(device, in.x, p.lead), dx(device, in.x, p.lead);
  number_array<S> mean(device, p.rows), inverse(device, p.rows);
  const values ones(in.w.size(), 1.0);
  number_array<G> dw(device, ones), db(device, ones), alone(device, ones), bias_alone(device, ones);

  kernels::norm_forward(device, x.view(), w.view(), b.view(), y.data(), mean.data(), inverse.data(), p.rows, p.columns,
                        eps);
  CHECK(difference(y.read(), expected.y) < tolerance<T>);
  CHECK(difference(mean.read(), expected.mean) < tolerance<S>);
  CHECK(difference(inverse.read(), expected.inverse) < tolerance<S>);
  check_sum<T>(device, p, in, y, [&](const T* from, const T* added, T* sum, T* to) {
    kernels::norm_forward(device, from, w.view(), b.view(), to, mean.data(), inverse.data(), p.rows, p.columns, eps,
                          added, sum);
  });
  kernels::norm_forward(device, x.view(), w.view(), b.view(), y.data(), mean.data(), inverse.data(), p.rows, p.columns,
                        eps);
  kernels::norm_backward(device, x.view(), w.view(), dy.view(), mean.view(), inverse.view(), dx.data(), dw.data(),
                         db.data(), p.rows, p.columns, addend.view());
  CHECK(difference(dx.read(), expected.dx) < tolerance<T>);
  CHECK(difference(dw.read(), sum_of(expected.dweight, ones)) < tolerance<G>);
  CHECK(difference(db.read(), sum_of(expected.dbias, ones)) < tolerance<G>);
  kernels::norm_backward(device, x.view(), w.view(), dy.view(), mean.view(), inverse.view(), static_cast<T*>(nullptr),
                         alone.data(), bias_alone.data(), p.rows, p.columns);
  CHECK(difference(alone.read(), sum_of(expected.dweight, ones)) < tolerance<G>);
  CHECK(difference(bias_alone.read(), sum_of(expected.dbias, ones)) < tolerance<G>);
  kernels::norm_backward_dweight(device, x.view(), dy.view(), mean.view(), inverse.view(), alone.data(),
                                 static_cast<G*>(nullptr), p.rows, p.columns);
  CHECK(difference(alone.read(), sum_of(sum_of(expected.dweight, expected.dweight), ones)) < tolerance<G>);
  kernels::norm_backward(device, x.view(), w.view(), dy.view(), mean.view(), inverse.view(), dy.data(),
                         static_cast<G*>(nullptr), static_cast<G*>(nullptr), p.rows, p.columns);  // in place of dy
  CHECK(difference(dy.read(), minus(expected.dx, in.addend)) < 2 * tolerance<T>);
}

template <class T>
void check_split_layer(const problem& p) {
  using S = statistic_of<T>;
  CAPTURE(sizeof(T));
  CAPTURE(p.columns);
  const inputs<T> in(p);
  const norm_arrays expected = layer_norm_on_cpu(in.x, in.w, in.b, in.dy, in.addend);
  cuda device;
  const int64_t cut = p.columns / 3;
  const auto parts = [&](auto f) {
    for (const auto& [first, count] : {std::pair{int64_t{0}, cut}, std::pair{cut, p.columns - cut}})
      f(first, count, number_array<T>(device, part_of(in.x, p.columns, first, count), p.lead),
        number_array<T>(device, part_of(in.w, p.columns, first, count), p.lead),
        number_array<T>(device, part_of(in.dy, p.columns, first, count), p.lead));
  };
  const auto rows = static_cast<std::size_t>(p.rows);
  values sums(rows), squares(rows), dots(2 * rows);
  number_array<S> mine(device, 2 * p.rows);
  const auto first_rows = [&] {
    const values all = mine.read();
    return values(all.begin(), all.begin() + p.rows);
  };
  parts([&](int64_t, int64_t count, auto x, auto, auto) {
    kernels::row_sums(device, x.view(), mine.data(), p.rows, count);
    sums = sum_of(sums, first_rows());
  });
  number_array<S> reduced(device, sums), inverse(device, p.rows);
  parts([&](int64_t, int64_t count, auto x, auto, auto) {
    kernels::row_squares(device, x.view(), reduced.view(), mine.data(), p.rows, count, p.columns);
    squares = sum_of(squares, first_rows());
  });
  number_array<S> centred(device, squares);
  kernels::norm_statistics(device, reduced.view(), centred.view(), reduced.data(), inverse.data(), p.rows, p.columns,
                           eps);
  auto& mean = reduced;
  CHECK(difference(mean.read(), expected.mean) < tolerance<S>);
  CHECK(difference(inverse.read(), expected.inverse) < tolerance<S>);
  parts([&](int64_t first, int64_t count, auto x, auto w, auto dy) {
    number_array<T> b(device, part_of(in.b, p.columns, first, count), p.lead), y(device, p.rows * count);
    kernels::norm_apply(device, x.view(), mean.view(), inverse.view(), w.view(), b.view(), y.data(), p.rows, count);
    CHECK(difference(y.read(), part_of(expected.y, p.columns, first, count)) < tolerance<T>);
    kernels::norm_backward_dots(device, x.view(), w.view(), dy.view(), mean.view(), inverse.view(), mine.data(), p.rows,
                                count);
    dots = sum_of(dots, mine.read());
  });
  number_array<S> dot(device, dots);
  parts([&](int64_t first, int64_t count, auto x, auto w, auto dy) {
    number_array<T> addend(device, part_of(in.addend, p.columns, first, count), p.lead);
    kernels::norm_backward_dx(device, x.view(), w.view(), dy.view(), mean.view(), inverse.view(), dot.view(), dy.data(),
                              p.rows, count, p.columns, addend.view());
    CHECK(difference(dy.read(), part_of(expected.dx, p.columns, first, count)) < tolerance<T>);
  });
}

TEST_CASE_TEMPLATE("rms norm on CUDA equals the processor's", T, float, double, bf16) {
  for (const problem& p : problems) check_rms<T>(p);
}

TEST_CASE_TEMPLATE("rms norm on CUDA of rows over two ranks", T, float, double, bf16) {
  for (const problem& p : {problem{5, 7, 0}, problem{6, 192, 0}, problem{6, 192, 1}, problem{3, 2400, 0}})
    check_split_rms<T>(p);
}

TEST_CASE_TEMPLATE("layer norm on CUDA equals the processor's", T, float, double, bf16) {
  for (const problem& p : problems) {
    if (p.columns > 1) check_layer<T>(p);  // with one column the result is only rounding error
  }
}

TEST_CASE_TEMPLATE("layer norm on CUDA of rows over two ranks", T, float, double, bf16) {
  for (const problem& p : {problem{5, 7, 0}, problem{6, 192, 0}, problem{6, 192, 1}, problem{3, 2400, 0}})
    check_split_layer<T>(p);
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
