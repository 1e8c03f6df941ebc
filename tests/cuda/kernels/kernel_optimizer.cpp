// program: kernels
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/cpu/optimizer.hpp"
#include "plait/kernels/cpu/reductions.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/kernels/settings.hpp"
#include "plait/kernels/sums.hpp"

namespace kernel_optimizer {  // files of one program may have helpers of the same name

using namespace plait::test;
using plait::bf16;
using plait::cuda;
using plait::kernels::adamw_scalars;
using plait::kernels::adamw_settings;
using plait::kernels::adamw_tensor;
using plait::kernels::clip_numbers;
using plait::kernels::const_elements;
using std::int64_t;

/// The numbers of one tensor between steps.
struct adamw_numbers {
  values master, m, v;
};

/// The cpu's step.
void adamw_on_cpu(adamw_numbers& tensor, const values& gradient, double weight_decay, const adamw_settings& settings,
                  const adamw_scalars& scalars) {
  plait::cpu device;
  const adamw_tensor<double, double, double> one{
      tensor.master.data(), gradient.data(), tensor.m.data(),
      tensor.v.data(),      nullptr,         static_cast<int64_t>(gradient.size()),
      weight_decay};
  plait::kernels::adamw_update(device, std::span(&one, 1), settings, &scalars);
}

/// The cpu's factors of clipping.
clip_numbers clip_on_cpu(double squares, double limit) {
  plait::cpu device;
  clip_numbers made{-1, -1, -1};
  plait::kernels::clip(device, &squares, limit, &made);
  return made;
}

/// More tensors than one launch takes, with sizes near those of a pack and of a chunk; some do not start on a boundary.
std::vector<int64_t> tensor_sizes() {
  std::vector<int64_t> sizes = {0, 1, 3, 4, 5, 255, 1024, 8191, 8192, 8193, 16384, 16385, 40003, 0};
  for (int i = 0; i < 150; ++i) sizes.push_back(i % 11);
  return sizes;
}

template <class M, class G, class W>
struct tensor_on_device {
  number_array<M> master, m, v;
  number_array<G> gradient;
  number_array<W> weight;
  tensor_on_device(cuda& device, const values& start, std::size_t lead)
      : master(device, start, lead),
        m(device, values(start.size()), lead),
        v(device, values(start.size()), lead),
        gradient(device, values(start.size()), lead),
        weight(device, values(start.size()), lead) {}
};

template <class M, class G, class W>
std::vector<values> train(cuda& device, const adamw_settings& settings, bool compare) {
  const std::vector<int64_t> sizes = tensor_sizes();
  std::vector<std::unique_ptr<tensor_on_device<M, G, W>>> tensors;
  std::vector<adamw_numbers> expected;
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    const auto n = static_cast<std::size_t>(sizes[t]);
    expected.push_back({random_values<M>(sizes[t], static_cast<unsigned>(t)), values(n), values(n)});
    tensors.push_back(std::make_unique<tensor_on_device<M, G, W>>(device, expected.back().master, t % 4 == 3 ? 1 : 0));
  }
  for (int64_t step = 1; step <= 2; ++step) {
    const adamw_scalars scalars = plait::kernels::adamw_scalars_of(settings, 0.01, step, 0.5);
    device_array<adamw_scalars> numbers(device, {scalars});
    std::vector<adamw_tensor<M, G, W>> table;
    for (std::size_t t = 0; t < sizes.size(); ++t) {
      auto& x = *tensors[t];
      const values gradient = random_values<G>(sizes[t], static_cast<unsigned>(1000 * step + static_cast<int64_t>(t)));
      x.gradient = number_array<G>(device, gradient, t % 4 == 3 ? 1 : 0);
      const double decay = t % 2 == 0 ? 0.1 : 0.0;
      table.push_back({x.master.data(), x.gradient.data(), x.m.data(), x.v.data(),
                       t % 3 == 2 ? nullptr : x.weight.data(), sizes[t], decay});
      adamw_on_cpu(expected[t], gradient, decay, settings, scalars);
    }
    plait::kernels::adamw_update(device, std::span<const adamw_tensor<M, G, W>>(table), settings, numbers.data());
  }
  std::vector<values> made;
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    auto& x = *tensors[t];
    made.push_back(x.master.read());
    if (!compare) continue;
    CAPTURE(sizes[t]);
    CHECK(difference(made.back(), expected[t].master) < tolerance<M>);
    CHECK(difference(x.m.read(), expected[t].m) < tolerance<M>);
    CHECK(difference(x.v.read(), expected[t].v) < tolerance<M>);
    values rounded(made.back());
    for (double& value : rounded) value = t % 3 == 2 ? 0.0 : widened(typed<W>(value));
    CHECK(x.weight.read() == rounded);
  }
  return made;
}

