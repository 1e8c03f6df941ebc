// One rank's place on a mesh, with a communicator for every group of axes and a ledger of their calls. A world belongs
// to a run, or to a dry run that only counts the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/value_checks.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/schedule/order.hpp"

namespace plait {

namespace detail {

/// One parameter's use of a piece of memory.
struct memory_use {
  const std::string* name;
  const bool* adds;    ///< whether this gradient has terms that are not reduced; null: the memory holds values
  bool valid = false;  ///< whether the memory still holds this parameter's numbers
  std::uintptr_t at = 0;
};

/// Records, by address, which parameter uses which of the rank's memory.
class memory_uses {
 public:
  /// Gives these bytes to `by`, whose numbers overwrite those of other users. Throws if they hold a gradient that was
  /// not reduced.
  void take(const void* memory, std::size_t bytes, const std::shared_ptr<memory_use>& by);

 private:
  std::map<std::uintptr_t, std::pair<std::uintptr_t, std::weak_ptr<memory_use>>> uses_;
};

}  // namespace detail

/// The log of what one rank starts, in order, on a mesh that does not run.
struct call_log {
  posted_program posted;
  /// Its `waits` has the rank's current place in its program. Null: the place is unknown.
  const ledger* counts = nullptr;
  /// The ranks of this rank's stage, as ranks of the whole mesh.
  std::vector<int> stage_ranks;
  /// The rule of the communicators whose calls are predicted.
  unequal_parts_rule unequal_parts = nullptr;
  int together = -1;   ///< the number of the open group of messages; -1: none
  int next_group = 0;  ///< the number of the next group of messages
};

/// A communicator for dry runs: its operations move nothing and complete at once. It has a rank, a size and a label,
/// but no other ranks. A `world` made for counting counts its calls like others, and writes them into its `call_log`.
/// `split` returns the whole group, because no other rank can tell its color.
class counting_communicator : public verbs<counting_communicator> {
 public:
  counting_communicator() = default;
  counting_communicator(int rank, int size, std::string label) : rank_(rank), size_(size), label_(std::move(label)) {}
  /// A communicator whose calls are logged. `name` includes its purpose, and `ranks` are its ranks on the whole mesh.
  counting_communicator(int rank, std::string label, std::shared_ptr<call_log> log, std::string name,
                        std::vector<int> ranks);

  explicit operator bool() const { return size_ > 0; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& label() const { return label_; }
  void run(const call& c) { write(c, false); }
  [[nodiscard]] request start(const call& c) {
    write(c, true);
    return {};
  }
  counting_communicator split(int color, int, std::string_view label = {}) const;
  /// Returns the communicator of two of this group's ranks, `first` and `second`, for this rank's place `rank` among
  /// them.
  counting_communicator pair(int rank, int first, int second, const std::string& label) const;
  void begin_group() {
    if (log_) log_->together = log_->next_group++;
  }
  void end_group() {
    if (log_) log_->together = -1;
  }
  void abort(const std::string&) noexcept {}
  bool unequal_parts(std::size_t bytes) const {
    return !log_ || log_->unequal_parts == nullptr || log_->unequal_parts(bytes);
  }

 private:
  void write(const call& c, bool asynchronous);

  int rank_ = 0, size_ = 0;
  std::string label_;
  std::shared_ptr<call_log> log_;
  int group_ = -1;
};

static_assert(communicator<counting_communicator>);

/// The name of a group of axes in messages, ledgers and plans, such as `dp` or `cp+tp`.
inline std::string label_of(const axis_list& axes) {
  std::string label;
  for (axis_id axis : axes) append(label, {label.empty() ? "" : "+", axis.text()});
  return label.empty() ? "none" : label;
}
/// A mesh as text, such as "dp=2,tp=4".
inline std::string text_of(const mesh_shape& mesh) {
  std::string text;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i)
    append(text, {i == 0 ? "" : ",", mesh.axes[i].text(), "=", mesh.extents[i]});
  return text;
}

namespace detail {
/// How often a rank has called `zero_gradients`.
struct unreduced_sums {
  std::int64_t calls = 0;
  std::int64_t first = 0;  ///< the first call of this step: a step begins when a parameter is zeroed again
};
}  // namespace detail

/// One rank's view of a mesh: its coordinate, and a communicator for the group that any set of axes spans. Every call
/// of these communicators is counted in `ledger()` under the axes' label.
class world {
 public:
  /// Makes all ranks of `root`, in order, the ranks of `shape`. Throws if the sizes differ or `root` is empty.
  world(const mesh_shape& shape, any_communicator root, std::shared_ptr<plait::recorder> events = nullptr);
  /// The view of `rank` in a dry run: calls are counted, and nothing is communicated. If `shape` is one stage of a
  /// larger mesh, `stage_ranks[r]` is the rank on the larger mesh of rank r. Empty: `shape` is the whole mesh. Parts
  /// are padded as by communicators with the rule `unequal_parts`, such as `nccl::takes_unequal_parts`.
  static world counting(const mesh_shape& shape, std::int64_t rank = 0, std::vector<int> stage_ranks = {},
                        unequal_parts_rule unequal_parts = nullptr) {
    return world(shape, rank, std::move(stage_ranks), unequal_parts);
  }
  ~world();
  world(const world&) = delete;
  world& operator=(const world&) = delete;

