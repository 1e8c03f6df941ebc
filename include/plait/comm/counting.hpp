// A communicator that has a rank and a size but moves nothing, for a program that is to be counted and not run. Its
// calls are counted as any backend's are, by comm/any_communicator.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/ledger.hpp"
#include "plait/schedule/order.hpp"

namespace plait {

/// Where the communicators of one rank of a mesh that does not run write what the rank starts, in order.
struct call_log {
  posted_program posted;
  /// Its `waits` says where in its program the rank is; null: unknown.
  const ledger* book = nullptr;
  /// The ranks of the whole mesh that are those of this rank's stage, by their place there.
  std::vector<int> stage_ranks;
  int together = -1;   ///< the number of the group of messages that is open
  int next_group = 0;  ///< of messages
};

/// A communicator without other ranks, to find out what a program would send: it has a rank, a size and a label,
/// and every operation is over at once and moves nothing. A `world` made for counting counts its calls as it would
/// those of any other, and writes them into its `call_log`. Its one subgroup is itself, because no other rank can be
/// asked.
class counting_communicator : public verbs<counting_communicator> {
 public:
  counting_communicator() = default;
  counting_communicator(int rank, int size, std::string label) : rank_(rank), size_(size), label_(std::move(label)) {}
  /// One whose calls are written down: `name` says what it is for as well, and `ranks` are those of the whole mesh.
  counting_communicator(int rank, std::string label, std::shared_ptr<call_log> log, std::string name,
                        std::vector<int> ranks)
      : rank_(rank), size_(static_cast<int>(ranks.size())), label_(std::move(label)), log_(std::move(log)) {
    group_ = static_cast<int>(log_->posted.groups.size());
    log_->posted.groups.push_back({std::move(name), std::move(ranks)});
  }

  explicit operator bool() const { return size_ > 0; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& label() const { return label_; }
  void run(const call& c) { write(c, false); }
  [[nodiscard]] request start(const call& c) {
    write(c, true);
    return {};
  }
  counting_communicator split(int color, int, std::string_view label = {}) const {
    if (color < 0) return {};
    if (!log_) return counting_communicator(rank_, size_, std::string(label));
    const posted_group own = log_->posted.groups[static_cast<std::size_t>(group_)];
    return counting_communicator(rank_, std::string(label), log_, own.name + " split", own.ranks);
  }
  /// Returns the communicator of two of its ranks; this rank is the one at `rank`.
  counting_communicator pair(int rank, int first, int second, const std::string& label) const {
    if (!log_) return counting_communicator(rank, 2, label);
    const std::vector<int>& own = log_->posted.groups[static_cast<std::size_t>(group_)].ranks;
    return counting_communicator(rank, label, log_, label,
                                 {own[static_cast<std::size_t>(first)], own[static_cast<std::size_t>(second)]});
  }
  void begin_group() {
    if (log_) log_->together = log_->next_group++;
  }
  void end_group() {
    if (log_) log_->together = -1;
  }
  void abort(const std::string&) noexcept {}

 private:
  void write(const call& c, bool asynchronous) {
    if (!log_ || size_ < 2) return;
    const wait_book* const waits = log_->book != nullptr ? log_->book->waits : nullptr;
    log_->posted.calls.push_back({group_, c.kind, c.ragged ? 0 : static_cast<std::uint64_t>(c.count), c.type, c.op,
                                  c.peer, c.tag, log_->together, asynchronous, waits != nullptr ? waits->place() : -1});
  }

  int rank_ = 0, size_ = 0;
  std::string label_;
  std::shared_ptr<call_log> log_;
  int group_ = -1;
};

static_assert(communicator<counting_communicator>);

}  // namespace plait