/// Tensors of the sizes above that start anywhere in a block, like the columns of a matrix split in two. Their moments
/// have type S: bf16, or codes in blocks. Moments and, for bf16 M, values are rounded stochastically.
template <class M, class G, class S>
void compare_rounded(cuda& device) {
  using tensor = plait::kernels::adamw_rounded_tensor<M, G, M, S>;
  struct on_host {
    std::vector<M> master;
    std::vector<S> m, v;
    std::vector<std::uint8_t> m_scales, v_scales;
  };
  struct on_device {
    device_array<M> master;
    device_array<G> gradient;
    device_array<S> m, v;
    device_array<std::uint8_t> m_scales, v_scales;
  };
  const adamw_settings settings{0.9, 0.95, 1e-8};
  const std::vector<int64_t> sizes = tensor_sizes();
  plait::cpu host;
  std::vector<on_host> expected;
  std::vector<std::unique_ptr<on_device>> tensors;
  std::vector<tensor> table;
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    const auto n = static_cast<std::size_t>(sizes[t]);
    const auto begin = static_cast<int64_t>(t * 100 % 256);
    on_host x;
    for (const double value : random_values<M>(sizes[t], static_cast<unsigned>(t))) x.master.push_back(typed<M>(value));
    x.m.resize(n), x.v.resize(n), x.m_scales.resize(n / 256 + 2), x.v_scales.resize(n / 256 + 2);
    tensors.push_back(std::make_unique<on_device>(on_device{{device, x.master},
                                                            {device, std::vector<G>(n)},
                                                            {device, x.m},
                                                            {device, x.v},
                                                            {device, x.m_scales},
                                                            {device, x.v_scales}}));
    on_device& d = *tensors.back();
    const int64_t columns = t % 2 == 0 ? 1 : 3;
    const plait::box part{2, {sizes[t] / columns + 1, 2 * columns}, {0, columns}, {sizes[t] / columns + 1, columns}};
    table.push_back({d.master.data(),
                     nullptr,
                     d.m.data(),
                     d.v.data(),
                     d.m_scales.data(),
                     d.v_scales.data(),
                     nullptr,
                     sizes[t],
                     begin,
                     t % 2 == 0 ? 0.1 : 0.0,
                     {plait::kernels::run_map::of(part), 0, 1000 + t}});
    expected.push_back(std::move(x));
  }
  for (int64_t step = 1; step <= 2; ++step) {
    const adamw_scalars scalars = plait::kernels::adamw_scalars_of(settings, 0.01, step, 0.5, 3);
    device_array<adamw_scalars> numbers(device, {scalars});
    for (std::size_t t = 0; t < sizes.size(); ++t) {
      std::vector<G> gradient;
      for (const double value :
           random_values<G>(sizes[t], static_cast<unsigned>(1000 * step + static_cast<int64_t>(t))))
        gradient.push_back(typed<G>(value));
      tensors[t]->gradient = device_array<G>(device, gradient);
      table[t].gradient = tensors[t]->gradient.data();
      tensor one = table[t];
      on_host& x = expected[t];
      one.master = x.master.data(), one.gradient = gradient.data(), one.m = x.m.data(), one.v = x.v.data();
      one.m_scales = x.m_scales.data(), one.v_scales = x.v_scales.data();
      plait::kernels::adamw_update(host, std::span<const tensor>(&one, 1), settings, &scalars);
    }
    plait::kernels::adamw_update(device, std::span<const tensor>(table), settings, numbers.data());
  }
  // Both use the same random bits, so results differ only where the last digit differs before rounding.
  std::size_t elements = 0, differing = 0;
  const auto count = [&](const auto& got, const auto& want) {
    REQUIRE(got.size() == want.size());
    elements += got.size();
    for (std::size_t i = 0; i < got.size(); ++i) differing += std::memcmp(&got[i], &want[i], sizeof(got[i])) != 0;
  };
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    CAPTURE(sizes[t]);
    count(tensors[t]->m.read(), expected[t].m);
    count(tensors[t]->v.read(), expected[t].v);
    count(tensors[t]->m_scales.read(), expected[t].m_scales);
    count(tensors[t]->v_scales.read(), expected[t].v_scales);
    const auto master = tensors[t]->master.read();
    for (std::size_t i = 0; i < master.size(); ++i) {
      const double want = plait::widened(expected[t].master[i]), error = plait::widened(master[i]) - want;
      CHECK(std::abs(error) <= 5e-3 + 0.008 * std::abs(want) * std::is_same_v<M, bf16>);  // a step is 0.01
      differing += std::abs(error) > 1e-5;
    }
    elements += master.size();
  }
  CHECK(elements > 100000);
  CHECK(differing < elements / 1000);
}

