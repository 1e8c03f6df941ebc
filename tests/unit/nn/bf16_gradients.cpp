// program: layers
// Gradients in bf16 in the caller's memory. Layers add the same values as in float, rounded on addition, and allocate
// no other memory for them. Ranks sum them; deterministic sums refuse them.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/parameter.hpp"
#include "support/linear_policies.hpp"
#include "support/on_pointers.hpp"

namespace narrow_gradients {  // files of one program may have helpers of the same name

using namespace plait;
using namespace plait::test;

namespace {

constexpr std::int64_t width = 24, wide_size = 40, tokens = 4 * 8;

dim_sizes sizes() { return sizes_of<batch, seq, hidden, ffn, vocab>(4, 8, width, wide_size, 16); }

using whole = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
struct table_policy {
  using mesh = two;
  using input = spec<shard<batch, dp>, seq, invariant<tp>>;
  using weight = spec<vocab, hidden>;
  using output = whole;
};

/// The numbers of an array of bf16 or float.
template <class T>
std::vector<double> numbers(const std::vector<T>& from) {
  std::vector<double> all;
  for (const T x : from) all.push_back(converted<double>(x));
  return all;
}
template <class T>
std::vector<T> made(std::int64_t n, double scale) {
  std::vector<T> all;
  for (std::int64_t i = 0; i < n; ++i)
    all.push_back(converted<T>(scale * std::sin(0.7 * static_cast<double>(i) + scale)));
  return all;
}

/// The gradients of one layer of each kind after two passes, in the program's memory.
template <class Precision>
struct gradients {
  using G = gradient_of<Precision>;
  std::vector<G> weight = std::vector<G>(wide_size * width), bias = std::vector<G>(wide_size);
  std::vector<G> scale = std::vector<G>(width), shift = std::vector<G>(width), rms = std::vector<G>(width);
  std::vector<G> table = std::vector<G>(16 * width);
};

template <class Precision>
gradients<Precision> two_passes(std::int64_t ranks) {
  gradients<Precision> all;
  threads::run(static_cast<int>(ranks), [&](threads::communicator c) {
    gradients<Precision> g;
    world w(two{ranks, 1}.shape(), c);
    cpu device;
    const context<cpu> ctx{device, w, sizes(), 1};
    std::vector<bf16> weight = made<bf16>(wide_size * width, 0.4), bias = made<bf16>(wide_size, 0.1);
    std::vector<bf16> one = made<bf16>(width, 0.9), zero = made<bf16>(width, 0.2), rms = made<bf16>(width, 1.1);
    std::vector<bf16> table = made<bf16>(16 * width, 0.3);
    using up = policy<whole, column, wide, true>;
    const std::size_t before = device.bytes_in_use();
    const auto memory = [](bf16* value, auto* gradient, bf16* bias_value, auto* bias_gradient) {
      parameter_memory<Precision> given{.weight = value, .gradient = gradient};
      if (bias_value) given.bias = bias_value, given.bias_gradient = bias_gradient;
      if constexpr (!std::is_same_v<Precision, bf16_gradients>) {  // master weights are float
        given.master = own_memory;
        if (bias_value) given.bias_master = own_memory;
      }
      return given;
    };
    linear<Precision, up> layer(ctx, "up",
                                {.memory = memory(weight.data(), g.weight.data(), bias.data(), g.bias.data())});
    layer_norm<Precision, whole> norm(ctx, 1e-5, "norm",
                                      memory(one.data(), g.scale.data(), zero.data(), g.shift.data()));
    using G = gradient_of<Precision>;
    rms_norm<Precision, whole> root(ctx, 1e-5, "rms",
                                    memory(rms.data(), g.rms.data(), nullptr, static_cast<G*>(nullptr)));
    embedding<Precision, table_policy> lookup(
        ctx, 16, "table", {.memory = memory(table.data(), g.table.data(), nullptr, static_cast<G*>(nullptr))});
    if constexpr (std::is_same_v<Precision, bf16_gradients>) {
      gather_parameters(ctx, layer, norm, root, lookup);
      CHECK(device.bytes_in_use() == before);
    } else {
      device.release_cache();
      gather_parameters(ctx, layer, norm, root, lookup);
    }
    zero_gradients(ctx, layer, norm, root, lookup);
    const std::int64_t own = tokens / ranks, at = c.rank() * own;
    for (const double by : {1.0, 0.3}) {
      const std::vector<bf16> x_all = made<bf16>(tokens * width, by), dy_all = made<bf16>(tokens * wide_size, 0.5 * by);
      const bf16 *x = x_all.data() + at * width, *dy = dy_all.data() + at * wide_size;
      const bf16* const d = dy_all.data() + at * width;  // of arrays with the width of x
      std::vector<bf16> y(static_cast<std::size_t>(own * wide_size)), dx(static_cast<std::size_t>(own * width));
      std::vector<std::int64_t> ids;
      for (std::int64_t i = 0; i < own; ++i) ids.push_back((at + i) * 7 % 16);
      typename linear<Precision, up>::saved kept;
      forward_on(layer, ctx, x, y.data(), &kept);
      backward_on(layer, ctx, x, kept, dy, dx.data());
      typename layer_norm<Precision, whole>::saved kept_norm;
      forward_on(norm, ctx, x, y.data(), &kept_norm);
      backward_on(norm, ctx, x, kept_norm, d, dx.data());
      typename rms_norm<Precision, whole>::saved kept_root;
      forward_on(root, ctx, x, y.data(), &kept_root);
      backward_on(root, ctx, x, kept_root, d, dx.data());
      backward_on(lookup, ctx, ids.data(), d);
    }
    reduce_all(ctx, layer, norm, root, lookup);
    if (c.rank() == 0) all = g;
  });
  return all;
}

void check_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    worst = std::max(worst, std::abs(a[i] - b[i])), largest = std::max(largest, std::abs(b[i]));
  CHECK(largest > 0.1);
  CHECK(worst <= tolerance * largest);
}

}  // namespace

TEST_CASE("gradients in bf16 are those in float, rounded at each addition") {
  const auto usual = two_passes<bf16>(1);
  for (const std::int64_t ranks : {1, 2, 4}) {
    const auto narrow = two_passes<bf16_gradients>(ranks);
    const double tolerance = 0.02;  // a few roundings of 2^-9
    check_near(numbers(narrow.weight), numbers(usual.weight), tolerance);
    check_near(numbers(narrow.bias), numbers(usual.bias), tolerance);
    check_near(numbers(narrow.scale), numbers(usual.scale), tolerance);
    check_near(numbers(narrow.shift), numbers(usual.shift), tolerance);
    check_near(numbers(narrow.rms), numbers(usual.rms), tolerance);
    check_near(numbers(narrow.table), numbers(usual.table), tolerance);
  }
}

TEST_CASE("deterministic sums refuse gradients in bf16") {
  CHECK_THROWS_WITH_AS(threads::run(1,
                                    [&](threads::communicator c) {
                                      world w(two{1, 1}.shape(), c);
                                      cpu device({.deterministic = true});
                                      const context<cpu> ctx{device, w, sizes(), 1, deterministic<4, 4>{}};
                                      rms_norm<bf16_gradients, whole> norm(ctx, 1e-5, "norm");
                                    }),
                       doctest::Contains("parameter norm.weight: deterministic sums have gradients in "
                                         "float or double"),
                       error);
}

}  // namespace narrow_gradients
