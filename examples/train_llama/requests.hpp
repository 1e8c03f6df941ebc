#pragma once

#include <array>
#include <cstddef>
#include <utility>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"

/// Requests and news of the ranks of a run, as all of them know them: of each the largest that some rank has said.
struct requests {
  double stop = 0;           ///< a signal asks the run to end after this step
  double save = 0;           ///< SIGUSR1 asks for a save
  double ended_saves = 0;    ///< a save has ended
  double communication = 0;  ///< how many rows the communication of a rank has
};

/// Brings requests together once a step, among collectives that all ranks wait for anyway, so that nobody waits for
/// them in particular: not for the gathers that updates leave on their way. Where other collectives are called between
/// `start` and `finish`, `ranks` must be a communicator of its own.
template <class Device>
class request_exchange {
 public:
  request_exchange(Device& device, plait::any_communicator ranks) : ranks_(std::move(ranks)), there_(device, numbers) {}

  /// Collective, as `finish`.
  void start(const requests& own) {
    own_ = own;
    if (ranks_.size() == 1) return;
    const std::array<double, numbers> mine{own.stop, own.save, own.ended_saves, own.communication};
    there_.upload(mine.data(), numbers);
    ranks_.start_all_reduce(there_.data(), there_.data(), numbers, plait::dtype::f64, plait::reduce_op::max)
        .swap(under_way_);
  }
  /// Returns the requests of all ranks, as they were when each called `start`.
  requests finish() {
    if (ranks_.size() == 1) return own_;
    under_way_.wait();
    std::array<double, numbers> all{};
    there_.download(all.data(), numbers);
    return {all[0], all[1], all[2], all[3]};
  }
  plait::any_communicator& ranks() { return ranks_; }

 private:
  static constexpr std::size_t numbers = 4;

  plait::any_communicator ranks_;
  plait::host_values<double, Device> there_;
  plait::request under_way_;
  requests own_;
};
