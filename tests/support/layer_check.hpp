#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/ledger.hpp"
#include "plait/comm/threads.hpp"
#include "plait/nn/combinators.hpp"

/// Runs a layer on any mesh with inputs, weights and output gradients that depend on global indices only, so that
/// results of meshes compare with one rank, and one rank with finite differences. The loss is <coefficients, output>.
namespace plait::test {

/// Adds `by` to element `index` of the input (empty name) or of a parameter.
struct bump {
  std::string name;
  std::int64_t index = -1;
  double by = 0;
};

struct layer_values {
  double loss = 0;
  std::vector<double> y, dx;
  std::vector<std::pair<std::string, std::vector<double>>> gradients;
};

inline double random_at(std::uint64_t stream, std::int64_t i) {
  std::uint64_t x = stream * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(i) * 0xbf58476d1ce4e5b9ull + 12345;
  x ^= x >> 31, x *= 0x94d049bb133111ebull, x ^= x >> 29, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 32;
  return static_cast<double>(x >> 11) / 9007199254740992.0 * 2 - 1;
}

inline layout whole_of(const layout& a) {
  layout whole;
  for (const dim_placement& p : a.dims) whole.dims.push_back({p.dim, {}});
  return whole;
}

/// A tensor whose full value is `full`, laid out as `Spec` (a partial one has all of it on one rank).
template <class Spec, class T>
tensor<T, Spec> place_full(context<cpu>& ctx, const std::vector<T>& full) {
  const executor moves(whole_of(layout_v<Spec>), layout_v<Spec>, ctx.ranks, ctx.sizes, "placing");
  tensor<T, Spec> out(ctx);
  moves.run(ctx.device, full.data(), out.data(), dtype_of<T>);
  return out;
}
inline std::vector<double> collect_full(context<cpu>& ctx, const layout& from, const double* local) {
  const executor moves(from, whole_of(from), ctx.ranks, ctx.sizes, "collecting");
  std::vector<double> out(static_cast<std::size_t>(moves.to().local_size()));
  moves.run(ctx.device, local, out.data(), dtype::f64);
  return out;
}

inline std::vector<double> random_full(const layout& a, const dim_sizes& sizes, std::uint64_t stream) {
  std::int64_t n = 1;
  for (const dim_placement& p : a.dims) n *= sizes.of(p.dim);
  std::vector<double> v(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) v[static_cast<std::size_t>(i)] = random_at(stream, i);
  return v;
}

/// Weights around `mean`, by global index; then the bump.
template <class Layer>
void fill_parameters(context<cpu>& ctx, Layer& layer, const bump& change) {
  layer.visit([&](auto& p) {
    kernels::fill_normal(ctx.device, p.value(), p.part(), 5, p.stream_of(p.name()), 0.2, 0.4);
    p.clear_padding(ctx, p.value());
    if (change.index >= 0 && p.name() == change.name) p.value()[change.index] += change.by;
    p.gather(ctx);
    p.zero_gradient(ctx);
  });
}

inline void check_books(const ledger& measured, const ledger& predicted) {
  for (const ledger* book : {&measured, &predicted})
    for (const ledger::row& row : book->rows)
      for (int k = 0; k < collective_kinds; ++k) {
        const auto kind = static_cast<collective>(k);
        const ledger::entry m = measured.total(row.label, kind), p = predicted.total(row.label, kind);
        INFO(row.label << " " << name_of(kind));
        CHECK(m.calls == p.calls);
        CHECK(m.payload == p.payload);
        if (kind != collective::all_to_all) CHECK(m.wire == p.wire);
      }
}

/// One rank's share: forward, backward, gather everything. Also checks that what is kept and what is communicated are
/// as the layer predicts.
template <class Make>
layer_values run_layer(world& ranks, const dim_sizes& sizes, Make&& make, const bump& change = {},
                       recompute policy = recompute::none, bool with_gradients = true) {
  cpu device;
  context<cpu> ctx{device, ranks, sizes, 99};
  auto layer = make(ctx);
  using L = decltype(layer);
  fill_parameters(ctx, layer, change);
  std::vector<double> input = random_full(layout_v<typename L::input>, sizes, 1);
  if (change.index >= 0 && change.name.empty()) input[static_cast<std::size_t>(change.index)] += change.by;
  const auto x = place_full<typename L::input>(ctx, input);
  const std::vector<double> coefficients = random_full(layout_v<typename L::output>, sizes, 2);
  const auto dy = place_full<dual_t<typename L::output>>(ctx, coefficients);
  layer_values out;
  {
    ranks.ledger().clear();
    typename L::saved kept;
    const std::size_t before = device.bytes_in_use();
    const auto y = layer.forward(ctx, x, &kept, policy);
    const auto held = static_cast<std::int64_t>(device.bytes_in_use() - before) -
                      y.size() * static_cast<std::int64_t>(sizeof(double));
    if (with_gradients) CHECK(held == layer.saved_bytes(ctx, policy));
    const ledger forward = ranks.ledger();
    out.y = collect_full(ctx, layout_v<typename L::output>, y.data());
    for (std::size_t i = 0; i < out.y.size(); ++i) out.loss += coefficients[i] * out.y[i];
    if (!with_gradients) return out;
    ranks.ledger().clear();
    const auto dx = layer.backward(ctx, x, kept, dy);
    ledger expected_forward, expected_backward;
    layer.visit_collectives(
        [&](const char* pass, const collective_cost& c) {
          if (ranks.pruned(c.axes).empty()) return;
          (pass[0] == 'f' ? expected_forward : expected_backward)
              .of(label_of(ranks.pruned(c.axes)))
              .kinds[static_cast<std::size_t>(c.kind)] += {1, c.payload, c.wire, 0.0};
        },
        policy);
    check_books(forward, expected_forward);
    check_books(ranks.ledger(), expected_backward);
    out.dx = collect_full(ctx, layout_v<dual_t<typename L::input>>, dx.data());
  }
  layer.visit([&](auto& p) {
    p.reduce(ctx);
    out.gradients.emplace_back(p.name(), collect_full(ctx, dual(p.stored()), p.gradient()));
  });
  return out;
}

/// All ranks of a mesh; `Make` makes the layer from a context.
template <class Mesh, class Make>
std::vector<layer_values> run_on(const Mesh& mesh, const dim_sizes& sizes, Make&& make, const bump& change = {},
                                 recompute policy = recompute::none, bool with_gradients = true) {
  std::vector<layer_values> all(static_cast<std::size_t>(mesh.size()));
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator c) {
    world ranks(mesh.shape(), c);
    all[static_cast<std::size_t>(ranks.rank())] = run_layer(ranks, sizes, make, change, policy, with_gradients);
  });
  return all;
}

