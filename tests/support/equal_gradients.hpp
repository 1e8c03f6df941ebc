#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/llama_parity.hpp"

/// Trains a small Llama with gradients that depend on the step, the parameter and the element only. A difference
/// between meshes then comes from the optimizer.
namespace plait::test {

/// The gradient of an element: a size from 1/1000 to 1, exact in a float with bits to spare.
inline double made_gradient(const std::string& name, std::int64_t step, std::int64_t element) {
  const auto seed = kernels::rounding_seed_of(fnv1a(name), static_cast<std::uint64_t>(1000 * step));
  const auto word = kernels::random_words(seed, 1, static_cast<std::uint64_t>(element))[0];
  return static_cast<double>(static_cast<std::int32_t>(word) >> 16) * (element % 3 == 0 ? 0x1p-25 : 0x1p-15);
}

/// The layout, the optimizer and the steps of a run with made gradients.
struct made_run {
  std::int64_t dp = 1, tp = 1, cp = 1;
  zero_level level = zero_level::replicated;
  bucket_cut cut = bucket_cut::even;
  gradient_wire wire = gradient_wire::full;
  data_axes axes{};
  std::int64_t steps = 3;
  bool every_rank =
      false;  ///< whether each data rank adds its own term of a pending sum, instead of the first rank only
  llama_config config = small_config(8, 4);
};

/// Results of a run on rank 0: all values, the bytes of optimizer state there, and the bytes sent by reductions.
struct made_outcome {
  std::vector<named_values> values;
  std::size_t state_bytes = 0, state_predicted = 0;
  double reduced_bytes = 0;
};

template <class Precision>
made_outcome run_made_gradients(const made_run& how, const optimizer_options& options) {
  made_outcome out;
  using strategy = context_parallel<megatron_sp, chosen<plait::cp>, zigzag>;
  threads::run(static_cast<int>(how.dp * how.cp * how.tp), [&](threads::communicator c) {
    world w(megatron_sp::mesh{how.dp, how.cp, how.tp, 1}.shape(), c);
    cpu device;
    const context<cpu> ctx{device, w, llama_sizes<strategy>(how.config, w.shape(), 8, 16), 7};
    llama<Precision, strategy, cpu> model(ctx, how.config);
    parameter_units<Precision, cpu> units(ctx, how.level, how.axes, how.cut, how.wire);
    for (int u = 0; u < model.units(); ++u) units.add(ctx, 0, [&](auto&& f) { model.visit_unit(u, f); });
    model.visit([&](auto& p) { p.initialize(ctx); });
    chosen_optimizer<Precision, cpu> optimizer(options);
    std::size_t state_bytes = 0;
    for (std::int64_t step = 0; step < how.steps; ++step) {
      units.begin_step(ctx);
      optimizer.begin_step(ctx, 1e-2);
      typename parameter_units<Precision, cpu>::gradients all;
      for (int u = 0; u < units.size(); ++u) {
        units.gather(ctx, u);
        units.enter(ctx, u, true);
        model.visit_unit(u, [&](auto& p) {
          auto* const to = p.used_gradient(device);
          const layout gradient = dual(p.used());
          std::string name = p.name();
          for (const axis_id axis : w.shape().axes) {
            const bool data = axis == axis_of<dp> || axis == axis_of<cp>;
            if (gradient.state_of(axis) != state::partial || (how.every_rank && data)) continue;
            if (w.coordinate(axis) != 0) return;  // a pending sum has one term
          }
          if (how.every_rank)
            name +=
                std::to_string(w.coordinate(axis_of<dp>) * w.shape().extent(axis_of<cp>) + w.coordinate(axis_of<cp>));
          const auto map = kernels::run_map::of(p.part());
          for (std::int64_t i = 0; i < p.size(); ++i)
            to[i] = converted<gradient_of<Precision>>(made_gradient(name, step, map.global_of_element(i)));
        });
        units.reduce(ctx, u);
        units.reduce_copies(u);
        units.finish_reduction(ctx, u, all);
      }
      const std::size_t before = device.bytes_in_use();
      optimizer.update(ctx, std::span<reduced_gradient<Precision, cpu>>(all));
      if (step == 0) state_bytes = device.bytes_in_use() - before;
    }
    std::size_t predicted = 0;
    model.visit([&](auto& p) {
      const storage_slice piece = p.slice();
      predicted += moment_bytes<Precision>(options, p.info(), piece.size(),
                                           (p.array_offset() + piece.begin) % kernels::moment_block);
    });
    double reduced = 0;
    for (const collective kind : {collective::all_reduce, collective::reduce_scatter})
      reduced += static_cast<double>(w.ledger().total("dp", kind).wire);
    auto values = gather_values(ctx, model);
    if (w.rank() == 0) out = {std::move(values), state_bytes, predicted, reduced};
  });
  return out;
}

/// Whether two runs have bitwise equal results.
inline bool equal_bits(const made_outcome& a, const made_outcome& b) {
  if (a.values.empty() || a.values.size() != b.values.size()) return false;
  for (std::size_t i = 0; i < a.values.size(); ++i)
    if (a.values[i].name != b.values[i].name || a.values[i].values != b.values[i].values) return false;
  return true;
}

}  // namespace plait::test
