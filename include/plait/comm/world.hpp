#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/counting.hpp"
#include "plait/mesh/mesh.hpp"

namespace plait {

/// The name of a group of axes in messages, ledgers and plans: `dp`, `cp+tp`.
inline std::string label_of(const axis_list& axes) {
  std::string label;
  for (axis_id axis : axes) {
    if (!label.empty()) label += '+';
    label += axis.text();
  }
  return label.empty() ? "none" : label;
}

/// One rank's view of a mesh: its coordinate, and a communicator for the group that any set of axes spans. Every call
/// of those communicators is counted in `ledger()` under the axes' label.
class world {
 public:
  /// Takes all ranks of `root`, in order, as the ranks of `shape`. Throws where the sizes differ. Collective: the
  /// groups of every set of axes (of more than one rank, in the mesh's order) are made here.
  world(const mesh_shape& shape, any_communicator root, std::shared_ptr<plait::recorder> events = nullptr)
      : shape_(shape), root_(std::move(root)), ledger_(std::make_shared<plait::ledger>()), events_(std::move(events)) {
    if (shape_.size() != root_.size())
      fail({"the mesh has ", shape_.size(), " ranks, but the communicator has ", root_.size(),
            ": the extents of the axes must multiply to the number of ranks"});
    make_groups();
  }
  /// The view of `rank` on a mesh that does not run: everything is counted, and nothing communicated.
  static world counting(const mesh_shape& shape, std::int64_t rank = 0) { return world(shape, rank); }
  world(const world&) = delete;
  world& operator=(const world&) = delete;

  const mesh_shape& shape() const { return shape_; }
  std::int64_t rank() const { return root_.rank(); }
  std::int64_t size() const { return shape_.size(); }
  std::int64_t coordinate(axis_id axis) const { return shape_.coordinate(rank(), axis); }
  any_communicator& root() { return root_; }
  plait::ledger& ledger() { return *ledger_; }
  /// Another communicator of this rank, counted in the same ledger under its own label.
  any_communicator count(const any_communicator& other) { return other.counted(ledger_, events_); }

  /// The axes of `axes` along which there is more than one rank.
  axis_list pruned(const axis_list& axes) const {
    axis_list rest;
    for (axis_id axis : axes)
      if (shape_.extent(axis) > 1) rest.push_back(axis);
    return rest;
  }

  /// The group that `axes` span, its ranks ordered with the first axis major. For axes in another order than the mesh's
  /// the group is made at its first use, which is then collective over the whole world. Valid as long as the world.
  any_communicator& group(const axis_list& axes) {
    const axis_list wanted = pruned(axes);
    for (entry& e : groups_)
      if (e.axes == wanted) return e.comm;
    return make(wanted);
  }

 private:
  struct entry {
    axis_list axes;
    any_communicator comm;
  };

  world(const mesh_shape& shape, std::int64_t rank)
      : shape_(shape),
        root_(counting_communicator(static_cast<int>(rank), static_cast<int>(shape.size()), "world")),
        ledger_(std::make_shared<plait::ledger>()),
        counting_(true) {
    make_groups();
  }

  void make_groups() {
    for (unsigned set = 1; set < 1u << shape_.axes.size(); ++set) {
      axis_list axes;
      for (std::size_t i = 0; i < shape_.axes.size(); ++i)
        if (set >> i & 1u) axes.push_back(shape_.axes[i]);
      if (pruned(axes) == axes) make(axes);
    }
  }

  any_communicator& make(const axis_list& axes) {
    any_communicator part = counting_ ? counting_communicator(static_cast<int>(shape_.index_in(rank(), axes)),
                                                              static_cast<int>(shape_.size(axes)), label_of(axes))
                                      : root_.split(static_cast<int>(shape_.group_of(rank(), axes)),
                                                    static_cast<int>(shape_.index_in(rank(), axes)), label_of(axes));
    groups_.push_back({axes, count(part)});
    return groups_.back().comm;
  }

  mesh_shape shape_;
  any_communicator root_;
  std::shared_ptr<plait::ledger> ledger_;
  std::shared_ptr<plait::recorder> events_;
  std::deque<entry> groups_;
  bool counting_ = false;
};

}  // namespace plait
