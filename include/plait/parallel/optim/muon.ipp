// The definitions of muon.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

PLAIT_INLINE matrix_owners::matrix_owners(world& w, const axis_list& axes, const std::vector<stored_matrix>& matrices) {
  std::vector<std::int64_t> members(static_cast<std::size_t>(w.shape().size(axes)));
  const auto group = w.shape().group_of(w.rank(), axes);
  for (std::int64_t r = 0; r < w.size(); ++r)
    if (w.shape().group_of(r, axes) == group) members[static_cast<std::size_t>(w.shape().index_in(r, axes))] = r;
  const auto here = static_cast<std::size_t>(w.shape().index_in(w.rank(), axes));
  if (members.size() > 1) group_ = &w.group(axes);

  std::vector<double> costs;
  for (const stored_matrix& m : matrices) {
    costs.push_back(m.cost);
    std::vector<box>& parts = parts_.emplace_back();
    for (const std::int64_t r : members) parts.push_back(local_box(m.stored, w.shape(), m.sizes, r));
  }
  const std::vector<int> owner_of = balance_owners(costs, static_cast<int>(members.size()));
  std::vector<std::vector<int>> owned(members.size());
  for (std::size_t i = 0; i < matrices.size(); ++i)
    owned[static_cast<std::size_t>(owner_of[i])].push_back(static_cast<int>(i));
  std::size_t most = 0;
  for (std::vector<int>& of_one : owned) {
    std::stable_sort(of_one.begin(), of_one.end(), [&](int a, int b) {
      return costs[static_cast<std::size_t>(a)] > costs[static_cast<std::size_t>(b)];
    });
    most = std::max(most, of_one.size());
  }
  for (std::size_t i = 0; i < most; ++i) {
    round& r = rounds_.emplace_back();
    for (const std::vector<int>& of_one : owned) r.matrices.push_back(i < of_one.size() ? of_one[i] : -1);
    r.own = r.matrices[here];
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      r.part_size.push_back(elements(r.matrices[rank], here));
      r.piece_size.push_back(elements(r.own, rank));
    }
    r.part_at.resize(members.size());
    r.piece_at.resize(members.size());
    std::exclusive_scan(r.part_size.begin(), r.part_size.end(), r.part_at.begin(), std::size_t{0});
    std::exclusive_scan(r.piece_size.begin(), r.piece_size.end(), r.piece_at.begin(), std::size_t{0});
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