inline void check_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance,
                       const std::string& what) {
  INFO(what);
  REQUIRE(a.size() == b.size());
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = std::isfinite(a[i]) ? std::max(difference, std::abs(a[i] - b[i])) : INFINITY;
    size = std::max(size, std::abs(b[i]));
  }
  CHECK(difference <= tolerance * std::max(size, 1e-3));
}

/// The backward pass of one rank against central differences of its forward pass, at up to `samples` elements each.
template <class Mesh, class Make>
layer_values check_differences(const Mesh& one, const dim_sizes& sizes, Make&& make, std::int64_t samples = 40) {
  const layer_values at = run_on(one, sizes, make)[0];
  const double h = 1e-5;
  const auto compare = [&](const std::string& name, const std::vector<double>& gradient) {
    const auto n = static_cast<std::int64_t>(gradient.size());
    const std::int64_t stride = std::max<std::int64_t>(1, n / samples);
    double size = 0;
    for (double g : gradient) size = std::max(size, std::abs(g));
    INFO((name.empty() ? "input" : name));
    CHECK(size > 0);
    for (std::int64_t i = 0; i < n; i += stride) {
      const double up = run_on(one, sizes, make, {name, i, h}, recompute::none, false)[0].loss;
      const double down = run_on(one, sizes, make, {name, i, -h}, recompute::none, false)[0].loss;
      INFO("element " << i << ": difference quotient " << (up - down) / (2 * h) << ", gradient "
                      << gradient[static_cast<std::size_t>(i)]);
      CHECK(std::abs((up - down) / (2 * h) - gradient[static_cast<std::size_t>(i)]) <= 1e-7 * std::max(1.0, size));
    }
  };
  if (!at.dx.empty()) compare("", at.dx);
  for (const auto& [name, gradient] : at.gradients) compare(name, gradient);
  return at;
}

/// Every rank of `mesh` against the values of one rank.
template <class Mesh, class Make>
void check_layer(const Mesh& mesh, const dim_sizes& sizes, const layer_values& one, Make&& make,
                 recompute policy = recompute::none) {
  for (const layer_values& got : run_on(mesh, sizes, make, {}, policy)) {
    check_near(got.y, one.y, 1e-12, "output");
    check_near(got.dx, one.dx, 1e-12, "gradient of the input");
    REQUIRE(got.gradients.size() == one.gradients.size());
    for (std::size_t i = 0; i < one.gradients.size(); ++i)
      check_near(got.gradients[i].second, one.gradients[i].second, 1e-12, "gradient of " + one.gradients[i].first);
  }
}

inline dim_sizes transformer_sizes(std::int64_t batch_size = 4, std::int64_t seq_size = 8) {
  dim_sizes s;
  s.set(dim_of<batch>, batch_size);
  s.set(dim_of<seq>, seq_size);
  s.set(dim_of<zseq>, seq_size);
  s.set(dim_of<hidden>, 8);
  s.set(dim_of<heads>, 4);
  s.set(dim_of<kv_heads>, 2);
  s.set(dim_of<head_dim>, 4);
  s.set(dim_of<ffn>, 16);
  s.set(dim_of<vocab>, 12);
  return s;
}

}  // namespace plait::test