clip_numbers clip_on_gpu(cuda& device, double squares, double limit) {
  number_array<double> from(device, values{squares});
  device_array<clip_numbers> out(device, {{-1, -1, -1}});
  plait::kernels::clip(device, from.data(), limit, out.data());
  return out.read()[0];
}

TEST_CASE("adamw equals the processor's, for many tensors in one launch") {
  cuda device;
  const adamw_settings settings{0.9, 0.95, 1e-8};
  train<float, float, float>(device, settings, true);
  train<float, float, bf16>(device, settings, true);
  train<float, bf16, bf16>(device, settings, true);
  train<double, double, double>(device, settings, true);
  CHECK(train<float, float, bf16>(device, settings, false) == train<float, float, bf16>(device, settings, false));
  device.synchronize();
}

TEST_CASE("adamw with rounded moments and values equals the processor's, with the same random bits") {
  cuda device;
  compare_rounded<float, float, bf16>(device);
  compare_rounded<float, float, std::uint8_t>(device);
  compare_rounded<bf16, float, float>(device);
  compare_rounded<bf16, float, bf16>(device);
  compare_rounded<bf16, float, std::uint8_t>(device);
  compare_rounded<bf16, bf16, float>(device);
  compare_rounded<bf16, bf16, bf16>(device);
  compare_rounded<bf16, bf16, std::uint8_t>(device);
  compare_rounded<double, double, bf16>(device);
  compare_rounded<double, double, std::uint8_t>(device);
  device.synchronize();
}

TEST_CASE_TEMPLATE("sums equal those of the processor in every size", T, float, double, bf16) {
  cuda device;
  for (const int64_t n : {0, 1, 31, 257, 16383, 16384, 16385, 70001}) {
    CAPTURE(n);
    const values x = random_values<T>(n, 5);
    number_array<T> on_device(device, x, n % 2);
    number_array<double> out(device, values{7.0});
    plait::kernels::sum<T>(device, on_device.data(), n, out.data());
    const double expected = std::accumulate(x.begin(), x.end(), 0.0), sum = out.read()[0];
    CHECK(std::abs(sum - expected) < 1e-9);
    plait::kernels::sum<T>(device, on_device.data(), n, out.data());
    CHECK(out.read()[0] == sum);
  }
}

TEST_CASE_TEMPLATE("squares of many tensors are added to the existing sum", T, float, double, bf16) {
  cuda device;
  std::vector<std::unique_ptr<number_array<T>>> arrays;
  std::vector<const_elements<T>> parts;
  double expected = 3;
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (const int64_t n : tensor_sizes()) {
      const values x = random_values<T>(n, static_cast<unsigned>(n + repeat));
      for (const double value : x) expected += value * value;
      arrays.push_back(std::make_unique<number_array<T>>(device, x, static_cast<std::size_t>(repeat)));
      parts.push_back({arrays.back()->data(), n});
    }
  }
  std::vector<double> first;
  for (int run = 0; run < 2; ++run) {
    number_array<double> out(device, values{3.0});
    plait::kernels::add_sum_squares(device, std::span<const const_elements<T>>(parts), out.data());
    CHECK(out.read()[0] == doctest::Approx(expected).epsilon(1e-13));
    if (run == 0) first = out.read();
    CHECK(out.read() == first);
  }
  number_array<double> out(device, values{3.0});
  plait::kernels::add_sum_squares(device, std::span<const const_elements<T>>(), out.data());
  CHECK(out.read()[0] == 3.0);
}

