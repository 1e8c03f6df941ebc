// Checks that a layer computes the same on every mesh as on one rank, and compares one rank with finite differences.
// Inputs, weights and output gradients only depend on global indices; the loss is <coefficients, output>.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/metrics.hpp"
#include "plait/comm/threads.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#ifndef PLAIT_NO_CPU
#include "plait/device/cpu.hpp"
#endif
#include "plait/core/text.hpp"
#include "plait/layout/check.hpp"
#include "plait/nn/layer.hpp"
#include "plait/parallel/offload.hpp"
#include "plait/plan/dry_run.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/tensor/tensor.hpp"
#include "plait/testing/findings.hpp"

namespace plait::testing {

#ifdef PLAIT_NO_CPU
struct on_cpu;  // without a CPU device, name threads::on_one_gpu
#else
/// Starts the ranks of a parity test as threads on the CPU (the default). `threads::on_one_gpu` (comm/threads/cuda.hpp)
/// starts threads that share a GPU. Other types work too if they call body(communicator, device) on every rank.
struct on_cpu {
  cpu::options device{};

  template <class F>
  void operator()(int ranks, F&& body) const {
    threads::run(ranks, [&](threads::communicator& comm) {
      cpu own(device);
      body(comm, own);
    });
  }
};
#endif

/// A number from -1 to 1 that depends on the stream and the index only.
inline double random_at(std::uint64_t stream, std::int64_t i) {
  std::uint64_t x = stream * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(i) * 0xbf58476d1ce4e5b9ull + 12345;
  x ^= x >> 31, x *= 0x94d049bb133111ebull, x ^= x >> 29, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 32;
  return static_cast<double>(x >> 11) / 9007199254740992.0 * 2 - 1;
}

/// The layout of `a` on one rank: every dim whole.
inline layout whole_of(const layout& a) {
  layout whole;
  for (const dim_placement& p : a.dims) whole.dims.push_back({p.dim, {}});
  return whole;
}

/// Returns a whole row-major array of such numbers.
inline std::vector<double> random_full(const layout& a, const dim_sizes& sizes, std::uint64_t stream) {
  std::int64_t n = 1;
  for (const dim_placement& p : a.dims) n *= sizes.of(p.dim);
  std::vector<double> v(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) v[static_cast<std::size_t>(i)] = random_at(stream, i);
  return v;
}

/// Makes a tensor with layout `Spec` and the whole value `full`; if partial, one rank holds all of it. Collective.
template <class Spec, class T, class Device>
tensor<T, Spec, Device> place_full(const context<Device>& ctx, const std::vector<T>& full) {
  const ready_plan moves(whole_of(layout_v<Spec>), layout_v<Spec>, ctx.ranks, ctx.sizes, "placing");
  auto there = make_buffer<T>(ctx.device, full.size());
  ctx.device.upload(there.data(), full.data(), there.bytes(), ctx.device.main_stream());
  tensor<T, Spec, Device> out(ctx);
  moves.run(ctx.device, there.data(), out.data(), dtype_of<T>);
  return out;
}
/// Returns the whole value; `local` is this rank's part. Collective.
template <class T, class Device>
std::vector<double> collect_full(const context<Device>& ctx, const layout& from, const T* local) {
  const ready_plan moves(from, whole_of(from), ctx.ranks, ctx.sizes, "collecting");
  auto there = make_buffer<T>(ctx.device, static_cast<std::size_t>(moves.target().local_size()));
  moves.run(ctx.device, local, there.data(), dtype_of<T>);
  std::vector<T> out(static_cast<std::size_t>(moves.target().local_size()));
  ctx.device.download(out.data(), there.data(), there.bytes(), ctx.device.main_stream());
  return std::vector<double>(out.begin(), out.end());
}

/// Compares two ledgers in calls, payload and wire bytes. Wire bytes of all-to-alls are compared only with
/// `wire_of_exchanges`, because one ledger may have a mean over ranks and the other a rank's own. If `ragged`, only the
/// calls of all-to-alls are compared, because sizes depend on values.
inline findings compare_ledgers(const ledger& measured, const ledger& predicted, bool wire_of_exchanges = false,
                                bool ragged = false) {
  findings found;
  for (const ledger* book : {&measured, &predicted})
    for (const ledger::row& row : book->rows)
      for (int k = 0; k < collective_kinds; ++k) {
        const auto kind = static_cast<collective>(k);
        const ledger::entry m = measured.total(row.label, kind), p = predicted.total(row.label, kind);
        const bool wire = m.wire == p.wire || (kind == collective::all_to_all && !wire_of_exchanges);
        if (m.calls == p.calls && ragged && kind == collective::all_to_all) continue;
        if (m.calls == p.calls && m.payload == p.payload && wire) continue;
        found.add(cat({row.label, " ", name_of(kind), ": ", m.calls, " calls of ", m.payload, " bytes (", m.wire,
                       " on the wire), and predicted were ", p.calls, " of ", p.payload, " (", p.wire, ")"}));
      }
  return found;
}

namespace detail {
template <class Context>
struct device_of_context;
template <class Device>
struct device_of_context<context<Device>> {
  using type = Device;
};
}  // namespace detail
/// The device of the context with which a layer is made.
template <class Context>
using device_of = typename detail::device_of_context<std::remove_cvref_t<Context>>::type;

/// Adds `by` to element `index` of the input (if `name` is empty) or of a parameter.
struct bump {
  std::string name;
  std::int64_t index = -1;
  double by = 0;
};

/// Options of one run of a layer.
struct layer_run {
  bump change{};
  recompute policy = recompute::none;
  bool backward = true;
  bool deferred = false;  ///< whether weight gradients are deferred until the input's gradient exists
  bool reused = false;    ///< whether passes over other values have used this `saved` before
  int passes = 1;         ///< equal passes, forward and backward; their gradients add up
  deterministic_leaves order{};
};

struct layer_values {
  double loss = 0;       ///< including `auxiliary`
  double auxiliary = 0;  ///< the layer's auxiliary loss
  std::vector<double> y, dx;
  std::vector<std::pair<std::string, std::vector<double>>> gradients;
  findings found;  ///< differences between kept or sent bytes and the dry run
  ledger sent;     ///< forward and backward
};

/// Fills parameters with weights around 0.2 by global index, then applies the bump.
template <class Layer, class Device>
void fill_parameters(const context<Device>& ctx, Layer& layer, const bump& change) {
  layer.visit([&](auto& p) {
    kernels::fill_normal(ctx.device, p.value(), p.part(), 5, p.stream_of(p.name()), 0.2, 0.4);
    p.clear_padding(ctx, p.value());
    if (change.index >= 0 && p.name() == change.name) {
      auto* const at = p.value() + change.index;
      std::remove_cvref_t<decltype(*at)> number{};
      ctx.device.download(&number, at, sizeof number, ctx.device.main_stream());
      number += static_cast<decltype(number)>(change.by);
      ctx.device.upload(at, &number, sizeof number, ctx.device.main_stream());
    }
    p.gather(ctx);
    p.zero_gradient(ctx);
  });
}

/// Runs passes over other values that use `kept`: one without a backward pass, one under another policy, and one with a
/// backward pass. They leave no gradients.
template <class Layer, class Device>
void use_before(const microbatch<Device>& mb, Layer& layer, typename Layer::saved& kept) {
  using T = typename Layer::value_type;
  const auto placed = [&]<class Spec>(std::type_identity<Spec>, std::uint64_t stream) {
    const std::vector<double> all = random_full(layout_v<Spec>, mb.ctx.sizes, stream);
    return place_full<Spec>(mb.ctx, std::vector<T>(all.begin(), all.end()));
  };
  const auto x = placed(std::type_identity<typename Layer::input>(), 3);
  const auto dy = placed(std::type_identity<dual_t<typename Layer::output>>(), 4);
  microbatch<Device> now = mb;
  now.deferred = nullptr, now.auxiliary = nullptr;
  layer.forward(now.keeping(recompute::none), x, &kept);
  layer.forward(now, x, &kept);
  layer.backward(now, x, kept, dy);
  layer.visit([&](auto& p) { p.discard_gradient(mb.ctx); });
}

/// Runs both passes of a layer, and leaves their gradients.
template <class Layer, class Device>
void pass_over(const microbatch<Device>& mb, Layer& layer, const auto& x, const auto& dy) {
  typename Layer::saved kept;
  layer.forward(mb, x, &kept);
  layer.backward(mb, x, kept, dy);
}

/// Returns the sum of auxiliary losses over all ranks. Collective.
template <class Device>
double collect_auxiliary(const context<Device>& ctx, const auxiliary_sum& sum) {
  layout terms;
  for (axis_id axis : ctx.ranks.shape().axes) terms.set(axis, state::partial);
  return sum.used ? collect_full(ctx, terms, sum.value)[0] : 0;
}

/// Returns the whole gradient of each trained parameter. Collective.
template <class Layer, class Device>
std::vector<std::pair<std::string, std::vector<double>>> reduce_gradients(const context<Device>& ctx, Layer& layer) {
  std::vector<std::pair<std::string, std::vector<double>>> all;
  layer.visit([&](auto& p) {
    if (!p.trainable()) return;
    const auto gradient = p.reduce(ctx);
    const context<Device> own{ctx.device, ctx.ranks, p.sizes(), ctx.seed};
    all.emplace_back(p.name(), collect_full(own, dual(p.stored()), gradient.data()));
  });
  return all;
}

/// Moves the `held` bytes that a forward pass has kept to the host's memory and back, as a step that offloads
/// activations does. Finds memory that a `saved` with a `visit` does not visit.
template <class Saved, class Device>
findings offload_and_reload(Device& device, Saved& kept, std::int64_t held) {
  findings found;
  if constexpr (requires { kept.visit(plait::detail::any_visitor{}); }) {
    offloaded_unit<Device> away(device);
    const auto visit = [&](auto&& f) { kept.visit(f); };
    away.offload(visit);
    const std::size_t before = device.bytes_in_use();
    away.drop(visit);
    const auto freed = static_cast<std::int64_t>(before - device.bytes_in_use());
    found.require(freed == held, cat({"of ", held, " bytes that a forward pass keeps, ", freed, " are offloaded"}));
    away.reload(visit);
    away.wait();
  }
  return found;
}

/// Runs one rank's passes and collects all values. `make(ctx)` makes the layer from a context of the device, and from
/// one of the `counting_device`. Kept and sent bytes are compared with the prediction of the latter. Kept values are
/// offloaded between the passes.
template <class Device, class Make>
layer_values run_layer(world& ranks, Device& device, const dim_sizes& sizes, Make&& make, const layer_run& how = {}) {
  const context<Device> ctx{device, ranks, sizes, 99, how.order};
  auto layer = make(ctx);
  using L = decltype(layer);
  using T = typename L::value_type;
  fill_parameters(ctx, layer, how.change);
  std::vector<double> input = random_full(layout_v<typename L::input>, sizes, 1);
  if (how.change.index >= 0 && how.change.name.empty())
    input[static_cast<std::size_t>(how.change.index)] += how.change.by;
  const std::vector<double> coefficients = random_full(layout_v<typename L::output>, sizes, 2);
  const auto as_type = [](const std::vector<double>& v) { return std::vector<T>(v.begin(), v.end()); };
  const auto x = place_full<typename L::input>(ctx, as_type(input));
  const auto dy = place_full<dual_t<typename L::output>>(ctx, as_type(coefficients));
  microbatch<Device> mb(ctx);
  mb.policy = how.policy;
  weight_work later;
  if (how.deferred) mb.deferred = &later;
  auto added = make_buffer<double>(device, 1);
  device.zero(added.data(), added.bytes(), device.main_stream());
  auxiliary_sum auxiliary{added.template data<double>()};
  mb.auxiliary = &auxiliary;
  for (int pass = 1; pass < how.passes; ++pass) pass_over(mb, layer, x, dy), later.run();
  layer_values out;
  {
    ranks.ledger().clear();
    typename L::saved kept;
    if (how.reused) use_before(mb, layer, kept), ranks.ledger().clear();
    const std::size_t before = device.bytes_in_use();
    const auto y = layer.forward(mb, x, how.backward ? &kept : nullptr);
    const auto held =
        static_cast<std::int64_t>(device.bytes_in_use() - before) - y.size() * static_cast<std::int64_t>(sizeof(T));
    const ledger forward = ranks.ledger();
    out.sent = forward;
    out.y = collect_full(ctx, layout_v<typename L::output>, y.data());
    for (std::size_t i = 0; i < out.y.size(); ++i) out.loss += coefficients[i] * out.y[i];
    out.auxiliary = collect_auxiliary(ctx, auxiliary);
    out.loss += out.auxiliary;
    if (!how.backward) {
      out.found.require(held == 0, cat({"a forward pass without `saved` keeps ", held, " bytes"}));
      return out;
    }
    ranks.ledger().clear();
    if (!how.reused) out.found.add(offload_and_reload(device, kept, held), "offload");  // else `held` is less
    const auto dx = layer.backward(mb, x, kept, dy);
    later.run();
    const layer_plan plan = dry_run(ranks.shape(), sizes, ranks.rank(), make, how.policy, how.order);
    constexpr bool ragged = requires { L::ragged; };                    // then the dry run counts a mean
    out.found.require(how.reused || ragged || held == plan.kept_bytes,  // earlier values count too
                      cat({"a forward pass keeps ", held, " bytes, and the dry run predicted ", plan.kept_bytes}));
    out.found.add(compare_ledgers(forward, plan.forward, false, ragged), "forward");
    out.found.add(compare_ledgers(ranks.ledger(), plan.backward, false, ragged), "backward");
    for (const ledger::row& row : ranks.ledger().rows)
      for (std::size_t k = 0; k < row.kinds.size(); ++k) out.sent.of(row.label).kinds[k] += row.kinds[k];
    out.dx = collect_full(ctx, layout_v<dual_t<typename L::input>>, dx.data());
    const double again = collect_auxiliary(ctx, auxiliary) - out.auxiliary;
    out.found.require(again == 0, cat({"the backward pass adds ", again, " to the auxiliary loss"}));
  }
  out.gradients = reduce_gradients(ctx, layer);
  return out;
}

/// Runs all ranks of a mesh.
template <class Mesh, class Make, class Launch = on_cpu>
std::vector<layer_values> run_on(const Mesh& mesh, const dim_sizes& sizes, Make&& make, const layer_run& how = {},
                                 const Launch& launch = {}) {
  std::vector<layer_values> all(static_cast<std::size_t>(mesh.size()));
  launch(static_cast<int>(mesh.size()), [&](auto& c, auto& device) {
    world ranks(mesh.shape(), c);
    all[static_cast<std::size_t>(ranks.rank())] = run_layer(ranks, device, sizes, make, how);
  });
  return all;
}

/// Compares the backward pass on one rank with central differences of its forward pass, at about `samples` evenly
/// spaced elements of each gradient. Also reports gradients that are zero everywhere, because they show nothing.
template <class Mesh, class Make, class Launch = on_cpu>
findings check_differences(const Mesh& one, const dim_sizes& sizes, const layer_values& at, Make&& make,
                           std::int64_t samples = 40, const Launch& launch = {}) {
  findings found;
  const double h = 1e-5;
  const auto loss = [&](const std::string& name, std::int64_t i, double by) {
    return run_on(one, sizes, make, {.change = {name, i, by}, .backward = false}, launch)[0].loss;
  };
  const auto compare = [&](const std::string& name, const std::vector<double>& gradient) {
    const std::string what = name.empty() ? "input" : name;
    const auto n = static_cast<std::int64_t>(gradient.size());
    const std::int64_t stride = std::max<std::int64_t>(1, n / samples);
    double size = 0;
    for (double g : gradient) size = std::max(size, std::abs(g));
    found.require(size > 0, what + ": the gradient is zero, so that the case shows nothing of it");
    for (std::int64_t i = 0; i < n; i += stride) {
      const double quotient = (loss(name, i, h) - loss(name, i, -h)) / (2 * h);
      const double got = gradient[static_cast<std::size_t>(i)];
      if (!(std::abs(quotient - got) <= 1e-7 * std::max(1.0, size)))
        found.add(cat({what, ", element ", i, ": the gradient is ", got, ", and the difference quotient ", quotient}));
    }
  };
  if (!at.dx.empty()) compare("", at.dx);
  for (const auto& [name, gradient] : at.gradients) compare(name, gradient);
  return found;
}

/// Compares the values of one rank of a mesh with those of a single rank.
inline findings compare_layers(const layer_values& got, const layer_values& one, double tolerance) {
  findings found = got.found;
  const auto near = [&](const std::vector<double>& a, const std::vector<double>& b, const std::string& what) {
    const double d = largest_difference(a, b);
    if (!(d <= tolerance)) found.add(cat({what, " differs by ", d, " of its size"}));
  };
  near(got.y, one.y, "output");
  near({got.auxiliary}, {one.auxiliary}, "auxiliary loss");
  near(got.dx, one.dx, "gradient of the input");
  found.require(got.gradients.size() == one.gradients.size(), "other parameters than on one rank");
  for (std::size_t i = 0; i < std::min(got.gradients.size(), one.gradients.size()); ++i)
    near(got.gradients[i].second, one.gradients[i].second, "gradient of " + one.gradients[i].first);
  return found;
}

/// Compares every rank of `mesh` with a single rank, for each recompute policy and with deferred weight gradients.
template <class Mesh, class Make, class Launch = on_cpu>
findings check_mesh(const Mesh& mesh, const dim_sizes& sizes, const layer_values& one, Make&& make,
                    double tolerance = 1e-12, const Launch& launch = {}) {
  findings found;
  for (const recompute policy : {recompute::none, recompute::selective, recompute::full})
    for (const bool deferred : {false, true}) {
      if (deferred && policy == recompute::selective) continue;
      const bool reused = deferred || policy == recompute::selective;
      const auto all = run_on(mesh, sizes, make, {.policy = policy, .deferred = deferred, .reused = reused}, launch);
      for (std::size_t r = 0; r < all.size(); ++r)
        found.add(compare_layers(all[r], one, tolerance),
                  cat({describe(mesh.shape()), ", rank ", r, ", recompute ", name_of(policy),
                       (deferred ? ", deferred" : ""), (reused ? ", reused" : "")}));
    }
  return found;
}

/// Reports a gradient of a parameter that a second pass does not double: passes of a step add to gradients.
template <class Mesh, class Make, class Launch = on_cpu>
findings check_sums(const Mesh& one, const dim_sizes& sizes, layer_values once, Make&& make, double tolerance,
                    const Launch& launch) {
  findings found;
  const layer_values twice = run_on(one, sizes, make, {.passes = 2}, launch)[0];
  for (std::size_t i = 0; i < once.gradients.size(); ++i) {
    auto& [name, gradient] = once.gradients[i];
    for (double& g : gradient) g *= 2;
    const double d = largest_difference(twice.gradients[i].second, gradient);
    if (!(d <= tolerance))
      found.add(cat({"two passes of a step: the gradient of ", name, " differs by ", d,
                     " of its size from twice that of one pass; a pass adds to gradients"}));
  }
  return found;
}

/// Checks a layer: finite differences on `one`, a mesh of one rank, then every mesh in comparison to it.
///
///     const auto make = [](const auto& ctx) { return linear<double, up, device_of<decltype(ctx)>>(ctx, "up"); };
///     CHECK(check_layer(mesh{1, 1}, {mesh{2, 1}, mesh{2, 4}}, sizes, make).text() == "");
template <class Mesh, class Make, class Launch = on_cpu>
findings check_layer(const Mesh& one, std::initializer_list<Mesh> meshes, const dim_sizes& sizes, Make&& make,
                     double tolerance = 1e-12, const Launch& launch = {}) {
  const layer_values alone = run_on(one, sizes, make, {}, launch)[0];
  findings found = alone.found;
  found.add(check_differences(one, sizes, alone, make, 40, launch), "one rank");
  found.add(check_sums(one, sizes, alone, make, tolerance, launch), "one rank");
  mesh_shape active;
  for (const Mesh& mesh : meshes) {
    found.add(check_mesh(mesh, sizes, alone, make, tolerance, launch), "mesh");
    for (axis_id axis : mesh.shape().axes)
      if (mesh.shape().extent(axis) > 1 && !active.has(axis)) active.add(axis, 2);
  }
  for (axis_id axis : one.shape().axes)
    found.require(active.has(axis), std::string("no mesh has more than one rank along ") + axis.text());
  return found;
}

}  // namespace plait::testing

#include "plait/core/macros_on.hpp"
