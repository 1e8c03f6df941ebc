// Where the arrays of a bucket's parameters lie in it: their sizes and costs, as data_parallel/placement.hpp takes
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plait/data_parallel/placement.hpp"
#include "plait/nn/parameter/info.hpp"

namespace plait::detail {

/// Returns where the arrays lie in a bucket of `pieces` pieces. With `loads`, of each rank, every array has one owner.
template <class Member, class Array>
bucket_placement place_arrays(std::span<const Member> members, const std::vector<Array*>& arrays, std::int64_t pieces,
                              std::int64_t block, std::vector<double>* loads) {
  std::vector<std::int64_t> sizes;
  std::vector<double> costs(arrays.size(), 0.0);
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    sizes.push_back(arrays[i]->size());
    for (const Member& m : members)
      if (m.who->array().get() == arrays[i] && m.who->trainable()) costs[i] += update_cost(m.who->info());
  }
  if (!loads) return place_evenly(sizes, pieces, block);
  if (!members[0].who->info().tied_across_stages) return place_whole(sizes, costs, block, *loads);
  std::vector<double> none(loads->size(), 0.0);  // for two stages that sum their pieces must place alike
  bucket_placement out = place_whole(sizes, costs, block, none);
  for (std::size_t i = 0; i < none.size(); ++i) (*loads)[i] += none[i];
  return out;
}

}  // namespace plait::detail
