// The definitions of world.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

PLAIT_INLINE world::world(const mesh_shape& shape, any_communicator root, std::shared_ptr<plait::recorder> events)
    : shape_(shape), root_(std::move(root)), ledger_(std::make_shared<plait::ledger>()), events_(std::move(events)) {
  for (std::size_t i = 0; i < shape_.axes.size(); ++i)
    if (shape_.extents[i] < 1)
      fail({"the mesh has ", shape_.extents[i], " ranks along ", shape_.axes[i].text(), "; legal is 1 or more"});
  if (shape_.size() != root_.size())
    fail({"the mesh has ", shape_.size(), " ranks, but the communicator has ", root_.size(),
          ": the extents of the axes must multiply to the number of ranks"});
}

PLAIT_INLINE axis_list world::pruned(const axis_list& axes) const {
  axis_list rest;
  for (axis_id axis : axes)
    if (shape_.extent(axis) > 1) rest.push_back(axis);
  return rest;
}

PLAIT_INLINE any_communicator& world::group(const axis_list& axes, channel purpose) {
  const axis_list wanted = pruned(axes);
  for (entry& e : groups_)
    if (e.axes == wanted && e.purpose == purpose) return e.comm;
  const std::string label = label_of(wanted);
  const bool all = purpose == channel::layers && shape_.size(wanted) == size() && shape_.in_order(wanted) == wanted;
  any_communicator part = calls_ ? any_communicator(counted_group(wanted, purpose))
                          : all && root_.serves_groups()
                              ? root_
                              : root_.split(static_cast<int>(shape_.group_of(rank(), wanted)),
                                            static_cast<int>(shape_.index_in(rank(), wanted)), label);
  groups_.push_back({wanted, part.counted(ledger_, events_, label), purpose});  // every purpose under one label
  return groups_.back().comm;
}

PLAIT_INLINE counting_communicator world::counted_group(const axis_list& axes, channel purpose) const {
  std::vector<int> ranks(static_cast<std::size_t>(shape_.size(axes)));
  for (std::int64_t r = 0; r < shape_.size(); ++r)
    if (shape_.group_of(r, axes) == shape_.group_of(rank(), axes))
      ranks[static_cast<std::size_t>(shape_.index_in(r, axes))] = calls_->stage_ranks[static_cast<std::size_t>(r)];
  const std::string label = label_of(axes);
  const char* const purposes[] = {"", " gathers", " reductions"};
  return counting_communicator(static_cast<int>(shape_.index_in(rank(), axes)), label, calls_,
                               label + purposes[static_cast<std::size_t>(purpose)], std::move(ranks));
}

PLAIT_INLINE world::world(const mesh_shape& shape, std::int64_t rank, std::vector<int> stage_ranks)
    : shape_(shape), ledger_(std::make_shared<plait::ledger>()), calls_(std::make_shared<call_log>()) {
  for (int r = 0; stage_ranks.size() < static_cast<std::size_t>(shape.size()); ++r) stage_ranks.push_back(r);
  calls_->book = ledger_.get();
  calls_->stage_ranks = stage_ranks;
  root_ = counting_communicator(static_cast<int>(rank), "world", calls_, "world", std::move(stage_ranks));
}

PLAIT_INLINE std::string label_of(const axis_list& axes) {
  std::string label;
  for (axis_id axis : axes) {
    if (!label.empty()) label += '+';
    label += axis.text();
  }
  return label.empty() ? "none" : label;
}
PLAIT_INLINE std::string text_of(const mesh_shape& mesh) {
  std::string text;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i)
    append(text, {i == 0 ? "" : ",", mesh.axes[i].text(), "=", mesh.extents[i]});
  return text;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
