// The world of a stage and the communicator along the pipeline, made from a mesh with a pipeline axis.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/agreement.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// A mesh with a pipeline axis from one rank's viewpoint: the world of its stage, which is the mesh without that axis,
/// and the communicator along it. Layers only use the world; no tensor of a stage is sharded over the pipeline axis.
class pipeline_world {
 public:
  /// Collective over `root`, whose ranks are the ranks of `whole` in order. A mesh without the axis has one stage. If
  /// `events` is not null, it observes all communication.
  pipeline_world(const mesh_shape& whole, any_communicator root, std::shared_ptr<plait::recorder> events = nullptr,
                 axis_id axis = axis_of<pp>)
      : whole_(checked(whole, root)),
        root_(std::move(root)),
        stage_(without(whole, axis), part(whole, root_, whole.others(axis_list(axis)), "stage"), std::move(events)),
        along_(stage_.count(part(whole, root_, axis_list(axis), axis.text()))) {
    stage_.set_everyone(root_);
  }
  /// Returns the view of `rank` on a mesh that does not run, and counts the data that the rank would send.
  /// `unequal_parts` as for `world::counting`.
  static pipeline_world counting(const mesh_shape& whole, std::int64_t rank = 0, axis_id axis = axis_of<pp>,
                                 unequal_parts_rule unequal_parts = nullptr) {
    return pipeline_world(whole, rank, axis, unequal_parts);
  }

  const mesh_shape& shape() const { return whole_; }
  any_communicator& root() { return root_; }
  /// The world of this rank's stage; its ledger also counts the traffic along the pipeline.
  world& stage() { return stage_; }
  /// The ranks that hold the other stages for the same part of the data.
  any_communicator& along() { return along_; }

 private:
  pipeline_world(const mesh_shape& whole, std::int64_t rank, axis_id axis, unequal_parts_rule unequal_parts)
      : whole_(whole),
        root_(counting_communicator(static_cast<int>(rank), static_cast<int>(whole.size()), "world")),
        stage_(world::counting(without(whole, axis), whole.index_in(rank, whole.others(axis_list(axis))),
                               ranks_with(whole, rank, whole.others(axis_list(axis))), unequal_parts)),
        along_(stage_.count(counting_communicator(static_cast<int>(whole.coordinate(rank, axis)),
                                                  std::string(axis.text()), stage_.calls(), std::string(axis.text()),
                                                  ranks_with(whole, rank, axis_list(axis))))) {}

  /// Returns the ranks of the group along `axes` that contains `rank`, in order.
  static std::vector<int> ranks_with(const mesh_shape& whole, std::int64_t rank, const axis_list& axes) {
    std::vector<int> ranks(static_cast<std::size_t>(whole.size(axes)));
    for (std::int64_t r = 0; r < whole.size(); ++r)
      if (whole.group_of(r, axes) == whole.group_of(rank, axes))
        ranks[static_cast<std::size_t>(whole.index_in(r, axes))] = static_cast<int>(r);
    return ranks;
  }
  static mesh_shape without(const mesh_shape& whole, axis_id axis) {
    mesh_shape rest;
    for (std::size_t i = 0; i < whole.axes.size(); ++i)
      if (!(whole.axes[i] == axis)) rest.add(whole.axes[i], whole.extents[i]);
    return rest;
  }
  static const mesh_shape& checked(const mesh_shape& whole, const any_communicator& root) {
    if (whole.size() != root.size())
      fail({"the mesh has ", whole.size(), " ranks, but the communicator has ", root.size(),
            ": the extents of the axes must multiply to the number of ranks"});
    if (!root.enqueues()) {
      any_communicator all = root;
      require_agreement(all, std::vector<setting>{{"mesh", text_of(whole)}});
    }
    return whole;
  }
  static any_communicator part(const mesh_shape& whole, any_communicator& root, const axis_list& axes,
                               std::string_view label) {
    const std::int64_t rank = root.rank();
    if (whole.size(axes) == whole.size() && root.serves_groups()) return root;
    return root.split(static_cast<int>(whole.group_of(rank, axes)), static_cast<int>(whole.index_in(rank, axes)),
                      label);
  }

  mesh_shape whole_;
  any_communicator root_;
  world stage_;
  any_communicator along_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
