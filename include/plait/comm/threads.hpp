// The in-process backend: the ranks are threads of one process, which move data in its memory and find a deadlock at
// once. It needs no launcher and spans no machines (comm/mpi.hpp and comm/nccl.hpp do).
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "plait/comm/communicator.hpp"
#include "plait/comm/threads/member.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::threads {

/// A rank's handle of a group of threads of this process; see communicator.hpp for what the operations mean.
///
/// Reductions are in the order of the ranks, so they give the same bits on every rank and in every run. A send waits
/// for its receive (there is no buffering). Errors, each ending all ranks of the run:
///   - ranks of a group call different operations, counts, dtypes, ops or roots at the same place of the sequence;
///   - no rank can go on (a deadlock, found exactly and at once, which includes ranks that have returned);
///   - a rank throws or calls abort.
class communicator : public verbs<communicator> {
 public:
  communicator() = default;
  explicit communicator(std::shared_ptr<detail::member> member) : member_(std::move(member)) {}

  explicit operator bool() const { return member_ != nullptr; }
  int rank() const { return self().rank(); }
  int size() const { return self().size(); }
  /// Rank among all threads of the run.
  int world_rank() const { return self().world_rank(); }
  const std::string& label() const { return self().home().label; }
  /// Whether calls return before a device has done what they ask for.
  bool enqueues() const { return self().on_device(); }

  void run(const call& c) { self().finish(self().post(c), detail::side_of(c)); }
  [[nodiscard]] request start(const call& c) {
    const int side = detail::side_of(c);
    return request(side < 0    ? detail::request_table<-1>
                   : side == 0 ? detail::request_table<0>
                               : detail::request_table<1>,
                   member_, self().post(c, true));
  }

  /// Collective. The label names the subgroup in messages; without one it is the parent's, a dot and the color.
  communicator split(int color, int key, std::string_view label = {}) {
    auto child = self().split(color, key, label);
    return child ? communicator(std::move(child)) : communicator();
  }

  /// Collective: the same ranks, on the memory of each rank's device. The streams that `engine` uses must outlive it.
  communicator on(std::shared_ptr<device_engine> engine) {
    auto child = self().split(0, rank(), label());
    child->use(std::move(engine));
    return communicator(std::move(child));
  }

  void abort(const std::string& why) noexcept {
    try {
      self().run().fail(cat({"rank ", world_rank(), " called abort: ", why}));
    } catch (...) {
      std::terminate();
    }
  }

 private:
  detail::member& self() const {
    if (!member_) fail("a communicator without a group was used (its rank has a negative color in the split)");
    return *member_;
  }

  std::shared_ptr<detail::member> member_;
};

static_assert(plait::communicator<communicator>);

namespace detail {

void run_ranks(int ranks, const std::function<void(communicator&)>& body);

}  // namespace detail

/// Runs `body(communicator)` on `ranks` threads and returns when all have ended. The first error of any rank ends them
/// all and is thrown here as a plait::error that says which rank it was and what every rank did last; the rank's own
/// exception is nested in it.
template <class F>
void run(int ranks, F&& body) {
  detail::run_ranks(ranks, [&body](communicator& comm) { body(comm); });
}

}  // namespace plait::threads

#ifndef PLAIT_COMPILED
#include "plait/comm/threads.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
