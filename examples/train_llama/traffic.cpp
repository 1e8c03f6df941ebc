#include "traffic.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>

#include "../size_text.hpp"
#include "plan.hpp"

std::uint64_t per_rank(const plait::mesh_shape& shape, const std::string& label, plait::collective kind,
                       std::uint64_t wire) {
  if (kind == plait::collective::send) return wire;
  std::int64_t ranks = label == "pp ends" ? 2 : 1;
  for (plait::axis_id axis : shape.axes)
    if (fmt::format("+{}+", label).find(fmt::format("+{}+", axis.text())) != std::string::npos)
      ranks *= shape.extent(axis);
  return wire / static_cast<std::uint64_t>(ranks);
}
std::uint64_t per_rank(const plait::mesh_shape& shape, const plait::ledger::row& row, std::uint64_t steps) {
  std::uint64_t sum = 0;
  for (int k = 0; k < plait::collective_kinds; ++k)
    sum += per_rank(shape, row.label, static_cast<plait::collective>(k),
                    row.kinds[static_cast<std::size_t>(k)].wire / steps);
  return sum;
}

traffic traffic_of(const setup& s, model_run& run, std::int64_t steps) {
  plait::world& w = run.world();
  const plait::ledger predicted = plan_of_rank(s, run.rank(), run.stages()).traffic;
  traffic out;
  const auto seen = static_cast<std::uint64_t>(run.counted_steps()), all = static_cast<std::uint64_t>(steps);
  for (const auto& row : predicted.rows) w.ledger().of(row.label);  // what was predicted and not sent counts too
  for (const auto& row : w.ledger().rows) {
    const plait::ledger::entry total = w.ledger().total(row.label), expected = predicted.total(row.label);
    out.as_predicted = out.as_predicted && total.wire == expected.wire * seen && total.calls == expected.calls * seen;
    if (total.calls == 0) continue;
    const std::uint64_t bytes = per_rank(s.mesh, row, seen) * all;
    out.bytes.add(row.label, bytes);
    out.text +=
        fmt::format("{}{} over {}", out.text.empty() ? "" : ", ", size_text(static_cast<double>(bytes)), row.label);
  }
  out.as_predicted = run.all_reduce(out.as_predicted ? 1 : 0, plait::reduce_op::min) > 0;
  return out;
}

const plait::axis_communication* most_waited(const std::vector<plait::axis_communication>& communication) {
  const plait::axis_communication* most = nullptr;
  for (const plait::axis_communication& c : communication)
    if (!std::isnan(c.waited) && (most == nullptr || c.waited > most->waited)) most = &c;
  return most;
}
