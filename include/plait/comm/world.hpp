// One rank's place on a mesh, with a communicator for every group of axes and the ledger of their calls.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/counting.hpp"
#include "plait/comm/value_checks.hpp"
#include "plait/layout/mesh.hpp"

namespace plait {

/// The name of a group of axes in messages, ledgers and plans: `dp`, `cp+tp`.
std::string label_of(const axis_list& axes);
/// "dp=2,tp=4".
std::string text_of(const mesh_shape& mesh);

/// One rank's view of a mesh: its coordinate, and a communicator for the group that any set of axes spans. Every call
/// of those communicators is counted in `ledger()` under the axes' label.
class world {
 public:
  /// Takes all ranks of `root`, in order, as the ranks of `shape`. Throws where the sizes differ.
  world(const mesh_shape& shape, any_communicator root, std::shared_ptr<plait::recorder> events = nullptr);
  /// The view of `rank` on a mesh that does not run: everything is counted, and nothing communicated.
  /// `stage_ranks` are the ranks of a larger mesh that has `shape` as a stage, by their place in this one; empty: this
  /// is the whole mesh.
  static world counting(const mesh_shape& shape, std::int64_t rank = 0, std::vector<int> stage_ranks = {}) {
    return world(shape, rank, std::move(stage_ranks));
  }
  world(const world&) = delete;
  world& operator=(const world&) = delete;

  const mesh_shape& shape() const { return shape_; }
  std::int64_t rank() const { return root_.rank(); }
  std::int64_t size() const { return shape_.size(); }
  std::int64_t coordinate(axis_id axis) const { return shape_.coordinate(rank(), axis); }
  any_communicator& root() { return root_; }
  /// The ranks that run one program: those of all stages of a pipeline, or else of this mesh. No ledger counts its
  /// calls.
  any_communicator& everyone() { return everyone_ ? everyone_ : root_; }
  /// This mesh is one stage of a pipeline; `all` are the ranks of all stages.
  void set_everyone(any_communicator all) { everyone_ = std::move(all); }
  plait::ledger& ledger() { return *ledger_; }
  /// Where a world that is made for counting writes what its rank starts, in order; null in others.
  const std::shared_ptr<call_log>& calls() const { return calls_; }
  /// Which values of this rank are compared with those of others, and in which steps:
  /// `checks().set(value_check::every(100))`.
  value_checks& checks() { return checks_; }
  /// Another communicator of this rank, counted in the same ledger under its own label.
  any_communicator count(const any_communicator& other) { return other.counted(ledger_, events_); }

  /// The axes of `axes` along which there is more than one rank.
  axis_list pruned(const axis_list& axes) const;

  /// The purpose of a communicator: in those for gathers of parameters and for reductions of gradients nothing waits
  /// for what layers send over the same ranks.
  enum class channel : std::uint8_t { layers, gathers, reductions };
  /// The group that `axes` span, its ranks ordered with the first axis major; valid as long as the world. It is made
  /// when it is first asked for, which is collective over the whole world: layers, losses and optimizers ask as they
  /// are built, so a world has the communicators that its model needs. Who wants one for some of the ranks alone asks
  /// on all of them first.
  any_communicator& group(const axis_list& axes, channel purpose = channel::layers);
  /// Returns how many communicators have been made.
  std::size_t communicators() const { return groups_.size(); }

 private:
  struct entry {
    axis_list axes;
    any_communicator comm;
    channel purpose;
  };

  world(const mesh_shape& shape, std::int64_t rank, std::vector<int> stage_ranks);
  counting_communicator counted_group(const axis_list& axes, channel purpose) const;

  mesh_shape shape_;
  any_communicator root_, everyone_;
  std::shared_ptr<plait::ledger> ledger_;
  std::shared_ptr<plait::recorder> events_;
  std::deque<entry> groups_;
  value_checks checks_;
  std::shared_ptr<call_log> calls_;  ///< of a world that is made for counting
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/comm/world.ipp"  // IWYU pragma: keep
#endif
