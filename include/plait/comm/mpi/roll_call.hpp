// The inner part of comm/mpi.hpp that finds out who is missing: a rank that has waited for a while tells all others for
// what, so that at a deadline each knows who is silent.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/mpi/calls.hpp"
#include "plait/comm/mpi/hosts.hpp"
#include "plait/comm/ranks_text.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::mpi::detail {

/// How many collectives a rank has called on a communicator.
struct call_count {
  std::array<char, 32> label{};
  std::uint64_t collectives = 0;

  void set_label(std::string_view text) {
    label = {};
    std::copy_n(text.data(), std::min(text.size(), label.size() - 1), label.data());
  }
};

/// A message of a rank that waits to the others, sent as bytes.
struct presence {
  static constexpr std::size_t most = 16;

  std::array<char, 128> waits_for{};  ///< "all_reduce #3 on 'dp'"; empty: the rank has reported nothing
  std::uint64_t communicators = 0;    ///< of which `calls` tells
  std::array<call_count, most> calls{};

  /// Returns how many collectives the rank has called on the communicator of this label: the fewest where there are
  /// several of them, and none where it is not told.
  std::uint64_t called(const call_count& on) const {
    std::uint64_t fewest = UINT64_MAX;
    for (std::size_t i = 0; i < communicators; ++i)
      if (calls[i].label == on.label) fewest = std::min(fewest, calls[i].collectives);
    return fewest == UINT64_MAX ? 0 : fewest;
  }
};

/// An operation that waits, as the ranks of its communicator know it.
struct waiting_operation {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, size = 1;
  int peer = -1;   ///< of a message; -1: a collective
  call_count own;  ///< of its communicator; of a collective, how many were called before it
};

/// The ranks of a communicator and of all that are split from it, and what they wait for. A rank sends it after a tenth
/// of a deadline, in messages over a separate communicator. The others read them when their deadline is over: until
/// then nothing is asked, and no thread runs for it.
class roll_call {
 public:
  /// Collective over `all`.
  roll_call(MPI_Comm all, int rank, int size) : rank_(rank), heard_(static_cast<std::size_t>(size)) {
    check(MPI_Comm_dup(all, &comm_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    in_world_ = ranks_in(all, size, MPI_COMM_WORLD);
  }
  roll_call(const roll_call&) = delete;
  roll_call& operator=(const roll_call&) = delete;
  ~roll_call() {
    int over = 0;
    if (MPI_Finalized(&over) != MPI_SUCCESS || over) return;
    collect();
    for (message& m : sent_)  // what the library may still read is left to it
      if (!finish(m)) static_cast<void>(new std::shared_ptr<const presence>(std::move(m.said)));
    MPI_Comm_free(&comm_);
  }

  /// Tells all other ranks for what this one waits, and what it has called.
  void announce(const std::string& waits_for, const std::vector<const call_count*>& calls) {
    collect();  // of waits that are over
    std::erase_if(sent_, [](message& m) { return finish(m); });
    const auto said = std::make_shared<presence>();
    std::copy_n(waits_for.data(), std::min(waits_for.size(), said->waits_for.size() - 1), said->waits_for.data());
    said->communicators = std::min(calls.size(), presence::most);
    for (std::size_t i = 0; i < said->communicators; ++i) said->calls[i] = *calls[i];
    for (int k = 0; k < static_cast<int>(heard_.size()); ++k) {
      if (k == rank_) continue;
      message& m = sent_.emplace_back(message{said, MPI_REQUEST_NULL});
      check(MPI_Isend(said.get(), sizeof *said, MPI_BYTE, k, 0, comm_, &m.request), "MPI_Isend");
    }
  }

  /// Returns who is missing, in words; `o` is past its deadline.
  std::string missing(const waiting_operation& o) {
    for (int i = 0; i < 20; ++i) {  // messages come in while the library is called
      collect();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const std::vector<int> group = ranks_in(o.comm, o.size, comm_);
    std::vector<std::size_t> silent, others;
    std::string behind;
    int named = 0;
    for (int k = 0; k < o.size; ++k) {
      if (k == o.rank || (o.peer >= 0 && k != o.peer)) continue;
      const auto r = static_cast<std::size_t>(group[static_cast<std::size_t>(k)]);
      if (is_silent(r)) {
        silent.push_back(name_of(r));
      } else if (o.peer >= 0 || heard_[r].called(o.own) <= o.own.collectives) {
        if (++named <= 4)
          append(behind, {"; rank ", name_of(r), " has not called it, and waits for ", heard_[r].waits_for.data()});
      }
    }
    for (std::size_t r = 0; r < heard_.size(); ++r)
      if (is_silent(r) && std::find(silent.begin(), silent.end(), name_of(r)) == silent.end())
        others.push_back(name_of(r));
    if (named > 4) append(behind, {"; and so do ", named - 4, " more"});
    if (!silent.empty()) return silent_text(silent) + behind;
    if (named == 0 && others.empty()) return "all ranks have called it, so that a link between them is lost";
    return (others.empty() ? "no rank is silent" : "of the other ranks, " + silent_text(others)) + behind;
  }

 private:
  struct message {
    std::shared_ptr<const presence> said;
    MPI_Request request;
  };

  static bool finish(message& m) {
    int done = 0;
    return MPI_Test(&m.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0;
  }
  static std::string silent_text(const std::vector<std::size_t>& ranks) {
    return plait::detail::ranks_text(ranks) +
           (ranks.size() == 1 ? " is silent: it waits for nothing, so that it is"
                              : " are silent: they wait for nothing, so that they are") +
           " lost, stopped or still at work";
  }
  bool is_silent(std::size_t r) const { return static_cast<int>(r) != rank_ && heard_[r].waits_for[0] == '\0'; }
  /// The rank of the process in MPI_COMM_WORLD, where it is there.
  std::size_t name_of(std::size_t r) const {
    return in_world_[r] == MPI_UNDEFINED ? r : static_cast<std::size_t>(in_world_[r]);
  }
  /// Reads what has come in.
  void collect() {
    for (int there = 1; there != 0;) {
      MPI_Status status;
      if (MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &there, &status) != MPI_SUCCESS || there == 0) return;
      presence said;
      if (MPI_Recv(&said, sizeof said, MPI_BYTE, status.MPI_SOURCE, 0, comm_, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
      heard_[static_cast<std::size_t>(status.MPI_SOURCE)] = said;
    }
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_;
  std::vector<int> in_world_;
  std::vector<presence> heard_;
  std::vector<message> sent_;
};

}  // namespace plait::mpi::detail

#include "plait/core/macros_on.hpp"
