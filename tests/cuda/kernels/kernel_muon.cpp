// program: training
// Compares Muon's kernels and the Newton-Schulz iteration on a GPU with loops in double.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/kernels/cuda/kernels.hpp"
#include "support/plain_muon.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// More tensors than one launch takes; some do not start on a boundary.
std::vector<std::int64_t> muon_sizes() {
  std::vector<std::int64_t> sizes = {0, 1, 3, 4, 5, 1024, 8191, 8192, 8193, 20001};
  for (int i = 0; i < 150; ++i) sizes.push_back(i % 7);
  return sizes;
}

template <class M, class G, class W>
struct muon_arrays {
  number_array<M> master, momentum;
  number_array<G> gradient;
  number_array<M> direction;
  number_array<W> weight;
};

template <class M, class G, class W>
void check_steps(bool nesterov, double update) {
  cuda device;
  const kernels::muon_settings settings{0.9, nesterov};
  const kernels::adamw_scalars scalars{.learning_rate = 0.1, .gradient_scale = 0.5, .update = update};
  device_array<kernels::adamw_scalars> numbers(device, {scalars});
  const std::vector<std::int64_t> sizes = muon_sizes();
  std::vector<std::unique_ptr<muon_arrays<M, G, W>>> all;
  std::vector<kernels::muon_momentum_tensor<M, G>> momenta;
  std::vector<kernels::muon_tensor<M, W>> updates;
  const auto poison = update == 0 ? std::numeric_limits<double>::infinity() : 1.0;
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    const std::size_t lead = t % 4 == 3 ? 1 : 0;
    const auto numbers_of = [&](unsigned seed) { return random_values<M>(sizes[t], seed); };
    values gradient = random_values<G>(sizes[t], 3);
    for (double& g : gradient) g *= poison;
    const auto n = static_cast<std::size_t>(sizes[t]);
    all.push_back(std::make_unique<muon_arrays<M, G, W>>(muon_arrays<M, G, W>{{device, numbers_of(1), lead},
                                                                              {device, numbers_of(2), lead},
                                                                              {device, gradient, lead},
                                                                              {device, values(n, 9.0), lead},
                                                                              {device, values(n, 0.5), lead}}));
    auto& x = *all.back();
    momenta.push_back({x.gradient.data(), x.momentum.data(), x.direction.data(), sizes[t]});
    updates.push_back({x.master.data(), x.direction.data(), t % 3 == 2 ? nullptr : x.weight.data(), sizes[t], 0.3,
                       t % 2 == 0 ? 0.2 : 0.0});
  }
  kernels::muon_momentum(device, std::span<const kernels::muon_momentum_tensor<M, G>>(momenta), settings,
                         numbers.data());
  kernels::muon_update(device, std::span<const kernels::muon_tensor<M, W>>(updates), numbers.data());
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    CAPTURE(sizes[t]);
    values master = random_values<M>(sizes[t], 1), momentum = random_values<M>(sizes[t], 2),
           direction(momentum.size(), 0.0), weight(momentum.size(), 0.5);
    const values gradient = random_values<G>(sizes[t], 3);
    for (std::size_t i = 0; update != 0 && i < master.size(); ++i) {
      const double g = 0.5 * gradient[i];
      momentum[i] = 0.9 * momentum[i] + 0.1 * g;
      direction[i] = nesterov ? 0.9 * momentum[i] + 0.1 * g : momentum[i];
      master[i] -= 0.1 * ((t % 2 == 0 ? 0.2 : 0.0) * master[i] + 0.3 * direction[i]);
    }
    auto& x = *all[t];
    const values made = x.master.read();
    CHECK(difference(made, master) < tolerance<M>);
    CHECK(difference(x.momentum.read(), momentum) < tolerance<M>);
    CHECK(difference(x.direction.read(), direction) < tolerance<M>);
    if (update == 0) {
      CHECK(made == master);
      CHECK(x.momentum.read() == momentum);
    } else if (t % 3 != 2) {
      for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = widened(typed<W>(made[i]));
    }
    CHECK(x.weight.read() == weight);
  }
}