  const mesh_shape& shape() const { return shape_; }
  std::int64_t rank() const { return root_.rank(); }
  std::int64_t size() const { return shape_.size(); }
  std::int64_t coordinate(axis_id axis) const { return shape_.coordinate(rank(), axis); }
  any_communicator& root() { return root_; }
  /// All ranks that run one program: the ranks of all stages of a pipeline, or else the ranks of this mesh. No ledger
  /// counts its calls.
  any_communicator& everyone() { return everyone_ ? everyone_ : root_; }
  /// Makes this mesh one stage of a pipeline; `all` are the ranks of all stages.
  void set_everyone(any_communicator all) { everyone_ = std::move(all); }
  plait::ledger& ledger() { return *ledger_; }
  /// The log of what the rank starts, in a world made for counting; null in others.
  const std::shared_ptr<call_log>& calls() const { return calls_; }
  /// The checks that compare this rank's values with other ranks', and the steps that they run in:
  /// `checks().set(value_check::every(100))`.
  value_checks& checks() { return checks_; }
  /// Records which parameter uses which of the program's memory.
  detail::memory_uses& memory_uses() { return memory_uses_; }
  /// Records which sums of gradients have begun.
  detail::unreduced_sums& sums() { return sums_; }
  /// Counts another communicator of this rank in this ledger, under its own label.
  any_communicator count(const any_communicator& other) { return other.counted(ledger_, events_); }

  /// Returns those of `axes` along which there is more than one rank.
  axis_list pruned(const axis_list& axes) const {
    axis_list rest;
    for (axis_id axis : axes)
      if (shape_.extent(axis) > 1) rest.push_back(axis);
    return rest;
  }

  /// The purpose of a communicator. Gathers of parameters and reductions of gradients have communicators of their own,
  /// so they do not wait for the layers' operations on the same ranks.
  enum class channel : std::uint8_t { layers, gathers, reductions };
  /// The group that `axes` span, with ranks ordered so that the first axis is major. It is valid as long as the world.
  /// The first call for a group makes it, which is collective over the whole world. Layers, losses and optimizers call
  /// it when they are built. A program that uses a group on some ranks only must first call this on all ranks.
  any_communicator& group(const axis_list& axes, channel purpose = channel::layers);
  /// Returns how many communicators have been made.
  std::size_t communicators() const { return groups_.size(); }

 private:
  struct entry {
    axis_list axes;
    any_communicator comm;
    channel purpose;
  };

  world(const mesh_shape& shape, std::int64_t rank, std::vector<int> stage_ranks, unequal_parts_rule unequal_parts);
  counting_communicator counted_group(const axis_list& axes, channel purpose) const;

  mesh_shape shape_;
  any_communicator root_, everyone_;
  std::shared_ptr<plait::ledger> ledger_;
  std::shared_ptr<plait::recorder> events_;
  std::deque<entry> groups_;
  value_checks checks_;
  detail::memory_uses memory_uses_;
  detail::unreduced_sums sums_;
  std::shared_ptr<call_log> calls_;  ///< in a world made for counting
};

}  // namespace plait

