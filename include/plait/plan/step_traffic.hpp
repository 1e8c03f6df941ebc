#pragma once

#include <cstdint>

#include "plait/comm/ledger.hpp"
#include "plait/parallel/train_step.hpp"

namespace plait {

/// The collectives of one `train_step`, predicted from the layouts alone: what each rank's ledger will have counted
/// after it (without the seconds).
template <class Model, class Precision, compute_device Device>
ledger predict_step_traffic(context<Device>& ctx, Model& model, const adamw<Precision, Device>&,
                            std::int64_t microbatches) {
  ledger book;
  const auto add = [&](const collective_cost& c, std::uint64_t times) {
    if (ctx.ranks.pruned(c.axes).empty() || times == 0) return;
    book.of(label_of(ctx.ranks.pruned(c.axes))).kinds[static_cast<std::size_t>(c.kind)] +=
        {times, times * c.payload, times * c.wire, 0.0};
  };
  const auto add_scalar = [&](const axis_list& axes) {
    axis_list ordered;
    for (axis_id axis : ctx.ranks.shape().axes)
      if (axes.contains(axis)) ordered.push_back(axis);
    ordered = ctx.ranks.pruned(ordered);
    const auto ranks = static_cast<int>(ctx.ranks.shape().size(ordered));
    add({collective::all_reduce, ordered, sizeof(double), wire_bytes(collective::all_reduce, ranks, sizeof(double))},
        1);
  };
  model.visit_collectives(
      [&](const char*, const collective_cost& c) { add(c, static_cast<std::uint64_t>(microbatches)); });
  gradient_norm<Precision, Device> norm;
  model.visit([&](parameter_base<Precision, Device>& p) {
    p.gather_plan().visit_collectives([&](const collective_cost& c) { add(c, 1); }, sizeof(weight_of<Precision>));
    p.reduce_plan().visit_collectives([&](const collective_cost& c) { add(c, 1); }, sizeof(gradient_of<Precision>));
  });
  const auto prepare = [&](parameter_base<Precision, Device>& p) { norm.prepare(ctx, p); };
  if constexpr (staged_model<Model, Device>) {
    model.add_traffic(ctx, book);
    model.visit_once(prepare);
  } else {
    model.visit(prepare);
  }
  for (const axis_list& axes : norm.groups()) add_scalar(axes);
  axis_list sharding;
  for (const dim_placement& p : layout_v<typename Model::tokens::spec>.dims) sharding = union_of(sharding, p.axes);
  add_scalar(sharding);
  add_scalar(layout_v<typename Model::loss_sum::spec>.partial);
  return book;
}

}  // namespace plait