template <class Factor, class T>
double iteration_error(cuda& device, std::int64_t rows, std::int64_t columns) {
  const values from = random_values<T>(rows * columns, 4, 1e-3);
  number_array<T> x(device, from);
  newton_schulz<Factor>(device, x.data(), rows, columns);
  return difference(x.read(), plain_newton_schulz(from, rows, columns));
}

}  // namespace

TEST_CASE("momenta and updates equal loops, for many tensors in one launch") {
  for (const bool nesterov : {false, true}) {
    check_steps<float, float, float>(nesterov, 1.0);
    check_steps<float, float, bf16>(nesterov, 1.0);
    check_steps<float, bf16, bf16>(nesterov, 1.0);
    check_steps<double, double, double>(nesterov, 1.0);
  }
}

TEST_CASE("momenta in bf16 are rounded by the bits of their elements, after directions are computed") {
  cuda device;
  const kernels::muon_settings settings{0.9, true};
  for (const double update : {1.0, 0.0}) {
    const kernels::adamw_scalars scalars{.learning_rate = 0.1, .gradient_scale = 0.5, .update = update, .rounding = 77};
    device_array<kernels::adamw_scalars> numbers(device, {scalars});
    std::size_t elements = 0, other = 0;
    for (const std::int64_t n : {1, 3, 4, 1023, 8192, 20001}) {
      CAPTURE(n);
      const values gradient = random_values<bf16>(n, 3), before = random_values<bf16>(n, 2);
      number_array<bf16> momentum(device, before, n % 2), from(device, gradient, n % 2);
      number_array<float> direction(device, values(static_cast<std::size_t>(n), 9.0), n % 2);
      const box part{2, {n, 2}, {0, 1}, {n, 1}};  // every second element of a matrix
      const kernels::muon_rounded_tensor<float, bf16> one{
          from.data(), momentum.data(), direction.data(), n, {kernels::run_map::of(part), 0, 5}};
      kernels::muon_momentum(device, std::span<const kernels::muon_rounded_tensor<float, bf16>>(&one, 1), settings,
                             numbers.data());
      const values got = momentum.read(), made = direction.read();
      for (std::size_t i = 0; i < got.size(); ++i, ++elements) {
        const auto g = static_cast<float>(0.5 * gradient[i]), m = static_cast<float>(before[i]);
        const float next = m + (g - m) * static_cast<float>(1.0 - 0.9);
        const auto global = static_cast<std::uint64_t>(2 * i + 1);
        const std::uint32_t word = kernels::random_words(77, 5, global / 4)[global % 4];
        const double expected = update == 0 ? before[i] : widened(kernels::to_bf16_stochastically(next, word));
        other += got[i] != expected;
        CHECK(std::abs(made[i] - (update == 0 ? 0.0 : 0.1 * g + 0.9 * static_cast<double>(next))) < 1e-6);
      }
    }
    CHECK(elements > 20000);
    CHECK(other <= (update == 0 ? 0 : elements / 1000));  // sums whose last digit differs
  }
}

TEST_CASE("a skipped step changes nothing, and its directions are zero") {
  check_steps<float, float, bf16>(true, 0.0);
  check_steps<float, bf16, bf16>(true, 0.0);
  check_steps<double, double, double>(true, 0.0);
}

TEST_CASE("the iteration equals loops, approximately so with factors in bf16") {
  cuda device;
  for (const auto& [rows, columns] : {std::pair{1, 8}, {8, 8}, {16, 40}, {40, 16}, {33, 7}}) {
    INFO(rows << " x " << columns);
    CHECK(iteration_error<double, double>(device, rows, columns) < 1e-12);
    CHECK(iteration_error<float, float>(device, rows, columns) < 1e-5);
    CHECK(iteration_error<bf16, float>(device, rows, columns) < 5e-2);
  }
}