TEST_CASE("norms, factors and reciprocals are made on the device") {
  cuda device;
  number_array<double> inverse(device, 1);
  for (const double squares : {0.0, 16.0, 1e-30}) {
    for (const double limit : {0.0, 1.0, 5.0}) {
      number_array<double> from(device, values{squares});
      plait::kernels::reciprocal(device, from.data(), inverse.data());
      const clip_numbers expected = clip_on_cpu(squares, limit), got = clip_on_gpu(device, squares, limit);
      CHECK(got.norm == expected.norm);
      CHECK(got.factor == doctest::Approx(expected.factor).epsilon(1e-15));
      CHECK(got.update == 1.0);
      CHECK(expected.update == 1.0);
      CHECK(inverse.read()[0] == (squares > 0 ? 1 / squares : 0.0));
    }
  }
  number_array<double> value(device, values{0.1});
  number_array<bf16> y(device, 1001);
  plait::kernels::fill_from(device, y.data(), 1000, value.data());
  const values got = y.read();
  CHECK(got[0] == 0.10009765625);
  CHECK(got[999] == got[0]);
  CHECK(got[1000] == 0.0);
}

TEST_CASE("squares that are not finite skip the step, as on the processor") {
  cuda device;
  const double infinite = std::numeric_limits<double>::infinity(), none = std::numeric_limits<double>::quiet_NaN();
  for (const double squares : {infinite, none, -none}) {
    for (const double limit : {0.0, 1.0}) {
      const clip_numbers expected = clip_on_cpu(squares, limit), got = clip_on_gpu(device, squares, limit);
      CAPTURE(squares);
      CHECK(got.update == 0.0);
      CHECK(got.factor == 0.0);
      CHECK(std::isnan(got.norm) == std::isnan(squares));
      CHECK(expected.update == got.update);
      CHECK(expected.factor == got.factor);
      CHECK(std::isnan(expected.norm) == std::isnan(got.norm));
    }
  }
  CHECK(clip_on_gpu(device, std::numeric_limits<double>::max(), 1.0).update == 1.0);
}

TEST_CASE_TEMPLATE("a skipped step changes nothing, for any gradients", T, float, double) {
  cuda device;
  const adamw_settings settings{0.9, 0.95, 1e-8};
  adamw_scalars scalars = plait::kernels::adamw_scalars_of(settings, 0.01, 1, std::numeric_limits<double>::quiet_NaN());
  for (const double update : {0.0, 1.0}) {
    scalars.update = update;
    for (const int64_t n : {1, 5, 8193, 40003}) {
      const auto size = static_cast<std::size_t>(n);
      adamw_numbers expected{random_values<T>(n, 1), random_values<T>(n, 2), random_values<T>(n, 3)};
      const adamw_numbers before = expected;
      number_array<T> master(device, before.master), m(device, before.m), v(device, before.v),
          gradient(device, values(size, std::numeric_limits<double>::infinity())), weight(device, values(size, 0.5));
      device_array<adamw_scalars> numbers(device, {scalars});
      const adamw_tensor<T, T, T> one{master.data(), gradient.data(), m.data(), v.data(), weight.data(), n, 0.1};
      plait::kernels::adamw_update(device, std::span(&one, 1), settings, numbers.data());
      adamw_on_cpu(expected, values(size, std::numeric_limits<double>::infinity()), 0.1, settings, scalars);
      CAPTURE(n);
      CHECK((master.read() == before.master) == (update == 0));
      CHECK((m.read() == before.m) == (update == 0));
      CHECK((v.read() == before.v) == (update == 0));
      CHECK((weight.read() == values(size, 0.5)) == (update == 0));
      CHECK((expected.master == before.master) == (update == 0));
      CHECK((expected.m == before.m) == (update == 0));
      CHECK((expected.v == before.v) == (update == 0));
    }
  }
}

}  // namespace kernel_optimizer
