#include "plan.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model_run.hpp"
#include "plait/schedule/order.hpp"
#include "strategies.hpp"

std::int64_t ranks_of_stage(const setup& s) {
  return s.mesh.size() / s.mesh.extent(plait::axis_of<plait::pp>) / s.mesh.extent(plait::axis_of<plait::dp>);
}

run_plan plan_of_rank(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages) {
  return with_types(s.opt, [&]<class Precision, class S>() { return plan_as<Precision, S>(s, rank, stages); });
}

plait::recompute_fit fit_of_rank(const setup& s, int at, std::int64_t budget) {
  return with_types(
      s.opt, [&]<class Precision, class S>() { return fit_as<Precision, S>(s, at, at * ranks_of_stage(s), budget); });
}

run_plan plan_of(const setup& s) {
  const std::int64_t inner = ranks_of_stage(s);
  std::optional<run_plan> most;
  std::vector<run_plan::parameter> parameters;
  std::vector<plait::safetensors_declaration> state;
  for (std::int64_t at = 0; at < s.mesh.extent(plait::axis_of<plait::pp>); ++at) {
    run_plan plan = plan_of_rank(s, at * inner, s.stages);
    parameters.insert(parameters.end(), plan.parameters.begin(), plan.parameters.end());
    state.insert(state.end(), plan.state.begin(), plan.state.end());
    if (!most || plan.bytes() > most->bytes()) most = std::move(plan);
  }
  most->parameters = std::move(parameters);
  most->state = std::move(state);
  return *most;
}

std::string order_text(const setup& s) {
  constexpr std::int64_t most = 64;  // ranks, each of which takes as long as a step takes on the host
  if (s.mesh.size() == 1) return {};
  if (s.mesh.size() > most)
    return fmt::format("order of collectives: not followed over {} ranks, only up to {}\n", s.mesh.size(), most);
  std::vector<plait::posted_program> ranks;
  for (std::int64_t rank = 0; rank < s.mesh.size(); ++rank) ranks.push_back(plan_of_rank(s, rank, s.stages).posted);
  plait::require_one_order(ranks);
  return fmt::format("order of collectives: {} collectives and messages of a step stand in one order on all {} ranks\n",
                     plait::verify_order(ranks).completed, s.mesh.size());
}
