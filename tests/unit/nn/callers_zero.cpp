// program: layers
// ZeRO on a program's own arrays: parameters are stored in shards, and their weights and gradients share memory of the
// program, one layer after the other.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/parameter/free.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "support/on_mesh.hpp"

namespace plait::test {

namespace {

struct inner_features : dim_tag<"inner_features"> {};
using net = mesh<axis<dp>>;
using rows = spec<shard<batch, dp>, hidden>;
constexpr std::int64_t samples = 8, width = 8, layers = 4;

/// The arrays of a layer that stay for the whole step. ZeRO level 1 shards the optimizer's state, level 2 also
/// gradients, level 3 also weights.
template <class Precision>
struct own_arrays {
  own_arrays(int level, std::int64_t shard)
      : weights(static_cast<std::size_t>(level < 3 ? layers : 2),
                std::vector<weight_of<Precision>>(width * width, weight_of<Precision>{})),
        gradients(static_cast<std::size_t>(level < 2 ? layers : 1), std::vector<gradient_of<Precision>>(width * width)),
        masters(layers, std::vector<master_of<Precision>>(static_cast<std::size_t>(shard))),
        reduced(layers, std::vector<gradient_of<Precision>>(static_cast<std::size_t>(shard))) {}

  parameter_memory<Precision> of(std::size_t layer) {
    return {.weight = weights[layer % weights.size()].data(),
            .gradient = gradients[layer % gradients.size()].data(),
            .master = masters[layer].data(),
            .reduced = reduced[layer].data()};
  }
  parameter_memory<Precision> without_shards(std::size_t layer) {
    parameter_memory<Precision> some = of(layer);
    some.master = own_memory, some.reduced = own_memory;
    return some;
  }
  std::vector<std::vector<weight_of<Precision>>> weights;
  std::vector<std::vector<gradient_of<Precision>>> gradients;
  std::vector<std::vector<master_of<Precision>>> masters;
  std::vector<std::vector<gradient_of<Precision>>> reduced;
};

double number(double x) { return x; }
double number(float x) { return static_cast<double>(x); }
double number(bf16 x) { return static_cast<double>(to_float(x)); }

/// A net of tanh(x W) with its own products, loss and momentum. `Weight` is a parameter of width x width.
template <class Precision, class Weight>
std::vector<double> train(const context<cpu>& ctx, int level, bool gathers_again = true, bool reduces = true,
                          bool shards_of_its_own = false) {
  using G = gradient_of<Precision>;
  const std::int64_t here = samples / ctx.ranks.shape().extent(axis_of<dp>), first = here * ctx.ranks.rank();
  own_arrays<Precision> memory(level, width * width / ctx.ranks.shape().extent(axis_of<dp>));
  std::vector<Weight> net;
  for (std::size_t l = 0; l < layers; ++l)
    net.emplace_back(ctx, "w" + std::to_string(l), shards_of_its_own ? memory.without_shards(l) : memory.of(l),
                     initializer{0, 0.5});
  for (Weight& w : net) w.weight()->initialize(ctx);
  std::vector<std::vector<double>> momentum(layers, std::vector<double>(memory.masters[0].size()));
  const auto at = [](std::int64_t r, std::int64_t c) { return static_cast<std::size_t>(r * width + c); };
  const std::size_t bytes = ctx.device.bytes_in_use();
  for (int step = 0; step < 3; ++step) {
    std::vector<std::vector<double>> x(layers + 1, std::vector<double>(static_cast<std::size_t>(here * width)));
    for (std::int64_t r = 0; r < here; ++r)
      for (std::int64_t c = 0; c < width; ++c)
        x[0][at(r, c)] = std::sin(static_cast<double>((first + r) * width + c + step));
    if (level < 3)
      for (Weight& w : net) w.weight()->gather(ctx);
    if (level < 2)
      for (Weight& w : net) w.weight()->zero_gradient(ctx);
    for (std::size_t l = 0; l < layers; ++l) {
      if (level == 3) net[l].weight()->gather(ctx);
      const auto* w = net[l].values(ctx).unchecked();
      for (std::int64_t r = 0; r < here; ++r)
        for (std::int64_t c = 0; c < width; ++c) {
          double sum = 0;
          for (std::int64_t k = 0; k < width; ++k) sum += x[l][at(r, k)] * number(w[at(k, c)]);
          x[l + 1][at(r, c)] = std::tanh(sum);
        }
    }
    std::vector<double> d(x[layers]), before(d.size());
    for (double& e : d) e /= samples;
    for (std::size_t l = layers; l-- > 0;) {
      if (level == 3 && gathers_again) net[l].weight()->gather(ctx);
      if (level > 1) net[l].weight()->zero_gradient(ctx);
      const auto* w = net[l].values(ctx).unchecked();
      G* const dw = net[l].gradients(ctx).unchecked();
      for (std::size_t i = 0; i < d.size(); ++i) d[i] *= 1 - x[l + 1][i] * x[l + 1][i];
      std::fill(before.begin(), before.end(), 0.0);
      for (std::int64_t r = 0; r < here; ++r)
        for (std::int64_t k = 0; k < width; ++k)
          for (std::int64_t c = 0; c < width; ++c) {
            dw[at(k, c)] += static_cast<G>(x[l][at(r, k)] * d[at(r, c)]);
            before[at(r, k)] += d[at(r, c)] * number(w[at(k, c)]);
          }
      std::swap(d, before);
      if (level > 1 && reduces) static_cast<void>(net[l].weight()->reduce(ctx));
    }
    if (level < 2)
      for (Weight& w : net) static_cast<void>(w.weight()->reduce(ctx));
    for (std::size_t l = 0; l < layers; ++l) {
      auto& p = *net[l].weight();
      const G* const gradient = std::as_const(p).gradient();
      auto* const master = p.begin_update().master;
      for (std::size_t i = 0; i < momentum[l].size(); ++i) {
        momentum[l][i] = 0.5 * momentum[l][i] + static_cast<double>(gradient[i]);
        master[i] -= static_cast<master_of<Precision>>(0.1 * momentum[l][i]);
      }
    }
  }
  if (!shards_of_its_own && ctx.device.bytes_in_use() != bytes) fail("bytes that nobody asked for");
  std::vector<double> all;
  for (Weight& w : net) {
    w.weight()->gather(ctx);
    const auto values = w.values(ctx);
    for (std::int64_t i = 0; i < values.size(); ++i) all.push_back(number(values.unchecked()[i]));
  }
  return all;
}

using in_shards = spec<shard<hidden, dp>, inner_features>;
template <class Precision>
using sharded = free_parameter<Precision, spec<hidden, inner_features>, rows, in_shards>;

/// The result of rank 0 after training on `ranks`, or the error of a rank.
template <class Precision, class Weight>
std::vector<double> on(int ranks, int level, std::string* thrown = nullptr, bool gathers_again = true,
                       bool reduces = true, bool shards_of_its_own = false) {
  std::vector<double> out;
  const auto run = [&] {
    const dim_sizes sizes = sizes_of<batch, hidden, inner_features>(samples, width, width);
    on_mesh(net{ranks}, sizes, 7, [&](const context<cpu>& ctx) {
      auto mine = train<Precision, Weight>(ctx, level, gathers_again, reduces, shards_of_its_own);
      if (ctx.ranks.rank() == 0) out = std::move(mine);
    });
  };
  if (thrown)
    *thrown = text_thrown_by(run);
  else
    run();
  return out;
}

double difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = a.size() == b.size() && !a.empty() ? 0 : 1e9;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

struct first {
  using input = rows;
  using weight = spec<inner_features, hidden>;
  using output = spec<shard<batch, dp>, inner_features>;
  using stored = spec<shard<inner_features, dp>, hidden>;
  static constexpr bool bias = true;
};
struct second {
  using input = first::output;
  using weight = spec<hidden, inner_features>;
  using output = rows;
  using stored = spec<shard<hidden, dp>, inner_features>;
  static constexpr bool bias = true;
};

}  // namespace

TEST_CASE_TEMPLATE("levels 1 to 3 of ZeRO in the program's memory train as one rank", Precision, double, float, bf16) {
  const auto one = on<Precision, sharded<Precision>>(1, 1);
  const double most = std::is_same_v<Precision, double> ? 1e-12 : std::is_same_v<Precision, float> ? 1e-5 : 1e-2;
  for (const int ranks : {1, 2, 4})
    for (const int level : {1, 2, 3})
      for (const bool shards_of_its_own : {false, true}) {
        CAPTURE(ranks);
        CAPTURE(level);
        CAPTURE(shards_of_its_own);
        const auto many = on<Precision, sharded<Precision>>(ranks, level, nullptr, true, true, shards_of_its_own);
        CHECK(difference(many, one) < most);
      }
}

TEST_CASE("linears with biases share the program's memory, and AdamW updates them") {
  const auto trained = [](int ranks, bool in_turns) {
    std::vector<double> out;
    threads::run(ranks, [&](threads::communicator c) {
      cpu device;
      world all(net{ranks}.shape(), c);
      const context<cpu> ctx{device, all, sizes_of<batch, hidden, inner_features>(samples, width, width), 7};
      const auto n = static_cast<std::size_t>(width * width), shard = n / static_cast<std::size_t>(ranks);
      std::vector<double> w(n), dw(n), b(width), db(width), stored[2][4];
      const auto memory = [&](int layer) -> parameter_memory<double> {
        if (!in_turns) return {};
        auto& at = stored[layer];
        for (int k = 0; k < 4; ++k) at[k].resize(k < 2 ? shard : width / static_cast<std::size_t>(ranks));
        return {w.data(), dw.data(), b.data(), db.data(), at[0].data(), at[2].data(), at[1].data(), at[3].data()};
      };
      linear<double, first> up(ctx, "up", {.bias_init = {0, 0.5}, .memory = memory(0)});
      linear<double, second> down(ctx, "down", {.bias_init = {0, 0.5}, .memory = memory(1)});
      each_parameter([&](auto& p) { p.initialize(ctx); }, up, down);
      adamw<double> optimizer;
      tensor<double, rows> x(ctx);
      for (std::int64_t i = 0; i < x.size(); ++i)
        x.data()[i] = std::sin(static_cast<double>(x.size() * all.rank() + i));
      for (int step = 0; step < 3; ++step) {
        linear<double, first>::saved kept;
        linear<double, second>::saved kept_second;
        gather_parameters(ctx, up);
        const auto hidden_rows = up.forward(ctx, x, &kept);
        gather_parameters(ctx, down);
        const auto y = down.forward(ctx, hidden_rows, &kept_second);
        tensor<double, dual_t<rows>> dy(ctx);
        for (std::int64_t i = 0; i < y.size(); ++i) dy.data()[i] = y.data()[i] - 1;
        optimizer.begin_step(ctx, 1e-2);
        std::vector<reduced_gradient<double, cpu>> gradients;
        const auto reduce = [&](auto& layer) { layer.visit([&](auto& p) { gradients.push_back(p.reduce(ctx)); }); };
        zero_gradients(ctx, down);
        const auto dh = down.backward(ctx, hidden_rows, kept_second, dy);
        reduce(down);
        gather_parameters(ctx, up);
        zero_gradients(ctx, up);
        up.backward(ctx, x, kept, dh);
        reduce(up);
        for (auto& g : gradients) optimizer.update(ctx, std::move(g));
      }
      each_parameter(
          [&](auto& p) {
            p.gather(ctx);
            if (all.rank() == 0) out.insert(out.end(), p.used_value(), p.used_value() + p.used_size());
          },
          up, down);
    });
    return out;
  };
  const auto one = trained(1, false);
  for (const int ranks : {1, 2, 4}) CHECK(difference(trained(ranks, true), one) < 1e-12);
}

TEST_CASE("memory shared by several parameters is not read or added to for the wrong one") {
  for (const int ranks : {1, 2}) {
    std::string thrown;
    on<double, sharded<double>>(ranks, 3, &thrown, /*gathers_again=*/false);
    CHECK(has(thrown, "parameter w1 is used while it is stale: call gather(ctx)"));
    on<double, sharded<double>>(ranks, 3, &thrown, true, /*reduces=*/false);
    CHECK(has(thrown,
              "parameter w2: its numbers would overwrite the gradient of w3, to which passes have added; "
              "call reduce(ctx) for that one before"));
  }
}

}  // namespace plait::test
