// The axes over which the gradient of a parameter is reduced, as data parallelism sorts them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/data_parallel/placement.hpp"
#include "plait/data_parallel/ranks.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// How the gradient of a parameter becomes complete: over which axes of data parallelism, and over which others.
struct reduction_axes {
  axis_list shard;      ///< those of `data_axes::shard` over which it is partial
  axis_list replicate;  ///< those of `data_axes::replicate`
  axis_list rest;       ///< others, such as a norm's over tensor ranks; few elements

  friend bool operator==(const reduction_axes&, const reduction_axes&) = default;
};

/// Throws for a trainable parameter to whose gradient no pass of the step has added: it would decay, and nothing else.
/// Gradients in the caller's memory are not known to be empty.
template <class Precision, compute_device Device>
void require_used(const parameter<Precision, Device>& p) {
  if (!p.trainable() || !p.gradient_is_empty()) return;
  fail({"training step: no pass has added to the gradient of the parameter ", p.name(),
        ", which the model visits; use it in every step, freeze it before the step is made, or leave it out of visit"});
}

/// Over which axes the gradient of a parameter is reduced, by the dual of how it is used.
inline reduction_axes reduction_of(const layout& used, const data_ranks& ranks) {
  reduction_axes how;
  const layout gradient = dual(used);
  for (const axis_id axis : ranks.ranks().shape().axes) {
    if (gradient.state_of(axis) != state::partial || ranks.ranks().shape().extent(axis) == 1) continue;
    if (ranks.shard().find(axis) >= 0)
      how.shard.push_back(axis);
    else if (ranks.replicate().find(axis) >= 0)
      how.replicate.push_back(axis);
    else
      how.rest.push_back(axis);
  }
  return how;
}

/// Elements of a bucket whose gradients are summed over `comm` before all others.
struct reduced_range {
  std::int64_t begin = 0, end = 0;
  any_communicator* comm = nullptr;
};

/// Makes one of neighbours that are summed over the same ranks, with nothing between them but padding to `block`.
inline void join_neighbours(std::vector<reduced_range>& all, std::int64_t block) {
  std::sort(all.begin(), all.end(), [](const reduced_range& a, const reduced_range& b) { return a.begin < b.begin; });
  std::vector<reduced_range> joined;
  for (const reduced_range& r : all) {
    const bool next = !joined.empty() && joined.back().comm == r.comm &&
                      (joined.back().end == r.begin || round_up(joined.back().end, block) == r.begin);
    if (next)
      joined.back().end = r.end;
    else
      joined.push_back(r);
  }
  all = std::move(joined);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
