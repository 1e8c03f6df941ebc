// The in-process backend: ranks are threads of one process, and move data through its memory. It detects a deadlock at
// once and exactly. Test: tests/unit/comm/threads.cpp, tests/unit/comm/threads_errors.cpp.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "plait/comm/communicator.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::threads {

/// Thrown on the ranks that stop because another rank failed; `threads::run` reports the cause instead.
class stopped : public error {
 public:
  using error::error;
};

class device_engine;
namespace detail {
class member;
}  // namespace detail

/// A rank's handle of a group of threads of this process; communicator.hpp documents the operations.
///
/// Reductions add in the order of the ranks, so they give equal bits on every rank and in every run. A send blocks
/// until its receive (there is no buffering). These errors end all ranks of the run:
///   - ranks of a group call different operations, counts, dtypes, ops or roots at the same place of the sequence;
///   - all ranks wait or have returned (a deadlock, detected exactly and at once);
///   - a rank throws or calls abort.
class communicator : public verbs<communicator> {
 public:
  communicator() = default;
  explicit communicator(std::shared_ptr<detail::member> member) : member_(std::move(member)) {}

  explicit operator bool() const { return member_ != nullptr; }
  int rank() const;
  int size() const;
  /// The rank among all threads of the run.
  int world_rank() const;
  const std::string& label() const;
  /// Whether calls return before the device has completed them.
  bool enqueues() const;
  bool unequal_parts(std::size_t) const { return true; }

  void run(const call& c);
  [[nodiscard]] request start(const call& c);

  /// Collective. The label names the subgroup in messages; the default is the parent's label, a dot and the color.
  communicator split(int color, int key, std::string_view label = {});

  /// Returns a communicator of these ranks on the memory of each rank's device. Collective. The streams of `engine`
  /// must outlive it.
  communicator on(std::shared_ptr<device_engine> engine);

  void abort(const std::string& why) noexcept;

 private:
  detail::member& self() const { return plait::detail::held_by(member_); }

  std::shared_ptr<detail::member> member_;
};

static_assert(plait::communicator<communicator>);

namespace detail {

void run_ranks(int ranks, const std::function<void(communicator&)>& body);

}  // namespace detail

/// Runs `body(communicator)` on `ranks` threads, and returns when all have ended. The first error of any rank ends them
/// all. It is thrown here as a plait::error that names the rank and the last operations of every rank. The rank's own
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
