#include "check_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "../size_text.hpp"
#include "available_memory.hpp"
#include "plan.hpp"

namespace {

/// What is sure to be held: a run that is resumed may have made all of its steps.
least_bytes least_of(const setup& s, const run_plan& plan) {
  double bytes = plan.weights;
  if (s.opt.steps > 0) bytes += plan.optimizer;
  if (s.opt.steps > 0 && s.opt.resume == "none") bytes += plan.gradients + plan.kept + plan.attention;
  const double offloaded = s.opt.steps > 0 ? plan.on_host : 0;
  return s.opt.device == "cuda" ? least_bytes{bytes, offloaded} : least_bytes{0, bytes + offloaded};
}

}  // namespace

least_bytes least_bytes_of(const setup& s, std::int64_t rank) {
  const std::int64_t inner = ranks_of_stage(s), at = rank / inner % s.mesh.extent(plait::axis_of<plait::pp>);
  return least_of(s, plan_of_rank(s, at * inner, s.stages));
}

least_bytes least_bytes_of_all(const setup& s) {
  const std::int64_t pp = s.mesh.extent(plait::axis_of<plait::pp>), inner = ranks_of_stage(s);
  least_bytes all;
  for (std::int64_t at = 0; at < pp; ++at) {
    const least_bytes one = least_bytes_of(s, at * inner);
    const auto ranks = static_cast<double>(s.mesh.size() / pp);
    all.gpu += ranks * one.gpu;
    all.host += ranks * one.host;
  }
  return all;
}

std::string memory_fault(const setup& s, double bytes, double available, const std::string& memory) {
  if (bytes <= s.opt.memory_share * available) return {};
  return fmt::format(
      "--memory-share {}: the run needs at least {} of {}, and {} are available; --dry-run shows what takes it, and a "
      "share of {:.3g} starts the run nevertheless",
      s.opt.memory_share, size_text(bytes), memory, size_text(available), 1.01 * bytes / std::max(available, 1.0));
}

std::string host_memory_fault(const setup& s, double bytes) {
  const std::optional<double> available = available_memory();
  return available ? memory_fault(s, bytes, *available, "this host's memory") : "";
}
