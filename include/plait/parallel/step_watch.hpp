// The measurements of a step's program while it runs: which entries took how long, which of them waited for what, and
// the events of passes and messages. The executor tells it where it is: parallel/executor.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/comm/clock.hpp"
#include "plait/comm/ledger.hpp"
#include "plait/comm/wait_book.hpp"
#include "plait/schedule/expand.hpp"
#include "plait/schedule/simulate.hpp"

namespace plait {

/// One line of a measured timeline: when a step of the program began and ended, in seconds of `comm_clock`. A send or a
/// receive lasts from its start until it was seen to be complete. To measure, the executor waits for the device after
/// each action.
struct pipeline_event {
  step_entry step;
  double begin = 0, end = 0;
  std::uint64_t bytes = 0;  ///< of a message
  std::size_t memory = 0;   ///< bytes in use on the device after a compute
};

/// Where a rank is in the program of its step. Waits are written down in every run; a place is the number of an entry
/// of the rank's program, and the number behind the last one is the end of the step.
class step_watch {
 public:
  /// Where the times of what is computed are put, in seconds of `comm_clock`: of each unit of a pass by itself, without
  /// what the unit waits for before; of gathers and reductions how long it took to start them; of the norm and updates
  /// with what they waited. To measure, the executor then waits for the device. Null: nowhere.
  std::vector<timed_entry>* times = nullptr;

  /// Of all runs so far.
  const wait_book& waits() const { return waits_; }

  /// The calls counted in `book` are this run's; until `end_run`.
  void begin_run(ledger& book) {
    book_ = &book;
    book.waits = &waits_;
  }
  void end_run() noexcept {
    waits_.at(-1);
    if (book_ != nullptr) book_->waits = nullptr;
    book_ = nullptr;
  }
  void at(std::size_t entry) {
    if (book_ != nullptr) waits_.at(static_cast<int>(entry));
  }

  /// The computation of an entry begins; it ends before the next one's begins.
  template <class Device>
  void begin(Device& device, const step_entry& e) {
    if (times == nullptr) return;
    device.synchronize();
    waited_ = waits_.seconds();
    times->push_back({e, comm_clock(), 0, 0});
  }
  template <class Device>
  void end(Device& device) {
    if (times == nullptr) return;
    device.synchronize();
    times->back().end = comm_clock();
    times->back().waited = waits_.seconds() - waited_;
  }

 private:
  wait_book waits_;
  ledger* book_ = nullptr;
  double waited_ = 0;  ///< when the entry began
};

}  // namespace plait
