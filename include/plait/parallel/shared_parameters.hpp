// The agreement of a pipeline's stages about their parameters: names, and those that the first and the last stage
// share.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/counting.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/tensor/all_reduce_scalar.hpp"

namespace plait::detail {

/// The name of the communicator of the first and the last stage, over which they sum what both have.
inline constexpr const char* ends_axis = "pp ends";

/// (another rank, name) for each of `names` that another rank has too. Collective.
template <compute_device Device>
std::vector<std::pair<int, std::uint64_t>> find_twice(const context<Device>& ctx, any_communicator& along,
                                                      const std::vector<std::uint64_t>& names) {
  std::vector<std::pair<int, std::uint64_t>> twice;
  if (along.size() == 1 || only_counts<Device>) return twice;
  const auto most =
      static_cast<std::size_t>(all_reduce_scalar(ctx.device, along, static_cast<double>(names.size()), reduce_op::max));
  const std::vector<std::uint64_t> all = gather_all(ctx.device, along, names, most);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int rank = static_cast<int>(i / most);
    if (rank != along.rank() && all[i] != 0 && std::find(names.begin(), names.end(), all[i]) != names.end())
      twice.emplace_back(rank, all[i]);
  }
  return twice;
}

/// Throws where two parameters have one name, over all stages, but for those that are tied across stages. Collective.
/// `visit(f)` calls f(parameter) for each of this rank.
template <class Parameter, compute_device Device, class Visit>
void check_names(const context<Device>& ctx, any_communicator& along, const Visit& visit) {
  std::vector<std::uint64_t> names;
  std::set<std::string> seen;
  visit([&](Parameter& p) {
    if (!seen.insert(p.name()).second)
      fail({"pipeline: two parameters are called ", p.name(),
            ": they would have the same initial values and one entry in a checkpoint; give each its own name, or let "
            "several layers use one parameter"});
    if (!p.info().tied_across_stages) names.push_back(Parameter::stream_of(p.name()));
  });
  for (const auto& [rank, name] : find_twice(ctx, along, names))
    visit([&, rank = rank, name = name](Parameter& p) {
      if (!p.info().tied_across_stages && Parameter::stream_of(p.name()) == name)
        fail({"pipeline: the parameter ", p.name(), " is on pipeline ranks ", along.rank(), " and ", rank,
              "; if it is one parameter, both stages must make it with tied_across_stages, and if not, each needs its "
              "own name"});
    });
}
/// Returns a text that is equal where a parameter that is made twice is one parameter.
std::string made_as(const parameter_info& info);
/// The ranks of the first and the last stage sum the gradients of what both have.
template <class Parameter, compute_device Device, class Visit>
void tie_stages(const context<Device>& ctx, any_communicator& along, const pipeline_shape& shape, const Visit& visit) {
  const auto join = [&](const any_communicator& ends, bool counts) {
    visit([&](Parameter& p) {
      if (p.info().tied_across_stages) p.join_stages(ends, counts);
    });
  };
  const int first = shape.rank_of(0), last = shape.rank_of(shape.stages() - 1);
  const bool here = along.rank() == first || along.rank() == last;
  std::uint64_t names = 0;
  visit([&](Parameter& p) {
    if (!p.info().tied_across_stages) return;
    names += Parameter::stream_of(made_as(p.info()) + (p.trainable() ? "" : " frozen"));
    if (!here)
      fail({"pipeline: the parameter ", p.name(),
            " is tied across stages, but only the first and the last stage can share parameters"});
  });
  if (first == last || shape.ranks == 1) return;
  if constexpr (only_counts<Device>) {  // its split cannot know how many ranks there are
    const auto* const counting = along.get_if<counting_communicator>();
    if (here && counting != nullptr)
      join(ctx.ranks.count(counting->pair(along.rank() == first ? 0 : 1, first, last, ends_axis)),
           along.rank() == first);
  } else {
    any_communicator ends = along.split(here ? 0 : -1, along.rank(), ends_axis);
    if (!here) return;
    for (const std::uint64_t theirs : gather_all(ctx.device, ends, {names}, 1))
      if (theirs != names)
        fail(
            "pipeline: the first and the last stage do not have the same parameters that are tied across stages; "
            "both must make them, with one name, shape and initializer, and both freeze them or neither");
    join(ends, along.rank() == first);
  }
}

}  // namespace plait::detail

#ifndef PLAIT_COMPILED
#include "plait/parallel/shared_parameters.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
