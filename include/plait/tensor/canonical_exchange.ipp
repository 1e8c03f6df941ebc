// The definitions of canonical_exchange.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

PLAIT_INLINE std::vector<element_range> even_parts(std::int64_t elements, std::int64_t ranks) {
  const std::int64_t size = (elements + ranks - 1) / ranks;
  std::vector<element_range> parts;
  for (std::int64_t r = 0; r < ranks; ++r)
    parts.push_back({std::min(r * size, elements), std::min((r + 1) * size, elements)});
  return parts;
}

PLAIT_INLINE std::vector<std::int64_t> ranks_of_group(const mesh_shape& mesh, const axis_list& axes,
                                                      std::int64_t rank) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(mesh.size(axes)));
  for (std::int64_t r = 0; r < mesh.size(); ++r)
    if (mesh.group_of(r, axes) == mesh.group_of(rank, axes)) all[static_cast<std::size_t>(mesh.index_in(r, axes))] = r;
  return all;
}

PLAIT_INLINE canonical_exchange::canonical_exchange(any_communicator& comm, std::vector<std::vector<tree_node>> members,
                                                    std::int64_t leaves)
    : comm_(&comm), members_(std::move(members)), leaves_(leaves) {
  leaf_tree<char> tree(leaves);
  for (const auto& nodes : members_)
    for (const tree_node& node : nodes) tree.insert(node, 0, [](char&, char&) {});
  for (const auto& e : tree.roots()) joined_.push_back(e.node);
}

PLAIT_INLINE void canonical_exchange::check(const std::vector<tree_node>& own) const {
  if (own == members_[static_cast<std::size_t>(comm_->rank())]) return;
  fail({"a canonical sum over ", leaves_, " leaves is incomplete on this rank: it has ", own.size(),
        " partial sums where its layout has ", members_[static_cast<std::size_t>(comm_->rank())].size(),
        "; some leaf of the step was not added"});
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