#ifndef PLAIT_COMPILED
namespace plait {

PLAIT_INLINE void detail::memory_uses::take(const void* memory, std::size_t bytes,
                                            const std::shared_ptr<memory_use>& by) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
  if (begin == end) return;
  if (const auto before = uses_.find(by->at); before != uses_.end() && before->second.second.lock() == by)
    uses_.erase(before);
  auto at = uses_.lower_bound(begin);
  if (at != uses_.begin() && std::prev(at)->second.first > begin) --at;
  while (at != uses_.end() && at->first < end) {
    if (const auto other = at->second.second.lock(); other && other != by) {
      if (other->adds && *other->adds)
        fail({"parameter ", *by->name, ": its numbers would overwrite the gradient of ", *other->name,
              ", to which passes have added; call reduce(ctx) for that one before, or give each memory of its own"});
      other->valid = false;
    }
    at = uses_.erase(at);
  }
  uses_.try_emplace(begin, end, by);
  by->valid = true, by->at = begin;
}

PLAIT_INLINE counting_communicator::counting_communicator(int rank, std::string label, std::shared_ptr<call_log> log,
                                                          std::string name, std::vector<int> ranks)
    : rank_(rank), size_(static_cast<int>(ranks.size())), label_(std::move(label)), log_(std::move(log)) {
  group_ = static_cast<int>(log_->posted.groups.size());
  log_->posted.groups.push_back({std::move(name), std::move(ranks)});
}

PLAIT_INLINE counting_communicator counting_communicator::split(int color, int, std::string_view label) const {
  if (color < 0) return {};
  if (!log_) return counting_communicator(rank_, size_, std::string(label));
  const posted_group own = log_->posted.groups[static_cast<std::size_t>(group_)];
  return counting_communicator(rank_, std::string(label), log_, own.name + " split", own.ranks);
}

PLAIT_INLINE counting_communicator counting_communicator::pair(int rank, int first, int second,
                                                               const std::string& label) const {
  if (!log_) return counting_communicator(rank, 2, label);
  const std::vector<int>& own = log_->posted.groups[static_cast<std::size_t>(group_)].ranks;
  return counting_communicator(rank, label, log_, label,
                               {own[static_cast<std::size_t>(first)], own[static_cast<std::size_t>(second)]});
}

PLAIT_INLINE void counting_communicator::write(const call& c, bool asynchronous) {
  if (!log_ || size_ < 2) return;
  const wait_times* const waits = log_->counts != nullptr ? log_->counts->waits : nullptr;
  log_->posted.calls.push_back({group_, c.kind, c.ragged ? 0 : static_cast<std::uint64_t>(c.count), c.type, c.op,
                                c.peer, c.tag, log_->together, asynchronous, waits != nullptr ? waits->place() : -1});
}

PLAIT_INLINE world::world(const mesh_shape& shape, any_communicator root, std::shared_ptr<plait::recorder> events)
    : shape_(shape), root_(std::move(root)), ledger_(std::make_shared<plait::ledger>()), events_(std::move(events)) {
  if (!root_)
    fail(
        "world: the communicator is empty; give it the one of threads::run, of mpi::run, or of nccl::connect or "
        "attach");
  for (std::size_t i = 0; i < shape_.axes.size(); ++i)
    if (shape_.extents[i] < 1)
      fail({"the mesh has ", shape_.extents[i], " ranks along ", shape_.axes[i].text(), "; legal is 1 or more"});
  if (shape_.size() != root_.size())
    fail({"the mesh has ", shape_.size(), " ranks, but the communicator has ", root_.size(),
          ": the extents of the axes must multiply to the number of ranks"});
}

PLAIT_INLINE world::~world() = default;

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
  groups_.push_back({wanted, part.counted(ledger_, events_, label), purpose});  // all purposes share one label
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

PLAIT_INLINE world::world(const mesh_shape& shape, std::int64_t rank, std::vector<int> stage_ranks,
                          unequal_parts_rule unequal_parts)
    : shape_(shape), ledger_(std::make_shared<plait::ledger>()), calls_(std::make_shared<call_log>()) {
  for (int r = 0; stage_ranks.size() < static_cast<std::size_t>(shape.size()); ++r) stage_ranks.push_back(r);
  calls_->counts = ledger_.get();
  calls_->unequal_parts = unequal_parts;
  calls_->stage_ranks = stage_ranks;
  root_ = counting_communicator(static_cast<int>(rank), "world", calls_, "world", std::move(stage_ranks));
}

}  // namespace plait
#endif

#include "plait/core/macros_on.hpp"
